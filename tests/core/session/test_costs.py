"""What the library costs: commands, messages and connections are counted, and the capacity is kept busy."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease._core.protocol.encoding import Resource
from redlease._core.transport.opening.driver import SocketDriver

from clusters import told
from helpers import eventually, queue_up, until_waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    from redlease import Redlease, Semaphore

    from conftest import MakeClient, MakeProxy, OwnServer
    from proxy import Proxy
    from servers import Server

JOBS = 300


class Counted:
    """A server, and clients whose commands are counted, each by a proxy of its own."""

    def __init__(self, server: Server, make_client: MakeClient, make_proxy: MakeProxy) -> None:
        self.server = server
        self._make_client = make_client
        self._make_proxy = make_proxy

    async def client(self, **options: Any) -> tuple[Redlease, Proxy]:
        """Make a client and the proxy that counts for it."""
        proxy = await self._make_proxy(self.server)
        return await self._make_client(url=proxy.url, **options), proxy

    def messages(self) -> int:
        """Return how many messages scripts have published."""
        published = told(self.server, "INFO", "commandstats").get("cmdstat_publish", "calls=0")
        return int(published.removeprefix("calls=").split(",")[0])


@pytest.fixture
def counted(own_server: OwnServer, real_engine: str, make_client: MakeClient, make_proxy: MakeProxy) -> Counted:
    """A server of each real engine in turn."""
    return Counted(own_server(real_engine), make_client, make_proxy)


def sent(proxy: Proxy) -> int:
    """Return how many commands have come through."""
    return sum(proxy.commands.values())


async def test_acquire_and_release_are_one_command_each(counted: Counted) -> None:
    """Uncontended, each of acquire, release, try_acquire, renew and a block's two ends is one command."""
    client, proxy = await counted.client()
    lock = client.lock("r")

    async def pair() -> None:
        assert await lock.release(await lock.acquire())

    async def renewed() -> None:
        permit = await lock.try_acquire()
        assert permit is not None
        assert await lock.release(await lock.renew(permit))

    async def block() -> None:
        async with lock:
            pass

    uses: list[tuple[int, Callable[[], Any]]] = [(2, pair), (3, renewed), (2, block)]
    for commands, use in uses * 3:
        before, messages = sent(proxy), counted.messages()
        await use()
        assert sent(proxy) - before == commands
        assert counted.messages() == messages


async def test_a_hand_off_is_one_command_and_one_message(counted: Counted) -> None:
    """The releaser sends its one command, the server one message, and who enters a block sends nothing more."""
    (one, one_proxy), (two, two_proxy) = await counted.client(), await counted.client()
    locks = [(one.lock("r"), one_proxy), (two.lock("r"), two_proxy)]
    hold = await locks[0][0].hold()
    for turn in range(6):
        (_, holding), (lock, waiting) = locks[turn % 2], locks[1 - turn % 2]
        task = asyncio.create_task(_hold(lock))
        await until_waiting(lock, 1)
        before, releaser, messages = sent(waiting), sent(holding), counted.messages()
        assert await hold.release()
        hold = await asyncio.wait_for(task, 5)
        assert (sent(waiting) - before, sent(holding) - releaser, counted.messages() - messages) == (0, 1, 1)
    assert await hold.release()


async def _hold(lock: Semaphore) -> Any:
    return await lock.hold()


async def test_a_waiting_acquire_claims_with_one_command(counted: Counted) -> None:
    """Nobody renews what acquire returns, so after a wait it asks once more, for a full lease."""
    (one, _), (two, proxy) = await counted.client(), await counted.client()
    permit = await one.lock("r").acquire()
    (task,) = await queue_up(two.lock("r"), 1)
    before = sent(proxy)
    assert await one.lock("r").release(permit)
    later = await task
    assert sent(proxy) - before == 1
    assert later.expires_at_ms - later.granted_at_ms >= 30_000


async def test_a_cancelled_waiter_costs_one_command(counted: Counted) -> None:
    """Leaving the queue is one command, and no message to anybody."""
    client, proxy = await counted.client()
    lock = client.lock("r")
    await lock.acquire()
    tasks = await queue_up(lock, 3)
    before, messages = sent(proxy), counted.messages()
    tasks[1].cancel()
    await asyncio.wait(tasks[1:2])
    await eventually(lambda: sent(proxy) == before + 1)
    await until_waiting(lock, 2)
    assert counted.messages() == messages
    for task in (tasks[0], tasks[2]):
        task.cancel()


async def crowd(counted: Counted, seconds: float) -> None:
    """Let 200 tasks wait for a held lock, and count what their client sends meanwhile."""
    client, proxy = await counted.client()
    lock = client.lock("r")
    async with lock:
        tasks = [asyncio.create_task(lock.acquire()) for _ in range(200)]
        await until_waiting(lock, 200)
        before, began = sent(proxy), asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        commands, seconds = sent(proxy) - before, asyncio.get_running_loop().time() - began
        for task in tasks:
            task.cancel()
    assert commands <= 2 * seconds
    assert proxy.connections_most <= 2
    assert proxy.connections_total <= 2


@pytest.mark.slow
async def test_a_crowd_of_waiters_is_quiet(counted: Counted) -> None:
    """200 waiters in one process use at most two connections and two commands a second in all."""
    await crowd(counted, 2)


@pytest.mark.slow
async def test_a_crowd_of_waiters_is_quiet_for_ten_seconds(
    own_server: OwnServer, make_client: MakeClient, make_proxy: MakeProxy
) -> None:
    """The same for ten seconds, beats and a renewal included."""
    await crowd(Counted(own_server("valkey9"), make_client, make_proxy), 10)


async def test_an_idle_client_sends_nothing(counted: Counted) -> None:
    """A client that neither holds nor waits is silent."""
    client, proxy = await counted.client()
    assert await client.lock("r").release(await client.lock("r").acquire())
    before = sent(proxy)
    await asyncio.sleep(1)
    assert sent(proxy) == before


async def test_many_tasks_share_one_connection(counted: Counted) -> None:
    """A thousand tasks on a hundred resources use one connection."""
    client, proxy = await counted.client()

    async def work(number: int) -> None:
        async with client.lock(f"r{number % 100}"):
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(1000)))
    assert (proxy.connections_most, proxy.connections_total) == (1, 1)


async def test_calls_of_one_turn_leave_in_few_writes(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what many tasks ask in one turn of the loop the first leaves at once, and the rest in ever larger writes."""
    client, _ = await counted.client()
    pool = client.semaphore("r", capacity=200)
    permit = await pool.acquire()
    writes: list[int] = []
    write = SocketDriver.write

    def counting(driver: SocketDriver, data: bytes) -> None:
        writes.append(data.count(b"EVALSHA"))
        write(driver, data)

    monkeypatch.setattr(SocketDriver, "write", counting)
    permits = await asyncio.gather(*(pool.acquire() for _ in range(40)))
    assert writes == [1, 2, 4, 8, 16, 9]
    writes.clear()
    await asyncio.gather(*(pool.release(other) for other in (permit, *permits)))
    assert writes == [1, 2, 4, 8, 16, 10]


@pytest.mark.slow
async def test_renewals_are_few_and_spread(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand holds taken together are renewed some three times a lease each, in few writes and in no burst."""
    client, proxy = await counted.client()
    pool = client.semaphore("r", capacity=1000, lease=3)
    holds = await asyncio.gather(*(_hold(pool) for _ in range(1000)))
    bursts: list[int] = []
    write = SocketDriver.write

    def counting(driver: SocketDriver, data: bytes) -> None:
        bursts.append(data.count(b"EVALSHA"))
        write(driver, data)

    monkeypatch.setattr(SocketDriver, "write", counting)
    before, began = sent(proxy), asyncio.get_running_loop().time()
    await asyncio.sleep(3)
    leases = (asyncio.get_running_loop().time() - began) / 3
    assert 2000 <= (sent(proxy) - before) / leases <= 4500
    assert max(bursts) <= 100
    # The proxy shares the loop with the client, so its answers are slow, and the window is the smallest.
    assert sum(bursts) >= 3 * len(bursts)
    assert not any(hold.lost for hold in holds)
    await asyncio.gather(*(hold.release() for hold in holds))


async def test_a_watcher_costs_only_while_it_watches(counted: Counted) -> None:
    """Changes are published while somebody watches, and to nobody before."""
    client, _ = await counted.client()
    lock = client.lock("r")
    before = counted.messages()
    await lock.release(await lock.acquire())
    assert counted.messages() == before
    watching = lock.watch()
    await anext(watching)
    await lock.release(await lock.acquire())
    assert counted.messages() == before + 2
    await watching.aclose()


@pytest.mark.slow
@pytest.mark.parametrize("clients", [1, 4])
async def test_the_capacity_is_kept_busy(counted: Counted, clients: int) -> None:
    """While anybody waits each release grants in the same call, and a job costs two commands and hardly any other."""
    made = [await counted.client(waiter_lease=300) for _ in range(clients)]
    pools = [client.semaphore("r", capacity=2, lease=300, history=10 * JOBS) for client, _ in made]
    first = [await pools[0].acquire() for _ in range(2)]

    async def job(pool: Semaphore) -> None:
        async with pool.hold():
            await asyncio.sleep(0.001)

    jobs = [asyncio.create_task(job(pools[number % clients])) for number in range(JOBS)]
    await until_waiting(pools[0], JOBS)
    before = sum(sent(proxy) for _, proxy in made)
    for permit in first:
        await pools[0].release(permit)
    await asyncio.gather(*jobs)
    # Each has asked before; a process that stood still renews what it holds, or beats, when it goes on.
    assert 0 <= sum(sent(proxy) for _, proxy in made) - before - len(first) - JOBS <= JOBS // 10
    happened = [entry.event for entry in await pools[0].history(10 * JOBS)]
    assert happened == ["granted"] * 2 + ["released", "granted"] * JOBS + ["released"] * 2


async def test_a_primitive_made_anew_is_cheap(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys are written out once for as long as its name is among the last used."""
    client, _ = await counted.client()
    made: list[str] = []
    write_out = Resource.__init__

    def counting(resource: Resource, prefix: str, name: str) -> None:
        made.append(name)
        write_out(resource, prefix, name)

    monkeypatch.setattr(Resource, "__init__", counting)
    for lease in (10, 10, 20):
        async with client.lock("a", lease=lease).hold(), client.semaphore("b", capacity=2, lease=lease).hold():
            pass
    assert made == ["a", "b"]
