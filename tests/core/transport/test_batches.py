"""One call reaps a batch; what it could not look at is looked at by the next, and nobody is refused for the dead."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from redlease import QueueFull

from helpers import eventually

if TYPE_CHECKING:
    from redlease import Redlease

    from conftest import MakeClient


@pytest.mark.slow
async def test_more_lapsed_holders_than_a_call_reaps(client: Redlease) -> None:
    """The weight of all is free again when 250 permits have lapsed: an acquire that never queues has it."""
    pool = client.semaphore("r", 300, lease=60)
    permits = await asyncio.gather(*(pool.acquire() for _ in range(250)))
    # One after the other: so short a lease would end before a slow engine has granted or renewed all of them.
    for each in permits:
        await pool.renew(each, lease=0.3)
    await asyncio.sleep(0.4)
    permit = await pool.try_acquire(weight=300)
    assert permit is not None
    await pool.release(permit)


@pytest.mark.slow
async def test_dead_waiters_behind_a_thousand_live_ones(client: Redlease, make_client: MakeClient) -> None:
    """With 1,050 alive and 60 dead behind them, a queue of at most 1,100 takes one more, and is full with live ones."""
    dead = await make_client()
    held = await client.lock("r").acquire()
    session = client._session
    alive = [asyncio.ensure_future(client.lock("r", waiter_lease=60).acquire()) for _ in range(1050)]
    await eventually(
        lambda: len(session.pending) == 1050 and all(each.sequence for each in session.pending.values()), 30
    )
    dying = [asyncio.ensure_future(dead.lock("r", waiter_lease=0.5).acquire()) for _ in range(60)]
    await eventually(
        lambda: len(dead._session.pending) == 60 and all(each.sequence for each in dead._session.pending.values())
    )
    await dead.abandon()
    await asyncio.sleep(0.7)
    bounded = client.lock("r", max_waiters=1100)
    late = [asyncio.ensure_future(bounded.acquire(ticket=f"late{number}")) for number in range(50)]
    await eventually(
        lambda: len(session.pending) == 1100 and all(each.sequence for each in session.pending.values()), 30
    )
    with pytest.raises(QueueFull):
        await bounded.acquire()
    for task in (*alive, *dying, *late):
        task.cancel()
    await asyncio.gather(*alive, *dying, *late, return_exceptions=True)
    await client.lock("r").release(held)
