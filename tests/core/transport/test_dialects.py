"""Servers that speak otherwise: the client finds out what works, says so, and works."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, QueueFull, Rate, Redlease, RedleaseError
from redlease._cli.doctor.examination import examine
from redlease._cli.doctor.findings import Level
from redlease._core.transport.opening import dialects
from redlease.events import Connected, Event

from dialects import (
    DialectProxy,
    broken_by_subscribe,
    closed_by_publish,
    lacks,
    without_hello,
    without_resp3,
)
from helpers import eventually, queue_up, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from conftest import OwnServer
    from servers import Server

POLL_S = 0.2
RESP2 = {
    "no RESP3": (without_resp3,),
    "no HELLO": (without_hello,),
    "RESP3 without commands after SUBSCRIBE": (broken_by_subscribe,),
    "RESP3 that is closed by PUBLISH": (closed_by_publish,),
}
TEXTS = {"no SCRIPT": (lacks("SCRIPT"),), "no SCRIPT and no HELLO": (lacks("SCRIPT"), without_hello)}


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    """Each test begins with a process that knows no server."""
    dialects.forget_all()
    yield
    dialects.forget_all()


@contextlib.asynccontextmanager
async def client_of(server: Server, prefix: str, *answers: Any, **options: Any) -> AsyncIterator[Redlease]:
    """Enter a client behind a proxy that answers in this way; it polls often, if it must."""
    has_messages = options.pop("has_messages", True)
    async with (
        DialectProxy(server.port, *answers, has_messages=has_messages) as proxy,
        Redlease.from_url(proxy.url, prefix=prefix, poll_interval=POLL_S, **options) as client,
    ):
        yield client


async def check_locks(client: Redlease) -> None:
    """A lock, hand-offs in order, a timeout, a permit as data."""
    lock = client.lock("lock")
    order: list[int] = []

    async def visit(number: int) -> None:
        async with lock.hold():
            order.append(number)

    async with lock.hold() as hold:
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(visit(number)))
            await until_waiting(lock, number + 1)
        assert hold.fence > 0
        with pytest.raises(AcquireTimeout):
            await lock.acquire(timeout=0.3)
        assert await lock.try_acquire() is None
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    permit = await lock.acquire()
    permit = await lock.renew(permit)
    hold = await lock.adopt(permit)
    assert await lock.is_held(hold.permit)
    await hold.release()


async def check_pools(client: Redlease) -> None:
    """Weights, keys, rates, a full queue, and what operators do."""
    pool = client.semaphore("pool", capacity=3, max_waiters=1)
    async with pool.hold(weight=2):
        (task,) = await queue_up(pool, 1, weight=2)
        with pytest.raises(QueueFull):
            await pool.acquire(weight=2, timeout=5)
        await pool.resize(4)
        await pool.release(await task)
    keyed = client.semaphore("keyed", capacity=2, per_key=1, history=10)
    async with keyed.hold(key="a"), keyed.hold(key="b"):
        assert len((await keyed.inspect()).holders) == 2
    await keyed.set_limit(1, until=timedelta(seconds=30))
    await keyed.clear_limit()
    await keyed.pause(until=timedelta(seconds=30))
    await keyed.resume()
    assert len(await keyed.history()) >= 4
    rated = client.semaphore("rated", capacity=5, rate=Rate(1, per=0.2))
    for _ in range(2):
        await rated.release(await rated.acquire(timeout=5))


async def check_others(client: Redlease) -> None:
    """Read-write locks, sets, leaders, guards, watching and listing."""
    rwlock = client.rwlock("rw")
    async with rwlock.read.hold(), rwlock.read.hold():
        assert await rwlock.write.try_acquire() is None
    async with rwlock.write.hold():
        pass
    async with client.all(client.lock("one"), client.lock("two")):
        pass
    watching = client.lock("watched").watch()
    assert (await anext(watching)).holders == ()
    async with client.lock("watched").hold():
        assert len((await anext(watching)).holders) == 1
    await watching.aclose()
    async for term in client.leader("leader").terms():
        assert not term.lost
        break


CHECKS: list[Callable[[Redlease], Any]] = [check_locks, check_pools, check_others]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("dialect", [*RESP2, *TEXTS])
async def test_primitives(server: Server, prefix: str, dialect: str, check: Callable[[Redlease], Any]) -> None:
    """Every primitive works with each dialect."""
    answers = (RESP2 | TEXTS)[dialect]
    async with client_of(server, prefix, *answers) as client:
        await check(client)


async def test_a_guard_runs_a_script_where_none_is_loaded(server: Server, prefix: str) -> None:
    """The call of a user's script has as many arguments as it says, those of the user included."""
    async with client_of(server, prefix, lacks("SCRIPT")) as client:
        guard = client.guard(prefix)
        for fence in (1, 2):
            assert await guard.run(fence, "return #ARGV", [], ["a", "b"]) == 2


@pytest.mark.parametrize("dialect", RESP2)
async def test_resp2_is_found(server: Server, prefix: str, dialect: str, caplog: pytest.LogCaptureFixture) -> None:
    """RESP2 on two connections is chosen, and said once in the log, in `repr` and in an event; messages arrive."""
    caplog.set_level(logging.INFO, "redlease")
    events: list[Event] = []
    async with client_of(server, prefix, *RESP2[dialect], on_event=events.append) as client:
        await eventually(lambda: "RESP2 on two connections" in repr(client))
        lines = [record.getMessage() for record in caplog.records if "RESP2" in record.getMessage()]
        assert len([line for line in lines if line.startswith("how redlease works")]) == 1
        assert Connected(protocol=2, connections=2, sends_texts=False, silence=None) in events
        assert not [record for record in caplog.records if "no messages arrive" in record.getMessage()]
    # It is remembered for the address.
    async with DialectProxy(server.port, *RESP2[dialect]) as other:
        assert other.connections == 0


async def test_what_was_found_is_remembered(server: Server, prefix: str) -> None:
    """The next client of the same address speaks RESP2 at once."""
    async with DialectProxy(server.port, without_resp3) as proxy:
        for connections in (3, 5):
            async with Redlease.from_url(proxy.url, prefix=prefix):
                assert proxy.connections == connections


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_protocol_that_the_user_asks_for(server: Server, prefix: str, protocol: int) -> None:
    """It is spoken without a try of another; where RESP3 does not work, an error says what to do."""
    async with Redlease.from_url(server.url, prefix=prefix, protocol=protocol) as client:
        assert f"RESP{protocol}" in repr(client)
    async with Redlease.from_url(f"{server.url}?protocol={protocol}", prefix=prefix) as client:
        assert f"RESP{protocol}" in repr(client)
    async with DialectProxy(server.port, without_resp3) as proxy:
        client = Redlease.from_url(proxy.url, prefix=prefix, protocol=protocol)
        if protocol == 2:
            async with client:
                assert proxy.connections == 2
        else:
            with pytest.raises(RedleaseError, match="does not work with RESP3"):
                async with client:
                    pass


@pytest.mark.parametrize("wrong", ["4", "x"])
def test_a_protocol_that_there_is_not(wrong: str) -> None:
    """It is refused before anything is opened."""
    with pytest.raises(ValueError, match="protocol"):
        Redlease.from_url("redis://localhost", protocol=wrong)


# Messages that do not arrive


async def five_holds(client: Redlease) -> float:
    """Return how long five holds of 20 ms in a queue take."""
    lock = client.lock("slow")

    async def visit() -> None:
        async with lock.hold():
            await asyncio.sleep(0.02)

    began = time.monotonic()
    await asyncio.gather(*(visit() for _ in range(5)))
    return time.monotonic() - began


@contextlib.asynccontextmanager
async def without_messages(own_server: OwnServer, engine: str, how: str) -> AsyncIterator[str]:
    """Start a server of which no messages arrive; yield its URL."""
    if how == "renamed":
        yield own_server(engine, "--rename-command", "PUBLISH", "").url
        return
    server = own_server(engine)
    if how == "forbidden":
        server.cli("ACL", "SETUSER", "limited", "reset", "on", ">pw", "~*", "&*", "+@all", "-publish")
        yield server.url.replace("//", "//limited:pw@")
        return
    answers = [lacks("SUBSCRIBE")] if how == "no SUBSCRIBE" else []
    async with DialectProxy(server.port, *answers, has_messages=how != "lost") as proxy:
        yield proxy.url


@pytest.mark.parametrize("how", ["renamed", "forbidden", "lost", "no SUBSCRIBE"])
async def test_messages_that_do_not_arrive(
    own_server: OwnServer, real_engine: str, how: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning within two seconds says so, and a hand-off takes at most the interval at which waiters poll."""
    events: list[Event] = []
    async with (
        without_messages(own_server, real_engine, how) as url,
        Redlease.from_url(url, prefix=prefix, poll_interval=POLL_S, on_event=events.append) as client,
    ):
        async with asyncio.timeout(2):
            await eventually(lambda: client._connection.manner is not None, 2)
        warnings = [record for record in caplog.records if "no messages arrive" in record.getMessage()]
        assert len(warnings) == 1
        assert "poll" in repr(client)
        assert [event.silence for event in events if isinstance(event, Connected)] != [None]
        (found,) = [found for found in await examine(url, prefix) if found.check == "messages"]
        assert found.level is Level.WARNING
        assert "none arrive" in found.detail
        assert await five_holds(client) < 5 * POLL_S + 1
        await check_locks(client)
        await check_others(client)


async def test_messages_that_arrive_again(server: Server, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are probed after each reconnect: lost and found again, each is said once, and who waits then polls."""
    caplog.set_level(logging.INFO, "redlease")
    async with (
        DialectProxy(server.port) as proxy,
        Redlease.from_url(proxy.url, prefix=prefix, poll_interval=POLL_S) as client,
    ):
        lock = client.lock("r")
        for has_messages in (False, True):
            async with lock.hold():
                (task,) = await queue_up(lock, 1)
                proxy.has_messages = has_messages
                proxy.close_all()
                await eventually(partial(_hears, client, wanted=has_messages), 5)
            await lock.release(await asyncio.wait_for(task, 5))
        assert len([record for record in caplog.records if "no messages arrive" in record.getMessage()]) == 1


def _hears(client: Redlease, *, wanted: bool) -> bool:
    manner = client._connection.manner
    return manner is not None and (manner.silence is None) is wanted
