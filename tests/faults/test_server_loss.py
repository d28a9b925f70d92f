"""A server that dies, forgets, stands still or changes its clock: what is lost is known, and no fence goes back."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import fakeredis
import pytest

from redlease import LeaseLost, Redlease, Unavailable
from redlease._core.transport import connection
from redlease._core.transport.opening.drivers import open_driver

from helpers import eventually, queue_up, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Hold, Semaphore

    from conftest import MakeClient, OwnServer
    from servers import Server


@pytest.fixture
def server(own_server: OwnServer, real_engine: str) -> Server:
    """A server of each real engine in turn, for one test alone."""
    return own_server(real_engine)


class Bodies:
    """Tasks that hold or wait, and what became of them."""

    def __init__(self, pool: Semaphore) -> None:
        self.pool = pool
        self.entered: list[Hold] = []
        self.lost: list[Hold] = []
        self.done = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        """Let so many more tasks ask for the resource."""
        self.tasks += [asyncio.create_task(self._run()) for _ in range(count)]

    async def _run(self) -> None:
        hold = None
        try:
            async with self.pool.hold() as hold:
                self.entered.append(hold)
                await self.done.wait()
        except LeaseLost:
            assert hold is not None
            self.lost.append(hold)

    async def finish(self) -> None:
        """Let all of them through."""
        self.done.set()
        await asyncio.wait_for(asyncio.gather(*self.tasks), 20)

    @property
    def fences(self) -> list[int]:
        """The fences of all that entered, in the order in which they did."""
        return [hold.fence for hold in self.entered]


async def holders_and_waiters(pool: Semaphore, holders: int, waiters: int) -> Bodies:
    """Start tasks until so many hold and so many wait."""
    bodies = Bodies(pool)
    bodies.start(holders)
    await eventually(lambda: len(bodies.entered) == holders)
    bodies.start(waiters)
    await until_waiting(pool, waiters)
    return bodies


async def test_a_server_that_comes_back_empty(server: Server, make_client: MakeClient) -> None:
    """Holders get LeaseLost, waiters are served, and fences go on growing."""
    pools = [(await make_client(url=server.url)).semaphore("r", capacity=2, lease=1.5) for _ in range(2)]
    bodies = await holders_and_waiters(pools[0], 2, 5)
    others = Bodies(pools[1])
    others.start(5)
    await until_waiting(pools[0], 10)
    before = bodies.entered[:]
    server.restart()
    await eventually(lambda: len(bodies.lost) == 2)
    assert set(bodies.lost) == set(before)
    assert all(hold.lost for hold in before)
    bodies.done.set()
    others.done.set()
    await bodies.finish()
    await others.finish()
    fences = bodies.fences[2:] + others.fences
    assert len(fences) == 10
    assert min(fences) > max(bodies.fences[:2])
    assert len(set(fences)) == 10
    assert len(bodies.lost) == 2


async def test_a_server_that_stays_away(server: Server, make_client: MakeClient) -> None:
    """With the server gone a hold is lost by the local clock when its lease ends, not later; then all goes on (P7)."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=1)
    loop = asyncio.get_running_loop()
    bodies = await holders_and_waiters(lock, 1, 1)
    renewed = bodies.entered[0].permit.expires_at_ms
    await eventually(lambda: bodies.entered[0].permit.expires_at_ms > renewed)
    began = loop.time()
    server.kill()
    await eventually(lambda: bodies.lost)
    assert loop.time() - began > 0.5  # and nobody but its own clock could tell it
    server.start()
    await eventually(lambda: len(bodies.entered) == 2)
    assert bodies.fences[1] > bodies.fences[0]
    await bodies.finish()


async def test_a_server_that_stays_away_for_long(
    server: Server, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client finds its server again after thousands of attempts in vain, which is how many an hour's outage takes."""
    client = await make_client(url=server.url)
    attempts = 0

    async def shut(*arguments: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts <= 5000:
            raise ConnectionRefusedError("nobody is there")
        return await open_driver(*arguments)

    monkeypatch.setattr(connection, "open_driver", shut)
    monkeypatch.setattr(connection, "BACKOFF_S", (connection.BACKOFF_S[0], 0.0))
    server.cli("CLIENT", "KILL", "TYPE", "normal")
    server.cli("CLIENT", "KILL", "TYPE", "pubsub")
    await eventually(lambda: attempts > 5000, 20)
    assert await client.lock("r").acquire(timeout=5)


@pytest.mark.slow
async def test_calls_while_the_server_is_away(server: Server, make_client: MakeClient) -> None:
    """Timeouts include outages; calls without one end with Unavailable, and the same calls work again later."""
    client = await make_client(url=server.url)
    lock, spare = client.lock("r"), client.lock("s")
    permit = await lock.acquire()
    hold = await spare.hold()
    server.kill()
    with pytest.raises(Unavailable, match="r"):
        await lock.acquire(timeout=0.3)
    assert not await asyncio.wait_for(hold.release(), 15)
    calls = (lock.try_acquire(), lock.inspect(), lock.release(permit), lock.renew(permit), lock.is_held(permit))
    outcomes = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
    for outcome in outcomes:
        assert isinstance(outcome, Unavailable), outcome
        assert outcome.resource == "r"
    waiting = asyncio.create_task(lock.acquire())
    server.start()
    assert await asyncio.wait_for(waiting, 10)
    assert await spare.try_acquire() is not None


async def test_scripts_that_the_server_forgot(server: Server, make_client: MakeClient) -> None:
    """SCRIPT FLUSH in the middle of things costs nobody a permit or an error."""
    clients = [await make_client(url=server.url) for _ in range(2)]
    pools = [client.semaphore("r", capacity=2, lease=1) for client in clients]
    kept = await clients[0].lock("kept", lease=2).hold()
    stop = asyncio.Event()
    inside = 0

    async def work(pool: Semaphore) -> None:
        nonlocal inside
        while not stop.is_set():
            async with pool.hold():
                inside += 1
                assert inside <= 2
                await asyncio.sleep(0.001)
                inside -= 1

    tasks = [asyncio.create_task(work(pools[number % 2])) for number in range(8)]
    for _ in range(10):
        await asyncio.sleep(0.1)
        server.cli("SCRIPT", "FLUSH")
    stop.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert await kept.release()


async def test_data_that_the_server_forgot(server: Server, make_client: MakeClient) -> None:
    """After FLUSHALL holders lose their permits by the next renewal, and waiters are served within a beat."""
    client = await make_client(url=server.url, waiter_lease=0.6)
    lock = client.lock("r", lease=0.6)
    bodies = await holders_and_waiters(lock, 1, 4)
    server.cli("FLUSHALL")
    await eventually(lambda: len(bodies.lost) == 1 and len(bodies.entered) == 2)
    await bodies.finish()
    assert bodies.fences == sorted(set(bodies.fences))
    assert len(bodies.fences) == 5


async def test_keys_that_somebody_deleted(server: Server, make_client: MakeClient, prefix: str) -> None:
    """When one of the keys is gone the library recovers: no fence goes back, and the queue moves on."""
    client = await make_client(url=server.url, waiter_lease=0.6)
    for part in ("state", "holders", "queue", "waiters"):
        lock = client.lock(part, lease=0.6)
        bodies = await holders_and_waiters(lock, 1, 3)
        server.cli("DEL", f"{prefix}:{{{part}}}:{part}")
        bodies.done.set()
        await bodies.finish()
        assert len(set(bodies.fences)) == 4, part
        assert bodies.fences[1] > bodies.fences[0], part


async def test_a_server_that_pauses_briefly(server: Server, make_client: MakeClient) -> None:
    """A server that answers late, but within the lease, costs nobody anything."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=3)
    bodies = await holders_and_waiters(lock, 1, 2)
    server.pause()
    await asyncio.sleep(0.8)
    server.resume()
    await bodies.finish()
    assert bodies.lost == []
    assert bodies.fences == sorted(set(bodies.fences))


async def test_a_server_that_pauses_for_long(server: Server, make_client: MakeClient) -> None:
    """A server that is silent for longer than the lease costs the holder its permit, while it is still silent."""
    client = await make_client(url=server.url, waiter_lease=1)
    lock = client.lock("r", lease=0.6)
    bodies = await holders_and_waiters(lock, 1, 2)
    server.pause()
    await eventually(lambda: len(bodies.lost) == 1)
    server.resume()
    await eventually(lambda: len(bodies.entered) == 2)
    await bodies.finish()
    assert bodies.fences == sorted(set(bodies.fences))
    assert len(bodies.lost) == 1


@pytest.mark.slow
async def test_a_release_while_the_server_is_silent(server: Server, make_client: MakeClient) -> None:
    """A block ends within the patience of the connection, and its permit is given back when the server is there."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=30)
    async with lock.hold():
        server.pause()
        loop = asyncio.get_running_loop()
        began = loop.time()
    assert loop.time() - began < 20
    server.resume()
    permit = await asyncio.wait_for(lock.acquire(), 20)
    assert permit


async def test_a_permit_outlives_a_client_s_outage(server: Server, make_client: MakeClient) -> None:
    """Killing every connection to the server loses nothing: holds are renewed and waiters found on new ones."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=1)
    bodies = await holders_and_waiters(lock, 1, 3)
    for _ in range(5):
        server.cli("CLIENT", "KILL", "TYPE", "normal")
        server.cli("CLIENT", "KILL", "TYPE", "pubsub")
        await asyncio.sleep(0.2)
    await eventually(lambda: _renewed(bodies.entered[0]))
    await bodies.finish()
    assert bodies.lost == []
    assert bodies.fences == sorted(set(bodies.fences))


def _renewed(hold: Hold) -> bool:
    hold.check()
    return hold.remaining() > 0.5


# Steps of the server's clock


async def test_a_clock_that_jumps_ahead(own_server: OwnServer, clock_engine: str, make_client: MakeClient) -> None:
    """An hour ahead, holders are lost as lapsed, waiters queue anew and are served, and fences grow."""
    server = own_server(clock_engine, faketime=True)
    client = await make_client(url=server.url, waiter_lease=0.6)
    bodies = await holders_and_waiters(client.lock("r", lease=0.6), 1, 3)
    server.step_clock(3600)
    await eventually(lambda: len(bodies.entered) > 1)
    await bodies.finish()
    assert bodies.fences == sorted(set(bodies.fences))
    assert len(bodies.fences) == 4


@pytest.mark.parametrize("idle_ttl", [86_400, 0.1])
async def test_a_clock_that_jumps_back(
    own_server: OwnServer, clock_engine: str, make_client: MakeClient, idle_ttl: float
) -> None:
    """An hour back, those who live go on: releases pass on, and fences stay above those of the time ahead."""
    server = own_server(clock_engine, faketime=True)
    client = await make_client(url=server.url, idle_ttl=idle_ttl)
    lock = client.lock("r", lease=0.6)
    server.step_clock(3600)
    ahead = await lock.acquire()
    assert await lock.release(ahead)
    bodies = await holders_and_waiters(lock, 1, 3)
    server.step_clock(0)
    await eventually(lambda: _renewed_for(bodies.entered[0], 0.3))
    await bodies.finish()
    assert bodies.lost == []
    after = await lock.acquire()
    fences = [ahead.fence, *bodies.fences, after.fence]
    assert fences == sorted(set(fences))
    state_ms = int(server.cli("EVAL", "return redis.call('PTTL', KEYS[1])", 1, lock._resource.state_key))
    assert state_ms > 3_500_000  # as long as the last fence is ahead of the clock


def _renewed_for(hold: Hold, seconds: float) -> bool:
    return hold.remaining() > seconds


class PatchedClock:
    """The clock that fakeredis reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        true_time = time.time
        monkeypatch.setattr(time, "time", lambda: true_time() + self.ahead)


@pytest.fixture
async def patched(monkeypatch: pytest.MonkeyPatch, prefix: str) -> AsyncIterator[tuple[PatchedClock, Redlease]]:
    """A fakeredis client, and the clock of its server."""
    async with (
        fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer()) as fake,
        Redlease(fake, prefix=prefix, waiter_lease=0.6) as client,
    ):
        yield PatchedClock(monkeypatch), client


async def test_fences_grow_whatever_the_clock_does(patched: tuple[PatchedClock, Redlease]) -> None:
    """Steps in both directions, small and large, never bring a fence back (P3)."""
    clock, client = patched
    lock = client.lock("r")
    last: Any = None
    for ahead in (0, 10, -10, 3600, 3599.9, -3600, 86_400, 0, -86_400, 0.001, 0):
        clock.ahead = ahead
        permit = await lock.acquire()
        assert last is None or permit.fence > last.fence
        assert await lock.release(permit)
        last = permit


async def test_a_jump_ahead_lapses_what_it_passes(patched: tuple[PatchedClock, Redlease]) -> None:
    """A permit whose deadline the clock has jumped over is lost, and the next waiter has the unit."""
    clock, client = patched
    lock = client.lock("r", lease=30)
    permit = await lock.acquire()
    (task,) = await queue_up(lock, 1)
    clock.ahead = 60
    later = await asyncio.wait_for(task, 15)
    assert later.fence > permit.fence
    assert not await lock.release(permit)
    assert await lock.is_held(later)


async def test_a_jump_back_keeps_the_queue_moving(patched: tuple[PatchedClock, Redlease]) -> None:
    """Waiters that live keep their places when the clock is set back, and are granted in order."""
    clock, client = patched
    lock = client.lock("r", lease=1)
    clock.ahead = 3600
    permit = await lock.acquire()
    tasks = await queue_up(lock, 3)
    clock.ahead = 0
    await asyncio.sleep(1)
    assert await lock.release(permit)
    for task in tasks:
        permit = await asyncio.wait_for(task, 15)
        assert await lock.release(permit)
