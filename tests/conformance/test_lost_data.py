"""Redis loses a key of a resource, by eviction or by hand: requests go on, and nobody holds what is left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from redlease import LeaseLost, Rate, RedleaseError

from helpers import cancel, eventually, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease

    from conftest import MakeClient


async def test_the_queue_of_keys_is_lost(
    client: Redlease, make_client: MakeClient, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A waiter with a key queues again, and is granted when the holder of its key releases."""
    lock = (await make_client()).lock("r", waiter_lease=0.3)
    async with lock.hold(key="a") as hold:
        (waiting,) = await queue_up(client.lock("r", waiter_lease=0.3), 1, key="a")
        assert await raw.delete(f"{prefix}:{{r}}:queue")
        assert await lock.try_acquire(key="a") is None
    permit = await asyncio.wait_for(waiting, 5)
    assert permit.fence > hold.fence
    assert await client.lock("r").release(permit)
    async with lock.hold(key="a", timeout=5):
        pass


async def test_waiters_of_many_keys_queue_again(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """A client that learns that a request of one key is gone from the queue asks about its other keys at once."""
    pool = client.semaphore("r", capacity=1, waiter_lease=3)
    permit = await pool.acquire()
    tasks = [task for key in "abcdef" for task in await queue_up(pool, 1, key=key)]
    assert await raw.delete(f"{prefix}:{{r}}:queue") + await raw.delete(f"{prefix}:{{r}}:waiters") == 2
    tasks += [asyncio.create_task(pool.acquire(key="g"))]  # its place is alive again
    await until_waiting(pool, 7, 2.5)
    await pool.release(permit)
    for task in asyncio.as_completed(tasks):
        await pool.release(await task)


@pytest.mark.parametrize("lost", ["state", "holders", "queue", "waiters"])
async def test_a_pool_with_keys_and_rates_loses_a_key(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str, lost: str
) -> None:
    """What stood for the tokens of a key, and for limits, holds nothing up, and nothing is held by nobody."""
    pool = client.semaphore("r", capacity=1, per_key_rate=Rate(20), lease=0.5, waiter_lease=0.3)
    await pool.set_limit(1, key="b")
    permit = await pool.acquire(key="a")
    (waiting,) = await queue_up(pool, 1, key="a")
    assert await raw.delete(f"{prefix}:{{r}}:{lost}")
    await pool.release(permit)
    assert await pool.release(await asyncio.wait_for(waiting, 5))
    for key in "abc":
        assert await pool.release(await pool.acquire(key=key, timeout=5))
    assert (await pool.inspect()).in_use == 0


@pytest.mark.parametrize("lost", ["state", "holders", "queue", "waiters"])
async def test_all_is_released_at_once(client: Redlease, raw: redis.asyncio.Redis, prefix: str, lost: str) -> None:
    """`release_all` frees what is held after a loss."""
    pool = client.semaphore("r", capacity=2)
    await pool.acquire(key="a")
    await pool.acquire(weight=1)
    waiting = await queue_up(pool, 2, key="a", timeout=20)
    assert await raw.delete(f"{prefix}:{{r}}:{lost}")
    await pool.release_all(queue=True)
    await cancel(*waiting)
    assert await pool.release(await pool.acquire(key="b", timeout=5))


async def test_who_holds_without_a_record_is_told(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """A hold whose record is lost ends, and its unit is kept until its lease would have ended."""
    lock = client.lock("r", lease=0.6)
    with pytest.raises(LeaseLost):
        async with lock.hold() as hold:
            assert await raw.hdel(f"{prefix}:{{r}}:state", f"t{hold.permit.ticket}")
            assert await lock.try_acquire() is None
            await eventually(lambda: hold.lost)
            await asyncio.sleep(1)
    async with lock.hold(timeout=5) as hold:
        pass


async def test_a_newer_form_is_refused(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """What a newer release has stored otherwise is neither read nor changed, and the error says what to do."""
    lock = client.lock("r")
    permit = await lock.acquire()
    state = f"{prefix}:{{r}}:state"
    await raw.hset(state, "k", "-2")
    before = await raw.hgetall(state), await raw.zrange(f"{prefix}:{{r}}:holders", 0, -1, withscores=True)
    calls = (
        lock.acquire,
        lock.try_acquire,
        lock.inspect,
        lock.locked,
        lambda: lock.release(permit),
        lambda: lock.set_limit(1),
    )
    for call in (*calls, lambda: lock.is_held(permit), lambda: lock.resize(2), lambda: lock.renew(permit)):
        with pytest.raises(RedleaseError, match="newer release"):
            await call()
    after = await raw.hgetall(state), await raw.zrange(f"{prefix}:{{r}}:holders", 0, -1, withscores=True)
    assert after == before
