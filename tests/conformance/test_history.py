"""The history: what happened to a resource, as the scripts write it down, where that is asked for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from redlease import HistoryEntry, LeaseLost, Withdrawn
from redlease._core import operations as tickets

from helpers import eventually, queue_up

if TYPE_CHECKING:
    from collections.abc import Iterable

    import redis.asyncio

    from redlease import Redlease


def told(entries: Iterable[HistoryEntry]) -> list[tuple[str, str, int]]:
    """Return event, ticket and fence of each entry."""
    return [(entry.event, entry.ticket, entry.fence) for entry in entries]


async def test_grants_and_releases(client: Redlease) -> None:
    """Each grant and release is an entry with ticket, owner, fence, weight, and the time it waited or was held."""
    pool = client.semaphore("r", capacity=2, history=100)
    first = await pool.acquire(ticket="first", weight=2, owner='say "hi"', metadata={"k": "v"})
    waiting = await queue_up(pool, 1)
    await asyncio.sleep(0.05)
    assert await pool.release(first)
    second = await waiting[0]
    assert await pool.release(second)
    entries = await pool.history()
    assert told(entries) == [
        ("granted", "first", first.fence),
        ("released", "first", first.fence),
        ("granted", second.ticket, second.fence),
        ("released", second.ticket, second.fence),
    ]
    assert [entry.owner for entry in entries] == ['say "hi"', 'say "hi"', second.owner, second.owner]
    assert [entry.weight for entry in entries] == [2, 2, 1, 1]
    granted, released, handed, _ = entries
    assert (granted.waited_ms, granted.held_ms, granted.capacity) == (0, None, None)
    assert released.waited_ms is None
    assert handed.waited_ms is not None
    assert released.held_ms is not None
    assert released.held_ms >= handed.waited_ms >= 40
    assert abs(granted.at_ms - first.granted_at_ms) < 50
    assert [entry.at_ms for entry in entries] == sorted(entry.at_ms for entry in entries)


async def test_what_something_else_added_is_left_out(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries with other fields, or with values that cannot be, hide none of the others; the log says so once."""
    lock = client.lock("r", history=100)
    await lock.acquire(ticket="t")
    fields = {"e": "granted", "w": "1", "m": "0", "t": "t", "o": '"o"', "f": "1"}
    for each in ({"a": "b"}, fields | {"w": "many"}, fields | {"o": "7"}, fields | {"o": "[" * 5000}):
        await raw.xadd(f"{prefix}:{{r}}:history", each)  # type: ignore[arg-type]
    await lock.release("t")
    with caplog.at_level("WARNING", "redlease"):
        for _ in range(2):
            assert [entry.event for entry in await lock.history()] == ["granted", "forced"]
        assert [entry.event for entry in await lock.history(2)] == ["forced"]
    (record,) = caplog.records
    assert "resource 'r': 4 entries of its history" in record.getMessage()


async def test_losses(client: Redlease) -> None:
    """A lease that ends is noted once, when the next call finds it, with how long it was held until its end."""
    lock = client.lock("r", lease=0.2, history=100)
    lost = await lock.acquire(ticket="lost")
    following = await lock.acquire(timeout=5)
    await lock.release(following)
    assert not await lock.release(lost)
    entries = await lock.history()
    assert told(entries)[:2] == [("granted", "lost", lost.fence), ("lost", "lost", lost.fence)]
    assert [entry.event for entry in entries[2:]] == ["granted", "released"]
    assert entries[1].held_ms == lost.expires_at_ms - lost.granted_at_ms


async def test_a_loss_is_noted_while_capacity_is_free(client: Redlease) -> None:
    """The next acquire notes it, though nobody needs the units."""
    pool = client.semaphore("r", capacity=5, lease=0.1, history=100)
    lost = await pool.acquire(ticket="lost")

    async def is_over() -> bool:
        return not await pool.is_held(lost)

    await eventually(is_over)
    await client.semaphore("r", capacity=5, lease=30, history=100).acquire(ticket="next")
    assert [entry[:2] for entry in told(await pool.history())] == [
        ("granted", "lost"),
        ("lost", "lost"),
        ("granted", "next"),
    ]
    assert (await pool.inspect()).in_use == 1


async def test_what_operators_do(client: Redlease) -> None:
    """A release by ticket is forced, of a waiter too; each new capacity is noted, by a resize or a declaration."""
    pool = client.semaphore("r", capacity=2, history=100)
    held = await pool.acquire(ticket="held", weight=2)
    (waiting,) = await queue_up(pool, 1)
    (waiter,) = (await pool.inspect()).waiters
    assert await pool.release(waiter.ticket)
    with pytest.raises(Withdrawn):
        await waiting
    await pool.resize(3)
    assert await pool.release_all() == 1
    following = await client.semaphore("r", capacity=5).acquire(ticket="next")
    entries = (await pool.history())[1:]
    assert [(entry.event, entry.fence, entry.capacity) for entry in entries] == [
        ("forced", 0, None),
        ("resized", 0, 3),
        ("forced", held.fence, None),
        ("resized", 0, 5),
        ("granted", following.fence, None),
    ]
    assert entries[0].ticket == waiter.ticket
    assert entries[0].waited_ms is not None
    assert entries[0].held_ms is None


async def test_adoptions_and_downgrades(client: Redlease) -> None:
    """An adoption is noted with the new fence and owner; a downgrade with the weight that is left."""
    lock = client.lock("r", history=100)
    permit = await lock.acquire(ticket="t", owner="before")
    hold = await client.lock("r", owner="after").adopt(permit)
    _, adopted = await lock.history()
    assert (adopted.event, adopted.fence, adopted.owner) == ("adopted", hold.fence, "after")
    await hold.release()
    with pytest.raises(LeaseLost):
        await lock.adopt(permit)
    assert len(await lock.history()) == 3

    catalog = client.rwlock("catalog", history=100)
    async with catalog.write.hold() as writing:
        await writing.downgrade()
        assert [(entry.event, entry.weight) for entry in await catalog.read.history()] == [
            ("granted", 2**31 - 1),
            ("reduced", 1),
        ]


async def test_whose_key_it_is(client: Redlease) -> None:
    """Each entry has the key of its request, whatever that and the metadata look like, and a limit that of its key."""
    pool = client.semaphore("r", capacity=3, history=100)
    keys = ["acme", 'quo"ted\\', '{"a":"},"b"]', "},", None]
    for key in keys:
        await pool.release(await pool.acquire(key=key, metadata={"m": '"},"x"]', "},": "},"}, owner="},"))
    await pool.set_limit(1, key="acme")
    await pool.clear_limit(key="acme")
    await pool.set_limit(1)
    entries = await pool.history()
    told = [key for key in keys for _ in range(2)]
    assert [entry.key for entry in entries] == [*told, "acme", "acme", None]
    assert {entry.owner for entry in entries[: len(told)]} == {"},"}


async def test_it_is_off_unless_asked_for(client: Redlease) -> None:
    """Nothing is written by default; the next acquire turns it on for all clients, or off again."""
    lock, noting, ending = client.lock("r"), client.lock("r", history=10), client.lock("r", history=0)
    async with lock.hold():
        pass
    assert await lock.history() == []
    async with noting.hold():
        pass
    async with lock.hold():
        pass
    assert len(await lock.history()) == 4
    async with ending.hold():
        pass
    async with lock.hold():
        pass
    assert len(await lock.history()) == 4


async def test_it_is_bounded_and_read_in_pages(client: Redlease, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server keeps what was asked for and at most a hundred more; a long history is read in several replies."""
    monkeypatch.setattr(tickets, "PAGE_ENTRIES", 40)
    lock = client.lock("r", history=50)
    for _ in range(80):
        await lock.release(await lock.acquire())
    entries = await lock.history(1000)
    assert 50 <= len(entries) <= 150
    assert [entry.event for entry in entries[-2:]] == ["granted", "released"]
    assert len({entry.id for entry in entries}) == len(entries)
    assert await lock.history(45) == entries[-45:]
    assert await lock.history(1) == entries[-1:]


async def test_it_expires_with_the_resource(client: Redlease) -> None:
    """No key stays: the history lasts as long as the rest of the state of the resource."""
    lock = client.lock("r", lease=0.1, idle_ttl=0.3, history=10)
    await lock.release(await lock.acquire())
    assert len(await lock.history()) == 2

    async def is_gone() -> bool:
        return not await lock.history()

    await eventually(is_gone)
    assert (await lock.inspect()).fence == 0


async def test_misuse(client: Redlease) -> None:
    """A length or a count that is no whole number in range is refused before anything is sent."""
    for wrong in (-1, 100_001, 1.5, True):
        with pytest.raises(ValueError, match="history must be a whole number from 0 to 100000"):
            client.lock("r", history=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count must be"):
        await client.lock("r").history(0)
