"""The primitives one by one, in short: what a client must be able to do on any server and in any dialect of it.

Each check takes a client that is entered, and uses resources of its own, so that all of them may run at once. Run as a
program with a URL, this file tries them on that server.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from redlease import (
    AcquireTimeout,
    Hold,
    LeaseLost,
    Permit,
    QueueFull,
    Rate,
    Redlease,
    Retry,
    Semaphore,
    SequenceFailed,
    StaleFence,
    Superseded,
)

from helpers import cancel, queue_up, until_waiting

HALF_A_MINUTE = timedelta(seconds=30)


async def check_lock(client: Redlease) -> None:
    """One holder at a time; a timeout takes the request out of the queue; fences grow."""
    lock = client.lock("lock")
    async with lock.hold() as hold:
        assert await lock.locked()
        with pytest.raises(AcquireTimeout):
            await lock.acquire(timeout=0.1)
        assert await lock.try_acquire() is None
        assert not (await lock.inspect()).waiters
        first = hold.fence
    assert not await lock.locked()
    async with lock.hold() as hold:
        assert hold.fence > first > 0


async def check_hand_offs(client: Redlease) -> None:
    """Each release hands the lock to the next in the order of arrival."""
    lock = client.lock("handed")
    order: list[int] = []

    async def visit(number: int) -> None:
        async with lock.hold():
            order.append(number)

    async with asyncio.TaskGroup() as group, lock.hold():
        for number in range(3):
            group.create_task(visit(number))
            await until_waiting(lock, number + 1)
    assert order == [0, 1, 2]


async def check_permits(client: Redlease) -> None:
    """A permit as data is renewed, adopted under a new fence, and released; one that nobody renews is lost."""
    lock = client.lock("permits")
    permit = await lock.renew(await lock.acquire(ticket="mine"))
    assert (await lock.acquire(ticket="mine")).fence == permit.fence
    async with lock.adopt(permit) as hold:
        assert hold.fence > permit.fence
        assert await lock.is_held(hold.permit)
        assert not await lock.is_held(permit)
        with pytest.raises(LeaseLost):
            await lock.renew(permit)
    short = client.lock("permits", lease=0.3)
    left = await short.acquire()
    next_one = await lock.acquire(timeout=20)
    assert next_one.fence > left.fence
    assert not await lock.is_held(left)
    assert await lock.release(next_one)


async def check_weights(client: Redlease) -> None:
    """Units are counted; a heavy request is not passed by a light one; a full queue refuses; a resize grants."""
    pool = client.semaphore("weights", capacity=3, max_waiters=1)
    async with pool.hold(weight=2):
        (heavy,) = await queue_up(pool, 1, weight=2)
        assert await pool.try_acquire() is None
        with pytest.raises(QueueFull):
            await pool.acquire(weight=2)
        await pool.resize(4)
        permit = await heavy
        assert (await pool.inspect()).in_use == 4
        assert await pool.release(permit)
    lock = client.lock("weights of a lock")
    async with lock.hold():
        with pytest.raises(ValueError, match="is a lock"):
            await lock.resize(2)


async def check_keys(client: Redlease) -> None:
    """Requests of different keys take turns, and each key has its limit."""
    pool = client.semaphore("keys", capacity=1)
    taken = await pool.acquire()
    tasks = [(await queue_up(pool, 1, ticket=ticket, key=ticket[0]))[0] for ticket in ("a1", "a2", "b1")]
    assert await granted_in_turn(pool, taken, tasks) == ["a1", "b1", "a2"]
    keyed = client.semaphore("limit of each key", capacity=3, per_key=1)
    async with keyed.hold(key="a"), keyed.hold(key="b"):
        assert await keyed.try_acquire(key="a") is None
        assert {holder.key for holder in (await keyed.inspect()).holders} == {"a", "b"}


async def granted_in_turn(pool: Semaphore, taken: Permit, waiting: list[asyncio.Task[Permit]]) -> list[str]:
    """Release the only permit, and each that is granted then; return the tickets in the order of their grants."""
    tickets: list[str] = []
    pending = set(waiting)
    while await pool.release(taken) and pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        (taken,) = [task.result() for task in done]
        tickets.append(taken.ticket)
    return tickets


async def check_rates(client: Redlease) -> None:
    """A grant needs a token of the resource, or of its key; who waits for one gets it when it is due."""
    pool = client.semaphore("rate", capacity=9, rate=Rate(1, per=0.3, burst=2))
    permits = [await pool.acquire(timeout=20) for _ in range(3)]
    assert permits[2].fence - permits[0].fence > 290_000
    keyed = client.semaphore("rate of each key", capacity=9, per_key_rate=Rate(1, per=0.3))
    first, other = await keyed.acquire(key="a"), await keyed.acquire(key="b")
    second = await keyed.acquire(key="a", timeout=20)
    assert second.fence - first.fence > 290_000
    assert all([await pool.release(permit) for permit in permits])
    assert all([await keyed.release(permit) for permit in (first, other, second)])


async def check_priorities(client: Redlease) -> None:
    """A request with a priority stands before those without; its position says so."""
    lock = client.lock("priorities")
    taken = await lock.acquire()
    tasks = [(await queue_up(lock, 1, ticket=f"plain {number}"))[0] for number in range(2)]
    tasks += await queue_up(lock, 1, ticket="urgent", priority=1)
    position = await lock.position("plain 0")
    assert position is not None
    assert position.rank == 2
    assert await granted_in_turn(lock, taken, tasks) == ["urgent", "plain 0", "plain 1"]


async def check_when_full(client: Redlease) -> None:
    """A request is refused, replaces one that waits, or a holder."""
    lock = client.lock("when full")
    taken = await lock.acquire()
    with pytest.raises(QueueFull):
        await lock.acquire(when_full="refuse")
    (older,) = await queue_up(lock, 1)
    newer = asyncio.create_task(lock.acquire(when_full="replace-waiter"))
    with pytest.raises(Superseded):
        await older
    assert await lock.release(taken)
    replaced = await newer
    holder = await lock.acquire(when_full="replace-holder", grace=0.1, timeout=20)
    assert not await lock.is_held(replaced)
    assert await lock.release(holder)


async def check_limits(client: Redlease) -> None:
    """A limit, a pause and a back-off grant less than the capacity, `inspect` lists them, and lifting them grants."""
    pool = client.semaphore("limits", capacity=3)
    await pool.set_limit(1, until=HALF_A_MINUTE, reason="night")
    async with pool.hold():
        assert await pool.try_acquire() is None
        assert (await pool.inspect()).allowed == 1
        (waiting,) = await queue_up(pool, 1)
        assert await pool.clear_limit()
        assert await pool.release(await waiting)
    await pool.pause(until=HALF_A_MINUTE)
    (waiting,) = await queue_up(pool, 1)
    assert [limit.kind for limit in (await pool.inspect()).limits] == ["pause"]
    assert await pool.resume()
    assert await pool.release(await waiting)
    await pool.set_limit(per_key=1)
    async with pool.hold(key="a"):
        assert await pool.try_acquire(key="a") is None
    await pool.back_off("a", 0.3)
    assert await pool.try_acquire(key="a") is None
    assert await pool.release(await pool.acquire(key="a", timeout=20))
    await pool.back_off(None, HALF_A_MINUTE)
    assert await pool.end_back_off(None)
    assert await pool.clear_limit()


async def check_history(client: Redlease) -> None:
    """What happened is listed in its order."""
    lock = client.lock("history", history=100)
    async with lock.hold(owner="one"):
        (waiting,) = await queue_up(lock, 1, owner="two")
    assert await lock.release(await waiting)
    entries = await lock.history()
    assert [f"{entry.event} {entry.owner}" for entry in entries] == [
        *("granted one", "released one", "granted two", "released two")
    ]
    assert await client.lock("history of nothing").history() == []


async def check_guard(client: Redlease) -> None:
    """A guard refuses a stale fence, and runs a script under one that is not."""
    guard = client.guard("guard")
    key = f"{guard.hash_tag}:{uuid.uuid4()}"
    add = "return redis.call('INCRBY', KEYS[1], ARGV[1])"
    await guard.check(1_795_342_886_845_427)
    assert await guard.run(1_795_342_886_845_428, add, [key], [7]) == 7
    for refused in (guard.check(1_795_342_886_845_427), guard.run(1_795_342_886_845_427, add, [key], [7])):
        with pytest.raises(StaleFence) as error:
            await refused
        assert error.value.seen == 1_795_342_886_845_428
    assert await guard.run(1_795_342_886_845_428, add, [key], [1]) == 8


async def check_sequence(client: Redlease) -> None:
    """A sequence goes on after the items that are done, and forgets its results."""
    handled: list[int] = []

    async def handle(item: int, hold: Hold) -> int:
        assert not hold.lost
        handled.append(item)
        if item == 2 and handled.count(2) == 1:
            raise RuntimeError("broken")
        return 10 * item

    def sequence() -> Any:
        return client.sequence("sequence", [1, 2, 3], handle, id="id", retry=Retry(attempts=1))

    with pytest.raises(SequenceFailed):
        await sequence()
    progress = await client.sequence_progress("sequence", "id")
    assert progress is not None
    assert (progress.handled, progress.queued) == (1, 2)
    assert await sequence() == [10, 20, 30]
    assert handled == [1, 2, 2, 3]
    assert await client.forget_sequence("sequence", "id")
    assert await client.sequence_progress("sequence", "id") is None


async def check_rwlock(client: Redlease) -> None:
    """Readers share, a writer excludes, and may become a reader."""
    rwlock = client.rwlock("rwlock")
    async with rwlock.read.hold(), rwlock.read.hold():
        assert await rwlock.write.try_acquire() is None
    async with rwlock.write.hold() as hold:
        assert await rwlock.read.try_acquire() is None
        waiting = await queue_up(rwlock.read, 1)
        await hold.downgrade()
        assert await rwlock.read.release(await waiting[0])
    assert not (await rwlock.inspect()).holders


async def check_all(client: Redlease) -> None:
    """All of a set are held, or none."""
    one, two = client.lock("one of all"), client.semaphore("two of all", capacity=2)
    async with client.all(one, two.weighted(2)) as holds:
        assert len(holds) == 2
        assert await two.try_acquire() is None
    taken = await two.acquire()
    with pytest.raises(AcquireTimeout):
        async with client.all(one, two.weighted(2), timeout=0.1):
            pass
    assert not await one.locked()
    assert await two.release(taken)


async def check_watch(client: Redlease) -> None:
    """Who watches hears of each change."""
    lock = client.lock("watched")
    async with contextlib.aclosing(lock.watch()) as watching:
        assert (await anext(watching)).holders == ()
        async with lock.hold(owner="seen", metadata={"order": "7"}):
            (holder,) = (await anext(watching)).holders
            assert (holder.owner, dict(holder.metadata)) == ("seen", {"order": "7"})


async def check_leader(client: Redlease) -> None:
    """One candidate leads; when its term ends, the next begins."""
    terms = []
    for _ in range(2):
        async with contextlib.aclosing(client.leader("leader").terms()) as elections:
            term = await anext(elections)
            current = await client.leader("leader").current()
            assert current is not None
            assert current.fence == term.number
            terms.append(term.number)
    assert terms == sorted(set(terms))


async def check_release_all(client: Redlease) -> None:
    """An operator takes out everybody."""
    pool = client.semaphore("everybody", capacity=2)
    permits = [await pool.acquire() for _ in range(2)]
    waiting = await queue_up(pool, 2)
    assert await pool.release_all(queue=True) == 4
    await cancel(*waiting)
    assert not any([await pool.is_held(permit) for permit in permits])


Check = Callable[[Redlease], Coroutine[Any, Any, None]]
CHECKS: tuple[Check, ...] = (
    check_lock,
    check_hand_offs,
    check_permits,
    check_weights,
    check_keys,
    check_rates,
    check_priorities,
    check_when_full,
    check_limits,
    check_history,
    check_guard,
    check_sequence,
    check_rwlock,
    check_all,
    check_watch,
    check_leader,
    check_release_all,
)


async def check_everything(client: Redlease) -> None:
    """All checks at once."""
    async with asyncio.TaskGroup() as group:
        for check in CHECKS:
            group.create_task(check(client), name=check.__name__)


async def main(url: str) -> bool:
    """Try each check on any server, under a prefix of its own; print what comes of them."""
    passed = True
    async with Redlease.from_url(url, prefix=f"check-{uuid.uuid4()}", idle_ttl=60) as client:
        for check in CHECKS:
            try:
                async with asyncio.timeout(60):
                    await check(client)
            except Exception as error:  # noqa: BLE001  the others are tried all the same
                passed = False
                print(f"failed  {check.__name__}: {error!r}")  # noqa: T201
            else:
                print(f"ok      {check.__name__}")  # noqa: T201
        print(client)  # noqa: T201
    return passed


if __name__ == "__main__":
    sys.exit(not asyncio.run(main(sys.argv[1])))
