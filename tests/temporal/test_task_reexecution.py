"""Workflow tasks that are done anew, on every backend: what was done locally in them is done twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from awkward_flows import Anew, Pausing, take_time
from backend_bench import Bench
from backend_flows import Actor, Asking
from temporal_tools import names_of
from temporalio.worker import Replayer

from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporal_tools import Place
    from temporalio.client import Client


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
