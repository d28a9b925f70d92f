"""Where a request stands in the queue, and about how long it will wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from redlease import Position

from helpers import cancel, eventually, queue_up

if TYPE_CHECKING:
    from redlease import Redlease

    from conftest import MakeClient


async def test_who_waits_has_a_place(client: Redlease) -> None:
    """The first in line has place 1, who holds a permit 0, and who does neither none."""
    lock = client.lock("r")
    assert await lock.position("a") is None
    taken = await lock.acquire(ticket="taken")
    tasks = [(await queue_up(lock, 1, ticket=ticket))[0] for ticket in "abc"]
    assert [await lock.position(ticket) for ticket in ("taken", *"abc", "other")] == [
        Position(0, 0.0),
        Position(1, None),
        Position(2, None),
        Position(3, None),
        None,
    ]
    assert await lock.release(taken)
    assert [getattr(await lock.position(ticket), "rank", None) for ticket in ("taken", *"abc")] == [None, 0, 1, 2]
    await cancel(*tasks)
    with pytest.raises(ValueError, match="ticket"):
        await lock.position("")


async def test_the_wait_is_estimated_from_recent_holds(client: Redlease) -> None:
    """It is that of the units ahead and its own, each held as long as holds lasted of late, shared by the capacity."""
    pool = client.semaphore("r", capacity=2)
    holders = [await pool.acquire() for _ in range(2)]
    tasks = [(await queue_up(pool, 1, ticket=f"{weight}", weight=weight))[0] for weight in (1, 2)]
    assert await pool.release(holders[0])
    first = await tasks[0]
    lasted_s = (first.granted_at_ms - holders[0].granted_at_ms) / 1000
    (heavy,) = [await pool.position("2")]
    assert heavy is not None
    assert heavy.rank == 1
    assert heavy.estimated_wait == pytest.approx(lasted_s * 2 / 2, abs=0.003)
    more = await queue_up(pool, 1, ticket="3")
    behind = await pool.position("3")
    assert behind is not None
    assert behind.rank == 2
    assert behind.estimated_wait == pytest.approx(lasted_s * 3 / 2, abs=0.003)
    await cancel(*tasks, *more)


async def test_the_estimate_counts_what_is_allowed(client: Redlease) -> None:
    """A request waits longer under a limit or a pause, at the limit of its key or with a small share."""
    pool = client.semaphore("r", capacity=20)
    held = [await pool.acquire() for _ in range(20)]
    tasks = await queue_up(pool, 1)
    assert await pool.release(held.pop())
    await tasks[0]  # so it is known how long holds last
    tasks += await queue_up(pool, 20, key="a")
    tasks += await queue_up(pool, 20, key="b", share=0.1)
    waiting = (await pool.inspect()).waiters

    async def last(key: str) -> float:
        ticket = [waiter.ticket for waiter in waiting if waiter.key == key][-1]
        found = await pool.position(ticket)
        assert found is not None
        assert found.estimated_wait is not None
        return found.estimated_wait

    alone, of_a_small_share = await last("a"), await last("b")
    assert of_a_small_share > 1.5 * alone
    await pool.set_limit(2, key="a")
    assert await last("a") == pytest.approx(20 / (22 / 10) * alone, rel=0.2, abs=0.01)
    assert await pool.clear_limit(key="a")
    await pool.set_limit(2)
    assert await last("a") == pytest.approx(10 * alone, rel=0.05, abs=0.01)  # it is in whole ms
    assert await pool.clear_limit()
    await pool.back_off("a", 60)
    assert await last("a") >= 59
    await pool.pause(until=100)
    assert await last("b") > 99
    await pool.pause()
    ((_, *_, last_of_b),) = [[waiter.ticket for waiter in waiting if waiter.key == "b"]]
    found = await pool.position(last_of_b)
    assert found is not None
    assert found.estimated_wait is None
    await cancel(*tasks[1:])


async def test_a_limit_that_ends_is_counted_until_then(client: Redlease) -> None:
    """Without keys too: a limit that ends soon makes a request wait no longer than that, and what is left then."""
    pool = client.semaphore("r", capacity=20)
    held = [await pool.acquire() for _ in range(20)]
    tasks = await queue_up(pool, 20)
    assert await pool.release(held.pop())
    await tasks[0]
    ticket = (await pool.inspect()).waiters[-1].ticket
    estimates = []
    for until in (None, 0.2, 3600):
        if until:
            await pool.set_limit(1, until=until)
        found = await pool.position(ticket)
        assert found is not None
        estimates.append(found.estimated_wait or 0)
    free, soon, late = estimates
    assert late == pytest.approx(20 * free, rel=0.05)
    assert free <= soon <= 0.2 + free
    await pool.clear_limit()
    await cancel(*tasks[1:])


async def test_the_dead_are_not_ahead(make_client: MakeClient, engine: str) -> None:
    """Waiters whose client is gone do not count, wherever they stand; one of them has no place."""
    client, gone = await make_client(), await make_client(waiter_lease=0.3)
    lock = client.lock("r")
    taken = await lock.acquire()
    tasks = [
        (await queue_up(each.lock("r"), 1, ticket=ticket))[0]
        for each, ticket in ((client, "a"), (gone, "b"), (client, "c"))
    ]
    assert await lock.position("c") == Position(3, None)
    await gone.abandon()

    async def is_passed() -> bool:
        return await lock.position("c") == Position(2, None) and await lock.position("b") is None

    await eventually(is_passed)
    assert await lock.release(taken)
    await cancel(*tasks)
