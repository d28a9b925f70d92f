"""Replies that grow with what others have written stay small enough for one connection: they are read in pages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from redlease import Unavailable

from helpers import cancel, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease

    from conftest import MakeClient, OwnServer

LARGE = {"note": "\x01" * 1300}  # 7.8 kB as JSON


async def test_a_large_look_leaves_the_connection_alone(
    own_server: OwnServer, real_engine: str, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """More than the server keeps for one client is read in pages, and what else goes over the connection goes on."""
    server = own_server(real_engine)
    server.cli("CONFIG", "SET", "client-output-buffer-limit", "pubsub 4mb 4mb 60")
    client = await make_client(url=server.url)
    pool = client.semaphore("r", capacity=1000, lease=60)
    async with pool.hold():
        await asyncio.gather(*(pool.acquire(metadata=LARGE) for _ in range(600)))
        large_reads = await asyncio.gather(pool.inspect(), pool.inspect())
        for snapshot in large_reads:
            assert len(snapshot.holders) == 601
            assert [permit.metadata for permit in snapshot.holders[1:]] == [LARGE] * 600
    assert await pool.release_all() == 600
    assert "connection to Redis was lost" not in caplog.text


async def test_a_look_that_ends_the_connection_is_not_repeated_for_long(
    own_server: OwnServer, real_engine: str, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the server's limit is smaller than a page a look fails after a few attempts: each costs the connection."""
    server = own_server(real_engine)
    server.cli("CONFIG", "SET", "client-output-buffer-limit", "pubsub 64kb 64kb 60")
    client = await make_client(url=server.url)
    pool = client.semaphore("r", capacity=1000, lease=60)
    await asyncio.gather(*(pool.acquire(metadata=LARGE) for _ in range(600)))
    with pytest.raises(Unavailable):
        await pool.inspect()
    assert caplog.text.count("connection to Redis was lost") <= 3
    assert not await pool.locked()


@pytest.mark.slow
async def test_pages_make_the_same_snapshot(
    client: Redlease, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small the pages, everybody is listed once and in order; `limit` counts over all of them."""
    pool = client.semaphore("r", capacity=9, lease=60)
    for number in range(9):
        await pool.acquire(ticket=f"h{number}")
    tasks = [(await queue_up(pool, 1, ticket=f"w{number}"))[0] for number in range(9)]
    whole = await pool.inspect()
    for page_bytes in (1, 300, 1000):
        monkeypatch.setattr("redlease._core.protocol.snapshots.PAGE_BYTES", page_bytes)
        read = await pool.inspect()
        assert replace(read, server_time_ms=whole.server_time_ms) == whole
        for limit in (1, 4, 20):
            few = await pool.inspect(max_items=limit)
            assert (few.holders, few.waiters) == (whole.holders[:limit], whole.waiters[:limit])
    assert await pool.locked()
    assert await pool.release_all(queue=True) == 18
    await cancel(*tasks)


async def test_who_moves_between_pages_is_listed_once(client: Redlease, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals move holders, and releases make waiters holders, while pages are read; nobody stands there twice."""
    monkeypatch.setattr("redlease._core.protocol.snapshots.PAGE_BYTES", 1)
    pool = client.semaphore("r", capacity=8, lease=60)
    permits = [await pool.acquire(ticket=f"h{number}") for number in range(8)]
    tasks = await queue_up(pool, 8)

    async def disturb() -> None:
        for permit in permits[:4]:
            await pool.renew(permit)
            await pool.release(permits[7 - permits.index(permit)])

    disturbing = asyncio.create_task(disturb())
    while not disturbing.done():
        snapshot = await pool.inspect()
        tickets = [permit.ticket for permit in snapshot.holders] + [waiter.ticket for waiter in snapshot.waiters]
        assert len(tickets) == len(set(tickets))
        assert {permit.ticket for permit in permits[:4]} <= set(tickets)
        assert snapshot.fence >= max(permit.fence for permit in snapshot.holders)
    await cancel(*tasks)


async def test_who_waits_behind_thousands_that_are_dead_is_listed(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """One call looks at so many entries of the queue at most, and the next goes on."""
    lock = client.lock("r", lease=60)
    await lock.acquire()
    (task,) = await queue_up(lock, 1, ticket="alive")
    await raw.zadd(f"{prefix}:{{r}}:queue", {f"dead-{number}": -number for number in range(12_000)})
    assert await until_waiting(lock, 1) == ["alive"]
    await cancel(task)


@pytest.mark.usefixtures("engine")
async def test_many_looks_at_once(make_client: MakeClient) -> None:
    """Hundreds of looks come through, a few at a time."""
    client = await make_client(call_timeout=60)  # fakeredis takes its time for so many on a busy machine
    large_reads = await asyncio.gather(*(client.lock(f"r{number}").inspect() for number in range(300)))
    assert [look.resource for look in large_reads] == [f"r{number}" for number in range(300)]


@pytest.mark.slow
async def test_many_looks_during_an_outage(own_server: OwnServer, make_client: MakeClient) -> None:
    """All of them are told in time: none waits for those before it and then for as long again and again."""
    server = own_server("valkey9")
    client = await make_client(url=server.url)
    lock = client.lock("r")
    server.pause()
    try:
        large_reads = await asyncio.wait_for(
            asyncio.gather(*(lock.inspect() for _ in range(100)), return_exceptions=True), 30
        )
    finally:
        server.resume()
    assert [type(look) for look in large_reads] == [Unavailable] * 100
    assert await lock.inspect()
