"""A request that had to leave the queue can come back to where it stood: what keeps a workflow's place for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asking import ask

from redlease import Redlease

from helpers import until_waiting

if TYPE_CHECKING:
    from redlease._core.session.queueing import PendingAcquire


async def queued(waiting: PendingAcquire) -> int:
    """Wait until the request is in the queue; return its sequence."""
    heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waiting.on_queued = lambda queued: None if heard.done() else heard.set_result(queued.sequence)
    return await asyncio.wait_for(heard, 15)


async def test_it_stands_before_those_who_came_after_it(client: Redlease) -> None:
    """Taken out and asked for again with its arrival, a request is granted before a later one, and a newcomer last."""
    pool = client.lock("r")
    hold = await pool.hold()
    sequence = await queued(first := ask(client, pool, "first"))
    later = ask(client, pool, "later")
    await until_waiting(pool, 2)
    client._session.leave(first)
    await pool.release("first")
    again = ask(client, pool, "first", sequence)
    assert await queued(again) == sequence
    newcomer = ask(client, pool, "newcomer")
    await until_waiting(pool, 3)
    assert [waiter.ticket for waiter in (await pool.inspect()).waiters] == ["first", "later", "newcomer"]
    await hold.release()
    for waiting in (again, later, newcomer):
        assert await asyncio.wait_for(waiting.future, 15)
        client._session.leave(waiting)
        await pool.release(waiting.request.ticket)


async def test_it_is_granted_at_once_where_it_would_have_been(client: Redlease) -> None:
    """The head of the queue is too heavy for what is free: who stood before it and fits does not wait behind it."""
    pool = client.semaphore("r", 2)
    hold = await pool.hold()
    sequence = await queued(first := ask(client, pool, "first", weight=2, capacity=2))
    heavy = ask(client, pool, "heavy", weight=2, capacity=2)
    await until_waiting(pool, 2)
    client._session.leave(first)
    await pool.release("first")
    again = ask(client, pool, "first", sequence, weight=1, capacity=2)
    assert await asyncio.wait_for(again.future, 15)
    client._session.leave(again)
    await pool.release("first")
    await hold.release()
    assert await asyncio.wait_for(heavy.future, 15)
    client._session.leave(heavy)
    await pool.release("heavy")


async def test_the_bound_on_waiters_does_not_keep_it_out(client: Redlease) -> None:
    """It was let in before: max_waiters is for those who come new."""
    pool = client.lock("r", max_waiters=1)
    hold = await pool.hold()
    sequence = await queued(first := ask(client, pool, "first", most=1))
    client._session.leave(first)
    await pool.release("first")
    other = ask(client, pool, "other", most=1)
    await until_waiting(pool, 1)
    again = ask(client, pool, "first", sequence, most=1)
    assert await queued(again) == sequence
    await hold.release()
    for waiting in (again, other):
        assert await asyncio.wait_for(waiting.future, 15)
        client._session.leave(waiting)
        await pool.release(waiting.request.ticket)
