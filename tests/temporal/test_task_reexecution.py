"""Workflow tasks that are done anew, on every backend: what was done locally in them is done twice."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from awkward_flows import Anew, Pausing, Unanswered, take_time
from backend_bench import Bench
from backend_flows import Actor, Asking
from temporal_tools import names_of
from temporalio import activity
from temporalio.worker import Replayer

from redlease_temporal._plugin.activity_interceptor import PermitCheckInterceptor
from redlease_temporal._workflow_side import backend as calls
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporal_tools import Place
    from temporalio.client import Client

    from quiet import Quiet


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    async with place.serving([Actor, Anew], [take_time]) as client:
        yield client


@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
@pytest.mark.parametrize("what", ["renew", "adopt", "adopt and renew", "local activity"])
async def test_a_permit_is_needed_and_released_in_a_task_that_is_done_anew(
    client: Client, task_queue: str, backend: str, what: str
) -> None:
    """The second doing finds the permit as the first one did, gives it back, and the history replays."""
    bench = Bench(client, task_queue, backend)
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking()) if what != "renew" else None
    before = Pausing.begun
    handle = await client.start_workflow(
        Anew.run, args=[bench.on, what, permit], id=f"{task_queue}-anew", task_queue=task_queue
    )
    doings = 2 if what == "local activity" else 1
    await eventually(lambda: Pausing.begun == before + doings)
    await handle.signal(Anew.nudge)
    assert await handle.result() == "was held: True"
    assert "WORKFLOW_TASK_FAILED" in await names_of(handle)

    async def nobody_holds() -> bool:
        return not (await bench.seen(actor)).holders

    await eventually(nobody_holds)
    replayer = Replayer(workflows=[Anew], plugins=[RedleasePlugin("redis://nowhere.invalid")])
    await replayer.replay_workflow(await handle.fetch_history())


@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_a_call_that_took_too_long_replays(
    place: Place, backend: str, monkeypatch: pytest.MonkeyPatch, quiet: Quiet
) -> None:
    """A local activity that timed out is the same error in a replay, where the SDK raises its cause by itself."""
    execute = PermitCheckInterceptor.execute_activity

    async def never(self: Any, input: Any) -> Any:  # noqa: A002
        if activity.info().activity_type.endswith(".inspect"):
            await asyncio.Event().wait()
        return await execute(self, input)

    quiet.allow(r"Completing activity as failed")
    monkeypatch.setattr(PermitCheckInterceptor, "execute_activity", never)
    monkeypatch.setattr(calls, "LOCAL_ATTEMPT_TIMEOUT", timedelta(seconds=0.2))
    async with place.serving([Unanswered], []) as client:
        bench = Bench(client, place.task_queue, backend)
        handle = await bench.start(Unanswered.run, bench.on)
        assert "was not reached in time (Activity timed out)" in await handle.result()
    replayer = Replayer(workflows=[Unanswered], plugins=[RedleasePlugin("redis://nowhere.invalid")])
    await replayer.replay_workflow(await handle.fetch_history())
