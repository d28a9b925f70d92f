"""An exception that nobody expected ends no loop: it is told once, and what failed is done again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import redlease
from redlease import Redlease
from redlease._core.hold import lease_of
from redlease._core.session.schedule import Schedule
from redlease._core.transport.cluster import Cluster
from redlease._core.transport.connection import Connection
from redlease._core.transport.node import Node
from redlease._core.transport.opening.driver import SocketDriver

from helpers import cancel, eventually, queue_up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import CodeType, FrameType

    from conftest import MakeClient, Servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TIMES = 1000
PACKAGE = str(Path(redlease.__file__).parent)

# What stands between a loop and its end: these catch what is thrown below them, and have nothing above them.
LAST = {"_turn", "_arm", "_run", "_notify", "_answer", "report", "failed", "_mistaken", "_check_silence", "backed_off"}


class Mistake(Exception):
    """What is thrown."""


class Thrower:
    """Throws an exception into functions of the library that a loop calls, one at a time and at random."""

    def __init__(self, loop: CodeType, seed: int) -> None:
        self._loop = loop
        self._random = random.Random(seed)
        self._left = 0  # calls until one is thrown into; 0: none is
        self.thrown = 0
        self.told: list[BaseException] = []
        self.places: set[str] = set()

    def arm(self, most: int) -> None:
        """Throw into one of the next calls."""
        self._left = self._random.randint(1, most)
        sys.settrace(self._trace)

    @property
    def armed(self) -> bool:
        """Whether it has still to throw."""
        return self._left > 0

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or self._left == 0 or not self._concerns(frame):
            return
        self._left -= 1
        if self._left == 0:
            self.thrown += 1
            self.places.add(frame.f_code.co_name)
            sys.settrace(None)
            raise Mistake(f"{self.thrown}: {frame.f_code.co_name}")

    def _concerns(self, frame: FrameType) -> bool:
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name in LAST or code.co_name.startswith("<"):
            return False
        above: FrameType | None = frame
        while above is not None:
            if above.f_code is self._loop:
                return True
            above = above.f_back
        return False


@contextlib.contextmanager
def throwing(loop: Callable[..., Any], seed: int = 1) -> Iterator[Thrower]:
    """Throw into what a loop calls, and collect what is told of it."""
    thrower = Thrower(loop.__code__, seed)
    running = asyncio.get_running_loop()
    before = running.get_exception_handler()

    def tell(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        thrower.told.append(context["exception"])

    running.set_exception_handler(tell)
    try:
        yield thrower
    finally:
        sys.settrace(None)
        running.set_exception_handler(before)


def assert_told_once(thrower: Thrower) -> None:
    """Each was told, and none of them twice."""
    assert thrower.thrown >= TIMES
    told = [str(error) for error in thrower.told]
    assert sorted(told) == sorted(set(told))
    assert len(told) == thrower.thrown
    assert all(isinstance(error, Mistake) for error in thrower.told)


@contextlib.asynccontextmanager
async def busy(client: Redlease, pause_s: float = 0.01) -> AsyncIterator[list[redlease.Hold]]:
    """Let a client hold a lot, and queue and release all the time, each lock after a pause."""
    pool = client.semaphore("pool", capacity=100, lease=6)
    holds = [await pool.hold(on_lost="signal") for _ in range(100)]

    async def take_turns(number: int) -> None:
        while True:
            async with client.lock(f"r{number % 6}", lease=6, waiter_lease=6).hold(on_lost="signal"):
                await asyncio.sleep(pause_s)

    tasks = [asyncio.create_task(take_turns(number)) for number in range(18)]
    try:
        yield holds
    finally:
        assert not [task for task in tasks if task.done()]
        await cancel(*tasks)


async def all_renewed(holds: list[redlease.Hold]) -> None:
    """Show that no hold was lost, and that each is still renewed."""
    leases = [lease_of(hold) for hold in holds]
    until_ms = [lease.deadline_ms for lease in leases]
    await eventually(lambda: all(each.deadline_ms > was for each, was in zip(leases, until_ms, strict=True)), within=10)
    assert not [lease.why_lost for lease in leases if lease.is_lost()]


async def still_works(client: Redlease) -> None:
    """Show that the client grants, renews, hands over and releases."""
    lock = client.lock("after", lease=3, waiter_lease=3)
    async with lock.hold() as hold:
        (waiting,) = await queue_up(lock, 1)
        renewed = hold.permit.expires_at_ms
        await eventually(lambda: hold.permit.expires_at_ms > renewed)
    assert await lock.release(await asyncio.wait_for(waiting, 15))


async def throw_all(client: Redlease, thrower: Thrower, most: int, provoke: Callable[[], Any] = lambda: None) -> None:
    """Throw so often, each time after the one before has been thrown."""
    while thrower.thrown < TIMES:
        await client._connection.until_ready()
        thrower.arm(most)
        await eventually(lambda: provoke() or not thrower.armed, within=20)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect again, and look again, without long pauses."""
    monkeypatch.setattr("redlease._core.transport.connection.BACKOFF_S", (0.001, 0.002))
    monkeypatch.setattr("redlease._core.transport.cluster.BACKOFF_S", (0.001, 0.002))


async def test_mistakes_in_what_is_due(make_client: MakeClient, servers: Servers) -> None:
    """The timer goes on, and so does what failed: no hold is lost, and everything that was given back is free."""
    client = await make_client(url=servers["valkey9"].url)
    # Renewals and beats are what is due; more hand-offs between them would only be traced.
    async with busy(client, pause_s=0.1) as holds:
        with throwing(Schedule._turn) as thrower:
            await throw_all(client, thrower, 10)
        assert_told_once(thrower)
        assert {"turn", "_renew", "send", "stalled"} & thrower.places
        await all_renewed(holds)
    await eventually(lambda: not client._manager.leaving)
    await still_works(client)


async def test_mistakes_with_what_comes_in(make_client: MakeClient, servers: Servers) -> None:
    """Whoever fails with a reply or a message asks again; the connection goes on, or is made anew."""
    client = await make_client(url=servers["valkey9"].url)
    async with busy(client) as holds:
        with throwing(SocketDriver.data_received) as thrower:
            await throw_all(client, thrower, 30)
            await asyncio.sleep(0.5)
        assert_told_once(thrower)
        await all_renewed(holds)
    await eventually(lambda: not client._manager.leaving)
    await still_works(client)


async def test_mistakes_while_connecting(make_client: MakeClient, servers: Servers) -> None:
    """However often making a connection fails, the next attempt follows; who holds and who waits goes on."""
    client = await make_client(url=servers["valkey9"].url)
    connection = client._connection
    assert isinstance(connection, Connection)

    def cut() -> None:
        if connection.ready:
            assert isinstance(connection._driver, SocketDriver)
            connection._driver._lost("cut by the test")

    # The test cuts each connection at once, before a renewal comes through: the leases outlast the test.
    async with client.semaphore("pool", capacity=9, lease=600).hold() as hold:
        lock = client.lock("r", lease=600, waiter_lease=600)
        async with lock:
            (waiting,) = await queue_up(lock, 1)
            with throwing(Connection._run) as thrower:
                await throw_all(client, thrower, 300, cut)
            assert_told_once(thrower)
            assert {"_open", "_serve", "on_ready"} <= thrower.places
        assert await lock.release(await asyncio.wait_for(waiting, 10))
        assert not hold.lost
    await still_works(client)


async def test_mistakes_while_looking_where_the_slots_are(make_client: MakeClient, servers: Servers) -> None:
    """However often looking at a cluster fails, it is looked again."""
    client = await make_client(url=servers.cluster.url)
    connection = client._connection
    assert isinstance(connection, Cluster)
    async with contextlib.AsyncExitStack() as stack:
        holds = [await stack.enter_async_context(client.lock(f"r{number}", lease=6).hold()) for number in range(12)]
        with throwing(Cluster._run) as thrower:
            await throw_all(client, thrower, 100, connection._stale.set)
        assert_told_once(thrower)
        assert {"_find", "_apply", "query_node"} <= thrower.places
        await all_renewed(holds)
        connection._topology.owners[:] = [None] * len(connection._topology.owners)
        connection._stale.set()
        await still_works(client)


async def test_a_mistake_with_a_message(client: Redlease, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever drives the connection: it is made anew, and nobody waits for ever."""
    mistake = Mistake("with a message")
    raised: list[Mistake] = []

    def mistaken(on_push: Callable[[Any, list[Any]], None]) -> Callable[[Any, list[Any]], None]:
        def wrapped(receiver: Any, push: list[Any]) -> None:
            if not raised and push[0].endswith(b"message"):
                raised.append(mistake)
                raise mistake
            on_push(receiver, push)

        return wrapped

    lock = client.lock("r", lease=6, waiter_lease=6)
    hold = await lock.hold()
    (waiting,) = await queue_up(lock, 1)
    for kind in (Connection, Node):
        monkeypatch.setattr(kind, "on_push", mistaken(kind.on_push))
    with throwing(Connection._run) as thrower:
        assert await hold.release()
        permit = await asyncio.wait_for(waiting, 10)
    assert thrower.told == raised == [mistake]
    assert await lock.release(permit)
    await still_works(client)
