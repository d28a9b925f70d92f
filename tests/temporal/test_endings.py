"""What happens to a held permit when its run ends, or when a worker, Redis or Temporal is away."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from ending_flows import Cleaning, Ending, Heirs, guarded
from lock_flows import Sleeper, Use, work
from temporal_tools import (
    SHORT_S,
    WIDE,
    Place,
    holder_of,
    names_of,
    reset,
    stays_held,
    tasks_that_failed,
    until_free,
    waiting,
)
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError, CancelledError, TimeoutError  # noqa: A004

from redlease import Semaphore

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import WorkflowHandle

    from conftest import MakeClient, OwnServer
    from temporal.conftest import OwnTemporalServer, StartWorkerProcess
    from temporal_server import TemporalServer

WORKFLOWS = [Cleaning, Ending, Heirs, Sleeper]
ACTIVITIES = [guarded, work]
SERVED_WITHIN = 3.0  # of a run's end


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker for all workflows."""
    async with place.serving(WORKFLOWS, ACTIVITIES) as client:
        yield client


async def begun(
    client: Client, place: Place, use: Use, how: str, **options: Any
) -> tuple[WorkflowHandle[Any, Any], int]:
    """Start a workflow that ends in this way; returns it, and its fence as soon as it holds."""
    handle = await client.start_workflow(
        Ending.run, args=[use, how], id=place.task_queue, task_queue=place.task_queue, **options
    )
    return handle, await handle.execute_update(Ending.until_held)


# The run ends


async def test_completed(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that completes has given its permit back."""
    handle, fence = await begun(client, place, Use("r"), "complete")
    assert await holder_of(pool) == fence
    await handle.signal(Ending.proceed)
    assert await handle.result() == "complete True"
    await until_free(pool)


async def test_failed(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that fails has given its permit back."""
    handle, _ = await begun(client, place, Use("r"), "fail")
    await handle.signal(Ending.proceed)
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, ApplicationError)
    await until_free(pool)


async def test_cancelled(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that is cancelled cleans up under its permit, which is given back after that."""
    handle = await client.start_workflow(Cleaning.run, Use("r"), id=place.task_queue, task_queue=place.task_queue)
    await handle.execute_update(Cleaning.until_held)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, CancelledError)
    names = await names_of(handle)
    assert names.index("ACTIVITY_TASK_COMPLETED") > names.index("WORKFLOW_EXECUTION_CANCEL_REQUESTED")
    await until_free(pool)


@pytest.mark.parametrize("lease", [3.0, 30.0])
async def test_terminated(client: Client, place: Place, pool: Semaphore, lease: float) -> None:
    """The permit of a terminated run goes to who waits within 3 s, however long its lease is."""
    handle, fence = await begun(client, place, Use("r", lease=lease), "complete")
    async with waiting(pool) as waiter:
        await handle.terminate()
        permit = await asyncio.wait_for(asyncio.shield(waiter), SERVED_WITHIN)
        assert permit.fence > fence


async def test_terminated_before_anybody_waits(client: Client, place: Place, pool: Semaphore) -> None:
    """Who comes only after a run was terminated, and later than the relay's first look at it, waits no longer."""
    handle, fence = await begun(client, place, Use("r"), "complete")
    await asyncio.sleep(1.5)
    await handle.terminate()
    async with waiting(pool) as waiter:
        permit = await asyncio.wait_for(asyncio.shield(waiter), SERVED_WITHIN)
        assert permit.fence > fence


async def test_terminated_with_waiting_workflow(client: Client, place: Place, pool: Semaphore) -> None:
    """A workflow that waits is served within 3 s too."""
    handle, fence = await begun(client, place, Use("r"), "complete")
    next_id = f"{place.task_queue}-next"
    other = await client.start_workflow(Sleeper.run, Use("r"), id=next_id, task_queue=place.task_queue)
    await eventually(lambda: is_waiting(pool))
    await handle.terminate()
    await eventually(lambda: is_held_above(pool, fence), SERVED_WITHIN)
    await other.signal(Sleeper.proceed)
    assert (await other.result()).startswith("kept")


async def is_waiting(pool: Semaphore) -> bool:
    """Tell whether somebody waits."""
    return bool((await pool.inspect()).waiters)


async def is_held_above(pool: Semaphore, fence: int) -> bool:
    """Tell whether there is a holder with a greater fence."""
    return await holder_of(pool) > fence


async def test_terminated_on_lease(client: Client, place: Place, pool: Semaphore) -> None:
    """With on_close="lease" the permit of a terminated run is held until its lease ends, and not renewed."""
    handle, fence = await begun(client, place, Use("r", lease=3.0, on_close="lease"), "complete")
    async with waiting(pool) as waiter:
        before = (await pool.inspect()).holders[0].expires_at_ms
        await handle.terminate()
        permit = await asyncio.wait_for(asyncio.shield(waiter), 15)
        assert permit.fence > fence
        assert permit.granted_at_ms >= before


async def test_run_timeout(client: Client, place: Place, pool: Semaphore) -> None:
    """The permit of a run that timed out goes to who waits within 3 s."""
    handle, fence = await begun(client, place, Use("r"), "complete", run_timeout=timedelta(seconds=1.5))
    await times_out(handle, pool, fence)


async def test_execution_timeout(client: Client, place: Place, pool: Semaphore) -> None:
    """The permit of an execution that timed out goes to who waits within 3 s."""
    handle, fence = await begun(client, place, Use("r"), "complete", execution_timeout=timedelta(seconds=1.5))
    await times_out(handle, pool, fence)


async def times_out(handle: WorkflowHandle[Any, Any], pool: Semaphore, fence: int) -> None:
    """See the run time out, and a waiter served."""
    async with waiting(pool) as waiter:
        with pytest.raises(WorkflowFailureError) as raised:
            await handle.result()
        assert isinstance(raised.value.cause, TimeoutError)
        permit = await asyncio.wait_for(asyncio.shield(waiter), SERVED_WITHIN)
        assert permit.fence > fence


# The run is continued as new


async def test_continued_without_detach(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that is continued as new inside the block has given its permit back."""
    handle, _ = await begun(client, place, Use("r"), "continue")
    await handle.signal(Ending.proceed)
    await eventually(lambda: is_successor(handle))
    await until_free(pool)
    await handle_of_latest(client, handle).signal(Ending.proceed)
    assert await handle.result() == "successor"


def handle_of_latest(client: Client, handle: WorkflowHandle[Any, Any]) -> WorkflowHandle[Any, Any]:
    """Return a handle on whichever run is open."""
    return client.get_workflow_handle(handle.id)


async def is_successor(handle: WorkflowHandle[Any, Any]) -> bool:
    """Tell whether the open run is not the one that was started."""
    return (await handle.describe()).run_id != handle.first_execution_run_id


async def test_continued_and_adopted(client: Client, place: Place, pool: Semaphore) -> None:
    """A permit that is handed on keeps its fence over several runs, each of them longer than its lease, and is kept."""
    use = Use("r", lease=3.0, seconds=3.5)
    handle = await client.start_workflow(
        Heirs.run, args=[use, None, 4], id=place.task_queue, task_queue=place.task_queue
    )
    fence = await eventually(lambda: holder_of(pool))
    await stays_held(pool, fence, 15)
    await handle_of_latest(client, handle).signal(Heirs.proceed)
    assert await handle.result() == fence
    await eventually(lambda: is_free(pool), SERVED_WITHIN + 8)


async def is_free(pool: Semaphore) -> bool:
    """Tell whether nobody holds."""
    return await holder_of(pool) == 0


async def test_detached_and_never_adopted(place: Place, pool: Semaphore) -> None:
    """A permit that the next run does not adopt is kept for `adopt_window`, and lapses then."""
    async with place.serving(WORKFLOWS, ACTIVITIES, adopt_window=3.0) as client:
        handle, fence = await begun(client, place, Use("r", lease=1.0), "forget")
        async with waiting(pool) as waiter:
            await handle.signal(Ending.proceed)
            await eventually(lambda: is_successor(handle))
            await stays_held(pool, fence, 2.5)
            permit = await asyncio.wait_for(asyncio.shield(waiter), 15)
            assert permit.fence > fence
        await handle_of_latest(client, handle).signal(Ending.proceed)
        assert await handle.result() == "successor"


async def test_successor_closes(client: Client, place: Place, pool: Semaphore) -> None:
    """The permit that a terminated successor has adopted goes to who waits within 3 s."""
    handle = await client.start_workflow(
        Heirs.run, args=[Use("r"), None, 2], id=place.task_queue, task_queue=place.task_queue
    )
    await eventually(lambda: is_successor(handle))
    latest = handle_of_latest(client, handle)
    fence = await latest.execute_update(Heirs.until_held)
    async with waiting(pool) as waiter:
        await latest.terminate()
        permit = await asyncio.wait_for(asyncio.shield(waiter), SERVED_WITHIN)
        assert permit.fence > fence


async def test_successor_closes_without_adopting(client: Client, place: Place, pool: Semaphore) -> None:
    """The permit that a successor would have had to adopt goes to who waits when that is over."""
    handle, fence = await begun(client, place, Use("r"), "forget")
    async with waiting(pool) as waiter:
        await handle.signal(Ending.proceed)
        await eventually(lambda: is_successor(handle))
        await handle_of_latest(client, handle).terminate()
        permit = await asyncio.wait_for(asyncio.shield(waiter), SERVED_WITHIN)
        assert permit.fence > fence


# The run is reset


async def test_reset_after_the_acquire(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that was reset to after the acquire keeps the permit, its fence and its renewal."""
    handle, fence = await begun(client, place, Use("r", lease=SHORT_S), "complete")
    await handle.signal(Ending.nudge)
    await eventually(lambda: has_completed_tasks(handle, 2))
    async with waiting(pool):
        latest = await reset(client, handle, -1)
        await stays_held(pool, fence, SHORT_S + 2)
        await latest.signal(Ending.proceed)
        assert await latest.result() == "complete True"


async def has_completed_tasks(handle: WorkflowHandle[Any, Any], count: int) -> bool:
    """Tell whether so many workflow tasks have been completed."""
    return (await names_of(handle)).count("WORKFLOW_TASK_COMPLETED") >= count


async def test_reset_before_the_acquire(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that was reset to before the acquire finds its permit again, or gets one with a greater fence."""
    handle, fence = await begun(client, place, Use("r", lease=SHORT_S), "complete")
    latest = await reset(client, handle, 0)
    again = await latest.execute_update(Ending.until_held)
    assert again >= fence
    async with waiting(pool) as waiter:
        await stays_held(pool, again, SHORT_S + 2)
        await latest.signal(Ending.proceed)
        assert await latest.result() == "complete True"
        await asyncio.wait_for(asyncio.shield(waiter), SHORT_S - 1)


async def test_reset_and_terminated(client: Client, place: Place, pool: Semaphore) -> None:
    """The permit that a reset run has goes to who waits when that is terminated."""
    handle, fence = await begun(client, place, Use("r"), "complete")
    await handle.signal(Ending.nudge)
    await eventually(lambda: has_completed_tasks(handle, 2))
    latest = await reset(client, handle, -1)
    async with waiting(pool) as waiter:
        await latest.terminate()
        permit = await asyncio.wait_for(asyncio.shield(waiter), SERVED_WITHIN)
        assert permit.fence > fence


# Workers go


@pytest.mark.slow
async def test_worker_killed(
    temporal_client: Client, place: Place, pool: Semaphore, worker_process: StartWorkerProcess
) -> None:
    """A permit is kept, with its fence, when the worker that has got it is killed."""
    first = await worker_process("ending_flows", worker=WIDE)
    handle, fence = await begun(temporal_client, place, Use("r", lease=3.0), "complete")
    await worker_process("ending_flows", worker=WIDE)
    first.kill()
    await stays_held(pool, fence, 9)
    await handle.signal(Ending.proceed)
    assert await handle.result() == "complete True"
    await until_free(pool)


@pytest.mark.slow
async def test_worker_restarted(
    temporal_client: Client, place: Place, pool: Semaphore, worker_process: StartWorkerProcess
) -> None:
    """A hold of 24 s on a lease of 8 s keeps its fence while the only worker is shut down and another one started."""
    first = await worker_process("lock_flows", worker=WIDE)
    handle = await temporal_client.start_workflow(
        Sleeper.run, Use("r", lease=8.0), id=place.task_queue, task_queue=place.task_queue
    )
    fence = await eventually(lambda: holder_of(pool), 15)
    looking = asyncio.create_task(stays_held(pool, fence, 24))
    await asyncio.sleep(8)
    first.terminate()
    await first.ended()
    second = await worker_process("lock_flows", worker=WIDE)
    await looking
    await handle.signal(Sleeper.proceed)
    assert await handle.result() == f"kept {fence}"
    assert (await second.event("begin"))["fence"] == fence


@pytest.mark.slow
@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_all_workers_away(
    temporal_client: Client, place: Place, pool: Semaphore, worker_process: StartWorkerProcess, how: str
) -> None:
    """After three leases without a worker the guarded activity does not run, and the body hears of it soon."""
    first = await worker_process("lock_flows", worker=WIDE)
    handle = await temporal_client.start_workflow(
        Sleeper.run, Use("r", lease=1.0), id=place.task_queue, task_queue=place.task_queue
    )
    await eventually(lambda: is_held_by(handle))
    getattr(first, how)()
    await first.ended()
    await handle.signal(Sleeper.proceed)
    await asyncio.sleep(3)
    await until_free(pool)
    second = await worker_process("lock_flows", worker=WIDE)
    assert await asyncio.wait_for(handle.result(), 15) == "lost"
    assert second.said("begin") == []
    assert await tasks_that_failed(handle) == []


async def is_held_by(handle: WorkflowHandle[Any, Any]) -> int:
    """Return the fence that a Sleeper holds."""
    fence: int = await handle.query(Sleeper.held)
    return fence


# Redis is away


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.5, 4.0])
async def test_redis_away(
    temporal_server: TemporalServer,
    task_queue: str,
    prefix: str,
    own_server: OwnServer,
    make_client: MakeClient,
    seconds: float,
) -> None:
    """A permit outlasts an outage of Redis shorter than its lease; after a longer one the body gets LeaseLost."""
    redis = own_server("valkey9")
    place = Place(temporal_server, task_queue, redis.url, prefix)
    pool = (await make_client(url=redis.url)).lock("r")
    async with place.serving(WORKFLOWS, ACTIVITIES) as client:
        handle = await client.start_workflow(Sleeper.run, Use("r", lease=3.0), id=task_queue, task_queue=task_queue)
        fence = await eventually(lambda: is_held_by(handle))
        redis.pause()
        await asyncio.sleep(seconds)
        redis.resume()
        if seconds < 3:
            await stays_held(pool, fence, 4)
            await handle.signal(Sleeper.proceed)
            assert await handle.result() == f"kept {fence}"
        else:
            assert await asyncio.wait_for(handle.result(), 5) == "lost"
        assert await tasks_that_failed(handle) == []


async def test_redis_emptied(
    temporal_server: TemporalServer, task_queue: str, prefix: str, own_server: OwnServer
) -> None:
    """When Redis has lost its data, the body gets LeaseLost within a lease."""
    redis = own_server("valkey9")
    place = Place(temporal_server, task_queue, redis.url, prefix)
    async with place.serving(WORKFLOWS, ACTIVITIES) as client:
        handle = await client.start_workflow(Sleeper.run, Use("r", lease=3.0), id=task_queue, task_queue=task_queue)
        await eventually(lambda: is_held_by(handle))
        redis.cli("FLUSHALL")
        assert await asyncio.wait_for(handle.result(), 8) == "lost"
        assert await tasks_that_failed(handle) == []


# Temporal is away


@pytest.mark.slow
async def test_temporal_away_for_a_while(
    own_temporal_server: OwnTemporalServer, task_queue: str, redis_url: str, prefix: str, pool: Semaphore
) -> None:
    """A permit is kept while Temporal does not answer for less than `unknown_grace`."""
    temporal = await own_temporal_server()
    place = Place(temporal, task_queue, redis_url, prefix)
    async with place.serving(WORKFLOWS, ACTIVITIES) as client:
        handle, fence = await begun(client, place, Use("r", lease=3.0), "complete")
        async with waiting(pool):
            temporal.pause()
            try:
                await stays_held(pool, fence, 5)
            finally:
                temporal.resume()
            await stays_held(pool, fence, 3)
        await handle.signal(Ending.proceed)
        assert await handle.result() == "complete True"


@pytest.mark.slow
async def test_temporal_away_for_long(
    own_temporal_server: OwnTemporalServer, task_queue: str, redis_url: str, prefix: str, pool: Semaphore
) -> None:
    """A permit is not renewed once Temporal has not answered for `unknown_grace`; the body hears of it afterwards."""
    temporal = await own_temporal_server()
    place = Place(temporal, task_queue, redis_url, prefix)
    async with place.serving(WORKFLOWS, ACTIVITIES, unknown_grace=3.0) as client:
        handle = await client.start_workflow(Sleeper.run, Use("r", lease=1.5), id=task_queue, task_queue=task_queue)
        fence = await eventually(lambda: is_held_by(handle))
        async with waiting(pool) as waiter:
            temporal.pause()
            try:
                await stays_held(pool, fence, 2)
                permit = await asyncio.wait_for(asyncio.shield(waiter), 15)
                assert permit.fence > fence
            finally:
                temporal.resume()
            assert await asyncio.wait_for(handle.result(), 8) == "lost"
