"""Read-write locks in workflows: what both backends that have weights do."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from backend_bench import Bench
from backend_flows import Actor
from temporal_tools import SHORT_S, Place, names_of, reset
from temporalio.client import WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from together_flows import Part, Sharing

from redlease import Unavailable
from redlease._core.limits import CAPACITY_MAX
from redlease_temporal import RWLock
from redlease_temporal._backends.redis import backend
from redlease_temporal._backends.redis.requests import Requests

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import WorkflowHandle

    from redlease import Permit, Redlease, Snapshot
    from redlease_temporal._payloads import locks


class Catalog:
    """A read-write lock, and the workflows that use it."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.bench.on.capacity = CAPACITY_MAX

    async def start(
        self, side: Any, timeout: float | None = None, lease: float = 5.0, *, stays: bool = False
    ) -> WorkflowHandle[Any, Any]:
        """Start a reader or a writer; one that `stays` is not ended by a loss."""
        part = Part(self.bench.on.backend, self.bench.on.resource, side, lease=lease, stays=stays)
        return await self.bench.start(Sharing.run, part, timeout, None)

    async def held(self, side: Any, **options: Any) -> WorkflowHandle[Any, Any]:
        """Start a reader or a writer; returns when it holds."""
        handle = await self.start(side, **options)
        await handle.execute_update(Sharing.until_held)
        return handle

    async def queued(self, side: Any, actor: WorkflowHandle[Any, Any], place: int) -> WorkflowHandle[Any, Any]:
        """Start a reader or a writer; returns when it is the so-manieth who waits."""
        handle = await self.start(side)
        await self.bench.until_waiting(actor, place)
        return handle


@pytest.fixture(params=["redis", "coordinator"])
async def catalog(request: pytest.FixtureRequest, place: Place) -> AsyncIterator[Catalog]:
    """A lock of its own on each backend."""
    async with place.serving([Actor, Sharing], []) as client:
        yield Catalog(Bench(client, place.task_queue, request.param))


def sides(snapshot: Snapshot) -> tuple[list[bool], list[bool]]:
    """Return who of the holders writes, and who of the waiters wants to."""
    return (
        [RWLock.is_writer(permit) for permit in snapshot.holders],
        [RWLock.is_writer(waiter) for waiter in snapshot.waiters],
    )


async def end(handle: WorkflowHandle[Any, Any]) -> int:
    """Let it go on to its end; returns the fence that it held."""
    await handle.signal(Sharing.proceed)
    how, fence = (await handle.result()).split()
    assert how in {"held", "adopted"}
    return int(fence)


async def test_readers_share_and_a_waiting_writer_does_not_starve(catalog: Catalog) -> None:
    """Two readers hold side by side; a third one that comes after a writer waits until that has written."""
    first, second = [await catalog.held("read") for _ in range(2)]
    actor = await catalog.bench.actor()
    writer = await catalog.queued("write", actor, 1)
    third = await catalog.queued("read", actor, 2)
    assert sides(await catalog.bench.seen(actor)) == ([False, False], [True, False])
    read = [await end(first), await end(second)]
    await writer.execute_update(Sharing.until_held)
    assert sides(await catalog.bench.seen(actor)) == ([True], [False])
    written = await end(writer)
    assert max(read) < written < await end(third)


async def test_a_writer_that_gives_up_does_not_hinder(catalog: Catalog) -> None:
    """A reader behind a writer whose timeout passes enters then, beside the reader that holds."""
    reader, actor = await catalog.held("read"), await catalog.bench.actor()
    writer = await catalog.start("write", timeout=2.0)
    await catalog.bench.until_waiting(actor, 1)
    behind = await catalog.queued("read", actor, 2)
    assert await writer.result() == "timed out"
    await behind.execute_update(Sharing.until_held)
    await end(behind)
    await end(reader)


async def test_a_writer_becomes_a_reader(catalog: Catalog) -> None:
    """After a downgrade the readers next in the queue enter beside it, under its old fence, and no writer does."""
    writer, actor = await catalog.held("write"), await catalog.bench.actor()
    (fence,) = await writer.execute_update(Sharing.until_held)
    reader = await catalog.queued("read", actor, 1)
    other = await catalog.queued("write", actor, 2)
    for _ in range(2):  # it may be repeated
        permit: Permit = await writer.execute_update(Sharing.downgrade)
        assert (permit.fence, permit.weight) == (fence, 1)
    await reader.execute_update(Sharing.until_held)
    assert sides(await catalog.bench.seen(actor)) == ([False, False], [True])
    assert await end(writer) == fence
    await end(reader)
    assert await end(other) > fence


async def test_a_downgraded_permit_goes_from_run_to_run(catalog: Catalog) -> None:
    """What was downgraded and detached is adopted by the next run, as a reader's, and is kept past its lease."""
    writer, actor = await catalog.held("write", timeout=-30.0, lease=SHORT_S), await catalog.bench.actor()
    fence = (await writer.execute_update(Sharing.downgrade)).fence
    await writer.signal(Sharing.proceed)
    latest = catalog.bench.client.get_workflow_handle(writer.id)

    async def adopted() -> bool:
        return bool(
            (await latest.describe()).run_id != writer.first_execution_run_id and await latest.query("held") == [1]
        )

    await eventually(adopted, 2 * SHORT_S)
    other = await catalog.start("write", timeout=SHORT_S + 2)
    assert await other.result() == "timed out"
    await catalog.bench.until_waiting(actor, 0)
    assert sides(await catalog.bench.seen(actor)) == ([False], [])
    assert await end(latest) == fence


async def test_what_is_gone_is_not_downgraded(catalog: Catalog) -> None:
    """A permit that somebody released by its ticket cannot become a reader's: the hold gets LeaseLost."""
    writer, actor = await catalog.start("write", stays=True), await catalog.bench.actor()
    await writer.execute_update(Sharing.until_held)
    (permit,) = (await catalog.bench.seen(actor)).holders
    assert await catalog.bench.do(actor, Actor.release_ticket, permit.ticket)
    with pytest.raises(WorkflowUpdateFailedError) as raised:
        await writer.execute_update(Sharing.downgrade)
    assert isinstance(raised.value.cause, ApplicationError)
    assert raised.value.cause.type == "LeaseLost"
    await end(writer)


async def test_a_terminated_writer_holds_for_a_lease_at_most(catalog: Catalog) -> None:
    """Readers that wait for a writer whose run was terminated all enter."""
    writer, actor = await catalog.held("write", lease=2.0), await catalog.bench.actor()
    readers = [await catalog.queued("read", actor, place) for place in (1, 2)]
    await writer.terminate()
    for reader in readers:
        await asyncio.wait_for(reader.execute_update(Sharing.until_held), 6)
        await end(reader)


@pytest.mark.slow
async def test_a_run_that_is_reset_to_before_its_downgrade_has_lost_the_permit(catalog: Catalog) -> None:
    """It goes on as if it was the writer still, while others read: it gets LeaseLost, and the readers stay."""
    writer, actor = await catalog.held("write", lease=1.0), await catalog.bench.actor()
    await writer.execute_update(Sharing.until_held)  # a workflow task after that of the grant
    completed = (await names_of(writer)).count("WORKFLOW_TASK_COMPLETED")
    await writer.execute_update(Sharing.downgrade)
    reader = await catalog.held("read")
    again = await reset(catalog.bench.client, writer, completed - 1, reapply=False)
    assert await asyncio.wait_for(again.result(), 15) == "lost"

    async def only_the_reader() -> bool:
        return sides(await catalog.bench.seen(actor)) == ([False], [])

    await eventually(only_the_reader)
    await end(reader)


async def test_a_run_that_is_reset_to_its_start_writes_again(catalog: Catalog) -> None:
    """Though its ticket was known as a reader's, it is queued as a writer, and writes when the reader has gone."""
    writer, actor = await catalog.held("write"), await catalog.bench.actor()
    fence = (await writer.execute_update(Sharing.downgrade)).fence
    reader = await catalog.held("read")
    again = await reset(catalog.bench.client, writer, 0, reapply=False)
    await catalog.bench.until_waiting(actor, 1)
    assert sides(await catalog.bench.seen(actor)) == ([False], [True])
    await end(reader)
    assert (await again.execute_update(Sharing.until_held))[0] > fence
    assert sides(await catalog.bench.seen(actor)) == ([True], [])
    assert await end(again) > fence


async def test_a_downgrade_while_redis_is_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried again until Redis answers, or raises Unavailable when the lease is over; then it may be repeated."""
    away, told = asyncio.Event(), Requests.downgrade

    async def late(requests: Requests, call: locks.DowngradeCall) -> bool:
        if away.is_set():
            raise Unavailable("away", resource=call.terms.resource)
        return await told(requests, call)

    monkeypatch.setattr(Requests, "downgrade", late)
    monkeypatch.setattr(backend, "LOCAL_ATTEMPT_TIMEOUT", timedelta(0))
    async with place.serving([Actor, Sharing], []) as client:
        catalog = Catalog(Bench(client, place.task_queue, "redis"))
        writer = await catalog.held("write", lease=3.0)
        away.set()
        with pytest.raises(WorkflowUpdateFailedError) as raised:
            await writer.execute_update(Sharing.downgrade)
        assert isinstance(raised.value.cause, ApplicationError)
        assert raised.value.cause.type == "Unavailable"
        downgrading = asyncio.create_task(writer.execute_update(Sharing.downgrade))
        await eventually(lambda: pending(writer))
        away.clear()
        assert (await downgrading).weight == 1
        await end(writer)


async def pending(handle: WorkflowHandle[Any, Any]) -> bool:
    """Return True if an attempt of an activity of the run has failed, and the next is to come."""
    return any(each.attempt > 1 for each in (await handle.describe()).raw_description.pending_activities)


async def test_services_share_the_lock(place: Place, outside: Redlease) -> None:
    """On Redis a reader in a service holds beside one in a workflow, and a writer waits for the other."""
    async with place.serving([Actor, Sharing], []) as client:
        catalog = Catalog(Bench(client, place.task_queue, "redis"))
        both = outside.rwlock(catalog.bench.on.resource)
        reader = await catalog.held("read")
        permit = await both.read.acquire()
        assert await both.write.try_acquire() is None
        writer = await catalog.queued("write", await catalog.bench.actor(), 1)
        await end(reader)
        assert await both.read.release(permit)
        fence = (await writer.execute_update(Sharing.until_held))[0]
        waiting = asyncio.create_task(both.read.acquire())
        assert (await writer.execute_update(Sharing.downgrade)).fence == fence
        assert await both.read.release(await waiting)
        await end(writer)
