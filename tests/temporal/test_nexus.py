"""Locks for workflows of another namespace, by way of the Nexus service `redlease`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from lock_service import CALLERS, SERVICE_QUEUE, Callers, with_callers
from nexus_flows import ENDPOINT, Remote, RemoteCalls, RemoteHeirs, RemoteWaits
from temporal_tools import Place, holder_of, names_of, reset, tasks_that_failed, waiting
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import WorkflowHandle

    from redlease import Permit, Semaphore

    from quiet import Quiet
    from temporal.conftest import StartWorkerProcess
    from temporal_server import TemporalServer

WORKFLOWS = [Remote, RemoteCalls, RemoteHeirs, RemoteWaits]
MANY = 500
SOON = 60.0  # far more than it takes, on a machine that does much else


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def callers(temporal_server: TemporalServer) -> Callers:
    """The namespace of those who call."""
    return await with_callers(temporal_server)


@pytest.fixture
async def client(callers: Callers, place: Place) -> AsyncIterator[Client]:
    """A client of that namespace, beside a worker for its workflows; the service is served beside it, in its own."""
    async with callers.service(place) as _, callers.calling(place, WORKFLOWS) as client:
        yield client


async def begun(client: Client, place: Place, how: str, **options: Any) -> tuple[WorkflowHandle[Any, Any], int]:
    """Start a workflow that ends in this way; returns it, and its fence as soon as it holds."""
    handle = await client.start_workflow(Remote.run, how, id=place.prefix, task_queue=place.task_queue, **options)
    return handle, await handle.execute_update(Remote.until_held)


async def test_an_immediate_grant(client: Client, place: Place, pool: Semaphore) -> None:
    """It adds five events to the caller's history, and its release five; the permit is gone when the run ends."""
    handle, fence = await begun(client, place, "complete")
    assert await holder_of(pool) == fence
    assert (await pool.inspect()).holders[0].owner == handle.id
    await handle.signal(Remote.proceed)
    assert await handle.result() == "complete"
    assert await holder_of(pool) == 0
    names = await names_of(handle)
    assert [name for name in names if "NEXUS" in name] == ["NEXUS_OPERATION_SCHEDULED", "NEXUS_OPERATION_COMPLETED"] * 2
    assert await tasks_that_failed(handle) == []


async def test_calls(client: Client, place: Place) -> None:
    """Every operation answers as the method of its name does in a workflow of the service's own namespace."""
    told = await client.execute_workflow(RemoteCalls.run, id=place.prefix, task_queue=place.task_queue)
    assert told == [[True, None, ["one", "two"], 60_000], [True, [True, False, True], False, ["r", "one"]]]


async def test_a_wait(client: Client, place: Place, pool: Semaphore) -> None:
    """Who has to wait gets the permit in its turn; it costs the caller three more events and a workflow task."""
    before = await pool.acquire()
    handle = await client.start_workflow(Remote.run, "complete", id=place.prefix, task_queue=place.task_queue)
    await eventually(lambda: _waits(pool), SOON)
    await pool.release(before)
    assert await handle.execute_update(Remote.until_held) > before.fence
    await handle.signal(Remote.proceed)
    assert await handle.result() == "complete"
    assert "NEXUS_OPERATION_STARTED" in await names_of(handle)
    assert await holder_of(pool) == 0


async def test_a_wait_that_ends(client: Client, place: Place, pool: Semaphore) -> None:
    """A wait that times out, is cancelled, or whose run is terminated leaves no place in the queue."""
    before = await pool.acquire()
    told = await client.execute_workflow(RemoteWaits.run, 0.5, id=place.prefix, task_queue=place.task_queue)
    assert told == "timed out: r"
    assert not (await pool.inspect()).waiters
    for ending in ("cancel", "terminate"):
        handle = await client.start_workflow(
            Remote.run, "complete", id=f"{place.prefix}-{ending}", task_queue=place.task_queue
        )
        await eventually(lambda: _waits(pool), SOON)
        await getattr(handle, ending)()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        await eventually(lambda: _does_not_wait(pool), SOON)
    assert await pool.release(before)


async def _waits(pool: Semaphore) -> bool:
    return bool((await pool.inspect()).waiters)


async def _does_not_wait(pool: Semaphore) -> bool:
    return not (await pool.inspect()).waiters


# The table of docs/temporal.md, row by row


@pytest.mark.parametrize("how", ["complete", "fail", "continue"])
async def test_left(client: Client, place: Place, pool: Semaphore, how: str) -> None:
    """A run that leaves its block, by failing or continuing as new too, has given its permit back."""
    handle, fence = await begun(client, place, how)
    assert await holder_of(pool) == fence
    await handle.signal(Remote.proceed)
    if how == "fail":
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    await eventually(lambda: _is_free(pool), SOON)
    if how == "continue":
        await client.get_workflow_handle(handle.id).signal(Remote.proceed)
        assert await client.get_workflow_handle(handle.id).result() == "successor"


async def _is_free(pool: Semaphore) -> bool:
    return await holder_of(pool) == 0


async def test_cancelled(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that is cancelled has given its permit back when it closes."""
    handle, _ = await begun(client, place, "complete")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, CancelledError)
    assert await holder_of(pool) == 0


@pytest.mark.parametrize("how", ["terminated", "timed out"])
async def test_closed_from_outside(client: Client, place: Place, pool: Semaphore, how: str) -> None:
    """The permit of a run that is terminated, or times out, goes to the next in line, as a relay sees the end."""
    options = {"run_timeout": timedelta(seconds=15)} if how == "timed out" else {}
    handle, fence = await begun(client, place, "complete", **options)
    async with waiting(pool) as other:
        if how == "terminated":
            await handle.terminate()
        with pytest.raises(WorkflowFailureError):
            await handle.result()
        assert (await asyncio.wait_for(asyncio.shield(other), SOON)).fence > fence


async def test_continued_and_adopted(client: Client, place: Place, pool: Semaphore) -> None:
    """A permit that is detached, and adopted by the next run, stays held under its fence."""
    handle = await client.start_workflow(RemoteHeirs.run, None, id=place.prefix, task_queue=place.task_queue)
    await eventually(lambda: _continued(client, handle.id), SOON)
    latest = client.get_workflow_handle(handle.id)
    fence = await latest.execute_update(RemoteHeirs.until_held)
    assert await holder_of(pool) == fence
    await latest.signal(RemoteHeirs.proceed)
    assert await latest.result() == "same"
    assert await holder_of(pool) == 0


async def _continued(client: Client, workflow_id: str) -> bool:
    described = await client.get_workflow_handle(workflow_id).describe()
    return described.raw_description.workflow_execution_info.first_run_id != described.run_id


@pytest.mark.parametrize("grant", ["stays", "goes"])
async def test_reset(client: Client, place: Place, pool: Semaphore, grant: str) -> None:
    """The new run has the permit, under its fence: as its history says, or by asking again with the same ticket."""
    handle, fence = await begun(client, place, "complete")
    new = await reset(client, handle, 1 if grant == "stays" else 0, reapply=False)
    assert await new.execute_update(Remote.until_held) == fence
    assert await holder_of(pool) == fence
    await new.signal(Remote.proceed)
    assert await new.result() == "complete"
    assert await holder_of(pool) == 0


# Processes, numbers, languages


@pytest.mark.slow
async def test_many_wait_while_every_handler_is_killed(
    callers: Callers, place: Place, pool: Semaphore, worker_process: StartWorkerProcess, quiet: Quiet
) -> None:
    """Five hundred callers wait without a worker's slot; kill -9 of every handler costs no place and no permit."""
    quiet.allow(".*")
    slots = {"max_concurrent_workflow_tasks": 8, "max_concurrent_activities": 1, "max_concurrent_nexus_tasks": 8}
    kept = {"waiter_lease": 120}  # a busy machine takes its time to start a process
    service = {"serve": "locks", "task_queue": SERVICE_QUEUE, "plugin": kept, "worker": slots}
    async with callers.calling(place, WORKFLOWS) as client:
        first = await worker_process("nexus_flows", **service)
        holder, fence = await begun(client, place, "complete")
        handles = []
        for number in range(MANY):
            workflow_id = f"{place.prefix}-{number}"
            handles.append(
                await client.start_workflow(Remote.run, "complete", id=workflow_id, task_queue=place.task_queue)
            )
        await eventually(lambda: _so_many_wait(pool, MANY), 240)
        before = [waiter.ticket for waiter in (await pool.inspect(limit=MANY)).waiters]
        first.kill()
        await worker_process("nexus_flows", **service)
        assert await holder_of(pool) == fence
        await holder.signal(Remote.proceed)
        second = (await eventually(lambda: _other_holder(pool, fence), SOON)).ticket
        assert second == before[0]
        assert [waiter.ticket for waiter in (await pool.inspect(limit=MANY)).waiters] == before[1:]
        await asyncio.gather(*(handle.terminate() for handle in handles))


async def _so_many_wait(pool: Semaphore, count: int) -> bool:
    return (await pool.inspect(limit=1)).waiting == count


async def _other_holder(pool: Semaphore, fence: int) -> Permit | None:
    holders = (await pool.inspect()).holders
    return next((holder for holder in holders if holder.fence > fence), None)


@pytest.mark.slow
async def test_go(callers: Callers, place: Place, pool: Semaphore) -> None:
    """A workflow in Go releases its permit in every ending, and waits in the same queue as a service in Python."""
    client = await Client.connect(callers.address, namespace=CALLERS)
    async with callers.service(place), callers.go(place):
        before = await pool.acquire()
        for how in ("complete", "fail", "cancel", "terminate"):
            workflow_id = f"{place.prefix}-{how}"
            handle = await client.start_workflow(
                "Hold", args=[ENDPOINT, how], id=workflow_id, task_queue=place.task_queue
            )
            await eventually(lambda: _so_many_wait(pool, 1), SOON)
            async with waiting_behind(pool) as after:
                await pool.release(before)
                held = await eventually(functools.partial(_other_holder, pool, before.fence), SOON)
                assert held.owner == workflow_id
                await _end(handle, how)
                before = await asyncio.wait_for(after, SOON)
            assert before.fence > held.fence
        await pool.release(before)


async def _end(handle: WorkflowHandle[Any, Any], how: str) -> None:
    if how in {"cancel", "terminate"}:
        await getattr(handle, how)()
    else:
        await handle.signal("proceed")
    if how == "complete":
        assert await handle.result() > 0
        return
    with pytest.raises(WorkflowFailureError):
        await handle.result()


@contextlib.asynccontextmanager
async def waiting_behind(pool: Semaphore) -> AsyncIterator[asyncio.Task[Permit]]:
    """Wait behind one other for a permit, as a plain service does; it stays the caller's."""
    task = asyncio.create_task(pool.acquire())
    await eventually(lambda: _so_many_wait(pool, 2), SOON)
    yield task
