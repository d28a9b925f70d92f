"""Durability: a grant that replicas have before its caller does, and what happens where they do not have it in time."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from redis.exceptions import ConnectionError as Unreached

from redlease import Durability, NotReplicated, RedleaseError, Unavailable
from redlease._core.transport.replication import Demand, ReplicatedWrites

from clusters import until
from helpers import cancel, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redlease import Redlease

    from conftest import MakeClient, OwnServer
    from servers import Server

SOON = Durability(replicas=1, timeout=0.2)
AT_LENGTH = Durability(replicas=1, timeout=30)


@pytest.fixture
def primary(own_server: OwnServer, real_engine: str) -> Server:
    """A server that has a replica."""
    return own_server(real_engine, "--repl-diskless-sync-delay", "0")


@pytest.fixture
def replica(own_server: OwnServer, real_engine: str, primary: Server) -> Iterator[Server]:
    """The replica of the primary, once it follows."""
    server = own_server(real_engine, "--replicaof", "127.0.0.1", primary.url.rpartition(":")[2].split("/")[0])
    until(lambda: server.cli("INFO", "replication")["master_link_status"] == "up" and primary.cli("WAIT", 1, 1000))
    yield server
    server.resume()


async def nobody_holds(lock: Any) -> bool:
    """Tell whether a resource is free."""
    return not (await lock.inspect()).holders


async def test_a_replica_has_the_grant_before_its_caller(
    primary: Server, replica: Server, make_client: MakeClient, prefix: str
) -> None:
    """The primary fails just after a grant: at the replica that takes its place the permit is held, under its fence."""
    client = await make_client(url=primary.url)
    permit = await client.lock("r", durability=AT_LENGTH).acquire()
    primary.kill()
    replica.cli("REPLICAOF", "NO", "ONE")
    there = await make_client(url=replica.url)
    assert await there.lock("r").try_acquire() is None
    (held,) = (await there.lock("r").inspect()).holders
    assert (held.ticket, held.fence) == (permit.ticket, permit.fence)


async def test_what_falls_short_is_given_back(primary: Server, replica: Server, make_client: MakeClient) -> None:
    """With too few replicas in time the error says how many there were, and the permit is free."""
    client = await make_client(url=primary.url)
    lock = client.lock("r", durability=SOON)
    async with client.lock("r", durability=AT_LENGTH).hold() as hold:
        assert hold.fence
    with pytest.raises(NotReplicated, match="1 of 2 replicas") as error:
        await client.lock("r", durability=Durability(2, 0.5)).acquire(ticket="two")
    assert (error.value.resource, error.value.ticket) == ("r", "two")
    replica.pause()
    for call in (lock.acquire, lock.try_acquire, lock.hold):
        with pytest.raises(NotReplicated, match="0 of 1 replicas"):
            await call()
        await eventually(lambda: nobody_holds(lock))
    async with client.lock("r").hold(timeout=5):
        pass
    replica.resume()

    async def again() -> bool:
        try:
            await lock.release(await lock.acquire())
        except NotReplicated:
            return False
        return True

    await eventually(again)


async def test_the_wait_holds_up_nobody_else(primary: Server, replica: Server, make_client: MakeClient) -> None:
    """While one caller waits for a replica, the client's others go on; and its wait ends when the replica has it."""
    client = await make_client(url=primary.url)
    replica.pause()
    waiting = asyncio.create_task(client.lock("r", durability=AT_LENGTH).acquire())
    await eventually(lambda: blocked(primary))
    for number in range(50):
        async with client.lock(f"other {number % 5}").hold(timeout=5):
            pass
    assert await blocked(primary)
    assert not waiting.done()
    replica.resume()
    permit = await asyncio.wait_for(waiting, 10)
    assert await client.lock("r").release(permit)


async def blocked(server: Server) -> bool:
    """Tell whether a client waits for replicas."""
    return bool(server.cli("INFO", "clients")["blocked_clients"])


async def test_many_grants_share_a_wait(primary: Server, replica: Server, make_client: MakeClient) -> None:
    """A hundred callers at once cost a few WAITs, and one connection more than without."""
    client = await make_client(url=primary.url)
    await client.lock("r").release(await client.lock("r").acquire())
    before = primary.cli("INFO", "clients")["connected_clients"]
    replica.pause()
    first = asyncio.create_task(client.lock("first", durability=AT_LENGTH).acquire())
    await eventually(lambda: blocked(primary))
    tasks = [asyncio.create_task(client.lock(f"{number}", durability=AT_LENGTH).acquire()) for number in range(100)]
    await eventually(lambda: granted(client, 101))
    replica.resume()
    permits = await asyncio.wait_for(asyncio.gather(first, *tasks), 20)
    assert len({permit.resource for permit in permits}) == 101
    assert primary.cli("INFO", "clients")["connected_clients"] == before + 1
    waits = primary.cli("INFO", "commandstats")["cmdstat_wait"]["calls"]
    large_reads = 1  # the fixture's own, at least
    assert waits - large_reads <= 5


async def granted(client: Redlease, count: int) -> bool:
    """Tell whether so many requests of a client have their grants."""
    return sum(each.future.done() for each in client._session.pending.values()) == count


async def test_a_longer_wait_holds_up_no_shorter_one(primary: Server, replica: Server, make_client: MakeClient) -> None:
    """Who asks for more replicas, or for longer, keeps nobody waiting who asks for less, nor does one that gave up."""
    client = await make_client(url=primary.url)
    more = asyncio.create_task(client.lock("more", durability=Durability(2, 30)).acquire())
    await eventually(lambda: blocked(primary))
    assert await client.lock("r", durability=AT_LENGTH).acquire()
    replica.pause()
    longer = asyncio.create_task(client.lock("longer", durability=AT_LENGTH).acquire())
    await eventually(lambda: granted(client, 2))
    with pytest.raises(NotReplicated):
        await client.lock("soon", durability=SOON).acquire()
    await cancel(longer)
    with pytest.raises(NotReplicated):
        await client.lock("soon", durability=SOON).acquire()
    assert not more.done()
    await cancel(more)


async def test_who_is_cancelled_leaves_nothing(primary: Server, replica: Server, make_client: MakeClient) -> None:
    """A caller that is cancelled while it waits for replicas gives its grant back, and the others keep waiting."""
    client = await make_client(url=primary.url)
    replica.pause()
    gone, stays = (asyncio.create_task(client.lock(name, durability=AT_LENGTH).acquire()) for name in ("gone", "stays"))
    await eventually(lambda: blocked(primary))
    await eventually(lambda: granted(client, 2))
    await cancel(gone)
    await eventually(lambda: nobody_holds(client.lock("gone")))
    assert not stays.done()
    replica.resume()
    assert await asyncio.wait_for(stays, 10)


async def test_a_connection_that_breaks(primary: Server, replica: Server, make_client: MakeClient) -> None:
    """If the connection that waits is lost, what the replicas have is unknown: the grant is given back."""
    client = await make_client(url=primary.url)
    lock = client.lock("r", durability=AT_LENGTH)
    assert await lock.release(await lock.acquire())
    replica.pause()
    waiting = asyncio.create_task(lock.acquire())
    await eventually(lambda: blocked(primary))
    (number,) = re.findall(r"^id=(\d+) .* cmd=wait ", primary.cli("CLIENT", "LIST"), re.MULTILINE)
    primary.cli("CLIENT", "KILL", "ID", number)
    with pytest.raises(Unavailable, match="'r'"):
        await waiting
    await eventually(lambda: nobody_holds(lock))
    replica.resume()
    assert await lock.release(await lock.acquire())


async def test_a_client_closes_while_one_waits(primary: Server, replica: Server, make_client: MakeClient) -> None:
    """The waiting call ends with an error, and the grant is free."""
    client, other = await make_client(url=primary.url), await make_client(url=primary.url)
    replica.pause()
    waiting = asyncio.create_task(client.lock("r", durability=AT_LENGTH).acquire())
    await eventually(lambda: blocked(primary))
    await client.close()
    with pytest.raises(RedleaseError):
        await waiting
    await eventually(lambda: nobody_holds(other.lock("r")))


async def test_without_replicas(client: Redlease, engine: str) -> None:
    """A server without replicas says so when the time is over; fakeredis, which has no WAIT, says so at once."""
    lock = client.lock("r", durability=Durability(timeout=0.05))
    with pytest.raises(RedleaseError if engine == "fakeredis" else NotReplicated, match="'r'") as error:
        await lock.acquire()
    assert ("WAIT" in str(error.value)) == (engine == "fakeredis")
    await eventually(lambda: nobody_holds(lock))
    async with client.lock("r").hold(timeout=5):
        pass


async def test_one_that_cannot_connect_fails_alone() -> None:
    """Writes of a connection that cannot be made fail with what stopped it, and the next write tries again."""

    class Pool:
        connection_kwargs: ClassVar[dict[str, Any]] = {}
        made = 0

        def connection_class(self, **_: Any) -> Any:
            Pool.made += 1
            raise OSError("no route")

    writes = ReplicatedWrites(Pool(), Demand(1, 10))  # type: ignore[arg-type]
    for count in (1, 2):
        with pytest.raises(Unreached, match="no route"):
            await writes.write(b"")
        assert Pool.made == count
    await writes.close()


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"replicas": 1.5}, {"timeout": 0}, {"timeout": "1"}])
def test_what_is_no_durability_is_refused(wrong: dict[str, Any]) -> None:
    """At least one replica, and some time for it."""
    with pytest.raises(ValueError, match=r"replicas|timeout"):
        Durability(**wrong)


async def test_a_primitive_takes_nothing_else(client: Redlease) -> None:
    """A number alone would not say what it means."""
    with pytest.raises(ValueError, match="Durability"):
        client.lock("r", durability=1)  # type: ignore[arg-type]
