"""Runs that end while the library has still something to do for them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest
from awkward_flows import Fleeting, Leaving, Quitting, Unsettled
from backend_bench import Bench
from backend_flows import Actor, Asking
from temporal_tools import Place, has_event, names_of, tasks_that_failed
from temporalio.client import WorkflowFailureError
from temporalio.worker import Replayer

from redlease_temporal._backends.redis.requests import Requests
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from temporalio.client import WorkflowHandle

    from temporal_server import TemporalServer


@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_a_run_ends_after_its_last_request_is_given_up(
    place: Place, task_queue: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests that time out together the second takes longer to give up: the run ends all the same, at once."""
    release, given_up = Requests.release, 0

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
            monkeypatch.setattr(Requests, "release", second_is_slow)
        handle = await client.start_workflow(Leaving.run, bench.on, id=f"{task_queue}-leaving", task_queue=task_queue)
        assert await handle.result() == "timed out"
        assert not {"WORKFLOW_TASK_FAILED", "WORKFLOW_TASK_TIMED_OUT"} & set(await names_of(handle))
        monkeypatch.undo()
        await bench.do(actor, Actor.release, permit)

        async def nobody_waits() -> bool:
            return not (await bench.seen(actor)).waiters

        await eventually(nobody_waits)
        replayer = Replayer(workflows=[Leaving], plugins=[RedleasePlugin("redis://nowhere.invalid")])
        await replayer.replay_workflow(await handle.fetch_history())


@pytest.mark.parametrize("cached", [1000, 0], ids=["cached", "replayed"])
@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize("how", ["return", "cancelled", "fail", "continue as new"])
@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_a_run_ends_in_the_moment_in_which_it_gives_up(
    place: Place,
    temporal_server: TemporalServer,
    task_queue: str,
    redis_url: str,
    prefix: str,
    backend: str,
    how: str,
    turns: int,
    cached: int,
) -> None:
    """However a run ends, however soon after that: no task of it is refused, and its requests are out of the queue."""
    own = Place(temporal_server, f"{task_queue}-own", redis_url, prefix)
    async with (
        place.serving([Actor], []) as client,
        own.serving([Quitting], [], worker={"max_cached_workflows": cached}),
    ):
        bench = Bench(client, task_queue, backend)
        actor = await bench.actor()
        await bench.do(actor, Actor.acquire, Asking())
        handle = await client.start_workflow(
            Quitting.run, args=[bench.on, how, turns], id=f"{task_queue}-quitting", task_queue=own.task_queue
        )
        await bench.until_waiting(actor, 2)
        await (handle.cancel() if how == "cancelled" else handle.signal(Quitting.go))
        assert await asyncio.wait_for(end_of(handle), 15) == "left"
        await bench.until_waiting(actor, 0)
        run = client.get_workflow_handle(handle.id, run_id=handle.first_execution_run_id)
        assert not {"WORKFLOW_TASK_FAILED", "WORKFLOW_TASK_TIMED_OUT"} & set(await names_of(run))
        replayer = Replayer(workflows=[Quitting], plugins=[RedleasePlugin("redis://nowhere.invalid")])
        await replayer.replay_workflow(await run.fetch_history())


async def end_of(handle: WorkflowHandle[Any, str]) -> str:
    """Return what a run has ended with, be it a failure."""
    try:
        return await handle.result()
    except WorkflowFailureError as error:
        return str(error.cause)


@pytest.mark.parametrize("what", ["acquire", "try_acquire", "inspect", "release"])
@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_a_run_ends_as_it_thinks_better_of_a_call(place: Place, task_queue: str, backend: str, what: str) -> None:
    """A call that is cancelled as it begins, a turn earlier or later, keeps no run from ending and leaves nothing."""
    async with place.serving([Actor, Fleeting], []) as client:
        bench = Bench(client, task_queue, backend)
        actor = await bench.actor()
        handles = [
            await bench.start(Fleeting.run, bench.on, what, before, after) for before in range(5) for after in (0, 1, 4)
        ]
        async with asyncio.timeout(20):
            assert [await handle.result() for handle in handles] == ["left"] * 15
        replayer = Replayer(workflows=[Fleeting], plugins=[RedleasePlugin("redis://nowhere.invalid")])
        for handle in handles:
            assert not await tasks_that_failed(handle)
            await replayer.replay_workflow(await handle.fetch_history())

        async def all_is_free() -> bool:
            seen = await bench.seen(actor)
            return not seen.waiters and not seen.holders

        await eventually(all_is_free)


@pytest.mark.parametrize("cached", [1000, 1, 0])
async def test_a_run_that_waits_for_its_end_is_taken_out_of_memory(place: Place, task_queue: str, cached: int) -> None:
    """By its worker's shutdown, which does not wait for it, or before that to make room for others."""
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            place.serving([Unsettled], [], worker={"max_cached_workflows": cached})
        )
        handles = [
            await client.start_workflow(Unsettled.run, id=f"{task_queue}-{number}", task_queue=task_queue)
            for number in range(3)
        ]
        for handle in handles:
            await eventually(functools.partial(has_event, handle, "WORKFLOW_TASK_COMPLETED"))
        async with asyncio.timeout(15):
            await stack.aclose()
    for handle in handles:
        assert await names_of(handle) == [
            *("WORKFLOW_EXECUTION_STARTED", "WORKFLOW_TASK_SCHEDULED", "WORKFLOW_TASK_STARTED"),
            "WORKFLOW_TASK_COMPLETED",
        ]
        await handle.terminate()


async def test_a_worker_ends_while_its_run_gives_up(
    place: Place, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shutdown waits no longer than for the answer to what is asked just then; the run ends here or elsewhere."""
    release, asked = Requests.release, asyncio.Event()

    async def slowly(self: Any, *args: Any, **options: Any) -> Any:
        asked.set()
        await asyncio.sleep(0.5)
        return await release(self, *args, **options)

    workflows = [Actor, Quitting]
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(place.serving(workflows, []))
        bench = Bench(client, task_queue, "redis")
        actor = await bench.actor()
        await bench.do(actor, Actor.acquire, Asking())
        handle = await bench.start(Quitting.run, bench.on, "return", 2)
        await bench.until_waiting(actor, 2)
        monkeypatch.setattr(Requests, "release", slowly)
        await handle.signal(Quitting.go)
        await asyncio.wait_for(asked.wait(), 15)
        async with asyncio.timeout(15):
            await stack.aclose()
    async with place.serving(workflows, []):
        assert await asyncio.wait_for(handle.result(), 20) == "left"
        assert not await tasks_that_failed(handle)
        await bench.until_waiting(actor, 0)


async def test_an_offer_comes_with_what_gives_up(
    place: Place, temporal_server: TemporalServer, task_queue: str, redis_url: str, prefix: str
) -> None:
    """A slot that is offered to a request which is cancelled in the same workflow task is not taken."""
    own = Place(temporal_server, f"{task_queue}-own", redis_url, prefix)
    async with place.serving([Actor], []) as client:
        bench = Bench(client, task_queue, "slots")
        actor = await bench.actor()
        permit = await bench.do(actor, Actor.acquire, Asking())
        async with own.serving([Quitting], []):
            handle = await client.start_workflow(
                Quitting.run, args=[bench.on, "return", 0], id=f"{task_queue}-quitting", task_queue=own.task_queue
            )
            await bench.until_waiting(actor, 2)
        await bench.do(actor, Actor.release, permit)
        await eventually(functools.partial(has_event, handle, "WORKFLOW_EXECUTION_SIGNALED"))
        await handle.signal(Quitting.go)
        before = len(await names_of(handle))
        async with own.serving([Quitting], []):
            assert await asyncio.wait_for(handle.result(), 10) == "left"
        assert "START_CHILD_WORKFLOW_EXECUTION_INITIATED" not in (await names_of(handle))[before:]
