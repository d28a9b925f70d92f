"""Keys, shares, limits for each key and rates in workflows."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest
from nexus_flows import ENDPOINT
from temporal_tools import Place, tasks_that_failed
from temporalio.client import Client, WorkflowFailureError
from temporalio.common import Priority
from temporalio.exceptions import ApplicationError
from turn_flows import Try, Turn, Use

from redlease import Redlease, Semaphore
from redlease_temporal._payloads.locks import turn_of

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from lock_service import Callers
    from temporalio.client import WorkflowHandle

    from redlease import Permit

    from temporal.conftest import StartWorkerProcess

WORKFLOWS = [Turn, Try]


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    async with place.serving(WORKFLOWS, []) as client:
        yield client


class Starter:
    """Starts workflows that ask for turns, one behind the other."""

    def __init__(self, client: Client, place: Place) -> None:
        self.started: list[WorkflowHandle[Turn, Permit]] = []
        self._client = client
        self._tried = 0
        self._place = place

    async def start(
        self, use: Use, adopted: Permit | None = None, *, stays: bool = False, **options: Any
    ) -> WorkflowHandle[Turn, Permit]:
        """Start one."""
        handle = await self._client.start_workflow(
            Turn.run,
            args=[use, stays, adopted],
            id=f"{self._place.prefix}-{len(self.started)}",
            task_queue=self._place.task_queue,
            **options,
        )
        self.started.append(handle)
        return handle

    async def queue(self, pool: Semaphore, use: Use, **options: Any) -> None:
        """Start one, and return when it waits."""
        await self.start(use, **options)
        await until_waiting(pool, len(self.started), 15)

    async def tries(self, use: Use) -> bool:
        """Return whether a request that does not wait is granted."""
        self._tried += 1
        return await self._client.execute_workflow(
            Try.run, use, id=f"{self._place.prefix}-try-{self._tried}", task_queue=self._place.task_queue
        )

    async def order(self) -> list[str | None]:
        """Return the keys of all in the order of their grants."""
        permits = await asyncio.gather(*(handle.result() for handle in self.started))
        return [permit.key for permit in sorted(permits, key=lambda permit: permit.fence)]


@pytest.fixture
def starter(client: Client, place: Place) -> Starter:
    """What starts workflows."""
    return Starter(client, place)


async def test_keys_take_turns(starter: Starter, pool: Semaphore) -> None:
    """A key that comes last has its first turn before another has its second; a service's waiters are among them."""
    permit = await pool.acquire()
    for _ in range(3):
        await starter.queue(pool, Use("r", key="a"))
    await starter.queue(pool, Use("r", key="b"))
    service = asyncio.create_task(pool.acquire(key="c"))
    await until_waiting(pool, 5)
    assert [waiter.key for waiter in (await pool.inspect()).waiters] == ["a", "b", "c", "a", "a"]
    await pool.release(permit)
    granted = await service
    await pool.release(granted)
    assert await starter.order() == ["a", "b", "a", "a"]
    fences = sorted([(await handle.result()).fence for handle in starter.started])
    assert fences[1] < granted.fence < fences[2]


async def test_the_key_and_the_share_of_a_priority(starter: Starter, pool: Semaphore) -> None:
    """Who gives no key takes the turns of its priority's fairness key, and so many as its weight says."""
    permit = await pool.acquire()
    for key, weight in (("a", 1.0), ("b", 2.0)):
        for _ in range(4):
            await starter.queue(pool, Use("r"), priority=Priority(fairness_key=key, fairness_weight=weight))
    await pool.release(permit)
    order = await starter.order()
    assert order[:6].count("b") == 4, order


async def test_a_key_goes_before_that_of_the_priority(starter: Starter) -> None:
    """What a request says for itself counts, without the weight of the other key."""
    handle = await starter.start(Use("r", key="mine"), priority=Priority(fairness_key="a", fairness_weight=2.0))
    assert (await handle.result()).key == "mine"


@pytest.mark.parametrize(
    ("given", "turn"),
    [
        (Priority(), ("", 1)),
        (Priority(fairness_weight=3.0), ("", 1)),
        (Priority(fairness_key="a"), ("a", 1)),
        (Priority(fairness_key="a", fairness_weight=1e9), ("a", 1000)),
        (Priority(fairness_key="a", fairness_weight=1e-9), ("a", 0.001)),
    ],
)
def test_the_turn_of_a_priority(given: Priority, turn: tuple[str, float]) -> None:
    """A weight that is none of ours is the nearest that is, as Temporal has it too."""
    assert turn_of(given) == turn


async def test_a_key_at_its_limit_holds_up_nobody(starter: Starter, outside: Redlease) -> None:
    """The second of a key waits though there is room, and one of another key enters past it."""
    use, pool = Use("r", capacity=3, per_key=1, key="a"), outside.semaphore("r", 3)
    first = await starter.start(use, stays=True)
    await first.execute_update(Turn.until_held)
    second = await starter.start(use)
    await until_waiting(pool, 1, 15)
    other = await starter.start(Use("r", capacity=3, per_key=1, key="b"))
    assert (await other.result()).key == "b"
    assert not await starter.tries(use)
    await first.signal(Turn.proceed)
    assert (await second.result()).fence > (await first.result()).fence
    await eventually(lambda: starter.tries(use))


async def refused(handle: WorkflowHandle[Turn, Permit]) -> str:
    """Return why a run failed."""
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, ApplicationError)
    assert raised.value.cause.type == "QueueFull"
    return raised.value.cause.message


async def test_a_key_of_which_so_many_wait(starter: Starter, pool: Semaphore) -> None:
    """A further request of it is refused, and one of another key waits."""
    permit = await pool.acquire()
    await starter.queue(pool, Use("r", key="a", waiters=1))
    third = await starter.start(Use("r", key="a", waiters=1))
    assert "1 requests of key 'a' wait already and max_waiters_per_key is 1" in await refused(third)
    starter.started.remove(third)
    await starter.queue(pool, Use("r", key="b", waiters=1))
    await pool.release(permit)
    assert await starter.order() == ["a", "b"]


async def test_an_adopted_permit_counts_for_its_key(starter: Starter, outside: Redlease) -> None:
    """A workflow that takes a service's permit over holds it under its key, whose limit it has reached."""
    pool = outside.semaphore("r", 3, per_key=1)
    use = Use("r", capacity=3, per_key=1)
    adopter = await starter.start(use, await pool.acquire(key="a"), stays=True)
    assert (await adopter.execute_update(Turn.until_held)).key == "a"
    assert [holder.key for holder in (await pool.inspect()).holders] == ["a"]
    assert await pool.try_acquire(key="a") is None
    await adopter.signal(Turn.proceed)
    await adopter.result()
    assert await pool.acquire(key="a", timeout=5)


@pytest.mark.parametrize("use", [Use("r", capacity=4, rate=2), Use("r", capacity=4, key="a", key_rate=2)])
async def test_a_rate(starter: Starter, use: Use) -> None:
    """Two grants in a second are half a second apart, by the server's clock, however many units are free."""
    for _ in range(4):
        await starter.start(use)
    permits = await asyncio.gather(*(handle.result() for handle in starter.started))
    granted = sorted(permit.granted_at_ms for permit in permits)
    assert all(later - before >= 500 for before, later in itertools.pairwise(granted)), granted


@pytest.mark.parametrize("use", [Use("r", 4, rate=1, per=600), Use("r", 4, "a", key_rate=1, per=600)])
async def test_a_rate_refuses_who_does_not_wait(starter: Starter, use: Use) -> None:
    """There is no token for the second in ten minutes, though units are free."""
    assert await starter.tries(use)
    assert not await starter.tries(use)


@pytest.mark.timeout(120)
async def test_the_turn_of_a_waiter_outlives_its_worker(
    place: Place, temporal_client: Client, outside: Redlease, worker_process: StartWorkerProcess
) -> None:
    """The relay that takes a request over queues it under its key, and declares what it declared."""
    pool, starter = outside.semaphore("r", 2), Starter(temporal_client, place)
    wide = {"sticky_queue_schedule_to_start_timeout": 1.0}
    first = await worker_process("turn_flows", worker=wide)
    held = [await pool.acquire(key=key) for key in "ab"]
    await starter.queue(pool, Use("r", capacity=2, per_key=1, key="a"))
    first.kill()
    await first.ended()
    await worker_process("turn_flows", worker=wide)
    await pool.release(held[1])
    assert await pool.try_acquire(key="a") is None
    await pool.release(held[0])
    permit = await asyncio.wait_for(starter.started[0].result(), 40)
    assert permit.key == "a"


async def test_a_caller_through_nexus(callers: Callers, place: Place, outside: Redlease) -> None:
    """A lock service takes keys, shares, limits and rates as a worker of its own namespace does."""
    pool = outside.semaphore("r", 2)
    async with callers.service(place), callers.calling(place, WORKFLOWS) as client:
        starter = Starter(client, place)
        use = Use("r", capacity=2, per_key=1, key="a", key_rate=1000, waiters=1, endpoint=ENDPOINT)
        first = await starter.start(use, stays=True)
        assert (await first.execute_update(Turn.until_held)).key == "a"
        second = await starter.start(use)
        await until_waiting(pool, 1, 30)
        assert [waiter.key for waiter in (await pool.inspect()).waiters] == ["a"]
        third = await starter.start(use)
        assert "max_waiters_per_key is 1" in await refused(third)
        assert await pool.release(await pool.acquire(key="b"))
        await first.signal(Turn.proceed)
        assert (await second.result()).key == "a"
        assert await tasks_that_failed(second) == []
        adopter = await starter.start(use, await pool.acquire(key="b"), stays=True)
        assert (await adopter.execute_update(Turn.until_held)).key == "b"
        assert [holder.key for holder in (await pool.inspect()).holders] == ["b"]
        await adopter.signal(Turn.proceed)
        await adopter.result()


@pytest.mark.parametrize(
    ("use", "needs"),
    [
        (Use("r", key="a", backend="slots"), "'coordinator'"),
        (Use("r", per_key=1, backend="slots"), "'coordinator'"),
        (Use("r", rate=1, backend="slots"), "'redis'"),
        (Use("r", rate=1, backend="coordinator"), "'redis'"),
        (Use("r", key_rate=1, backend="coordinator"), "'redis'"),
    ],
    ids=str,
)
async def test_a_backend_without_turns_refuses_them(starter: Starter, use: Use, needs: str) -> None:
    """The run fails with a ValueError that names the backend which has them."""
    handle = await starter.start(use)
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    cause = raised.value.cause
    assert isinstance(cause, ApplicationError)
    assert cause.type == "ValueError"
    assert needs in cause.message


async def test_a_backend_without_turns_takes_no_notice_of_a_priority(starter: Starter) -> None:
    """A run with a fairness key is granted what it asks for, in the order of arrival."""
    handle = await starter.start(Use("r", backend="slots"), priority=Priority(fairness_key="a"))
    assert (await handle.result()).key is None
