"""What is over is forgotten a batch a call, and looked for no more often than something has ended."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease import QueueFull

from helpers import eventually

if TYPE_CHECKING:
    from redlease import Redlease

    from conftest import MakeClient, Servers

BATCH = 100  # as queue.lua has it


@pytest.fixture
def engine(real_engine: str) -> str:
    """Only engines that are processes: fakeredis counts no commands, and a cluster has other channels."""
    return real_engine


def waiters_key(client: Redlease) -> str:
    """The key in which they stand."""
    return client.lock("r")._resource.keys[3]


async def test_releases_by_ticket_leave_little(client: Redlease, raw: Any) -> None:
    """Two thousand tickets released by their name leave no more than what has not ended, and one batch."""
    lock = client.lock("r", lease=0.02)
    for number in range(2000):
        await lock.acquire(ticket=f"t{number}")
        await lock.release(f"t{number}")
    await asyncio.sleep(0.05)  # the last of them have ended
    for number in range(3):
        await lock.acquire(ticket=f"u{number}")
        await lock.release(f"u{number}")
    assert await raw.zcard(waiters_key(client)) < 2 * BATCH


async def test_a_call_forgets_no_more_than_a_batch(client: Redlease, raw: Any) -> None:
    """With a hundred thousand of them over, a call that queues takes out a batch of each kind."""
    lock = client.lock("r")
    permit = await lock.acquire()
    key = waiters_key(client)
    for start in range(0, 100_000, 10_000):
        await raw.zadd(key, {f"!ended{number}": -1000 - number for number in range(start, start + 10_000)})
        await raw.zadd(key, {f"place|{number}": 1000 + number for number in range(start, start + 10_000)})
    before = await raw.zcard(key)
    waiting = asyncio.ensure_future(lock.acquire(timeout=30))
    await eventually(lambda: raw.zscore(key, client._session.name))
    assert before - 2 * BATCH <= await raw.zcard(key) - 1 < before
    before = await raw.zcard(key)
    await lock.release(permit)
    assert before - 2 * BATCH <= await raw.zcard(key)
    await lock.release(await waiting)


async def test_a_smaller_capacity_is_told_behind_tombstones(
    client: Redlease, servers: Servers, real_engine: str, make_client: MakeClient
) -> None:
    """Two hundred of them do not stand between a resize and a waiter that can never fit any more."""
    other = await make_client(url=servers.url(real_engine))
    pool = client.semaphore("r", 4, waiter_lease=60, lease=60)
    held = await pool.acquire(weight=4)
    others = [
        asyncio.ensure_future(other.semaphore("r", 4, lease=60).acquire(ticket=f"w{n}")) for n in range(2 * BATCH)
    ]
    await eventually(
        lambda: all(waiting.sequence for waiting in other._session.pending.values()) and other._session.pending
    )
    for number in range(2 * BATCH):
        assert await pool.release(f"w{number}")  # each leaves a tombstone that lasts for a minute
    await asyncio.gather(*others, return_exceptions=True)
    heavy = asyncio.ensure_future(pool.acquire(weight=3))
    await eventually(lambda: any(waiting.sequence for waiting in client._session.pending.values()))
    await other.semaphore("r", 4).resize(2)
    async with asyncio.timeout(10):  # a beat would come after 20 s
        with pytest.raises(ValueError, match="can never fit"):
            await heavy
    await pool.release(held)


async def test_a_late_copy_still_grants_nothing(client: Redlease) -> None:
    """As long as it stands, a copy of the request that was taken out is told so."""
    permit = await client.lock("r").acquire()
    waiting = asyncio.ensure_future(client.lock("r").acquire(ticket="T"))
    await eventually(lambda: any(each.sequence for each in client._session.pending.values()))
    (late,) = client._session.pending.values()
    assert await client.lock("r").release("T")
    with pytest.raises(Exception, match="removed from the queue"):
        await waiting
    again = client._session.enter(late.request, needs_full_lease=True)
    with pytest.raises(Exception, match="removed from the queue"):
        await again.future
    client._session.leave(again)
    await client.lock("r").release(permit)


@pytest.mark.slow
async def test_a_full_queue_of_the_living_is_looked_through_once(
    client: Redlease, raw: Any, servers: Servers, real_engine: str, make_client: MakeClient
) -> None:
    """A refused request looks through the queue when a place has lapsed since that was last done, and not each time."""
    dead = await make_client(url=servers.url(real_engine))
    lock = client.lock("r", max_waiters=300)
    held = await lock.acquire()
    tasks = [asyncio.ensure_future(client.lock("r", waiter_lease=60).acquire()) for _ in range(301)]
    await eventually(
        lambda: len(client._session.pending) == 301 and all(w.sequence for w in client._session.pending.values())
    )
    tasks.append(asyncio.ensure_future(dead.lock("r", waiter_lease=0.1).acquire()))
    await eventually(lambda: any(each.sequence for each in dead._session.pending.values()))
    await dead.abandon()
    await asyncio.sleep(0.3)
    large_reads = []
    for _ in range(3):
        before = (await raw.info("commandstats"))["cmdstat_hget"]["calls"]
        with pytest.raises(QueueFull):
            await lock.acquire()
        large_reads.append((await raw.info("commandstats"))["cmdstat_hget"]["calls"] - before)
    assert large_reads[0] >= 301
    assert max(large_reads[1:]) < 100
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await lock.release(held)
