"""A resource of which something else has deleted or overwritten a part: what is still shown of it, and released."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import pytest

from redlease import DamagedEntry, Redlease, RedleaseError
from redlease._core.primitives.overview import Overview
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.snapshots import Reading

from helpers import cancel, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

HELD = b'1 1800000000000000 30000 1800000000000 c|1 h1 ["svc",{}]'
WAITS = b'1 0 30000 1800000000000 c|1 h1 ["svc",{}]'

# What is no record, each in the place of one.
UNREADABLE = {
    "empty": b"",
    "no fields": b"garbage",
    "words for numbers": HELD.replace(b"1 18", b"x 18", 1),
    "too few fields": b'1 1 ["svc",{}]',
    "no JSON": HELD.replace(b'["svc",{}]', b'["svc"'),
    "no list": HELD.replace(b'["svc",{}]', b"7"),
    "too short a list": HELD.replace(b'["svc",{}]', b'["svc"]'),
    "too long a list": HELD.replace(b'["svc",{}]', b'["svc",{},"key",1]'),
    "an owner that is no text": HELD.replace(b'"svc"', b"7"),
    "metadata that is no object": HELD.replace(b"{}", b"[]"),
    "metadata with numbers": HELD.replace(b"{}", b'{"a":1}'),
    "a key that is no text": HELD.replace(b"{}", b"{},7"),
    "no UTF-8": HELD.replace(b"svc", b"\xfe"),
    "a number of 5,000 digits": HELD.replace(b"30000", b"9" * 5000),
    "too deep": HELD.replace(b"{}", b"[" * 100_000),
}


def read(held: list[Any] = [], queued: list[Any] = [], limits: list[Any] = []) -> Any:  # noqa: B006
    """Return the snapshot that a reply of inspect makes."""
    reading = Reading("gpu", 3, 100)
    reading.add([1_800_000_000_000, 1, 3, 1, 0, held, queued, [], limits])
    return reading.snapshot()


@pytest.mark.parametrize("record", UNREADABLE.values(), ids=UNREADABLE)
def test_what_no_script_wrote_is_shown_as_damage(record: bytes) -> None:
    """A holder, a waiter or a limit with such a record is listed as damaged, and those beside it as ever."""
    snapshot = read(
        [b"ok", 1_800_000_030_000, HELD, b"bad", 1_800_000_030_000, record],
        [b"waits", WAITS, b"lost", record],
        [b"\xfflimit", 1_800_000_030_000, record],
    )
    assert [permit.ticket for permit in snapshot.holders] == ["ok"]
    assert [waiter.ticket for waiter in snapshot.waiters] == ["waits"]
    assert snapshot.limits == ()
    found = {(entry.kind, entry.name, entry.until_ms) for entry in snapshot.damaged}
    assert found == {
        ("holder", "bad", 1_800_000_030_000),
        ("waiter", "lost", None),
        ("limit", "limit", 1_800_000_030_000),
    }
    reason = "its record is unreadable" if record else "its record is missing"
    assert {entry.reason for entry in snapshot.damaged} == {reason}


def test_names_that_are_no_utf_8_are_shown_with_escapes() -> None:
    """What something else has added is listed by bytes that can be printed, and of a key's limit too."""
    snapshot = read([b"\xfe\x80", 5, HELD, b"\xfflimit \xfe", 2**52, HELD], [b"a\xfe", WAITS])
    assert [(entry.kind, entry.name) for entry in snapshot.damaged] == [
        ("holder", r"\xfe\x80"),
        ("limit", r"limit \xfe"),
        ("waiter", r"a\xfe"),
    ]
    assert {entry.reason for entry in snapshot.damaged} == {"its name is not UTF-8"}
    assert (snapshot.holders, snapshot.waiters, snapshot.limits) == ((), (), ())


@pytest.fixture
def keys(prefix: str) -> Resource:
    """The keys of the resource."""
    return Resource(prefix, "gpu")


async def test_a_holder_without_a_record_is_shown_and_released(
    client: Redlease, raw: redis.asyncio.Redis, keys: Resource
) -> None:
    """By its ticket and with all others; the unit is free again, and who waits for it is granted it."""
    pool = client.semaphore("gpu", capacity=2)
    for ticket in ("first", "second"):
        await pool.acquire(ticket=ticket)
    await raw.hdel(keys.keys[0], "tfirst", "tsecond")
    damaged = (await pool.inspect()).damaged
    assert {(entry.kind, entry.name, entry.reason) for entry in damaged} == {
        ("holder", "first", "its record is missing"),
        ("holder", "second", "its record is missing"),
    }
    (waiting,) = await queue_up(pool, 1)
    assert await pool.release("first")
    assert not await pool.release("first")
    granted = await waiting
    assert await pool.release_all() == 2
    assert not await pool.is_held(granted)
    snapshot = await pool.inspect()
    assert (snapshot.in_use, snapshot.damaged) == (0, ())


async def test_a_waiter_without_a_record_is_shown_and_taken_out(
    client: Redlease, raw: redis.asyncio.Redis, keys: Resource
) -> None:
    """It is listed as damaged, not counted as one who waits, and gone with the next call that changes anything."""
    lock = client.lock("gpu", waiter_lease=6)
    held = await lock.acquire()
    waiting = asyncio.create_task(lock.acquire(ticket="lost"))
    await until_waiting(lock, 1)
    await raw.hset(keys.keys[0], "tlost", "garbage")
    snapshot = await lock.inspect()
    assert (snapshot.waiting, snapshot.waiters) == (0, ())
    assert [(entry.kind, entry.name, entry.until_ms) for entry in snapshot.damaged] == [("waiter", "lost", None)]
    assert await lock.release_all() == 1
    assert (await lock.inspect()).damaged == ()
    assert not await lock.is_held(held)
    assert await lock.release(await waiting)  # its client queued again


async def test_a_waiter_without_a_record_is_taken_out_though_the_sums_are_right(
    client: Redlease, raw: redis.asyncio.Redis, keys: Resource
) -> None:
    """A holder's entry was lost as well, which outweighs the loss of the record: no repair has found either."""
    lock = client.lock("gpu", waiter_lease=60)
    held = await lock.acquire()
    waiting = asyncio.create_task(lock.acquire(ticket="lost"))
    await until_waiting(lock, 1)
    await raw.hdel(keys.keys[0], "tlost")
    await raw.zrem(keys.keys[1], held.ticket)
    assert await lock.release("lost")
    assert (await lock.inspect()).damaged == ()
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_a_member_that_is_no_utf_8_is_shown_and_released_with_all(
    client: Redlease, raw: redis.asyncio.Redis, keys: Resource
) -> None:
    """A client that wrote bytes of its own among holders and waiters keeps nothing held for ever."""
    pool = client.semaphore("gpu", capacity=2)
    await pool.acquire()
    await raw.zadd(keys.keys[1], {b"\xfe\x80": 4_000_000_000_000})
    await raw.zadd(keys.keys[2], {b"\xfd": 7})
    snapshot = await pool.inspect()
    assert {(entry.kind, entry.name) for entry in snapshot.damaged} == {("holder", r"\xfe\x80"), ("waiter", r"\xfd")}
    assert await pool.locked()
    await pool.release_all(queue=True)
    snapshot = await pool.inspect()
    assert (snapshot.in_use, snapshot.damaged) == (0, ())
    assert not await pool.locked()


async def test_a_resource_without_state_is_listed(client: Redlease, raw: redis.asyncio.Redis, keys: Resource) -> None:
    """Its holders tell of it: it is found, its units in use are counted, and all of them can be released."""
    pool = client.semaphore("gpu", capacity=2)
    for _ in range(2):
        await pool.acquire()
    await raw.delete(keys.keys[0])
    (listed,) = await Overview(client._operations).look()
    assert (listed.resource, listed.in_use, listed.error) == ("gpu", 2, None)
    assert len((await pool.inspect()).damaged) == 2
    assert await pool.release_all() == 2
    assert (await pool.inspect()).in_use == 0


@pytest.mark.parametrize("part", range(4), ids=["state", "holders", "queue", "waiters"])
async def test_a_key_of_a_wrong_type_is_an_error_of_its_resource_alone(
    client: Redlease, raw: redis.asyncio.Redis, keys: Resource, part: int
) -> None:
    """The list shows it with the reason, and the others as ever; each call on it says which step helps."""
    lock = client.lock("gpu")
    held = await lock.acquire()
    await client.lock("other").acquire()
    waiting = await queue_up(lock, 1)
    await cancel(*waiting, asyncio.create_task(lock.release(held)))
    await raw.delete(keys.keys[part])
    await raw.set(keys.keys[part], "something else")
    listed = {each.resource: each.error for each in await Overview(client._operations).look()}
    assert listed.keys() == {"gpu", "other"}
    assert listed["other"] is None
    with suppress(RedleaseError):
        await lock.inspect()
    if listed["gpu"] is not None:
        assert "Delete that key" in listed["gpu"]


async def test_damage_is_a_change_to_those_who_watch(
    client: Redlease, raw: redis.asyncio.Redis, keys: Resource
) -> None:
    """A snapshot with another damaged entry is yielded at the next change that the server publishes."""
    pool = client.semaphore("gpu", capacity=3)
    await pool.acquire(ticket="damaged")
    async with aclosing(pool.watch()) as snapshots:
        assert (await anext(snapshots)).damaged == ()
        await raw.hdel(keys.keys[0], "tdamaged")
        other = await pool.acquire()
        await pool.release(other)
        (damaged,) = (await anext(snapshots)).damaged
        assert damaged == DamagedEntry("holder", "damaged", "its record is missing", damaged.until_ms)


async def test_a_permit_whose_key_is_lost_is_granted_again_to_its_ticket(
    client: Redlease, raw: redis.asyncio.Redis, keys: Resource
) -> None:
    """A repeated request gets its permit, and is not told that it asked with another key than before."""
    pool = client.semaphore("gpu", capacity=3, per_key=1)
    permit = await pool.acquire(ticket="again", key="a")
    await pool.acquire(ticket="other", key="b")
    await raw.hdel(keys.keys[0], "pagain")
    await raw.zrem(keys.keys[1], "other")  # so that as many fields are there as entries need
    assert (await pool.acquire(ticket="again", key="a")).fence == permit.fence
    assert await pool.try_acquire(key="a") is None
    assert await pool.release(permit)
    assert await pool.try_acquire(key="a")
