"""Activities of which only so many run at once."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from exclusive_flows import (
    Calling,
    Order,
    Vendor,
    call_alone,
    call_at_a_rate,
    call_in_turn,
    call_unless_full,
    call_vendor,
)
from temporal_tools import Place
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import Priority
from temporalio.exceptions import ActivityError, ApplicationError
from temporalio.worker import Worker

from redlease import Redlease
from redlease_temporal.worker import current_hold, exclusive

from helpers import eventually, queue_up, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporal.conftest import StartWorkerProcess


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    activities = [call_vendor, call_alone, call_unless_full, call_in_turn, call_at_a_rate, Vendor().call_method]
    async with place.serving([Calling], activities) as client:
        yield client


async def call(
    client: Client, queue: str, name: str, order: Order, attempts: int = 0, number: int = 0, **options: Any
) -> Any:
    """Return the handle of a workflow that calls the activity."""
    return await client.start_workflow(
        Calling.run, args=[name, order, attempts], id=f"{queue}-{number}", task_queue=queue, **options
    )


async def test_no_more_than_the_capacity_run_at_once(client: Client, task_queue: str, outside: Redlease) -> None:
    """Six calls over a capacity of two: never three holders, and six fences."""
    handles = [await call(client, task_queue, "call_vendor", Order(seconds=0.2), number=number) for number in range(6)]
    most = 0
    pool = outside.semaphore("vendor-api", 2)
    results = asyncio.gather(*(handle.result() for handle in handles))
    while not results.done():
        most = max(most, len((await pool.inspect()).holders))
        await asyncio.wait([results], timeout=0.02)
    assert most == 2
    assert len({fence for _, fence in await results}) == 6
    assert not (await pool.inspect()).holders


async def test_each_key_is_a_resource_of_its_own(client: Client, task_queue: str, outside: Redlease) -> None:
    """What one vendor is held up by holds up no other; a method's key does not see `self`."""
    async with outside.lock("vendor-api:busy"):
        free = await call(client, task_queue, "call_alone", Order("free"))
        assert (await free.result())[0] == 1
    assert (await (await call(client, task_queue, "call_method", Order("m"), number=1)).result())[0] == 1


async def test_keys_share_a_resource_whose_limit_each_keeps_to(
    client: Client, task_queue: str, outside: Redlease
) -> None:
    """With `per_key` the second call for a vendor waits for the first, and one for another vendor runs beside it."""
    pool = outside.semaphore("vendor-fair", 3)
    first = await call(client, task_queue, "call_in_turn", Order("a", seconds=5.0))
    await eventually(lambda: _held(pool))
    second = await call(client, task_queue, "call_in_turn", Order("a"), number=1)
    await until_waiting(pool, 1, 10)
    other = await call(client, task_queue, "call_in_turn", Order("b"), number=2)
    fences = [(await handle.result())[1] for handle in (first, other, second)]
    assert fences == sorted(fences)


async def test_whose_turn_it_is_by_the_priority(client: Client, task_queue: str, outside: Redlease) -> None:
    """An activity without a key of its own takes the turns of its workflow's fairness key."""
    pool = outside.semaphore("vendor-api", 2)
    priority = Priority(fairness_key="a", fairness_weight=2.0)
    handle = await call(client, task_queue, "call_vendor", Order(seconds=2.0), priority=priority)
    await eventually(lambda: _held(pool))
    assert [holder.key for holder in (await pool.inspect()).holders] == ["a"]
    await handle.result()


async def test_calls_keep_to_a_rate(client: Client, task_queue: str) -> None:
    """Of four that might run at once two begin in a second: their fences, µs of the server's clock, tell."""
    handles = [await call(client, task_queue, "call_at_a_rate", Order(), number=number) for number in range(4)]
    fences = sorted([(await handle.result())[1] for handle in handles])
    assert all(later - before >= 499_000 for before, later in itertools.pairwise(fences)), fences


async def test_a_retry_takes_over_the_permit_with_a_new_fence(
    client: Client, task_queue: str, outside: Redlease
) -> None:
    """Between the attempts the permit stays, and a waiter does not come between; it is released at the end."""
    handle = await call(client, task_queue, "call_alone", Order(failures=2, seconds=0.2))
    lock = outside.lock("vendor-api:v")
    await eventually(lambda: _held(lock))
    first = (await lock.inspect()).holders[0]
    permit = await lock.acquire(timeout=20)
    attempt, fence = await handle.result()
    assert attempt == 3
    assert first.fence < fence < permit.fence


async def _held(lock: Any) -> bool:
    return bool((await lock.inspect()).holders)


async def test_an_error_that_is_not_retried_releases_at_once(
    client: Client, task_queue: str, outside: Redlease
) -> None:
    """Nor does the last attempt leave its permit behind."""
    lock = outside.lock("vendor-api:v")
    final = await call(client, task_queue, "call_alone", Order(failures=1, final=True))
    with pytest.raises(WorkflowFailureError):
        await final.result()
    assert not await lock.locked()
    last = await call(client, task_queue, "call_alone", Order(failures=9), attempts=2, number=1)
    with pytest.raises(WorkflowFailureError):
        await last.result()
    assert not await lock.locked()


async def test_an_attempt_does_not_wait_behind_too_many(client: Client, task_queue: str, outside: Redlease) -> None:
    """Where as many wait as may, the attempt fails with QueueFull."""
    lock = outside.lock("vendor-full")
    permit = await lock.acquire()
    (waiting,) = await queue_up(lock, 1)
    handle = await call(client, task_queue, "call_unless_full", Order(), attempts=1)
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    failed = raised.value.cause
    assert isinstance(failed, ActivityError)
    assert isinstance(failed.cause, ApplicationError)
    assert failed.cause.type == "QueueFull"
    await lock.release(permit)
    await lock.release(await waiting)


async def test_an_attempt_waits_in_its_slot_for_so_long_and_keeps_its_place(
    client: Client, task_queue: str, outside: Redlease
) -> None:
    """Attempts fail with AcquireTimeout, the same ticket stays first in the queue, and in the end it is served."""
    lock = outside.lock("vendor-api:v")
    hold = await lock.hold()
    handle: WorkflowHandle[Any, Any] = await call(client, task_queue, "call_alone", Order())

    async def attempts() -> int:
        pending = (await handle.describe()).raw_description.pending_activities
        return pending[0].attempt if pending else 0

    await eventually(lambda: _at_least(attempts, 1))
    await eventually(lambda: _somebody_waits(lock))
    later = asyncio.create_task(lock.acquire(timeout=20))
    await eventually(lambda: _at_least(attempts, 3), within=10)
    waiters = (await lock.inspect()).waiters
    assert [waiter.owner for waiter in waiters][:1] == [handle.id]
    await hold.release()
    attempt, fence = await handle.result()
    assert attempt >= 3
    assert fence < (await later).fence


async def _at_least(count: Any, least: int) -> bool:
    return bool(await count() >= least)


async def _somebody_waits(lock: Any) -> bool:
    return bool((await lock.inspect()).waiters)


async def test_a_lost_permit_cancels_the_activity(client: Client, task_queue: str, outside: Redlease) -> None:
    """Released from outside: the attempt ends, and the next one has a new fence."""
    handle = await call(client, task_queue, "call_alone", Order(seconds=1.0))
    lock = outside.lock("vendor-api:v")
    await eventually(lambda: _held(lock))
    first = (await lock.inspect()).holders[0]
    await lock.release(first.ticket)
    attempt, fence = await handle.result()
    assert attempt == 2
    assert fence > first.fence


async def test_a_killed_workers_activity_is_taken_over(
    client: Client, task_queue: str, worker_process: StartWorkerProcess
) -> None:
    """The next attempt, in another process, adopts what is left of the permit with a new fence."""
    queue = f"{task_queue}-processes"
    first = await worker_process("exclusive_flows", task_queue=queue)
    handle = await call(client, queue, "call_alone", Order(seconds=30))
    begun = await first.event("begin", 10)
    second = await worker_process("exclusive_flows", task_queue=queue)
    first.kill()
    again = await second.event("begin", 20)
    assert again["fence"] > begun["fence"]
    assert (await handle.result())[0] == 2


async def test_misuse_is_told_where_it_is_written() -> None:
    """A plain function, a wrong order of decorators and a wrong capacity are ValueErrors."""
    with pytest.raises(ValueError, match="async def"):
        exclusive("r")(lambda: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"below @activity\.defn"):
        exclusive("r")(call_vendor)
    with pytest.raises(ValueError, match="capacity"):
        exclusive("r", capacity=0)
    with pytest.raises(RuntimeError, match="exclusive"):
        current_hold()


async def test_without_the_plugin_it_says_so(temporal_client: Client, task_queue: str) -> None:
    """The activity fails for good, naming the plugin."""
    async with Worker(temporal_client, task_queue=task_queue, workflows=[Calling], activities=[call_vendor]):
        handle = await call(temporal_client, task_queue, "call_vendor", Order())
        with pytest.raises(WorkflowFailureError) as raised:
            await handle.result()
    failed = raised.value.cause
    assert isinstance(failed, ActivityError)
    cause = failed.cause
    assert isinstance(cause, ApplicationError)
    assert "RedleasePlugin" in str(cause)


def test_the_decorated_activity_keeps_its_types() -> None:
    """The SDK sees the parameters of the function itself."""
    definition = activity._Definition.must_from_callable(call_vendor)
    assert definition.arg_types == [Order]
