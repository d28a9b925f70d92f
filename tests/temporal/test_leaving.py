"""Runs that end while the library has still something to do for them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from awkward_flows import Leaving
from backend_bench import Bench
from backend_flows import Actor, Asking
from temporal_tools import names_of
from temporalio.worker import Replayer

from redlease_temporal.relay import Relay
from redlease_temporal.worker import RedleasePlugin

if TYPE_CHECKING:
    from temporal_tools import Place


@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_a_run_ends_after_its_last_request_is_given_up(
    place: Place, task_queue: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests that time out together the second takes longer to give up: the run ends all the same, at once."""
    release, given_up = Relay.release, 0

    async def second_is_slow(self: Any, *args: Any, **options: Any) -> Any:
        nonlocal given_up
        given_up += 1
        if given_up == 2:
            await asyncio.sleep(0.5)
        return await release(self, *args, **options)

    async with place.serving([Actor, Leaving], []) as client:
        bench = Bench(client, task_queue, backend)
        actor = await bench.actor()
        permit = await bench.do(actor, Actor.acquire, Asking())
        if backend == "redis":
            monkeypatch.setattr(Relay, "release", second_is_slow)
        handle = await client.start_workflow(Leaving.run, bench.on, id=f"{task_queue}-leaving", task_queue=task_queue)
        assert await handle.result() == "timed out"
        assert not {"WORKFLOW_TASK_FAILED", "WORKFLOW_TASK_TIMED_OUT"} & set(await names_of(handle))
        monkeypatch.undo()
        await bench.do(actor, Actor.release, permit)
        assert not (await bench.seen(actor)).waiters
        replayer = Replayer(workflows=[Leaving], plugins=[RedleasePlugin("redis://nowhere.invalid")])
        await replayer.replay_workflow(await handle.fetch_history())
