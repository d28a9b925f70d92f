"""A server that cannot serve for a while (it loads its data, is busy, or is a replica) is waited for."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import redis

from redlease import Redlease, RedleaseError, Unavailable

from clusters import Cluster
from helpers import eventually, queue_up, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import MakeClient, OwnServer
    from servers import Server

# It reads its file for more than a second and answers in between.
SLOW_TO_LOAD = ("--key-load-delay", "15000", "--rdbcompression", "no", "--lua-time-limit", "20")


@pytest.fixture
def server(own_server: OwnServer, real_engine: str) -> Server:
    """A server of each real engine in turn, for one test alone, that is slow to load its data."""
    return own_server(real_engine, *SLOW_TO_LOAD)


def fill(server: Server) -> None:
    """Give the server a data set that takes a while to load, and write it to disk."""
    with redis.Redis.from_url(server.url) as raw:
        for number in range(100):
            raw.set(f"filling:{number}", b"x" * 200_000)
        raw.save()


@contextlib.asynccontextmanager
async def loading(server: Server) -> AsyncIterator[None]:
    """Restart the server with what it has written to disk; yield while it loads, and end when it has."""
    await asyncio.to_thread(server.kill)
    starting = asyncio.create_task(asyncio.to_thread(server.start))

    def is_loading() -> bool:
        try:
            server.cli("PING")
        except redis.BusyLoadingError:
            return True
        except redis.ConnectionError:
            return False
        return False

    await eventually(is_loading)
    try:
        yield
    finally:
        await starting


@contextlib.asynccontextmanager
async def busy(server: Server) -> AsyncIterator[None]:
    """Let somebody's script run on the server until the block ends."""

    def run() -> None:
        patient = redis.Redis.from_url(server.url, socket_timeout=60)
        with patient as raw, contextlib.suppress(redis.ResponseError):
            raw.eval("while true do end", 0)

    running = asyncio.create_task(asyncio.to_thread(run))

    def is_busy() -> bool:
        try:
            server.cli("PING")
        except redis.ResponseError:
            return True
        return False

    await eventually(is_busy)
    try:
        yield
    finally:
        server.cli("SCRIPT", "KILL")
        await running


async def has_met(client: Redlease, trouble: str) -> None:
    """Wait until the client has connected to such a server."""
    await eventually(lambda: trouble in client._connection.trouble)


@pytest.mark.slow
async def test_a_server_that_loads_its_data(server: Server, make_client: MakeClient) -> None:
    """Restarted with its data, a server says LOADING for a while; all who wait, ask or connect then are served."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=60, waiter_lease=60)
    permit = await lock.acquire()
    (waiting,) = await queue_up(lock, 1, timeout=30)
    await asyncio.to_thread(fill, server)
    async with loading(server):
        asked = asyncio.create_task(client.lock("other").acquire(timeout=30))
        inspecting = asyncio.create_task(lock.inspect())
        newcomer = Redlease.from_url(server.url)
        restart = asyncio.create_task(newcomer.lock("third").acquire(timeout=30))
        await has_met(client, "LOADING")
        await has_met(newcomer, "LOADING")
        assert not waiting.done()
    assert await asked
    assert await restart
    assert (await inspecting).fence == permit.fence
    assert await lock.release(permit)
    assert (await asyncio.wait_for(waiting, 10)).fence > permit.fence
    await newcomer.close()


async def test_a_server_that_is_busy_while_a_client_connects(server: Server, make_client: MakeClient) -> None:
    """While a script of somebody else runs nothing can be loaded or probed: a client that connects then waits."""
    async with busy(server):
        client = Redlease.from_url(server.url)
        asked = asyncio.create_task(client.lock("r").acquire(timeout=30))
        await has_met(client, "BUSY")
        assert not asked.done()
        with pytest.raises(Unavailable, match="BUSY"):
            await client.lock("brief").acquire(timeout=0.05)
    assert await asked
    await client.close()


async def test_a_probe_that_finds_a_busy_server_is_made_again(server: Server, make_client: MakeClient) -> None:
    """A right that is missing is told even where the server was busy when the first probe came."""
    server.cli("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all", "-zadd")
    async with busy(server):
        client = Redlease.from_url(server.url.replace("//", "//limited:pw@"))
        asked = asyncio.create_task(client.lock("r").acquire(timeout=30))
        await has_met(client, "BUSY")
    with pytest.raises(RedleaseError, match="lacks rights that redlease needs: zadd"):
        await asked
    await client.close()


async def test_a_watcher_that_begins_while_the_server_is_busy(server: Server, make_client: MakeClient) -> None:
    """`watch` waits for the server too, also where it is the subscription that is refused."""
    client = await make_client(url=server.url)
    watching = client.lock("r").watch()
    async with busy(server):
        first = asyncio.create_task(anext(watching))
        await asyncio.sleep(0.2)
        assert not first.done()
    assert (await asyncio.wait_for(first, 10)).capacity == 1
    await watching.aclose()


async def test_a_primary_that_is_a_replica_for_a_moment(
    own_server: OwnServer, real_engine: str, server: Server, make_client: MakeClient
) -> None:
    """A managed failover behind one name: who waits and who asks then gets its grant once there is a primary again."""
    other = own_server(real_engine)
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=60, waiter_lease=0.6)
    hold = await lock.hold()
    (waiting,) = await queue_up(lock, 1, timeout=30)
    server.cli("REPLICAOF", "127.0.0.1", other.port)
    await has_met(client, "replica")
    asked = asyncio.create_task(client.lock("other").acquire(timeout=30))
    with pytest.raises(Unavailable, match="replica"):
        await client.lock("brief").acquire(timeout=0.2)
    assert not waiting.done()
    assert not asked.done()
    server.cli("REPLICAOF", "NO", "ONE")
    assert await asked
    await hold.release()  # if it had become a replica in earnest, its data is gone
    assert (await asyncio.wait_for(waiting, 10)).fence > hold.fence


async def test_a_replica_from_the_beginning_is_refused(
    own_server: OwnServer, real_engine: str, server: Server, make_client: MakeClient
) -> None:
    """Who has never seen a primary there has the wrong address, and is told so at once."""
    other = own_server(real_engine)
    server.cli("REPLICAOF", "127.0.0.1", other.port)
    client = Redlease.from_url(server.url)
    with pytest.raises(RedleaseError, match="read-only replica"):
        await client.lock("r").acquire(timeout=30)
    await client.close()


async def test_scripts_that_may_not_be_loaded_again(server: Server, make_client: MakeClient) -> None:
    """A user who lost the right to load scripts is told so when the server has forgotten them."""
    server.cli("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all")
    client = await make_client(url=server.url.replace("//", "//limited:pw@"))
    server.cli("ACL", "SETUSER", "limited", "-script|load" if server.engine != "redis62" else "-script")
    server.cli("SCRIPT", "FLUSH")
    with pytest.raises(RedleaseError, match="right"):
        await client.lock("r").acquire(timeout=10)


@pytest.mark.slow
async def test_nothing_is_queued_twice_over_a_slow_restart(server: Server, make_client: MakeClient) -> None:
    """The places of before the restart are found again, in their order."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=60, waiter_lease=60)
    hold = await lock.hold()
    tasks = await queue_up(lock, 3, timeout=30)
    await asyncio.to_thread(fill, server)
    tickets = await until_waiting(lock, 3)
    async with loading(server):
        await has_met(client, "LOADING")
    assert await until_waiting(lock, 3) == tickets
    assert await hold.release()
    for task in tasks:
        assert await lock.release(await asyncio.wait_for(task, 10))


@pytest.mark.slow
async def test_a_master_of_a_cluster_that_is_busy(make_client: MakeClient, prefix: str) -> None:
    """The same of one node of a cluster, whether a client knows it already or not."""
    with Cluster("redis7") as cluster:
        node = cluster.master_of(f"{prefix}:{{r}}:state")
        node.cli("CONFIG", "SET", "lua-time-limit", "20")
        client = await make_client(url=cluster.url)
        known = await make_client(url=cluster.url)
        permit = await known.lock("r").acquire()
        async with busy(node):
            asked = asyncio.create_task(client.lock("r").acquire(timeout=30))
            releasing = asyncio.create_task(known.lock("r").release(permit))
            await has_met(client, "BUSY")
            assert not asked.done()
        assert await releasing
        assert (await asked).fence > permit.fence
