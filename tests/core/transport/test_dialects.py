"""Servers that speak otherwise: the client finds out what works, says so, and works."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Redlease, RedleaseError
from redlease._cli.doctor.examination import examine
from redlease._cli.doctor.findings import Level
from redlease._core.transport.opening import dialects, socket_pair
from redlease.events import Connected, Event

from dialects import (
    Client,
    DialectProxy,
    broken_by_subscribe,
    closed_by_publish,
    keeps_resp2,
    lacks,
    without_hello,
    without_resp3,
)
from helpers import eventually, queue_up
from primitive_checks import check_everything

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from conftest import OwnServer
    from servers import Server

POLL_S = 0.2
RESP2 = {
    "no RESP3": (without_resp3,),
    "RESP2 after HELLO 3": (keeps_resp2,),
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


@pytest.mark.parametrize("dialect", [*RESP2, *TEXTS])
async def test_primitives(server: Server, prefix: str, dialect: str) -> None:
    """Every primitive works with each dialect."""
    answers = (RESP2 | TEXTS)[dialect]
    async with client_of(server, prefix, *answers) as client:
        await check_everything(client)


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
        assert other.connections_total == 0


async def test_what_was_found_is_remembered(server: Server, prefix: str) -> None:
    """The next client of the same address speaks RESP2 at once."""
    async with DialectProxy(server.port, without_resp3) as proxy:
        for connections in (3, 5):
            async with Redlease.from_url(proxy.url, prefix=prefix):
                assert proxy.connections_total == connections


@pytest.mark.parametrize("dialect", ["no RESP3", "RESP2 after HELLO 3"])
@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_protocol_that_the_user_asks_for(server: Server, prefix: str, dialect: str, protocol: int) -> None:
    """It is spoken without a try of another; where RESP3 does not work, an error says what to do."""
    async with Redlease.from_url(server.url, prefix=prefix, protocol=protocol) as client:
        assert (await client._connection.found_manner()).protocol == protocol
    async with Redlease.from_url(f"{server.url}?protocol={protocol}", prefix=prefix) as client:
        assert (await client._connection.found_manner()).protocol == protocol
    async with DialectProxy(server.port, *RESP2[dialect]) as proxy:
        client = Redlease.from_url(proxy.url, prefix=prefix, protocol=protocol)
        if protocol == 2:
            async with client:
                assert proxy.connections_total == 2
        else:
            with pytest.raises(RedleaseError, match="does not work with RESP3"):
                async with client:
                    pass


@pytest.mark.parametrize("wrong", ["4", "x"])
def test_a_protocol_that_there_is_not(wrong: str) -> None:
    """It is refused before anything is opened."""
    with pytest.raises(ValueError, match="protocol"):
        Redlease.from_url("redis://localhost", protocol=wrong)


async def test_a_server_that_runs_no_scripts(server: Server, prefix: str) -> None:
    """It is refused on connect with its own words, and not at the first acquire."""
    said = b"-ERR This instance has Lua scripting support disabled\r\n"

    def answer(_: Client, name: str, frame: bytes) -> bytes | None:
        return said if name.startswith("EVAL") else None

    with pytest.raises(RedleaseError, match="Lua scripting support disabled"):
        async with client_of(server, prefix, answer):
            pass


async def test_a_connection_for_messages_that_is_half_open(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With RESP2 the connection for messages is checked: a silent one is replaced, and the next waiter is served."""
    monkeypatch.setattr(socket_pair, "PING_S", 0.2)
    async with (
        DialectProxy(server.port, without_resp3) as proxy,
        Redlease.from_url(proxy.url, prefix=prefix) as client,
    ):
        lock = client.lock("r")
        hold = await lock.hold()
        (task,) = await queue_up(lock, 1)
        proxy.is_silent = True
        await hold.release()
        before = proxy.connections_total
        await eventually(lambda: proxy.connections_total > before)
        proxy.is_silent = False
        assert await lock.release(await asyncio.wait_for(task, 10))


async def test_a_user_without_ping(server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of PING is an answer too: the connection stays, and subscriptions are not taken for refused."""
    monkeypatch.setattr(socket_pair, "PING_S", 0.05)
    server.cli("ACL", "SETUSER", "mute", "reset", "on", ">pw", "~*", "&*", "+@all", "-ping")
    async with Redlease.from_url(server.url.replace("//", "//mute:pw@"), prefix=prefix, protocol=2) as client:
        driver = client._connection._driver  # type: ignore[attr-defined]
        for _ in range(10):
            watching = client.lock("r").watch()
            await anext(watching)
            await watching.aclose()
            await asyncio.sleep(0.05)
        assert client._connection._driver is driver  # type: ignore[attr-defined]


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


# A client finds out only after a second that nothing arrives, and so does the doctor.
SILENT = [pytest.param(how, marks=pytest.mark.slow) for how in ("lost", "no SUBSCRIBE")]


@pytest.mark.parametrize("how", ["renamed", "forbidden", *SILENT])
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
        await check_everything(client)


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
                proxy.drop_all()
                await eventually(partial(_hears, client, wanted=has_messages), 5)
            await lock.release(await asyncio.wait_for(task, 5))
        assert len([record for record in caplog.records if "no messages arrive" in record.getMessage()]) == 1


def _hears(client: Redlease, *, wanted: bool) -> bool:
    manner = client._connection.manner
    return manner is not None and (manner.silence is None) is wanted
