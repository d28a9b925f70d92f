"""Servers that answer later than is usual, over a long way or under load: a client finds them all the same."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Redlease
from redlease._core.transport.base import GrowingTimeout
from redlease._core.transport.cluster import ASK_S
from redlease._core.transport.topology import query_node

from clusters import Cluster, Watched

if TYPE_CHECKING:
    from redlease._core.transport.addresses import Address, Servers
    from redlease._core.transport.topology import Topology

LATE_S = 0.4


async def far_away(stack: contextlib.AsyncExitStack, port: int) -> int:
    """Return a port that leads to another one, from which every answer takes its time."""
    tasks: set[asyncio.Task[None]] = set()
    writers: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, late_s: float) -> None:
        while data := await reader.read(65_536):
            await asyncio.sleep(late_s)
            writer.write(data)
        writer.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        writers.append(back)
        for work in (pump(reader, back, 0), pump(there, writer, LATE_S)):
            tasks.add(asyncio.create_task(work))

    def end() -> None:
        for task in tasks:
            task.cancel()
        # A task that is cancelled, even before it has begun, closes nothing.
        for writer in writers:
            writer.close()

    stack.callback(end)
    server = await stack.enter_async_context(await asyncio.start_server(lead, "127.0.0.1", 0))
    found: int = server.sockets[0].getsockname()[1]
    return found


@pytest.mark.slow
async def test_sentinels_that_are_all_slow(prefix: str) -> None:
    """Each takes longer than the first time limit for one: the limit grows until one is heard."""
    with Watched("valkey9") as watched:
        async with contextlib.AsyncExitStack() as stack:
            ports = [await far_away(stack, sentinel.port) for sentinel in watched.sentinels]
            hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
            url = f"redis+sentinel://{hosts}/{watched.service}/0"
            async with Redlease.from_url(url, prefix=prefix, call_timeout=60) as client:
                assert await client.lock("r").try_acquire()


@pytest.mark.slow
async def test_nodes_of_a_cluster_that_are_all_slow(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes longer than the first time limit to tell where the slots are: the limit grows until one is heard."""

    async def slowly(servers: Servers, address: Address) -> Topology:
        await asyncio.sleep(1.5 * ASK_S[0])
        return await query_node(servers, address)

    monkeypatch.setattr("redlease._core.transport.cluster.query_node", slowly)
    with Cluster("valkey9") as cluster:
        async with Redlease.from_url(cluster.url, prefix=prefix, call_timeout=60) as client:
            assert await client.lock("r").try_acquire()


async def test_each_late_attempt_doubles_the_time_limit_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It doubles up to a limit, and one that is in time ends that; one that fails at once changes nothing."""
    limits: list[float | None] = []
    timeout = asyncio.timeout

    def noted(limit_s: float | None) -> Any:
        limits.append(limit_s)
        return timeout(0 if len(limits) <= 3 else None)

    monkeypatch.setattr("redlease._core.transport.base.asyncio.timeout", noted)
    patience = GrowingTimeout(3.0)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with patience.attempt(1.0):
                await asyncio.sleep(60)
    with pytest.raises(ConnectionError):
        async with patience.attempt(1.0):
            raise ConnectionRefusedError
    for _ in range(2):
        async with patience.attempt(1.0):
            pass
    assert limits == [1.0, 2.0, 3.0, 3.0, 3.0, 1.0]
