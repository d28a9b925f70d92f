"""Holds in scopes of anyio, which cancel in every turn of the event loop, and in asyncio's task groups and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from lock_service import Callers
from scope_flows import (
    ACTIVITIES,
    CANCELLED,
    ENDED_WHILE_WAITING,
    SHAPES,
    WAYS,
    WORKFLOWS,
    Keeps,
    Scoped,
    ScopedSequence,
    Where,
)
from temporal_tools import Place, tasks_that_failed
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from temporalio.client import WorkflowHandle

    from conftest import OwnServer
    from temporal_server import TemporalServer

BACKENDS = ["redis", "slots", "coordinator", "nexus"]
WITHIN = 120.0  # of some dozen runs at once, on a machine that does much else


class Runs:
    """Runs of `Scoped`, each with a resource of its own."""

    def __init__(self, client: Client, place: Place, backend: str) -> None:
        self.client = client
        self.place = place
        self.backend = backend

    def where(self, name: str) -> Where:
        """Return a resource."""
        return Where(self.backend, f"{self.place.task_queue}-{name}")

    async def start(self, run: Any, name: str, *args: Any) -> WorkflowHandle[Any, Any]:
        """Start a run with this resource."""
        return await self.client.start_workflow(
            run,
            args=[self.where(name), *args],
            id=f"{self.place.task_queue}-{name}-{run.__qualname__}",
            task_queue=self.place.task_queue,
        )

    async def all(self, names: Iterable[str], *, way: str = "", shape: str = "", others: int = 0) -> dict[str, Any]:
        """Start a run for each name, as the way or the shape that is not given; returns what came of them."""
        handles = {
            name: await self.start(Scoped.run, name, way or name, shape or name, others) for name in sorted(names)
        }
        async with asyncio.timeout(WITHIN):
            results = {name: await handle.result() for name, handle in handles.items()}
        for handle in handles.values():
            assert await tasks_that_failed(handle) == []
        return results


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn, and a lock service."""
    return str(request.param)


@pytest.fixture
async def runs(callers: Callers, place: Place, backend: str) -> AsyncIterator[Runs]:
    """Runs beside a worker for them."""
    async with contextlib.AsyncExitStack() as stack:
        if backend == "nexus":
            await stack.enter_async_context(callers.service(place))
            client = await stack.enter_async_context(callers.calling(place, WORKFLOWS, ACTIVITIES))
        else:
            client = await stack.enter_async_context(place.serving(WORKFLOWS, ACTIVITIES))
        yield Runs(client, place, backend)


def ways_of(backend: str) -> set[str]:
    """Return the ways to hold something that a backend has."""
    return WAYS.keys() - ({"read", "write", "downgrade"} if backend in {"slots", "nexus"} else set())


async def test_a_hold_in_each_scope(runs: Runs) -> None:
    """Whatever cancels a block, and however often, the permit is given back and the run goes on."""
    told = await runs.all(SHAPES, way="hold")
    # What is cancelled before it is granted does not hold.
    assert told == {shape: [shape != "cancelled_before", 0, 0] for shape in SHAPES}


async def test_each_way_to_hold(runs: Runs) -> None:
    """The same goes for all that a scope may be put around."""
    ways = ways_of(runs.backend)
    assert await runs.all(ways, shape="expires") == {way: [True, 0, 0] for way in ways}


async def test_a_scope_that_is_cancelled_before(runs: Runs) -> None:
    """A call that is cancelled as it begins leaves no permit and no place in the queue."""
    ways = ways_of(runs.backend)
    assert await runs.all(ways, shape="cancelled_before") == {way: [False, 0, 0] for way in ways}


async def test_a_wait_in_each_scope(runs: Runs) -> None:
    """Who waits in a scope that is cancelled is out of the queue, and the run goes on."""
    keepers = {shape: await runs.start(Keeps.run, shape) for shape in ENDED_WHILE_WAITING}
    for keeper in keepers.values():
        await keeper.execute_update(Keeps.until_held)
    told = await runs.all(ENDED_WHILE_WAITING, way="hold", others=1)
    assert told == {shape: [False, 1, 0] for shape in ENDED_WHILE_WAITING}
    for keeper in keepers.values():
        await keeper.signal(Keeps.proceed)
        await keeper.result()


async def test_a_run_that_is_cancelled(runs: Runs) -> None:
    """A run that is cancelled while a task group or scope of its holds ends, and has given the permit back."""
    handles = {shape: await runs.start(Scoped.run, shape, "hold", shape, 0) for shape in sorted(CANCELLED)}
    for handle in handles.values():
        await handle.execute_update(Scoped.until_entered)
        await handle.cancel()
    for shape, handle in handles.items():
        async with asyncio.timeout(WITHIN):
            with pytest.raises(WorkflowFailureError) as raised:
                await handle.result()
        assert isinstance(raised.value.cause, CancelledError), shape
        assert await tasks_that_failed(handle) == []
        keeper = await runs.start(Keeps.run, shape)
        await keeper.execute_update(Keeps.until_held)
        await keeper.signal(Keeps.proceed)
        await keeper.result()


async def test_without_a_cache(place: Place) -> None:
    """The same goes where each workflow task replays."""
    async with place.serving(WORKFLOWS, ACTIVITIES, worker={"max_cached_workflows": 0}) as client:
        told = await Runs(client, place, "redis").all(["expires", "group_of_anyio", "shielded_work"], way="hold")
    assert list(told.values()) == [[True, 0, 0]] * 3


async def test_a_worker_that_ends_meanwhile(
    temporal_server: TemporalServer, task_queue: str, prefix: str, own_server: OwnServer
) -> None:
    """A worker shuts down while a permit cannot be given back in such a scope, and another goes on with the run."""
    redis = own_server("valkey9")
    place = Place(temporal_server, task_queue, redis.url, prefix)
    async with place.serving(WORKFLOWS, ACTIVITIES) as client:
        handle = await Runs(client, place, "redis").start(Scoped.run, "r", "hold", "when_told", 0)
        await handle.execute_update(Scoped.until_entered)
        redis.pause()
        await handle.execute_update(Scoped.cancel)
        ending = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - ending < 30
    redis.resume()
    async with place.serving(WORKFLOWS, ACTIVITIES):
        assert await handle.result() == [True, 0, 0]


async def test_a_sequence(place: Place) -> None:
    """Items that are handed over in a scope that is cancelled are withdrawn, and those of a later call are handled."""
    shapes = sorted({"expires", "group_of_anyio", "outer", "times_out", "cancelled_before"})
    async with place.serving(WORKFLOWS, ACTIVITIES) as client:
        handles = [
            await client.start_workflow(
                ScopedSequence.run,
                args=[f"{place.task_queue}-{shape}", shape],
                id=f"{place.task_queue}-{shape}",
                task_queue=place.task_queue,
            )
            for shape in shapes
        ]
        async with asyncio.timeout(WITHIN):
            assert [await handle.result() for handle in handles] == [[1, 2]] * len(shapes)
        for handle in handles:
            assert await tasks_that_failed(handle) == []
