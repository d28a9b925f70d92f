"""The read-write lock: any number of readers or one writer, in the order of arrival."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from redlease import AcquireTimeout, LeaseLost

from helpers import cancel, queue_up, until_waiting

if TYPE_CHECKING:
    from redlease import Permit, Redlease

    from conftest import MakeClient


async def fences(tasks: list[asyncio.Task[Permit]]) -> list[int]:
    """Return the fences of what these tasks were granted."""
    return [permit.fence for permit in await asyncio.gather(*tasks)]


async def test_readers_share_and_a_writer_does_not(client: Redlease) -> None:
    """Readers hold side by side; a writer neither enters beside them nor lets one in."""
    catalog = client.rwlock("r")
    readers = [await catalog.read.hold() for _ in range(20)]
    assert not await catalog.read.locked()
    assert await catalog.write.locked()
    assert await catalog.write.try_acquire() is None
    for reader in readers:
        await reader.release()
    async with catalog.write.hold():
        assert await catalog.read.locked()
        assert await catalog.read.try_acquire() is None
        with pytest.raises(AcquireTimeout):
            await catalog.write.acquire(timeout=0)
    assert not await catalog.write.locked()


async def test_neither_side_starves(client: Redlease) -> None:
    """Whoever comes after a waiting writer waits behind it, and readers next to each other enter together."""
    catalog = client.rwlock("r")
    first = await catalog.read.acquire()
    waiting = [
        *await queue_up(catalog.write, 1),
        *await queue_up(catalog.read, 2),
        *await queue_up(catalog.write, 1),
        *await queue_up(catalog.read, 1),
    ]
    await catalog.read.release(first)
    writer = await waiting[0]
    assert [catalog.is_writer(waiter) for waiter in (await catalog.inspect()).waiters] == [False, False, True, False]
    await catalog.write.release(writer)
    readers = await asyncio.gather(*waiting[1:3])
    assert not waiting[3].done()
    for reader in readers:
        await catalog.read.release(reader)
    last_writer = await waiting[3]
    assert not waiting[4].done()
    await catalog.write.release(last_writer)
    granted = await fences(waiting)
    assert granted == sorted(granted)


async def test_a_reader_in_another_client_waits_for_a_writer(client: Redlease, make_client: MakeClient) -> None:
    """The two sides are one resource for every client of its name."""
    ours, theirs = client.rwlock("r"), (await make_client()).rwlock("r")
    async with ours.write.hold() as hold:
        reader = asyncio.create_task(theirs.read.acquire())
        await until_waiting(ours.read, 1)
        (held,) = (await theirs.inspect()).holders
        assert theirs.is_writer(held)
        assert held.fence == hold.fence
    assert (await reader).fence > hold.fence


async def test_a_writer_becomes_a_reader(client: Redlease) -> None:
    """A downgraded writer lets the readers behind it in at once, keeps out writers, and keeps its fence."""
    catalog = client.rwlock("r")
    async with catalog.write.hold() as hold:
        readers = await queue_up(catalog.read, 3)
        writers = await queue_up(catalog.write, 1)
        await hold.downgrade()
        permits = await asyncio.gather(*readers)
        await hold.downgrade()
        hold.check()
        holders = (await catalog.inspect()).holders
        assert [held.weight for held in holders] == [1, 1, 1, 1]
        assert holders[0].fence == hold.fence == hold.permit.fence
        assert hold.permit.weight == 1
        for permit in permits:
            assert await catalog.read.release(permit)
        assert not writers[0].done()
    assert await catalog.write.release(await writers[0])
    assert (await catalog.inspect()).holders == ()


async def test_a_permit_that_is_gone_is_not_downgraded(client: Redlease) -> None:
    """What the server no longer has is lost, and the next writer keeps its own."""
    catalog = client.rwlock("r")
    hold = await catalog.write.hold(on_lost="signal")
    other = (await queue_up(catalog.write, 1))[0]
    await catalog.write.release(hold.ticket)
    writer = await other
    with pytest.raises(LeaseLost):
        await hold.downgrade()
    assert await catalog.write.is_held(writer)
    assert await catalog.read.try_acquire() is None


async def test_more_readers_than_one_call_grants(client: Redlease) -> None:
    """A downgrade lets in however many readers wait next to each other."""
    catalog = client.rwlock("r")
    async with catalog.write.hold() as hold:
        readers = [asyncio.create_task(catalog.read.acquire()) for _ in range(250)]
        await until_waiting(catalog.read, 250)
        await hold.downgrade()
        await asyncio.gather(*readers)


async def test_a_reader_that_gives_up_does_not_hinder(client: Redlease) -> None:
    """A cancelled writer lets the readers behind it in."""
    catalog = client.rwlock("r")
    async with catalog.read.hold():
        (writer,) = await queue_up(catalog.write, 1)
        (reader,) = await queue_up(catalog.read, 1)
        await cancel(writer)
        assert await catalog.read.release(await reader)
