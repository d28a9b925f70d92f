"""Cancelled anywhere in acquire, in a block or in release, a task leaves neither permit nor place (P6)."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Literal

import pytest

from helpers import cancel, eventually, left_over, queue_up, until_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

    import redis.asyncio

    from redlease import Redlease, Semaphore

    from conftest import MakeClient

When = Literal["waiting", "resuming"]

# How many random cancellations each engine gets: fakeredis runs its scripts in this process.
RANDOM = {"fakeredis": 1000, "redis62": 2000, "redis7": 10_000, "valkey9": 2000, "cluster7": 2000}


class CancelledAt:
    """A coroutine whose task is cancelled at its n-th suspension.

    "waiting" cancels it in the next turn of the loop, "resuming" when what it waits for has come and before it has seen
    that: a grant on its way is there then, and the task does not know.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], step: int, when: When) -> None:
        self.coroutine = coroutine
        self.step = step
        self.when = when
        self.steps = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        task = asyncio.current_task()
        assert task is not None
        resume: Callable[[], Any] = lambda: self.coroutine.send(None)  # noqa: E731
        while True:
            try:
                waits_for = resume()
            except StopIteration as stop:
                return stop.value
            self.steps += 1
            if self.steps == self.step:
                if self.when == "resuming" and waits_for is not None:
                    waits_for.add_done_callback(lambda _: task.cancel())
                else:
                    asyncio.get_running_loop().call_soon(task.cancel)
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001
                thrown = error
                resume = lambda: self.coroutine.throw(thrown)  # noqa: B023, E731
            else:
                resume = lambda: self.coroutine.send(None)  # noqa: E731


async def cancelled_at(coroutine: Coroutine[Any, Any, Any], step: int, when: When) -> bool:
    """Run the coroutine, cancelled at that step; return whether it had so many."""
    wrapped = CancelledAt(coroutine, step, when)

    async def run() -> None:
        await wrapped

    task = asyncio.create_task(run())
    await asyncio.wait([task])
    if not task.cancelled():
        error = task.exception()
        assert error is None, error
    return wrapped.steps >= step


async def acquire_and_release(pool: Semaphore) -> None:
    """Use a plain permit; what acquire has returned is this task's to release."""
    await pool.release(await pool.acquire())


async def try_and_release(pool: Semaphore) -> None:
    """Use a permit that takes no waiting."""
    permit = await pool.try_acquire()
    if permit is not None:
        await pool.release(permit)


async def hold_a_block(pool: Semaphore) -> None:
    """Use a hold as a block."""
    async with pool.hold() as hold:
        await asyncio.sleep(0)
        hold.check()


async def hold_by_hand(pool: Semaphore) -> None:
    """Use a hold without a block; the finally clause is what its users write."""
    hold = await pool.hold()
    try:
        await asyncio.sleep(0)
    finally:
        await hold.release()


USES = [acquire_and_release, try_and_release, hold_a_block, hold_by_hand]


async def nothing_is_left(raw: redis.asyncio.Redis, prefix: str) -> bool:
    """Tell whether no permit and no place stands under the prefix."""
    return await left_over(raw, prefix) == []


@pytest.mark.parametrize("when", ["waiting", "resuming"])
@pytest.mark.parametrize("use", USES)
async def test_cancelled_at_each_step_on_a_free_resource(
    client: Redlease,
    raw: redis.asyncio.Redis,
    prefix: str,
    use: Callable[[Semaphore], Coroutine[Any, Any, Any]],
    when: When,
) -> None:
    """After the 1st, 2nd, ... last step of acquire and release nothing is left, and the lock is free."""
    lock = client.lock("r")
    step = 1
    while await cancelled_at(use(lock), step, when):
        await eventually(lambda: nothing_is_left(raw, prefix))
        step += 1
    assert step > 2
    assert await lock.try_acquire() is not None


@pytest.mark.parametrize("when", ["waiting", "resuming"])
@pytest.mark.parametrize("use", [acquire_and_release, hold_a_block, hold_by_hand])
async def test_cancelled_at_each_step_out_of_the_queue(
    client: Redlease,
    raw: redis.asyncio.Redis,
    prefix: str,
    use: Callable[[Semaphore], Coroutine[Any, Any, Any]],
    when: When,
) -> None:
    """The same where the grant comes after a wait: the one behind gets its turn whatever the step."""
    lock = client.lock("r")
    step, reached = 1, True
    while reached:
        permit = await lock.acquire()
        first = asyncio.create_task(cancelled_at(use(lock), step, when))
        if when == "resuming" or step > 1:
            await until_waiting(lock, 1)
        behind = asyncio.create_task(lock.acquire(ticket="behind"))
        await eventually(lambda: _is_queued(lock, "behind"))
        assert await lock.release(permit)
        reached = await first
        assert await lock.release(await asyncio.wait_for(behind, 15))
        await eventually(lambda: nothing_is_left(raw, prefix))
        step += 1
    assert step > 2


async def _is_queued(lock: Semaphore, ticket: str) -> bool:
    return ticket in [waiter.ticket for waiter in (await lock.inspect()).waiters]


async def test_cancelled_at_each_step_of_adopt_and_renew(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """Cancelling a renewal or an adoption leaves at most the one permit, which lapses or is released by its ticket."""
    lock = client.lock("r", lease=0.5)
    for use in (lock.renew, lock.adopt):
        step, reached = 1, True
        while reached:
            permit = await lock.acquire(ticket="t")

            async def run() -> None:
                done = await use(permit)  # noqa: B023
                if use == lock.adopt:  # noqa: B023
                    await done.release()  # type: ignore[union-attr]

            reached = await cancelled_at(run(), step, "waiting")
            await lock.release("t")
            await eventually(lambda: nothing_is_left(raw, prefix))
            step += 1
        assert step > 2


async def test_cancelling_does_not_wait_for_the_network(client: Redlease) -> None:
    """A cancelled wait ends within a few turns of the loop, before the server can have answered."""
    lock = client.lock("r")
    await lock.acquire()
    for use in (acquire_and_release, hold_a_block):
        task = asyncio.create_task(use(lock))
        await until_waiting(lock, 1)
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert task.cancelled()
        await until_waiting(lock, 0)


async def test_a_cancelled_release_goes_on(client: Redlease) -> None:
    """A release that is cancelled is carried out all the same, and may be repeated."""
    lock = client.lock("r")
    permit = await lock.acquire()
    task = asyncio.create_task(lock.release(permit))
    await asyncio.sleep(0)
    await cancel(task)
    later = await asyncio.wait_for(lock.acquire(), 15)
    assert not await lock.release(permit)
    assert await lock.release(later)


@pytest.mark.slow
async def test_cancelled_at_random(engine: str, make_client: MakeClient, raw: redis.asyncio.Redis, prefix: str) -> None:
    """Thousands of tasks, cancelled at random moments, leave no permit and no place, and are never too many inside."""
    dice = random.Random(6)
    pools = [(await make_client()).semaphore("r", capacity=3) for _ in range(2)]
    fences: list[int] = []
    inside = cancelled = 0

    async def use(pool: Semaphore) -> None:
        nonlocal inside
        async with pool.hold(weight=dice.choice((1, 1, 1, 2))) as hold:
            inside += hold.permit.weight
            assert inside <= 3
            fences.append(hold.fence)
            try:
                await asyncio.sleep(dice.choice((0, 0, 0.001)))
            finally:
                inside -= hold.permit.weight

    async def one() -> None:
        nonlocal cancelled
        task = asyncio.create_task(dice.choice((*USES, use, use, use))(dice.choice(pools)))
        if dice.random() < 0.5:
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(dice.uniform(0, 0.02))
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        if not task.cancelled() and (error := task.exception()):
            raise error

    async def some(count: int) -> None:
        for _ in range(count):
            await one()

    await asyncio.gather(*(some(RANDOM[engine] // 50) for _ in range(50)))
    assert cancelled > RANDOM[engine] / 4
    assert len(set(fences)) == len(fences)
    await eventually(lambda: nothing_is_left(raw, prefix))
    assert await pools[0].try_acquire(weight=3) is not None


async def test_a_client_that_closes_leaves_nothing_of_its_waiters(
    client: Redlease, make_client: MakeClient, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """Leaving a client while requests wait and are granted takes all of them back."""
    for turns in range(8):
        closing = await make_client()
        lock = closing.lock("r")
        permit = await client.lock("r").acquire()
        tasks = await queue_up(lock, 3)
        release = asyncio.create_task(client.lock("r").release(permit))
        for _ in range(turns):
            await asyncio.sleep(0)
        await closing.close()
        await release
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if not isinstance(outcome, BaseException):
                await client.lock("r").release(outcome)
        await eventually(lambda: nothing_is_left(raw, prefix))
