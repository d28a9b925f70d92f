"""A primary that Sentinels watch: it is found through them, and so is the one that takes its place."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from redis.asyncio.sentinel import Sentinel

from redlease import Redlease, RedleaseError, Unavailable
from redlease._core.transport.sentinel import Sentinels
from redlease._core.transport.urls import read_url

from clusters import Watched, raw_reply, told, until
from helpers import eventually, until_waiting
from servers import REAL_ENGINES, available_engines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redlease import Semaphore

    from conftest import MakeClient

pytestmark = pytest.mark.slow


@pytest.fixture(params=[engine for engine in available_engines() if engine in REAL_ENGINES])
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A primary, its replica and three Sentinels of each real engine in turn."""
    with Watched(request.param) as running:
        yield running


def primary_port(watched: Watched) -> int:
    """Return where the Sentinels say that the primary is."""
    said = raw_reply(watched.sentinels[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", watched.service)
    return int(said[1])


def caught_up(watched: Watched) -> bool:
    """Tell whether the replica has everything that was written."""
    primary, replica = (told(server, "INFO", "replication") for server in (watched.primary, watched.replica))
    return primary["master_repl_offset"] == replica["slave_repl_offset"]


async def in_line(pools: list[Semaphore], count: int) -> tuple[list[int], list[asyncio.Task[None]]]:
    """Let tasks queue up for a lock that is held; the list tells in which order they got it."""
    served: list[int] = []

    async def wait(number: int) -> None:
        async with pools[number % len(pools)].hold():
            served.append(number)

    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(wait(number)))
        await until_waiting(pools[0], number + 1)
    return served, tasks


async def test_a_replica_takes_over_with_waiters_queued(watched: Watched, make_client: MakeClient) -> None:
    """The primary is killed: hold, places and order go on at the replica, which the Sentinels are asked for."""
    clients = [await make_client(url=watched.url, lease=30, waiter_lease=30) for _ in range(2)]
    hold = await clients[0].lock("r").hold()
    served, tasks = await in_line([client.lock("r") for client in clients], 8)
    assert await asyncio.to_thread(until, lambda: caught_up(watched))
    watched.primary.kill()
    await asyncio.to_thread(until, lambda: primary_port(watched) == watched.replica.port)
    for client in clients:
        assert (await client.lock("r").inspect()).fence == hold.fence
    assert await hold.release()
    await asyncio.wait_for(asyncio.gather(*tasks), 15)
    assert served == list(range(8))


async def test_a_primary_that_comes_back_as_a_replica(watched: Watched, make_client: MakeClient) -> None:
    """A failover on request: the old primary refuses to write, and clients go where the Sentinels lead them."""
    client = await make_client(url=watched.url, lease=30, waiter_lease=30)
    hold = await client.lock("r").hold()
    served, tasks = await in_line([client.lock("r")], 4)
    assert await asyncio.to_thread(until, lambda: caught_up(watched))
    watched.sentinels[0].cli("SENTINEL", "FAILOVER", watched.service)
    await asyncio.to_thread(until, lambda: primary_port(watched) == watched.replica.port)
    await asyncio.to_thread(until, lambda: told(watched.primary, "INFO", "replication")["role"] == "slave")
    fence = hold.fence
    assert (await client.lock("r").inspect()).holders[0].fence == fence
    assert await hold.release()
    await asyncio.wait_for(asyncio.gather(*tasks), 15)
    assert served == list(range(4))


async def test_sentinels_that_are_away_are_passed_over(watched: Watched, make_client: MakeClient) -> None:
    """Of three Sentinels one is dead and one hangs, and the third is asked; none keeps a connection open."""
    watched.sentinels[0].kill()
    watched.sentinels[1].pause()
    client = await make_client(url=watched.url)
    async with client.lock("r"):
        pass

    def connections() -> int:
        return int(told(watched.sentinels[2], "INFO", "clients")["connected_clients"])

    others = connections()
    async with await make_client(url=watched.url):
        await eventually(lambda: connections() == others)


async def test_a_service_that_no_sentinel_knows(watched: Watched, prefix: str) -> None:
    """A wrong name of the service is told when the client is entered."""
    url = watched.url.replace(watched.service, "nosuch")
    with pytest.raises(Unavailable, match=r"no Sentinel knows a primary of 'nosuch': .*: no such service"):
        await Redlease.from_url(url, prefix=prefix).__aenter__()


async def test_the_sentinels_are_left_by_one_that_is_cancelled_twice(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that ends while it asks cancels the attempt again and again: no connection to a Sentinel stays open."""
    pool: Any = read_url(watched.url.replace(watched.service, "nosuch"), {})
    asked = asyncio.Event()
    discover = Sentinels.discover_master

    async def and_hang(sentinels: Sentinels, service_name: str) -> tuple[str, int]:
        with contextlib.suppress(redis.exceptions.ConnectionError):  # none knows it, so all three are asked
            await discover(sentinels, service_name)
        asked.set()
        return "", await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Sentinels, "discover_master", and_hang)
    asking = asyncio.ensure_future(pool.get_master_address())
    await asked.wait()
    pools = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
    connections = [each for one in pools for each in one._available_connections]
    assert [each.is_connected for each in connections] == [True] * 3
    asking.cancel()
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    assert [each.is_connected for each in connections] == [False] * 3


async def test_a_client_of_redis_py_that_asks_sentinels(watched: Watched, prefix: str) -> None:
    """`Redlease(sentinel.master_for(...))` is led in the same way."""
    addresses = [("127.0.0.1", sentinel.port) for sentinel in watched.sentinels]
    sentinel = Sentinel(addresses)  # type: ignore[no-untyped-call]
    primary: redis.asyncio.Redis = sentinel.master_for(watched.service)
    async with Redlease(primary, prefix=prefix, lease=30) as client:
        hold = await client.lock("r").hold()
        assert await asyncio.to_thread(until, lambda: caught_up(watched))
        watched.primary.kill()
        await asyncio.to_thread(until, lambda: primary_port(watched) == watched.replica.port)
        assert (await client.lock("r").inspect()).fence == hold.fence
        assert await hold.release()
    await primary.aclose()
    await sentinel.aclose()


async def test_a_client_of_redis_py_whose_first_sentinel_hangs(watched: Watched, prefix: str) -> None:
    """The others are asked while there is still time to connect."""
    watched.sentinels[0].pause()
    addresses = [("127.0.0.1", sentinel.port) for sentinel in watched.sentinels]
    sentinel = Sentinel(addresses)  # type: ignore[no-untyped-call]
    async with Redlease(sentinel.master_for(watched.service), prefix=prefix) as client:
        assert await client.lock("r").try_acquire()


async def test_a_client_of_redis_py_that_leads_to_replicas(watched: Watched) -> None:
    """`slave_for` is misuse, and told so."""
    sentinel = Sentinel([("127.0.0.1", watched.sentinels[0].port)])  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="master_for"):
        Redlease(sentinel.slave_for(watched.service))


async def test_the_passwords_of_sentinels(watched: Watched, make_client: MakeClient, prefix: str) -> None:
    """Sentinels have users of their own; a wrong password of theirs is told at once, as theirs."""
    for sentinel in watched.sentinels:
        sentinel.cli("ACL", "SETUSER", "asker", "on", ">pass", "+@all")
        sentinel.cli("ACL", "SETUSER", "default", "off")
    client = await make_client(url=f"{watched.url}?sentinel_username=asker&sentinel_password=pass")
    assert await client.lock("r").try_acquire()
    for url in (watched.url, f"{watched.url}?sentinel_username=asker&sentinel_password=wrong"):
        with pytest.raises(RedleaseError, match=r"a Sentinel refused the user name or password.*sentinel_password"):
            await Redlease.from_url(url, prefix=prefix).__aenter__()
