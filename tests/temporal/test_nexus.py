"""Locks for workflows of another namespace, by way of the Nexus service `redlease`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from lock_service import CALLERS, SERVICE_QUEUE, Callers
from nexus_flows import (
    ENDPOINT,
    FENCES,
    INSIDE,
    LateCopy,
    Remote,
    RemoteCalls,
    RemoteHeirs,
    RemoteWaits,
    TakesTurns,
    enter_and_leave,
)
from temporal_tools import (
    SHORT_S,
    Place,
    events_of,
    has_event,
    holder_of,
    names_of,
    reset,
    stays_held,
    tasks_that_failed,
    waiting,
)
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import CancelledError

from redlease._core import limits
from redlease_temporal._payloads.locks import Caller

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import WorkflowHandle

    from redlease import Permit, Semaphore

    from quiet import Quiet
    from temporal.conftest import StartWorkerProcess

WORKFLOWS = [LateCopy, Remote, RemoteCalls, RemoteHeirs, RemoteWaits]
MANY = 20  # more than the service has slots
TURNS = 4
NOT_BY_EXPIRY = 40.0  # less than the adopt_window and a lease, for what takes two seconds
# In Java a run that continues as new inside a block ends there, and does not come to the release.
CONTINUES = {"go": ["continue"], "java": [], "typescript": ["continue"]}
LANGUAGES = ("go", "java", "typescript")
SOON = 60.0  # far more than it takes, on a machine that does much else


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
    await eventually(lambda: _so_many_wait(pool, 1), SOON)
    await pool.release(before)
    assert await handle.execute_update(Remote.until_held) > before.fence
    await handle.signal(Remote.proceed)
    assert await handle.result() == "complete"
    assert "NEXUS_OPERATION_STARTED" in await names_of(handle)
    assert await holder_of(pool) == 0


async def test_a_wait_that_ends(client: Client, place: Place, pool: Semaphore) -> None:
    """A wait that times out, or is cancelled, leaves no place in the queue, soon after its run has ended."""
    before = await pool.acquire()
    told = await client.execute_workflow(RemoteWaits.run, 0.5, id=place.prefix, task_queue=place.task_queue)
    assert told == "timed out: r"
    await eventually(lambda: _so_many_wait(pool, 0), SOON)
    handle = await client.start_workflow(Remote.run, "complete", id=place.prefix, task_queue=place.task_queue)
    await eventually(lambda: _so_many_wait(pool, 1), SOON)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    await eventually(lambda: _so_many_wait(pool, 0), SOON)
    assert await pool.release(before)


@pytest.mark.parametrize("ending", ["terminate", "continue"])
async def test_a_wait_whose_run_is_gone(client: Client, place: Place, pool: Semaphore, ending: str) -> None:
    """A run that is terminated, or continues as new, while it waits does not keep the permit from the next in line."""
    before = await pool.acquire()
    handle = await client.start_workflow(Remote.run, "abandon", id=place.prefix, task_queue=place.task_queue)
    await eventually(lambda: _so_many_wait(pool, 1), SOON)
    async with waiting_behind(pool) as after:
        if ending == "terminate":
            await handle.terminate()
        else:
            await handle.signal(Remote.proceed)
            await eventually(lambda: _continued(client, handle.id), SOON)
        await pool.release(before)
        assert await pool.release(await asyncio.wait_for(after, NOT_BY_EXPIRY))


async def test_a_late_copy_of_a_request(client: Client, place: Place, pool: Semaphore) -> None:
    """A request that a handler executes again after its permit was released holds nothing, though its run is open."""
    handle, fence = await begun(client, place, "complete")
    ticket = (await pool.inspect()).holders[0].ticket
    assert await pool.release(ticket)
    kind = EventType.EVENT_TYPE_NEXUS_OPERATION_SCHEDULED
    asked = next(event.event_id for event in await events_of(handle) if event.event_type == kind)
    caller = Caller(CALLERS, handle.id, handle.result_run_id or "", asked)
    late = await client.execute_workflow(
        LateCopy.run, args=[ticket, caller], id=f"{place.prefix}-late", task_queue=place.task_queue
    )
    assert late.fence > fence
    async with waiting(pool) as after:
        assert (await asyncio.wait_for(asyncio.shield(after), NOT_BY_EXPIRY)).fence > late.fence
    await handle.signal(Remote.proceed)
    assert await handle.result() == "complete"


# The table of docs/temporal.md, row by row


@pytest.mark.parametrize("how", ["fail", "continue"])
async def test_left(client: Client, place: Place, pool: Semaphore, how: str) -> None:
    """A run that leaves its block, by failing or continuing as new too, has given its permit back."""
    handle, fence = await begun(client, place, how)
    assert await holder_of(pool) == fence
    await handle.signal(Remote.proceed)
    if how == "fail":
        with pytest.raises(WorkflowFailureError):
            await handle.result()
    else:
        await eventually(lambda: _continued(client, handle.id), SOON)
    assert await holder_of(pool) == 0
    if how == "continue":
        await client.get_workflow_handle(handle.id).signal(Remote.proceed)
        assert await client.get_workflow_handle(handle.id).result() == "successor"


async def test_cancelled(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that is cancelled has given its permit back when it closes."""
    handle, _ = await begun(client, place, "complete")
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, CancelledError)
    assert await holder_of(pool) == 0


async def test_terminated(client: Client, place: Place, pool: Semaphore) -> None:
    """The permit of a run that is terminated goes to the next in line, as soon as a relay sees the end."""
    handle, fence = await begun(client, place, "complete")
    async with waiting(pool) as other:
        await handle.terminate()
        assert (await asyncio.wait_for(asyncio.shield(other), NOT_BY_EXPIRY)).fence > fence


async def test_timed_out(client: Client, place: Place, pool: Semaphore) -> None:
    """So does that of a run that times out."""
    _, fence = await begun(client, place, "complete", run_timeout=timedelta(seconds=10))
    async with waiting(pool) as other:
        assert (await asyncio.wait_for(asyncio.shield(other), NOT_BY_EXPIRY)).fence > fence


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


@pytest.mark.slow
async def test_continued_and_not_adopted(callers: Callers, place: Place, pool: Semaphore) -> None:
    """A permit that the next run does not adopt is renewed for `adopt_window`, and then ends with its lease."""
    async with callers.service(place, adopt_window=2 * SHORT_S), callers.calling(place, WORKFLOWS) as client:
        handle, fence = await begun(client, place, "leave")
        async with waiting(pool) as other:
            await handle.signal(Remote.proceed)
            await eventually(lambda: _continued(client, handle.id), SOON)
            await stays_held(pool, fence, SHORT_S + 2)  # longer than without a renewal
            assert (await asyncio.wait_for(asyncio.shield(other), NOT_BY_EXPIRY)).fence > fence
        await client.get_workflow_handle(handle.id).terminate()


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


async def test_all_on_one_lock(callers: Callers, place: Place, pool: Semaphore) -> None:
    """Callers of the service, workflows with Redis and services take turns: never two inside, and growing fences."""
    FENCES.clear()
    INSIDE.clear()

    async def as_service() -> None:
        for _ in range(TURNS):
            async with pool.hold() as hold:
                await enter_and_leave(hold.fence)

    flows, activities = [TakesTurns], [enter_and_leave]
    async with (
        callers.service(place),
        callers.calling(place, flows, activities) as remote,
        place.serving(flows, activities) as local,
    ):
        tasks = [asyncio.create_task(as_service()) for _ in range(2)]
        for client, endpoint in ((remote, ENDPOINT), (local, None)):
            for number in range(2):
                running = client.execute_workflow(
                    TakesTurns.run,
                    args=[endpoint, TURNS],
                    id=f"{place.prefix}-{number}",
                    task_queue=place.task_queue,
                )
                tasks.append(asyncio.create_task(running))
        await asyncio.gather(*tasks)
    assert len(FENCES) == len(tasks) * TURNS
    assert sorted(set(FENCES)) == FENCES


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_many_wait_while_every_handler_is_killed(
    callers: Callers, place: Place, pool: Semaphore, worker_process: StartWorkerProcess, quiet: Quiet
) -> None:
    """Many callers wait without a worker's slot; kill -9 of every handler costs no place and no permit."""
    quiet.allow(".*")
    slots = {"max_concurrent_workflow_tasks": 8, "max_concurrent_activities": 1, "max_concurrent_nexus_tasks": 8}
    kept = {"waiter_lease": 120}  # a busy machine takes its time to start a process
    service: dict[str, Any] = {"serve": "locks", "task_queue": SERVICE_QUEUE, "plugin": kept, "worker": slots}
    async with callers.calling(place, WORKFLOWS) as client:
        first = await worker_process("nexus_flows", **service)
        holder, fence = await begun(client, place, "complete")
        handles = []
        for number in range(MANY):
            workflow_id = f"{place.prefix}-{number}"
            handles.append(
                await client.start_workflow(Remote.run, "complete", id=workflow_id, task_queue=place.task_queue)
            )
        await eventually(lambda: _so_many_wait(pool, MANY), SOON)
        before = [waiter.ticket for waiter in (await pool.inspect(max_items=MANY)).waiters]
        first.kill()
        await worker_process("nexus_flows", **service)
        assert await holder_of(pool) == fence
        await holder.signal(Remote.proceed)
        second = (await eventually(lambda: _other_holder(pool, fence), SOON)).ticket
        assert second == before[0]
        assert [waiter.ticket for waiter in (await pool.inspect(max_items=MANY)).waiters] == before[1:]
        await asyncio.gather(*(handle.terminate() for handle in handles))


async def _so_many_wait(pool: Semaphore, count: int) -> bool:
    return (await pool.inspect(max_items=1)).waiting == count


async def _other_holder(pool: Semaphore, fence: int) -> Permit | None:
    holders = (await pool.inspect()).holders
    return next((holder for holder in holders if holder.fence > fence), None)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time on a machine, the worker is built
@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_workflow_in_another_language(callers: Callers, place: Place, pool: Semaphore, language: str) -> None:
    """It releases its permit in every ending, and waits in the same queue as a service in Python."""
    client = await Client.connect(callers.address, namespace=CALLERS)
    async with callers.service(place), callers.foreign(language, place) as task_queue:
        before = await pool.acquire()
        for how in ("complete", "fail", "cancel", "terminate", *CONTINUES[language]):
            # One has an id that is longer than a ticket may be.
            workflow_id = f"{place.prefix}-{how}{'-' * 300 if how == 'complete' else ''}"
            handle = await client.start_workflow("Hold", args=[ENDPOINT, how], id=workflow_id, task_queue=task_queue)
            await eventually(lambda: _so_many_wait(pool, 1), SOON)
            async with waiting_behind(pool) as after:
                await pool.release(before)
                held = await eventually(functools.partial(_other_holder, pool, before.fence), SOON)
                assert held.owner == limits.shortened(workflow_id, limits.OWNER_BYTES_MAX)
                await _end(handle, how)
                before = await asyncio.wait_for(after, SOON)
            assert before.fence > held.fence
        await pool.release(before)
        refusal = await client.execute_workflow("AsksTwice", ENDPOINT, id=place.prefix, task_queue=task_queue)
        assert refusal == "AcquireTimeout"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("language", LANGUAGES)
async def test_a_grant_that_meets_a_cancellation(
    callers: Callers, place: Place, pool: Semaphore, language: str
) -> None:
    """Whoever learns of both in one workflow task ends as cancelled, and the permit is free."""
    client = await Client.connect(callers.address, namespace=CALLERS)
    async with callers.service(place):
        before = await pool.acquire()
        async with callers.foreign(language, place) as task_queue:
            handle = await client.start_workflow("Hold", args=[ENDPOINT, ""], id=place.prefix, task_queue=task_queue)
            await eventually(lambda: _so_many_wait(pool, 1), SOON)
        await handle.cancel()
        await pool.release(before)
        await eventually(functools.partial(has_event, handle, "NEXUS_OPERATION_COMPLETED"), SOON)
        async with callers.foreign(language, place):
            with pytest.raises(WorkflowFailureError) as ended:
                await asyncio.wait_for(handle.result(), SOON)
        assert isinstance(ended.value.cause, CancelledError)
        assert await holder_of(pool) == 0
        assert await tasks_that_failed(handle) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_body_is_done_though_nobody_takes_its_permit_back(
    callers: Callers, place: Place, pool: Semaphore
) -> None:
    """The release finds no service, until its time is over: the run returns what its body did."""
    client = await Client.connect(callers.address, namespace=CALLERS)
    async with contextlib.AsyncExitStack() as workers:
        queues = [await workers.enter_async_context(callers.foreign(each, place)) for each in LANGUAGES]
        async with callers.service(place):
            handles = [
                await client.start_workflow("Hold", args=[ENDPOINT, "outlive"], id=queue, task_queue=queue)
                for queue in queues
            ]
            for handle in handles:  # a service that ends before its answer is there leaves the caller waiting
                await eventually(functools.partial(has_event, handle, "NEXUS_OPERATION_COMPLETED"), SOON)
            holders = sorted(holder.fence for holder in (await pool.inspect()).holders)
            assert len(holders) == 3
        for handle in handles:
            await handle.signal("proceed")
        ended = (asyncio.wait_for(handle.result(), SOON) for handle in handles)
        assert sorted(await asyncio.gather(*ended)) == holders


async def _end(handle: WorkflowHandle[Any, Any], how: str) -> None:
    if how in {"cancel", "terminate"}:
        await getattr(handle, how)()
    else:
        await handle.signal("proceed")
    if how == "complete":
        assert await handle.result() > 0
        return
    if how == "continue":
        assert await handle.result() == 0  # of the run that it continued as
        return
    with pytest.raises(WorkflowFailureError):
        await handle.result()


@contextlib.asynccontextmanager
async def waiting_behind(pool: Semaphore) -> AsyncIterator[asyncio.Task[Permit]]:
    """Wait behind one other for a permit, as a plain service does; it stays the caller's."""
    task = asyncio.create_task(pool.acquire())
    await eventually(lambda: _so_many_wait(pool, 2), SOON)
    yield task
