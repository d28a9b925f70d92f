"""A network that loses, cuts, delays, doubles and goes silent: at most the capacity inside, nothing left behind."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, LeaseLost, Unavailable
from redlease._core.transport.opening.driver import SocketDriver

from helpers import eventually, left_over, queue_up, until_waiting
from proxy import Chances, Fault

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import redis.asyncio

    from redlease import Redlease, Semaphore

    from conftest import MakeClient, MakeProxy
    from proxy import Proxy
    from servers import Server

# A server that stalls is given up after seconds.
STALL = pytest.param(Fault.STALL, marks=pytest.mark.slow)
FAULTS = [Fault.LOSE, Fault.CUT, STALL, Fault.DELAY, Fault.DOUBLE]


@pytest.fixture
def engine(real_engine: str) -> str:
    """Only engines with a connection to disturb."""
    return real_engine


@pytest.fixture
async def shaky(proxy: Proxy, make_client: MakeClient) -> Redlease:
    """A client behind the proxy; a short lease lets it notice a silent connection in a quarter of a second."""
    shaky = await make_client(url=proxy.url, lease=0.75, waiter_lease=2)
    async with shaky.lock("warm up"):
        pass
    return shaky


async def nothing_is_left(raw: redis.asyncio.Redis, prefix: str) -> bool:
    """Tell whether no permit and no place stands under the prefix."""
    return await left_over(raw, prefix) == []


async def test_a_connection_that_is_lost_as_it_becomes_ready(proxy: Proxy, make_client: MakeClient) -> None:
    """Given up with the last reply of its opening, it is not taken for a good one: the next one serves."""
    proxy.plan(Fault.ECHO, 1, "INFO")
    client = await make_client(url=proxy.url)
    assert await client.lock("r").acquire(timeout=5)
    assert proxy.connections_total == 2


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("after", [1, 2])
async def test_one_fault_in_a_block(
    shaky: Redlease, proxy: Proxy, raw: redis.asyncio.Redis, prefix: str, fault: Fault, after: int
) -> None:
    """Whatever befalls the acquire or the release, the block is entered once, left, and leaves nothing."""
    lock = shaky.lock("r")
    proxy.plan(fault, after, "EVALSHA")
    async with lock.hold() as hold:
        (held,) = (await lock.inspect()).holders
        assert held.fence == hold.fence
    await eventually(lambda: nothing_is_left(raw, prefix))
    assert sum(proxy.faults.values()) == 1
    assert await lock.try_acquire() is not None


@pytest.mark.parametrize("fault", FAULTS)
async def test_one_fault_in_a_permit(
    shaky: Redlease, proxy: Proxy, raw: redis.asyncio.Redis, prefix: str, fault: Fault
) -> None:
    """Acquire, renew, check, adopt and release are repeated where their reply is lost, to the same effect."""
    lock = shaky.lock("r", lease=10)
    proxy.plan(fault, 1, "EVALSHA")
    permit = await lock.acquire(ticket="t")
    proxy.plan(fault, 1, "EVALSHA")
    renewed = await lock.renew(permit)
    assert (renewed.fence, renewed.ticket) == (permit.fence, "t")
    proxy.plan(fault, 1, "EVALSHA")
    assert await lock.is_held(renewed)
    proxy.plan(fault, 1, "EVALSHA")
    hold = await lock.adopt(renewed)
    assert hold.fence > permit.fence
    (held,) = (await lock.inspect()).holders
    assert held.fence == hold.fence
    permit = hold.detach()
    proxy.plan(fault, 1, "EVALSHA")
    await lock.release(permit)
    assert await left_over(raw, prefix) == []
    assert sum(proxy.faults.values()) == 5


@pytest.mark.parametrize("fault", FAULTS)
async def test_one_fault_in_the_queue(
    shaky: Redlease, proxy: Proxy, make_client: MakeClient, server: Server, fault: Fault
) -> None:
    """A waiter whose request or whose connection is disturbed keeps its place in the order."""
    steady = (await make_client(url=server.url)).lock("r")
    lock = shaky.lock("r")
    permit = await steady.acquire()
    proxy.plan(fault, 1, "EVALSHA")
    waiting = asyncio.create_task(lock.acquire(ticket="first"))
    await until_waiting(steady, 1)
    (behind,) = await queue_up(steady, 1)
    if fault is not Fault.DOUBLE:
        proxy.drop_all()
    assert await steady.release(permit)
    first = await asyncio.wait_for(waiting, 15)
    assert not behind.done()
    assert await lock.release(first)
    assert await steady.release(await behind)


async def test_a_message_that_is_lost(shaky: Redlease, proxy: Proxy, make_client: MakeClient, server: Server) -> None:
    """A grant whose message went down with the connection is found on the next one."""
    steady = (await make_client(url=server.url)).lock("r")
    permit = await steady.acquire()
    (task,) = await queue_up(shaky.lock("r"), 1)
    proxy.refuse()
    proxy.drop_all()
    assert await steady.release(permit)
    (held,) = (await steady.inspect()).holders
    await proxy.accept()
    granted = await asyncio.wait_for(task, 15)
    assert granted.fence == held.fence


async def test_a_message_that_never_came(
    shaky: Redlease, make_client: MakeClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pub/sub delivers at most once: a grant whose message alone was lost is found by the next beat."""
    steady = (await make_client(url=server.url)).lock("r")
    permit = await steady.acquire()
    (task,) = await queue_up(shaky.lock("r"), 1)
    dropped: list[Any] = []
    monkeypatch.setattr(type(shaky._connection), "on_push", lambda self, push: dropped.append(push))
    assert await steady.release(permit)
    await eventually(lambda: dropped)
    monkeypatch.undo()
    assert await asyncio.wait_for(task, 15)


async def test_a_silent_connection_is_noticed(shaky: Redlease, proxy: Proxy) -> None:
    """A connection that went silent is given up and the hold renewed on another, in time for its lease."""
    lock = shaky.lock("r")
    async with lock.hold() as hold:
        renewed = hold.permit.expires_at_ms
        await eventually(lambda: hold.permit.expires_at_ms > renewed)
        proxy.plan(Fault.STALL, 1, "EVALSHA")
        await eventually(lambda: proxy.faults[Fault.STALL])
        before = hold.permit.expires_at_ms
        await eventually(lambda: hold.permit.expires_at_ms > before + 300)
        hold.check()
    assert proxy.connections_total >= 2


async def test_a_network_that_is_silent_for_longer_than_the_lease(shaky: Redlease, proxy: Proxy) -> None:
    """A body behind a silent network is cancelled when its lease ends, and is not told twice."""
    lock = shaky.lock("r")
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(LeaseLost):
        async with lock.hold() as hold:
            proxy.freeze()
            began = loop.time()
            await asyncio.sleep(30)
    assert loop.time() - began < 0.75 + 5
    assert hold.lost
    proxy.thaw()
    async with lock.hold(timeout=5) as later:
        assert later.fence > hold.fence


async def test_a_short_outage_costs_nothing(shaky: Redlease, proxy: Proxy) -> None:
    """Refused connections for part of a lease lose no permit."""
    lock = shaky.lock("r", lease=2)
    async with lock.hold() as hold:
        proxy.refuse()
        proxy.drop_all()
        await asyncio.sleep(0.7)
        await proxy.accept()
        await eventually(lambda: hold.remaining() > 1.5)
        assert await lock.is_held(hold.permit)


# Late copies: a network that keeps a request back, and delivers it when nobody waits for it any more.


async def captured_acquire(use: Callable[[], Awaitable[Any]]) -> bytes:
    """Run something that acquires, and return the acquire as it was written."""
    written: list[bytes] = []
    write = SocketDriver.write

    def capturing(driver: SocketDriver, data: bytes) -> None:
        written.append(data)
        write(driver, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SocketDriver, "write", capturing)
        await use()
    return written[0]


async def send_copy(server: Server, frame: bytes) -> None:
    """Deliver a frame on a connection of its own, and wait for the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(frame)
    reply = await reader.read(1000)
    assert not reply.startswith(b"-"), reply
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("kind", ["hold", "permit", "cancelled"])
async def test_a_late_copy_of_an_acquire_grants_nothing(
    shaky: Redlease, proxy: Proxy, server: Server, raw: redis.asyncio.Redis, prefix: str, kind: str
) -> None:
    """A copy from a connection that was lost arrives after the release: it finds a tombstone."""
    lock = shaky.lock("r", lease=5)

    async def use() -> None:
        proxy.plan(Fault.CUT, 1, "EVALSHA")
        if kind == "hold":
            async with lock.hold():
                pass
        elif kind == "permit":
            assert await lock.release(await lock.acquire())
        else:
            task = asyncio.create_task(lock.acquire())
            await eventually(lambda: proxy.faults[Fault.CUT])
            task.cancel()
            await asyncio.wait([task])
            await eventually(lambda: nothing_is_left(raw, prefix))

    frame = await captured_acquire(use)
    assert await left_over(raw, prefix) == []
    await send_copy(server, frame)
    assert await left_over(raw, prefix) == []


async def test_a_late_copy_finds_its_own_permit(
    shaky: Redlease, server: Server, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A copy that arrives while the permit is held changes nothing."""
    lock = shaky.lock("r", lease=5)
    permits = []

    async def use() -> None:
        permits.append(await lock.acquire())

    frame = await captured_acquire(use)
    await send_copy(server, frame)
    assert len(await left_over(raw, prefix)) == 1
    assert await lock.is_held(permits[0])
    assert await lock.release(permits[0])
    assert await left_over(raw, prefix) == []


async def test_a_late_copy_does_not_disturb_the_ticket_s_next_use(
    shaky: Redlease, proxy: Proxy, server: Server, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A ticket that was released and is in use anew keeps its permit when a copy of its former request comes."""
    lock = shaky.lock("r", lease=5)

    async def use() -> None:
        proxy.plan(Fault.CUT, 1, "EVALSHA")
        assert await lock.release(await lock.acquire(ticket="t"))

    frame = await captured_acquire(use)
    permit = await lock.acquire(ticket="t")
    await send_copy(server, frame)
    assert await lock.is_held(permit)
    assert await lock.release(permit)
    assert await left_over(raw, prefix) == []


# Everything at once


MIXTURES = {
    "cuts": Chances(lose=0.005, cut=0.005),
    "silence": Chances(stall=0.003, delay=0.03),
    "doubles": Chances(double=0.2, delay=0.03),
    "broken streams": Chances(drop=0.004, echo=0.004, delay=0.03),
    "all": Chances(drop=0.002, echo=0.002, lose=0.003, cut=0.003, stall=0.002, delay=0.03, double=0.05),
}


class Shared:
    """What the tasks of a mixture do together: never too many inside, and every fence another."""

    def __init__(self, capacity: int, dice: random.Random) -> None:
        self.capacity = capacity
        self.dice = dice
        self.inside = 0
        self.fences: list[int] = []

    async def use(self, pool: Semaphore) -> None:
        """Hold once; a hold that is known to be lost is not inside any more."""
        weight = self.dice.choice((1, 1, 1, 2))
        try:
            async with pool.hold(weight=weight, timeout=self.dice.choice((None, None, 0.02))) as hold:
                self.fences.append(hold.fence)
                self.inside += weight
                assert self.inside <= self.capacity
                try:
                    await asyncio.sleep(self.dice.uniform(0, 0.004))
                finally:
                    self.inside -= weight
        except (LeaseLost, AcquireTimeout, Unavailable):
            pass

    async def use_permit(self, pool: Semaphore) -> None:
        """Use a plain permit, tried or waited for."""
        try:
            permit = await (pool.acquire() if self.dice.random() < 0.7 else pool.try_acquire())
        except Unavailable:
            return
        if permit is not None:
            self.fences.append(permit.fence)
            self.inside += 1
            assert self.inside <= self.capacity
            self.inside -= 1
            await self._until_released(pool, permit)

    async def _until_released(self, pool: Semaphore, permit: Any) -> None:
        while True:
            try:
                await pool.release(permit)
            except Unavailable:
                continue
            return

    async def worker(self, pool: Semaphore, times: int) -> None:
        """Use the pool again and again, cancelled now and then."""
        for _ in range(times):
            task = asyncio.create_task(self.dice.choice((self.use, self.use, self.use_permit))(pool))
            if self.dice.random() < 0.2:
                await asyncio.sleep(self.dice.uniform(0, 0.01))
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()):
                raise error


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES)
async def test_faults_at_random(
    server: Server,
    make_client: MakeClient,
    make_proxy: MakeProxy,
    raw: redis.asyncio.Redis,
    prefix: str,
    mixture: str,
) -> None:
    """Many tasks of several clients behind a bad network: at most the capacity inside, and nothing left at the end."""
    dice = random.Random(f"{mixture} of {server.engine}")
    shared = Shared(3, dice)
    pools, proxies = [], []
    for seed in range(2):
        proxy = await make_proxy(server, seed=dice.randrange(2**32) + seed)
        pools.append((await make_client(url=proxy.url, lease=2, waiter_lease=2)).semaphore("r", capacity=3))
        proxy.chances = MIXTURES[mixture]
        proxies.append(proxy)
    await asyncio.gather(*(shared.worker(pools[number % 2], 10) for number in range(30)))
    for proxy in proxies:
        proxy.chances = Chances()
    assert sum(sum(proxy.faults.values()) for proxy in proxies) > 3
    assert len(set(shared.fences)) == len(shared.fences) > 100
    await eventually(lambda: nothing_is_left(raw, prefix), 8)
    permit = await asyncio.wait_for(pools[0].acquire(weight=3), 15)
    assert permit.fence > max(shared.fences)


@pytest.mark.slow
async def test_copies_at_random(server: Server, make_client: MakeClient, make_proxy: MakeProxy) -> None:
    """Late copies of anything, with and without the connection lost: never too many inside, nothing alive later."""
    shared = Shared(3, random.Random(server.engine))
    proxy = await make_proxy(server, seed=7)
    client = await make_client(url=proxy.url, lease=1, waiter_lease=1)
    pool = client.semaphore("r", capacity=3)
    proxy.chances = Chances(late=0.05, cut=0.01, late_max=0.2)
    await asyncio.gather(*(shared.worker(pool, 10) for _ in range(30)))
    proxy.chances = Chances()
    assert proxy.faults[Fault.LATE] > 5
    assert len(set(shared.fences)) == len(shared.fences)

    async def idle() -> bool:
        # What a copy has queued or been granted lapses by itself: nobody keeps it.
        snapshot = await pool.inspect()
        return not snapshot.holders and not snapshot.waiters

    await eventually(idle, 8)
    assert await asyncio.wait_for(pool.acquire(weight=3), 15)
