"""What the attempts of an `@exclusive` activity leave to each other when the server has given one up."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import attempt_flows
import pytest
from attempt_flows import Again, Attempts, complete_later, hang
from temporal_tools import Place
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ActivityError, ApplicationError

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Redlease, Semaphore

    from conftest import MakeClient


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client beside a worker."""
    async with place.serving([Again, Attempts], [hang, complete_later]) as client:
        yield client


@pytest.fixture
async def service(make_client: MakeClient, redis_url: str) -> Redlease:
    """A service beside the workflows."""
    return await make_client(url=redis_url)


def pool_of(service: Redlease, task_queue: str) -> Semaphore:
    """Return the resource of a test."""
    return service.lock(f"attempts:{task_queue}")


async def test_an_attempt_that_hangs_is_taken_over(client: Client, service: Redlease, task_queue: str) -> None:
    """Timed out twice on a living worker, an activity goes on in its third attempt: at once, under a new fence."""
    pool = pool_of(service, task_queue)
    handle = await client.start_workflow(Attempts.run, args=[task_queue, 2], id=task_queue, task_queue=task_queue)
    first: list[int] = []

    async def holds() -> bool:
        first[:] = [held.fence for held in (await pool.inspect()).holders]
        return bool(first)

    await eventually(holds)
    attempt, fence = await asyncio.wait_for(handle.result(), 20)
    assert attempt == 3
    assert fence > first[0]
    assert [said.split(" ", 1)[1] for said in attempt_flows.ended[-2:]] == ["1 cancelled", "2 cancelled"]
    permit = await pool.try_acquire()
    assert permit is not None
    await pool.release(permit)


async def test_an_attempt_that_waits_too_long_leaves_its_place(
    client: Client, service: Redlease, task_queue: str
) -> None:
    """Attempts time out while they wait, and the activity is served before who came after its first one."""
    pool = pool_of(service, task_queue)
    permit = await pool.acquire()
    handle = await client.start_workflow(Attempts.run, args=[task_queue, 0], id=task_queue, task_queue=task_queue)
    await until_waiting(pool, 1)
    newcomer = asyncio.create_task(pool.acquire())
    await until_waiting(pool, 2)

    async def attempted_again() -> bool:
        (pending,) = (await handle.describe()).raw_description.pending_activities
        return pending.attempt >= 3 and pending.state == PendingActivityState.PENDING_ACTIVITY_STATE_STARTED

    await eventually(attempted_again, 15)
    await pool.release(permit)
    (_, fence), later = await asyncio.gather(handle.result(), newcomer)
    assert fence < later.fence
    assert await pool.release(later)


async def test_an_activity_that_would_complete_later(client: Client, service: Redlease, task_queue: str) -> None:
    """It fails for good: nobody would hold its permit until then."""
    handle = await client.start_workflow(Attempts.run, args=[task_queue, -1], id=task_queue, task_queue=task_queue)
    with pytest.raises(WorkflowFailureError) as caught:
        await asyncio.wait_for(handle.result(), 20)
    assert isinstance(caught.value.cause, ActivityError)
    assert isinstance(caught.value.cause.cause, ApplicationError)
    assert "complete later" in caught.value.cause.cause.message
    assert not await pool_of(service, task_queue).locked()


async def test_an_activity_id_that_is_used_again(client: Client, service: Redlease, task_queue: str) -> None:
    """What the first activity of that id still does is cancelled before the second one begins, under a new fence."""
    said = len(attempt_flows.ended)
    attempt, fence = await client.execute_workflow(Again.run, task_queue, id=task_queue, task_queue=task_queue)
    assert attempt == 1
    assert attempt_flows.ended[said:] == ["one 1 cancelled"]
    permit = await pool_of(service, task_queue).acquire(timeout=1)
    assert permit.fence > fence
    assert await pool_of(service, task_queue).release(permit)


async def test_the_last_attempt_leaves_no_place(client: Client, service: Redlease, task_queue: str) -> None:
    """An activity that failed for good as it waited too long keeps nobody waiting."""
    pool = pool_of(service, task_queue)
    permit = await pool.acquire()
    with pytest.raises(WorkflowFailureError):
        await client.execute_workflow(Attempts.run, args=[task_queue, 0, 1], id=task_queue, task_queue=task_queue)
    await eventually(lambda: nobody_waits(pool))
    assert await pool.release(permit)


async def nobody_waits(pool: Semaphore) -> bool:
    """Tell whether the queue is empty."""
    return not (await pool.inspect()).waiters
