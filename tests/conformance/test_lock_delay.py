"""The lock delay: what a lost holder had stays in use for a while, so that its late writes land before the next one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from redlease import LeaseLost

from helpers import eventually, queue_up

if TYPE_CHECKING:
    from redlease import Redlease

DELAY_S = 0.6


async def test_the_next_grant_waits_after_a_loss(client: Redlease) -> None:
    """The units of a permit that lapsed are granted when the delay after its deadline is over, and at once then."""
    lock = client.lock("r", lease=0.2, lock_delay=DELAY_S)
    lost = await lock.acquire(ticket="lost")
    assert await lock.try_acquire() is None
    waiting = await queue_up(lock, 1)

    async def has_expired() -> bool:
        return not await lock.is_held(lost)

    await eventually(has_expired)
    snapshot = await lock.inspect()
    assert (snapshot.holders, snapshot.in_use, snapshot.waiting) == ((), 1, 1)
    assert await lock.locked()
    assert not await lock.release(lost)  # too late to cut the delay short
    with pytest.raises(LeaseLost):
        await lock.renew(lost)
    next_one = await waiting[0]
    late_ms = next_one.granted_at_ms - (lost.expires_at_ms + DELAY_S * 1000)
    assert 0 <= late_ms < 5000
    assert await lock.release(next_one)


async def test_a_release_is_not_delayed(client: Redlease) -> None:
    """Whoever comes after a release, of a holder or by its ticket, enters at once."""
    lock = client.lock("r", lock_delay=60)
    for _ in range(3):
        async with lock.hold(timeout=5):
            pass
    taken = await lock.acquire(ticket="t")
    waiting = await queue_up(lock, 1)
    assert await lock.release("t")
    assert (await waiting[0]).fence > taken.fence
    assert await lock.release_all() == 1
    assert not await lock.locked()


async def test_the_same_ticket_waits_too(client: Redlease) -> None:
    """A request with the ticket of the lost permit is a new one, and its grant is delayed like any other."""
    pool = client.semaphore("r", capacity=3, lease=0.2, lock_delay=DELAY_S)
    lost = await pool.acquire(ticket="t", weight=2)

    async def has_expired() -> bool:
        return not await pool.is_held(lost)

    await eventually(has_expired)
    beside = await pool.acquire(timeout=5)  # one unit was free all the time
    assert beside.granted_at_ms < lost.expires_at_ms + DELAY_S * 1000
    again = await pool.acquire(ticket="t", weight=2, timeout=5)
    assert again.granted_at_ms >= lost.expires_at_ms + DELAY_S * 1000
    assert again.fence > lost.fence
    # Each loss is delayed once: what is in use in the end is what is held.
    await eventually(lambda: _in_use(client), 10)
    assert (await pool.inspect()).in_use == 0


async def _in_use(client: Redlease) -> bool:
    return (await client.semaphore("r", capacity=3).inspect()).in_use == 0


async def test_the_delay_is_a_setting_of_the_resource(client: Redlease) -> None:
    """It holds for requests that do not name it, until another value is given."""
    await client.lock("r", lock_delay=60).release(await client.lock("r", lock_delay=60).acquire())
    quick = client.lock("r", lease=0.2)
    lost = await quick.acquire()

    async def has_expired() -> bool:
        return not await quick.is_held(lost)

    await eventually(has_expired)
    assert await quick.locked()
    assert await quick.try_acquire() is None
    assert await client.lock("r", lock_delay=0).try_acquire() is None  # what was delayed stays so
    await client.lock("s", lock_delay=60).release(await client.lock("s", lock_delay=60).acquire())
    await client.lock("s", lock_delay=0).release(await client.lock("s", lock_delay=0).acquire())
    await client.lock("s", lease=0.2).acquire()
    assert await client.lock("s").acquire(timeout=5)


@pytest.mark.parametrize("delay", [-1, "1", True, 90_000])
async def test_what_is_no_delay_is_refused(client: Redlease, delay: float) -> None:
    """It is a duration of at most `idle_ttl`, for which alone the server keeps an idle resource."""
    for make in (client.lock, client.rwlock):
        with pytest.raises(ValueError, match="lock_delay"):
            make("r", lock_delay=delay)
    client.lock("r", lock_delay=90_000, idle_ttl=90_000)


async def test_a_writer_that_is_lost_keeps_all_out(client: Redlease) -> None:
    """Of a read-write lock, readers too wait for the delay after a lost writer."""
    catalog = client.rwlock("r", lease=0.2, lock_delay=DELAY_S)
    lost = await catalog.write.acquire()
    reader = await catalog.read.acquire(timeout=5)
    assert reader.granted_at_ms >= lost.expires_at_ms + DELAY_S * 1000
    await asyncio.gather(*(catalog.read.acquire(timeout=5) for _ in range(3)))
    await catalog.read.release_all()
