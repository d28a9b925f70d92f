"""Priorities: who asks with one passes a bounded number of earlier requests, and nobody starves."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from redlease import AcquireTimeout, QueueFull

from helpers import cancel, queue_up

if TYPE_CHECKING:
    from redlease import Redlease, Semaphore

    from conftest import MakeClient


async def line(pool: Semaphore) -> list[str]:
    """Return the tickets of the queue in their order."""
    return [waiter.ticket for waiter in (await pool.inspect()).waiters]


async def test_a_step_passes_ten(client: Redlease) -> None:
    """A request stands ten places ahead of the tail for each step of its priority."""
    lock = client.lock("r")
    taken = await lock.acquire()
    plain = [f"w{number:02}" for number in range(1, 26)]
    tasks = [(await queue_up(lock, 1, ticket=ticket))[0] for ticket in plain]
    for priority in (1, 2, 3):
        tasks += await queue_up(lock, 1, ticket=f"p{priority}", priority=priority)
    # Arrivals count, whoever they were: the 26th, 27th and 28th passed ten, twenty and all.
    assert await line(lock) == ["p3", *plain[:6], "p2", *plain[6:15], "p1", *plain[15:]]
    assert await lock.release(taken)
    fences = []
    while waiting := await line(lock):
        (held,) = (await lock.inspect()).holders
        fences.append(held.fence)
        assert await lock.release(held.ticket)
        assert len(await line(lock)) == len(waiting) - 1
    assert fences == sorted(fences)
    await cancel(*tasks)


async def test_equal_priorities_are_served_in_order(client: Redlease) -> None:
    """Among requests of one priority the order is that of arrival."""
    lock = client.lock("r")
    taken = await lock.acquire()
    tasks = [(await queue_up(lock, 1, ticket=ticket, priority=100))[0] for ticket in "cab"]
    assert await line(lock) == ["c", "a", "b"]
    assert await lock.release(taken)
    await cancel(*tasks)


async def test_nobody_starves(client: Redlease) -> None:
    """However many requests of priority 2 come after it, twenty pass a request without one, and no more."""
    lock = client.lock("r")
    taken = await lock.acquire()
    tasks = await queue_up(lock, 1, ticket="plain")
    tasks += await queue_up(lock, 30, priority=2)
    assert (await line(lock)).index("plain") in (19, 20)  # the twentieth has the same number, and tickets decide
    assert await lock.release(taken)
    await cancel(*tasks)


async def test_who_is_first_enters_if_it_fits(client: Redlease) -> None:
    """A light request with a priority passes a heavy one that must wait, and leaves no capacity idle."""
    pool = client.semaphore("r", capacity=3)
    taken = await pool.acquire(weight=2)
    heavy = await queue_up(pool, 1, ticket="heavy", weight=2)
    assert await pool.try_acquire() is None
    with pytest.raises(AcquireTimeout):
        await pool.acquire(timeout=0)
    first = await pool.acquire(timeout=0, priority=1)
    assert await line(pool) == ["heavy"]
    assert await pool.release(first)
    assert await line(pool) == ["heavy"]
    assert await pool.release(taken)
    assert (await heavy[0]).ticket == "heavy"


async def test_a_repeated_request_keeps_its_place(make_client: MakeClient, engine: str) -> None:
    """A ticket that waits stays where it is, whatever priority a repeated request with it has."""
    client, other = await make_client(), await make_client()
    lock, elsewhere = client.lock("r"), other.lock("r")
    taken = await lock.acquire()
    tasks = await queue_up(lock, 1, ticket="a")
    tasks += await queue_up(lock, 1, ticket="b")
    with pytest.raises(AcquireTimeout):
        await elsewhere.acquire(ticket="b", priority=5, timeout=0.05)
    assert await line(lock) == ["a", "b"]
    assert await lock.release(taken)
    await cancel(*tasks)


async def test_a_full_queue_is_full_for_all(client: Redlease) -> None:
    """`max_waiters` counts everybody who waits, not only those ahead."""
    lock = client.lock("r", max_waiters=2)
    taken = await lock.acquire()
    tasks = await queue_up(lock, 2)
    with pytest.raises(QueueFull):
        await lock.acquire(priority=100)
    await cancel(*tasks)
    assert await lock.release(taken)


@pytest.mark.of_tasks("it decorates an `async def` function")
async def test_holds_of_all_kinds_take_a_priority(client: Redlease) -> None:
    """`hold`, `holding`, `all` and both sides of a read-write lock pass it on."""
    lock, catalog = client.lock("r"), client.rwlock("c")
    async with lock.hold(priority=1), catalog.write.hold(priority=100), client.all(client.lock("b"), priority=2):
        pass

    @lock.holding(priority=1)
    async def work() -> str:
        return "done"

    assert await work() == "done"


@pytest.mark.parametrize("priority", [101, -1, 1.0, "1", None, True])
async def test_what_is_no_priority_is_refused(client: Redlease, priority: int) -> None:
    """It is a whole number from 0 to 100."""
    for call in (client.lock("r").hold, client.lock("r").acquire):
        with pytest.raises(ValueError, match="priority"):
            await call(priority=priority)


async def test_light_ones_do_not_starve_a_heavy_one(client: Redlease) -> None:
    """Of requests that fit at once, ten pass a heavy one or a writer, and no more, though none of them is queued."""
    pool, catalog = client.semaphore("p", capacity=2), client.rwlock("c")
    for light, heavy in ((pool, {"weight": 2}), (catalog.read, {})):
        taken = await light.acquire()
        waiting = await queue_up(light if heavy else catalog.write, 1, **heavy)
        passed = 0
        for _ in range(30):
            with contextlib.suppress(AcquireTimeout):
                permit = await light.acquire(priority=1, timeout=0)
                passed += 1
                assert await light.release(permit)
        assert 9 <= passed <= 10
        assert await light.release(taken)
        await cancel(*waiting)
        assert await light.release_all() <= 1
