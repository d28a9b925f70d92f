"""How much a client leaves unanswered: a server that works on one client's calls serves nobody else meanwhile."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from redis.asyncio import ConnectionPool

from redlease import AcquireTimeout, Redlease
from redlease._core import clock
from redlease._core.hold import lease_of
from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.transport.addresses import Address
from redlease._core.transport.connection import Connection
from redlease._core.transport.node import ImportingNode, Node
from redlease._core.transport.opening.driver import SocketDriver
from redlease._core.transport.window import LOOKS_EVERY, UNITS_FIRST, UNITS_OF_LOOK, Window

from clusters import Cluster
from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from redlease._core.protocol.scripts import Script

    from conftest import MakeClient, OwnServer
    from servers import Server

TASKS = 400
NAMES = {script.sha.encode(): script.name for script in scripts.SCRIPTS}


@pytest.fixture
def server(own_server: OwnServer) -> Server:
    """A server for one test alone."""
    return own_server("valkey9")


@pytest.fixture
async def client(server: Server, make_client: MakeClient) -> Redlease:
    """A client of it, which does not take the pauses of these tests for a loss."""
    client = await make_client(url=server.url)
    connection_of(client).set_silence_limit(lambda: 1e9)
    return client


def connection_of(client: Redlease) -> Any:
    """Return its connection, or its cluster."""
    return client._connection


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the scripts that are called, in the order in which they are written."""
    names: list[str] = []
    write = SocketDriver.write

    def noting(driver: SocketDriver, data: bytes) -> None:
        words = data.split(b"\r\n")
        called = [words[at + 2] for at, word in enumerate(words) if word == b"EVALSHA"]
        names.extend(NAMES[sha] for sha in called if sha in NAMES)  # without the probe of messages, on each connect
        write(driver, data)

    monkeypatch.setattr(SocketDriver, "write", noting)
    return names


@pytest.fixture
async def flood(server: Server, client: Redlease, sent: list[str]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Requests for a lock each, more than are sent at once, to a server that stands still until the test resumes it."""
    await client.lock("warm").acquire()
    server.pause()
    sent.clear()
    tasks = [asyncio.create_task(client.lock(f"r{number}").acquire()) for number in range(TASKS)]
    await eventually(lambda: connection_of(client)._is_full)
    yield tasks
    server.resume()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_flood_leaves_few_calls_unanswered(
    server: Server, client: Redlease, flood: list[asyncio.Task[Any]], sent: list[str]
) -> None:
    """What is over the window waits in the client, and all of it is served in the end."""
    connection = connection_of(client)
    await asyncio.sleep(0)
    assert len(connection._pending) == len(sent) == UNITS_FIRST
    server.resume()
    permits = await asyncio.gather(*flood)
    assert len({permit.resource for permit in permits}) == TASKS
    assert sent == ["acquire"] * TASKS
    assert not connection._is_full


async def test_what_it_has_goes_first(
    server: Server, client: Redlease, flood: list[asyncio.Task[Any]], sent: list[str]
) -> None:
    """Renewals and releases are sent before all requests that wait in the client."""
    warm = client.lock("warm")
    looking = asyncio.create_task(warm.inspect())
    await asyncio.sleep(0)
    releasing = asyncio.create_task(warm.release("nobody's"))
    await asyncio.sleep(0)
    server.resume()
    await asyncio.gather(*flood, looking, releasing)
    assert sent.index("release") == UNITS_FIRST
    assert sent.index("inspect") == len(sent) - 1


async def test_who_is_gone_before_it_is_sent_is_not_sent(
    server: Server, client: Redlease, flood: list[asyncio.Task[Any]], sent: list[str]
) -> None:
    """A request whose task is cancelled before it is sent costs the server nothing, and needs no release."""
    await asyncio.sleep(0)
    for task in flood[100:]:
        task.cancel()
    await asyncio.gather(*flood[100:], return_exceptions=True)
    server.resume()
    await asyncio.gather(*flood[:100])
    assert sent == ["acquire"] * 100
    assert not (await client.lock("r200").inspect()).holders


async def test_a_connection_that_is_lost_with_unsent_calls(
    client: Redlease, server: Server, flood: list[asyncio.Task[Any]]
) -> None:
    """What waits is repeated on the next connection, as what is unanswered is; each gets one permit."""
    releasing = asyncio.create_task(client.lock("warm").release("nobody's"))
    await asyncio.sleep(0)
    connection = connection_of(client)
    connection._driver._lost("cut by the test")
    assert not connection._pending
    assert not connection._is_full
    server.resume()
    permits = await asyncio.gather(*flood)
    assert len({permit.fence for permit in permits}) == TASKS
    await releasing
    assert len((await client.lock("r399").inspect()).holders) == 1


async def test_unsent_releases_leave_with_the_client(
    server: Server, client: Redlease, flood: list[asyncio.Task[Any]], sent: list[str]
) -> None:
    """Whoever closes a client while the server is slow has its releases sent, though nobody reads the answers."""
    await asyncio.sleep(0)
    releasing = asyncio.create_task(client.lock("warm").release("nobody's"))
    await asyncio.sleep(0)
    await connection_of(client).close()
    assert sent[UNITS_FIRST] == "release"
    releasing.cancel()
    for task in flood:
        task.cancel()


async def test_the_shortest_timeout_at_a_busy_client(
    server: Server, client: Redlease, flood: list[asyncio.Task[Any]], sent: list[str]
) -> None:
    """It is not told that the server is out of reach, and what was never sent is not withdrawn either."""
    with pytest.raises(AcquireTimeout, match="had not answered"):
        await client.lock("warm").acquire(timeout=0.001)
    server.resume()
    await asyncio.gather(*flood)
    assert sent == ["acquire"] * TASKS


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["redis7", "valkey9"])
async def test_a_flood_at_a_cluster(engine: str, make_client: MakeClient) -> None:
    """Each node has a window of its own, and all are served."""
    with Cluster(engine) as cluster:
        client = await make_client(url=cluster.url)
        holds = [client.lock(f"r{number}").hold() for number in range(3 * TASKS)]

        async def enter(hold: Any) -> int:
            async with hold as held:
                return int(held.fence)

        assert len(await asyncio.gather(*map(enter, holds))) == 3 * TASKS
        await eventually(lambda: all(not node._pending for node in connection_of(client)._nodes.values()))


class Wire:
    """A driver that keeps what is written."""

    inline_push = True
    protocol = "3"

    def __init__(self) -> None:
        """Nothing is written yet."""
        self.words: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Keep the words that tell calls apart."""
        self.words += [word for word in data.split(b"\r\n") if word in {b"ASKING", b"EVALSHA"}]

    def abort(self) -> None:
        """Nothing is open."""


def ready(connection: Any) -> Wire:
    """Let it write to a wire."""
    wire = Wire()
    connection._driver, connection.ready, connection._closed = wire, True, True
    connection._loop, connection._process = asyncio.get_running_loop(), os.getpid()
    return wire


def answer(connection: Connection, count: int = 1) -> None:
    """Answer its oldest calls, each in a read of its own."""
    for _ in range(count):
        tag = connection._pending[0][0]
        connection.on_reply([tag, 1] if tag is not None else "OK")
        connection.on_read()


RESOURCE = Resource("p", "r")


def call(link: Any, script: Script = scripts.ACQUIRE, departs: Callable[[], bool] | None = None) -> bool:
    """Send a call of which nothing matters but its script."""
    done: bool = link.send(RESOURCE, script, b"", lambda _: None, departs)
    return done


async def test_asking_stays_with_its_call() -> None:
    """A call on a slot that a node imports has its ASKING right before it, also if it waits; dropped, it has none."""
    node = Node(
        *(Address("h", 1), ConnectionPool(), "p"), owner=AnyOwner(), channel="c", on_message=lambda payload: None
    )
    wire, importing = ready(node), ImportingNode(node)
    assert call(importing)
    sent_at_once = sum(call(node) for _ in range(UNITS_FIRST))
    assert not call(importing)
    assert not call(importing, departs=lambda: False)
    assert not call(node)
    answer(node, sent_at_once + 2)
    while node._pending:
        answer(node)
    assert wire.words.count(b"ASKING") == 2
    assert [wire.words[at + 1] for at, word in enumerate(wire.words) if word == b"ASKING"] == [b"EVALSHA"] * 2
    assert wire.words[-3:] == [b"ASKING", b"EVALSHA", b"EVALSHA"]


class AnyOwner:
    """A cluster that takes no part."""

    channel = "c"

    def __getattr__(self, name: str) -> Any:
        """Do nothing."""
        return lambda *_: None


async def test_looks_go_one_at_a_time() -> None:
    """A call that keeps a server busy for long fills the window alone; one is always sent, however small that is."""
    connection = Connection(ConnectionPool(), "p", lambda: None, lambda payload: None)
    wire = ready(connection)
    assert [call(connection, scripts.INSPECT) for _ in range(3)] == [True, False, False]
    for done in (2, 3):
        answer(connection)
        assert wire.words == [b"EVALSHA"] * done


def measured(window: Window, took_ms: Callable[[int], float], times: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes after so many measurements, of answers that take so long for so many units."""
    now_s, sizes = 0.0, []
    monkeypatch.setattr("redlease._core.transport.window.monotonic", lambda: now_s)
    for _ in range(times):
        unanswered = window.size
        window.begin(unanswered)
        now_s += took_ms(unanswered) / 1000
        assert window.answered(unanswered)
        sizes.append(window.size)
    return sizes


def taking(round_trip_ms: float, unit_ms: float, units: int) -> float:
    """Return how long a server takes for so many units."""
    return round_trip_ms + unit_ms * units


@pytest.mark.parametrize("round_trip_ms", [0.1, 1, 50])
def test_usual_calls_never_shrink_it(round_trip_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the server is: over a long way more calls may be under way, as many as it answers meanwhile."""
    took_ms = partial(taking, round_trip_ms, 0.015)
    sizes = measured(Window(), took_ms, 3000, monkeypatch)
    usual = [size for size in sizes[100:] if size > UNITS_OF_LOOK]
    assert min(usual) >= UNITS_FIRST
    assert len(usual) > len(sizes[100:]) - 20
    assert max(usual) <= UNITS_FIRST + 50 * (round_trip_ms + 1)


@pytest.mark.parametrize("round_trip_ms", [0.1, 1, 50])
def test_costly_calls_shrink_it(round_trip_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server has of them to do is bounded, and what one answer takes that was late is forgotten."""
    window = Window()
    measured(window, lambda _: 500, 3, monkeypatch)  # the first look is disturbed
    sizes = measured(window, partial(taking, round_trip_ms, 0.1), 3 * LOOKS_EVERY[1], monkeypatch)
    late = [0.1 * size for size in sizes[200:]]
    assert max(late) < 2 + round_trip_ms
    assert sorted(late)[len(late) // 2] < 1.2


def test_a_longer_way_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the way becomes a long one on the same connection, the window is not left small."""
    window = Window()
    measured(window, partial(taking, 0.1, 0.015), 100, monkeypatch)
    sizes = measured(window, partial(taking, 50, 0.015), 5 * LOOKS_EVERY[1], monkeypatch)
    assert sizes[-1] >= UNITS_FIRST


async def test_a_hold_is_renewed_before_requests(
    client: Redlease, flood: list[asyncio.Task[Any]], server: Server, sent: list[str]
) -> None:
    """The hold of a client that floods the server is renewed first."""
    holding = client.lock("held").hold()
    server.resume()
    await asyncio.gather(*flood)
    async with holding as hold:
        server.pause()
        sent.clear()
        more = [asyncio.create_task(client.lock(f"s{number}").acquire()) for number in range(TASKS)]
        await eventually(lambda: connection_of(client)._is_full)
        lease_of(hold)._renew(clock.now_ms())
        unanswered = len(connection_of(client)._pending)
        assert "renew" not in sent
        server.resume()
        await asyncio.gather(*more)
        assert sent.index("renew") == unanswered
