"""Limits of operators: they outrank what processes declare, at once and for all, until they end or are lifted."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from redlease import QueueFull

from helpers import cancel, eventually, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease, Semaphore

    from conftest import MakeClient

SOON_S = 0.4


async def held_of(pool: Semaphore) -> int:
    """Take as much as there is at once, and return how many units that were."""
    count = 0
    while await pool.try_acquire():
        count += 1
    return count


async def test_a_limit_below_what_is_held(client: Redlease) -> None:
    """Who holds goes on, and nothing is granted until fewer are held than the limit, or it is lifted."""
    pool = client.semaphore("r", capacity=5)
    permits = [await pool.acquire() for _ in range(3)]
    await pool.set_limit(2, reason="the vendor asked us to")
    assert await pool.try_acquire() is None
    assert await pool.locked()
    waiting = await queue_up(pool, 2)
    assert await pool.release(permits[0])
    assert not any(task.done() for task in waiting)
    assert await pool.release(permits[1])
    await waiting[0]
    snapshot = await pool.inspect()
    (limit,) = snapshot.limits
    assert (limit.kind, limit.units, limit.key, limit.until_ms) == ("limit", 2, None, None)
    assert limit.reason == "the vendor asked us to"
    assert limit.owner
    assert (snapshot.capacity, snapshot.allowed, snapshot.in_use, snapshot.waiting) == (5, 2, 2, 1)
    assert await pool.renew(permits[2])
    assert await pool.clear_limit()
    await waiting[1]
    assert await held_of(pool) == 2
    assert not await pool.clear_limit()
    assert (await pool.inspect()).limits == ()


async def test_no_declaration_undoes_a_limit(client: Redlease, make_client: MakeClient) -> None:
    """Neither another capacity that a process declares, nor a resize, nor a process that starts anew."""
    await client.semaphore("r", capacity=3).set_limit(2)  # nobody has used it before
    assert await held_of(client.semaphore("r", capacity=3)) == 2
    other = await make_client()
    greater = other.semaphore("r", capacity=10)
    assert await greater.try_acquire() is None
    await greater.resize(20)
    assert await greater.try_acquire() is None
    await greater.set_limit(4)
    assert await held_of(greater) == 2
    assert await greater.clear_limit()
    assert await held_of(greater) == 16
    assert (await greater.inspect()).in_use == 20


async def test_a_limit_ends_by_itself(client: Redlease) -> None:
    """Who waits is granted when it is over, though nothing else happens; and so is who came before it was set."""
    lock = client.lock("r", lease=60)
    permit = await lock.acquire()
    waiting = await queue_up(lock, 1)
    await lock.set_limit(0, until=SOON_S)
    later = await queue_up(lock, 1)
    assert await lock.release(permit)
    assert not waiting[0].done()
    (limit,) = (await lock.inspect()).limits
    assert limit.until_ms is not None
    granted = await asyncio.wait_for(waiting[0], 10)
    assert granted.granted_at_ms >= limit.until_ms
    assert await lock.release(granted)
    await later[0]
    assert (await lock.inspect()).limits == ()


async def test_a_limit_until_a_time(client: Redlease) -> None:
    """A time with a zone is compared with the clock of the server."""
    pool = client.semaphore("r", capacity=2)
    until = datetime.now(UTC) + timedelta(hours=1)
    await pool.set_limit(1, until=until)
    assert await held_of(pool) == 1
    (limit,) = (await pool.inspect()).limits
    assert limit.until_ms == int(until.timestamp() * 1000)


async def test_a_pause(client: Redlease) -> None:
    """Nothing is granted, not even what is free; who holds goes on; and a limit is still there when it is over."""
    pool = client.semaphore("r", capacity=3)
    await pool.set_limit(2)
    async with pool.hold() as hold:
        await pool.pause(reason="the database moves")
        waiting = await queue_up(pool, 2)
        assert await pool.try_acquire() is None
        assert hold.remaining() > 0
        assert [limit.kind for limit in (await pool.inspect()).limits] == ["limit", "pause"]
        assert (await pool.inspect()).allowed == 0
        assert await pool.resume()
        await waiting[0]
        assert not waiting[1].done()
        assert not await pool.resume()
        assert await pool.clear_limit()
        await waiting[1]


async def test_a_request_that_is_heavier_than_the_limit_waits(client: Redlease) -> None:
    """It is not refused, since the limit may end; those behind it do not pass it."""
    pool = client.semaphore("r", capacity=4)
    await pool.set_limit(2)
    heavy = await queue_up(pool, 1, weight=3)
    light = await queue_up(pool, 1)
    assert await pool.try_acquire() is None
    assert await pool.clear_limit()
    assert (await heavy[0]).fence < (await light[0]).fence


async def test_a_limit_of_one_key(client: Redlease) -> None:
    """It counts instead of `per_key`, holds up no other key, and can be higher too."""
    pool = client.semaphore("r", capacity=6, per_key=2)
    await pool.set_limit(1, key="acme")
    await pool.set_limit(3, key="best")
    for key, most in (("acme", 1), ("best", 3), ("other", 2)):
        permits = [permit for _ in range(4) if (permit := await pool.try_acquire(key=key))]
        assert len(permits) == most
        for permit in permits:
            assert await pool.release(permit)
    assert await pool.release(await pool.acquire(key="best", weight=3))  # more than `per_key`
    held = await pool.acquire(key="acme")
    waiting = await queue_up(pool, 1, key="acme")
    passing = await pool.acquire(key="other", timeout=0)
    assert {limit.key for limit in (await pool.inspect()).limits} == {"acme", "best"}
    assert not waiting[0].done()
    assert await pool.clear_limit(key="acme")
    await waiting[0]
    assert await pool.release(held)
    assert await pool.release(passing)


async def test_a_limit_of_each_key(client: Redlease) -> None:
    """It counts for keys without a limit of their own, whether or not `per_key` was declared."""
    pool = client.semaphore("r", capacity=6)
    await pool.set_limit(per_key=1)
    first = await pool.acquire(key="a")
    waiting = await queue_up(pool, 2, key="a")
    assert await pool.acquire(key="b", timeout=0)
    assert await pool.acquire(timeout=0)
    await pool.set_limit(per_key=2)
    await waiting[0]
    assert not waiting[1].done()
    (limit,) = (await pool.inspect()).limits
    assert (limit.kind, limit.units, limit.key) == ("per_key", 2, None)
    assert await pool.release(first)
    await waiting[1]
    assert await pool.clear_limit()


async def test_a_key_that_is_held_back(client: Redlease) -> None:
    """Nothing of that key is granted so long, and others are; it needs no operator to go on."""
    pool = client.semaphore("r", capacity=3)
    async with pool.hold(key="acme"):
        await pool.back_off("acme", SOON_S, reason="429")
        (limit,) = (await pool.inspect()).limits
        assert (limit.kind, limit.key, limit.reason) == ("back_off", "acme", "429")
        assert await pool.try_acquire(key="acme") is None
        waiting = asyncio.create_task(pool.acquire(key="acme"))
        await until_waiting(pool, 1)
        assert await pool.acquire(key="other", timeout=0)
        granted = await asyncio.wait_for(waiting, 10)
        assert limit.until_ms is not None
        assert granted.granted_at_ms >= limit.until_ms


async def test_a_dead_waiter_of_a_limited_key(make_client: MakeClient, engine: str) -> None:
    """One that is heavier than the limit holds up those behind it until its place lapses, and no longer."""
    client, gone = [await make_client(waiter_lease=0.6) for _ in range(2)]
    pool = client.semaphore("r", capacity=10)
    await pool.set_limit(2, key="a")
    dead = await queue_up(gone.semaphore("r", capacity=10), 1, key="a", weight=3)
    waiting = await queue_up(pool, 1, key="a")
    await gone.abandon()
    assert (await asyncio.wait_for(waiting[0], 10)).key == "a"
    await cancel(*dead)


async def test_many_limits_that_are_over(client: Redlease) -> None:
    """They stop nobody, however many ended before the one that is asked about."""
    pool = client.semaphore("r", capacity=3)
    await asyncio.gather(*(pool.back_off(f"k{number}", 0.3) for number in range(150)))
    await pool.back_off("last", 1.5)
    assert await pool.try_acquire(key="last") is None
    (until_ms,) = (limit.until_ms for limit in (await pool.inspect()).limits if limit.key == "last")
    assert until_ms is not None

    async def is_over() -> bool:
        return (await pool.inspect()).server_time_ms > until_ms

    await eventually(is_over)
    assert await pool.try_acquire(key="last") is not None


@pytest.mark.of_tasks
@pytest.mark.parametrize("engine", ["valkey9"])
async def test_a_thousand_limits_of_keys_hide_nothing(client: Redlease, engine: str) -> None:
    """The holders are listed beside them, and what limits took is free again when they are over."""
    pool = client.semaphore("r", capacity=20)
    permit = await pool.acquire()
    await asyncio.gather(*(pool.back_off(f"k{number}", 3) for number in range(1100)))
    await pool.set_limit(2, until=3)
    snapshot = await pool.inspect()
    assert [holder.ticket for holder in snapshot.holders] == [permit.ticket]
    assert (snapshot.in_use, len(snapshot.limits)) == (1, 1101)

    async def are_over() -> bool:
        return not (await pool.inspect()).limits

    await eventually(are_over)
    assert (await pool.inspect()).in_use == 1


@pytest.mark.parametrize("key", [None, "heavy"])
@pytest.mark.parametrize("how", ["lifted", "raised", "over"])
async def test_a_heavy_request_under_a_limit_holds_up_no_other_key(client: Redlease, key: str | None, how: str) -> None:
    """It waits for the end of the limit, or a higher one; other keys pass it, and its own waits behind it."""
    pool = client.semaphore("r", capacity=5)
    await pool.set_limit(2, until=SOON_S if how == "over" else None)
    heavy = await queue_up(pool, 1, key=key, weight=3)
    behind = await queue_up(pool, 1, key=key)
    for other in ("a", "b"):
        assert await pool.release(await pool.acquire(key=other, timeout=10))
    assert not heavy[0].done()
    assert not behind[0].done()
    if how == "raised":
        await pool.set_limit(3)
    elif how == "lifted":
        assert await pool.clear_limit()
    assert await pool.release(await asyncio.wait_for(heavy[0], 10))
    assert await pool.release(await behind[0])
    assert await pool.clear_limit() == (how == "raised")
    assert await held_of(pool) == 5


async def test_everything_is_held_back(client: Redlease) -> None:
    """Without a key nothing at all is granted so long, and then grants go on."""
    pool = client.semaphore("r", capacity=2)
    await pool.back_off(None, timedelta(seconds=SOON_S))
    assert await pool.try_acquire() is None
    await asyncio.wait_for(pool.acquire(), 10)


@pytest.mark.parametrize("key", [None, "acme"])
async def test_the_longest_time_counts(client: Redlease, key: str | None) -> None:
    """Several answers of a vendor race: one that names a shorter time shortens no other, and 0 is a time too."""
    pool = client.semaphore("r", capacity=2)
    await pool.back_off(key, 30)
    for delay in (60, 5, 0, timedelta()):
        await pool.back_off(key, delay)
    snapshot = await pool.inspect()
    (until_ms,) = (limit.until_ms for limit in snapshot.limits)
    assert until_ms is not None
    assert 30_000 < until_ms - snapshot.server_time_ms <= 60_000
    with pytest.raises(ValueError, match="delay must be from 0 s"):
        await pool.back_off(key, -1)


@pytest.mark.parametrize("key", [None, "acme"])
async def test_what_a_vendor_asked_for_is_not_lifted_with_a_limit(client: Redlease, key: str | None) -> None:
    """`clear_limit` lifts what operators have set, and `end_back_off` the rest."""
    pool = client.semaphore("r", capacity=2)
    await pool.set_limit(1, key=key)
    await pool.back_off(key, 60)
    assert await pool.clear_limit(key=key)
    assert not await pool.clear_limit(key=key)
    assert await pool.try_acquire(key=key) is None
    assert await pool.end_back_off(key)
    assert not await pool.end_back_off(key)
    assert await pool.try_acquire(key=key) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"capacity": -1},
        {"capacity": 1, "per_key": 1},
        {"per_key": 1, "key": "a"},
        {"capacity": 1, "key": ""},
        {"capacity": 1, "until": 0},
        {"capacity": 1, "until": datetime(2100, 1, 1)},  # noqa: DTZ001  without a zone
        {"capacity": 1, "until": datetime(2001, 1, 1, tzinfo=UTC)},
        {"capacity": 1, "reason": 7},
    ],
    ids=str,
)
async def test_a_wrong_limit(client: Redlease, wrong: dict[str, Any]) -> None:
    """It is a ValueError, and nothing is limited."""
    pool = client.semaphore("r", capacity=2)
    with pytest.raises(ValueError, match=r"\w"):
        await pool.set_limit(**wrong)
    assert (await pool.inspect()).limits == ()
    assert await held_of(pool) == 2


async def test_a_read_write_lock_is_paused(client: Redlease) -> None:
    """It has no capacity to limit; a pause stops readers and writers."""
    catalog = client.rwlock("r")
    with pytest.raises(ValueError, match="pause"):
        await catalog.read.set_limit(1)
    await catalog.write.pause()
    assert await catalog.read.try_acquire() is None
    assert await catalog.write.locked()
    waiting = await queue_up(catalog.read, 1)
    assert await catalog.read.resume()
    await waiting[0]


async def test_limits_are_in_the_history(client: Redlease) -> None:
    """Who set a limit and who lifted it, where a history is kept."""
    pool = client.semaphore("r", capacity=2, history=10)
    await pool.acquire()
    await pool.set_limit(1)
    await pool.set_limit(1, key="acme")
    await pool.clear_limit()
    told = [(entry.event, entry.ticket, entry.capacity) for entry in await pool.history()][1:]
    assert told == [("limited", "", 1), ("limited", "acme", 1), ("lifted", "", None)]
    assert all(entry.owner for entry in await pool.history())


async def test_a_lifted_limit_keeps_nothing(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """While it is set the server keeps the resource for longer than `idle_ttl`, and afterwards it does not."""
    pool = client.semaphore("r", capacity=2, idle_ttl=60)
    await pool.set_limit(1)
    await pool.set_limit(1, key="acme")
    assert await raw.pttl(f"{prefix}:{{r}}:state") > 1_000_000
    assert await pool.clear_limit()
    assert await pool.clear_limit(key="acme")
    assert await raw.pttl(f"{prefix}:{{r}}:state") < 70_000
    assert await held_of(pool) == 2


async def test_a_lifted_limit_for_each_key_after_a_refusal(client: Redlease) -> None:
    """The resource works on, where a full queue had refused a request before the limit for each key was set."""
    pool = client.semaphore("r", capacity=1, max_waiters=1)
    permit = await pool.acquire()
    waiting = await queue_up(pool, 1)
    with pytest.raises(QueueFull):
        await pool.acquire()
    await pool.set_limit(per_key=5)
    await pool.set_limit(3, key="acme")
    assert await pool.clear_limit()
    assert await pool.release(permit)
    await pool.release(await waiting[0])
    assert await held_of(pool) == 1
