"""A cluster: each resource is served by its master, and found again where its slot moves or a replica takes over."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from redis.crc import key_slot

from redlease import Redlease, RedleaseError, Unavailable
from redlease._cli.app import app
from redlease._core.primitives.overview import Overview
from redlease._core.protocol import rights

from clusters import SLOTS, Cluster, raw_reply, told, until
from helpers import eventually, queue_up, until_waiting
from ports import free_port
from servers import REAL_ENGINES, available_engines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from redlease import Semaphore

    from conftest import MakeClient, Servers
    from servers import Server

pytestmark = pytest.mark.slow

ENGINES = [engine for engine in available_engines() if engine in REAL_ENGINES]


@pytest.fixture(scope="module", params=ENGINES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three masters of each real engine in turn; a test may move slots, and kills nobody."""
    with Cluster(request.param) as running:
        yield running


@pytest.fixture(params=ENGINES)
def replicated(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three masters with a replica each, for one test alone."""
    with Cluster(request.param, replicas=3) as running:
        yield running


def slot_of(prefix: str, name: str) -> int:
    """Return the slot of a resource."""
    return key_slot(f"{prefix}:{{{name}}}:state".encode())


def serving(cluster: Cluster, prefix: str, name: str = "r") -> Server:
    """Return the master that serves a resource now."""
    return cluster.master_of(f"{prefix}:{{{name}}}:state")


def other_than(cluster: Cluster, node: Server) -> Server:
    """Return another master."""
    return next(other for other in cluster.masters if other is not node)


def calls(node: Server, command: str) -> int:
    """Return how often a node has carried a command out, inside scripts too."""
    said = told(node, "INFO", "commandstats").get(f"cmdstat_{command}", "calls=0,")
    return int(said.split("calls=")[1].split(",")[0])


def connections(node: Server, prefix: str) -> int:
    """Return how many connections a node has that listen to a client of this prefix."""
    return len(raw_reply(node, "PUBSUB", "CHANNELS", f"{prefix}:client:*"))


class Line:
    """A lock that is held by one client, and waited for by tasks of two others, who note in which order they got it."""

    def __init__(self, holder: Semaphore, pools: list[Semaphore]) -> None:
        self.pools = pools
        self.served: list[int] = []
        self.fences: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._holder = holder

    async def form(self, count: int) -> None:
        """Take the lock and let so many tasks queue up, one after the other."""
        self.hold = await self._holder.hold()
        for number in range(count):
            self.tasks.append(asyncio.create_task(self._wait(number)))
            await until_waiting(self._holder, number + 1)

    async def _wait(self, number: int) -> None:
        async with self.pools[number % len(self.pools)].hold() as hold:
            self.served.append(number)
            self.fences.append(hold.fence)

    async def until_answered(self) -> None:
        """Wait until every client has found the server that answers for the lock."""
        for pool in (self._holder, *self.pools):
            assert (await pool.inspect()).fence == self.hold.fence

    async def run_down(self, within: float = 10) -> None:
        """Let go, and check that all were served, once each and in the order in which they came."""
        assert await self.hold.release()
        async with asyncio.timeout(within):
            await asyncio.gather(*self.tasks)
        assert self.served == list(range(len(self.tasks)))
        assert self.fences == sorted(set(self.fences))
        assert self.fences[0] > self.hold.fence


@pytest.fixture
async def form_line(make_client: MakeClient) -> Callable[..., Any]:
    """Makes a line of waiters on a lock of a cluster."""

    async def make(cluster: Cluster, count: int = 12, **options: Any) -> Line:
        clients = [await make_client(url=cluster.url, **options) for _ in range(3)]
        line = Line(clients[0].lock("r"), [client.lock("r") for client in clients[1:]])
        await line.form(count)
        return line

    return make


# Where things are


async def test_resources_are_spread_evenly(cluster: Cluster, make_client: MakeClient, prefix: str) -> None:
    """Keys, permits and calls of 600 names are shared out by a third to each master, over one connection each."""
    client = await make_client(url=cluster.url)
    before = [(calls(node, "evalsha"), len(node.cli("KEYS", f"{prefix}:*"))) for node in cluster.masters]
    permits = await asyncio.gather(*(client.lock(f"n{number}").acquire() for number in range(600)))
    for node, (calls_before, keys_before) in zip(cluster.masters, before, strict=True):
        assert 150 <= calls(node, "evalsha") - calls_before <= 260
        assert 150 <= (len(node.cli("KEYS", f"{prefix}:*")) - keys_before) / 2 <= 260
        assert connections(node, prefix) == 1
    await asyncio.gather(*(client.lock(permit.resource).release(permit) for permit in permits))


async def test_a_pair_costs_what_it_costs_on_a_single_server(
    cluster: Cluster, servers: Servers, make_client: MakeClient
) -> None:
    """Three hundred blocks on thirty names send their masters the commands that they send to one server, no more."""

    async def commands(url: str, nodes: list[Server]) -> Counter[str]:
        client = await make_client(url=url)
        for number in range(30):
            async with client.lock(f"n{number}"):
                pass
        before = commands_of(nodes)
        for number in range(300):
            async with client.lock(f"n{number % 30}"):
                pass
        return commands_of(nodes) - before

    single = servers[cluster.engine]
    assert await commands(cluster.url, cluster.masters) == await commands(single.url, [single])


def commands_of(nodes: list[Server]) -> Counter[str]:
    """Count what nodes have carried out, inside scripts too, save what tests and other nodes ask of them."""
    counts: Counter[str] = Counter()
    for node in nodes:
        for name, said in told(node, "INFO", "commandstats").items():
            command = name.removeprefix("cmdstat_")
            if command.split("|")[0] not in {"info", "cluster", "ping", "hello", "client", "auth"}:
                counts[command] += int(said.split("calls=")[1].split(",")[0])
    return counts


async def test_only_masters_that_are_used_are_connected_to(
    cluster: Cluster, make_client: MakeClient, prefix: str
) -> None:
    """A client of one resource has one connection, whatever the number of masters."""
    client = await make_client(url=cluster.url)
    async with client.lock("r"):
        assert sum(connections(node, prefix) for node in cluster.masters) == 1
        assert connections(serving(cluster, prefix), prefix) == 1


async def test_a_grant_goes_by_a_sharded_channel_where_there_is_one(
    cluster: Cluster, form_line: Callable[..., Any], prefix: str
) -> None:
    """A hand-off is one message of the master that grants, on a sharded channel from Redis 7 on."""
    verb = "publish" if cluster.engine == "redis62" else "spublish"
    line = await form_line(cluster, 6)
    node = serving(cluster, prefix)
    before = {one: [calls(master, one) for master in cluster.masters] for one in ("publish", "spublish")}
    await line.run_down()
    for one, counts in before.items():
        for master, count in zip(cluster.masters, counts, strict=True):
            assert calls(master, one) - count == (6 if master is node and one == verb else 0)


async def test_a_hold_hears_of_its_end_from_its_first_moment(cluster: Cluster, make_client: MakeClient) -> None:
    """A hold of an hour whose ticket is released is lost at once: right after its grant too, and while others queue."""
    one, two = [await make_client(url=cluster.url, lease=3600) for _ in range(2)]
    for number, pause_s in enumerate((0, 0.05, 0.6)):
        lock = one.lock(f"r{number}")
        hold = await lock.hold(on_lost="signal")
        await asyncio.sleep(pause_s)
        assert await two.lock(lock.name).release(hold.permit.ticket)
        async with two.lock(lock.name).hold():
            (task,) = await queue_up(lock, 1)
            async with asyncio.timeout(1):
                assert await hold.wait_lost()
        assert await lock.release(await asyncio.wait_for(task, 2))


async def test_names_with_spaces_bars_and_braces(cluster: Cluster, make_client: MakeClient) -> None:
    """A waiter hears of its grant whatever the name of the resource."""
    one, two = [await make_client(url=cluster.url) for _ in range(2)]
    for name in ("a b", "a|b", "{a}b", "ä{", ":", "%7B"):
        hold = await one.lock(name).hold()
        (task,) = await queue_up(two.lock(name), 1)
        assert await hold.release()
        assert await two.lock(name).release(await asyncio.wait_for(task, 2))


async def test_a_watcher_sees_changes(cluster: Cluster, make_client: MakeClient) -> None:
    """`watch` tells of a grant that another client gets."""
    one, two = [await make_client(url=cluster.url) for _ in range(2)]
    watching = one.lock("r").watch()
    assert (await anext(watching)).holders == ()
    permit = await two.lock("r").acquire()
    async with asyncio.timeout(5):
        while not (snapshot := await anext(watching)).holders:
            pass
    assert snapshot.holders[0].fence == permit.fence
    await watching.aclose()
    assert await two.lock("r").release(permit)


async def test_channels_of_names_used_once_are_left_again(
    cluster: Cluster, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that takes ever new names listens to a bounded number of them, and still to those that it keeps."""
    monkeypatch.setattr("redlease._core.transport.node.CHANNELS_MIN", 20)
    one, two = [await make_client(url=cluster.url) for _ in range(2)]
    hold = await one.lock("kept", lease=60).hold(on_lost="signal")
    for number in range(300):
        async with one.lock(f"once{number}"):
            pass
    for node in cluster.masters:
        assert len(raw_reply(node, "PUBSUB", "SHARDCHANNELS" if cluster.engine != "redis62" else "CHANNELS")) <= 60
    assert await two.lock("kept").release(hold.permit.ticket)
    assert await asyncio.wait_for(hold.wait_lost(), 2)


async def test_the_commands_take_the_url_of_a_cluster(
    cluster: Cluster, make_client: MakeClient, prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`redlease inspect` and `release` find the resource on its master."""
    client = await make_client(url=cluster.url)
    await client.lock("r").acquire(ticket="t")
    options = ("--url", cluster.url, "--prefix", prefix)
    assert await asyncio.to_thread(command, "inspect", "r", *options, "--json") == 0
    assert '"t"' in capsys.readouterr().out
    assert await asyncio.to_thread(command, "release", "r", "t", *options) == 0
    assert await asyncio.to_thread(command, "release", "r", "t", *options) == 1


def command(*words: str) -> int:
    """Run a command in this process and return its exit status."""
    return int(app([*words], standalone_mode=False) or 0)


# Slots that move


async def test_a_slot_moves_with_waiters_queued(
    cluster: Cluster, form_line: Callable[..., Any], prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A slot is resharded while a lock in it is held and waited for: nobody loses its place or is granted it twice."""
    line = await form_line(cluster)
    source = serving(cluster, prefix)
    target = other_than(cluster, source)
    cluster.move_slot(slot_of(prefix, "r"), source, target)
    await line.run_down()
    assert serving(cluster, prefix) is target
    assert "is lost" not in caplog.text


@pytest.mark.parametrize("cluster", [engine for engine in ENGINES if engine == "valkey9"], indirect=True)
async def test_a_slot_moves_in_one_step(cluster: Cluster, form_line: Callable[..., Any], prefix: str) -> None:
    """Valkey 9 hands a slot over as a whole: nobody loses its place, and what is kept in it is heard of at once."""
    line = await form_line(cluster, waiter_lease=30)
    source, slot = serving(cluster, prefix), slot_of(prefix, "r")
    target = other_than(cluster, source)
    source.cli("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", cluster.id_of(target))
    await asyncio.to_thread(until, lambda: serving(cluster, prefix) is target)
    await line.run_down(within=5)


async def test_a_grant_just_after_a_slot_moved_is_heard_of(
    cluster: Cluster, form_line: Callable[..., Any], prefix: str
) -> None:
    """Waiters listen at once where their slot has gone: a release there reaches them long before their next beat."""
    line = await form_line(cluster, 2, waiter_lease=30)
    source = serving(cluster, prefix)
    cluster.move_slot(slot_of(prefix, "r"), source, other_than(cluster, source))
    await line.run_down(within=5)


async def test_calls_during_a_move_go_to_either_side(
    cluster: Cluster, form_line: Callable[..., Any], prefix: str
) -> None:
    """While a slot is between two masters, a lock is used where its keys are."""
    line = await form_line(cluster, 4, lease=3)
    source = serving(cluster, prefix)
    target, slot = other_than(cluster, source), slot_of(prefix, "r")
    cluster.begin_move(slot, source, target)
    try:
        snapshot = await line.pools[0].inspect()
        cluster.move_keys(slot, source, target)
        assert source.cli("CLUSTER", "COUNTKEYSINSLOT", slot) == 0
        assert (await line.pools[0].inspect()).waiters == snapshot.waiters
        ends = line.hold.permit.expires_at_ms
        await eventually(lambda: line.hold.permit.expires_at_ms > ends)  # a renewal goes where the permit is
    finally:
        cluster.end_move(slot, target)
    await line.run_down()


async def test_a_new_request_waits_until_a_slot_has_moved(
    cluster: Cluster, make_client: MakeClient, prefix: str
) -> None:
    """A lock that has no keys yet belongs to neither side of a move: asking for it takes until the slot has arrived."""
    client = await make_client(url=cluster.url)
    source = serving(cluster, prefix, "fresh")
    target, slot = other_than(cluster, source), slot_of(prefix, "fresh")
    cluster.begin_move(slot, source, target)
    task = asyncio.create_task(client.lock("fresh").acquire(timeout=10))
    try:
        await eventually(lambda: calls(target, "asking") > 0)
        assert not task.done()
    finally:
        cluster.end_move(slot, target)
    assert await client.lock("fresh").release(await asyncio.wait_for(task, 5))


async def test_slots_that_move_to_and_fro_under_load(cluster: Cluster, make_client: MakeClient, prefix: str) -> None:
    """While slots move, many tasks use the locks in them: never two at once, and every fence is higher."""
    names = [f"n{number}" for number in range(4)]
    clients = [await make_client(url=cluster.url, lease=5) for _ in range(3)]
    inside, fences, entered = dict.fromkeys(names, 0), {name: [0] for name in names}, 0
    over = asyncio.Event()

    async def use(client: Redlease, name: str) -> None:
        nonlocal entered
        while not over.is_set():
            async with client.lock(name).hold(timeout=20) as hold:
                inside[name] += 1
                assert inside[name] == 1
                assert hold.fence > fences[name][-1]
                fences[name].append(hold.fence)
                entered += 1
                await asyncio.sleep(0.001)
                inside[name] -= 1

    tasks = [asyncio.create_task(use(client, name)) for client in clients for name in names]
    for _ in range(3):
        for name in names:
            source = serving(cluster, prefix, name)
            target = other_than(cluster, source)
            await asyncio.to_thread(cluster.move_slot, slot_of(prefix, name), source, target)
    before = entered
    await eventually(lambda: entered > before + 50)
    over.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 20)


# Masters that die


async def promoted(cluster: Cluster, prefix: str, master: Server, within: float = 15) -> Server:
    """Wait until another node than the killed one serves the lock, and return it."""

    def successor() -> Server | None:
        node = serving(cluster, prefix)
        return node if node is not master else None

    return await asyncio.to_thread(until, successor, within)


async def test_a_replica_takes_over_with_waiters_queued(
    replicated: Cluster, form_line: Callable[..., Any], prefix: str
) -> None:
    """The master is killed: the hold and the queue go on at the replica that is promoted, in the same order."""
    line = await form_line(replicated, lease=30, waiter_lease=30)
    master = serving(replicated, prefix)
    assert await asyncio.to_thread(settled, replicated, master)
    master.kill()
    await promoted(replicated, prefix, master)
    await line.until_answered()
    await line.run_down(within=15)


def settled(cluster: Cluster, master: Server) -> bool:
    """Wait until a master's replica has everything that was written."""

    def has_all() -> bool:
        said = [told(node, "INFO", "replication") for node in cluster.nodes if node.is_running]
        (wanted,) = (one["master_repl_offset"] for one in [told(master, "INFO", "replication")])
        return any(one.get("master_port") == str(master.port) and one["slave_repl_offset"] == wanted for one in said)

    return bool(until(has_all))


def replica_of(cluster: Cluster, master: Server) -> Server:
    """Return the replica of a master."""
    port = str(master.port)
    return next(node for node in cluster.nodes if told(node, "INFO", "replication").get("master_port") == port)


async def test_a_master_that_steps_down(
    replicated: Cluster, form_line: Callable[..., Any], prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A failover on request moves the lock to the replica with nothing lost and nobody passed over."""
    line = await form_line(replicated, 6, lease=30)
    master = serving(replicated, prefix)
    replica = replica_of(replicated, master)
    asked = 0.0

    def stepped_down() -> bool:
        nonlocal asked
        if time.monotonic() - asked > 6:  # the nodes give one attempt up after five seconds
            replica.cli("CLUSTER", "FAILOVER")
            asked = time.monotonic()
        return serving(replicated, prefix) is replica

    await asyncio.to_thread(until, stepped_down)
    await line.run_down()
    assert "is lost" not in caplog.text


async def test_fences_grow_over_a_failover_that_loses_a_grant(
    replicated: Cluster, make_client: MakeClient, prefix: str
) -> None:
    """What was not replicated is gone: the holder is told, a second holder may overlap, and its fence is higher."""
    one, two = [await make_client(url=replicated.url) for _ in range(2)]
    async with one.lock("r"):
        pass
    master = serving(replicated, prefix)
    assert await asyncio.to_thread(settled, replicated, master)
    replica = next(
        node for node in replicated.nodes if told(node, "INFO", "replication").get("master_port") == str(master.port)
    )
    replica.pause()
    master.cli("CLIENT", "KILL", "TYPE", "replica")
    hold = await one.lock("r", lease=20).hold(on_lost="signal")
    master.kill()
    replica.resume()
    await promoted(replicated, prefix, master)
    later = await two.lock("r").acquire(timeout=10)
    assert later.fence > hold.fence
    assert await asyncio.wait_for(hold.wait_lost(), 20)
    assert await two.lock("r").release(later)


async def test_the_other_masters_serve_on_while_one_is_down(
    cluster_of_two: Cluster, make_client: MakeClient, prefix: str
) -> None:
    """A master that is away stops what it serves, and nothing else; its waiters go on when it is back."""
    client = await make_client(url=cluster_of_two.url)
    here = next(f"n{number}" for number in range(99) if on(cluster_of_two, prefix, f"n{number}", 0))
    there = next(f"n{number}" for number in range(99) if on(cluster_of_two, prefix, f"n{number}", 1))
    for name in (here, there):
        async with client.lock(name):
            pass
    cluster_of_two.masters[0].pause()
    waiting = asyncio.create_task(client.lock(here).acquire(timeout=20))
    with pytest.raises(Unavailable, match="was not reached within 5 s"):
        await client.lock(here).try_acquire()
    async with asyncio.timeout(2):
        async with client.lock(there):
            pass
    assert not waiting.done()
    cluster_of_two.masters[0].resume()
    assert await client.lock(here).release(await asyncio.wait_for(waiting, 10))


def on(cluster: Cluster, prefix: str, name: str, number: int) -> bool:
    """Tell whether a resource is served by that master."""
    return serving(cluster, prefix, name) is cluster.masters[number]


@pytest.fixture(params=ENGINES[-1:])
def cluster_of_two(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Masters that go on without each other, for one test alone."""
    with Cluster(request.param, "--cluster-require-full-coverage", "no") as running:
        yield running


# Settings


@pytest.fixture(params=ENGINES)
def announcing(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three masters which announce ports that nobody listens on, one above their own."""
    cluster = Cluster(request.param)
    for node in cluster.masters:
        announced = {"port": node.port + 1, "bus-port": node.port + 10_000}
        node.arguments += tuple(
            word for name, value in announced.items() for word in (f"--cluster-announce-{name}", str(value))
        )
    with cluster:
        yield cluster


async def test_a_client_of_redis_py_that_knows_better_where_nodes_are(announcing: Cluster, prefix: str) -> None:
    """`address_remap` leads to nodes that announce other addresses: on the first look, by MOVED and by ASK."""
    seed = announcing.masters[0]
    given = redis.asyncio.RedisCluster(
        "127.0.0.1", seed.port, address_remap=lambda address: (address[0], address[1] - 1)
    )
    async with Redlease(given, prefix=prefix) as client, asyncio.timeout(10):
        hold = await client.lock("r").hold()
        tasks = await queue_up(client.lock("r"), 1)
        slot = slot_of(prefix, "r")
        source = announcing.masters[slot // -(-SLOTS // 3)]
        target = other_than(announcing, source)
        await asyncio.to_thread(announcing.begin_move, slot, source, target)
        await asyncio.to_thread(announcing.move_keys, slot, source, target)
        assert (await client.lock("r").inspect()).fence == hold.fence
        await asyncio.to_thread(announcing.end_move, slot, target)
        assert await hold.release()
        assert await client.lock("r").release(await tasks[0])
    await given.aclose()


async def test_a_server_that_is_no_cluster_is_told(servers: Servers, prefix: str) -> None:
    """The error names the server, and the URL that would lead to it."""
    server = servers[ENGINES[-1]]
    with pytest.raises(
        RedleaseError, match=rf"is no part of a cluster\. Give it as redis://127\.0\.0\.1:{server.port}"
    ):
        await Redlease.from_url(f"redis+cluster://127.0.0.1:{server.port}", prefix=prefix).__aenter__()


async def test_a_node_of_a_cluster_is_told(cluster: Cluster, prefix: str) -> None:
    """Whoever goes to one node as to a single server is told that it is a cluster's."""
    async with Redlease.from_url(cluster.masters[0].url, prefix=prefix) as client:
        with pytest.raises(RedleaseError, match="part of a cluster"):
            for number in range(20):
                await client.lock(f"n{number}").try_acquire()


async def test_a_seed_may_be_away(cluster: Cluster, make_client: MakeClient) -> None:
    """One of the nodes in the URL is enough, wherever it stands; a replica would do too."""
    url = f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{cluster.masters[2].port}"
    client = await make_client(url=url)
    async with client.lock("r"):
        pass


async def test_a_cluster_that_is_away(prefix: str) -> None:
    """Entering a client whose cluster cannot be reached ends with Unavailable, which says why."""
    with pytest.raises(Unavailable, match="Connect call failed"):
        await Redlease.from_url(f"redis+cluster://127.0.0.1:{free_port()}", prefix=prefix).__aenter__()


async def test_passwords_and_rights(cluster: Cluster, make_client: MakeClient, prefix: str) -> None:
    """User and password go to every node; a wrong one and a missing right are told by the error."""
    publish = "publish" if cluster.engine == "redis62" else "spublish"
    missing = ("zadd", publish)
    advised = f"{rights.rules(prefix, rights.CLIENT)} {rights.CLUSTER_RULES}".split()
    looking = rights.rules(prefix, (*rights.READER, "asking", "cluster|slots")).split()
    for node in cluster.masters:
        node.cli("ACL", "SETUSER", "good", "on", ">pass:/@word", "resetchannels", *advised)
        node.cli("ACL", "SETUSER", "reader", "on", ">pass", "resetchannels", *looking)
        for command in missing:
            node.cli("ACL", "SETUSER", f"no-{command}", "on", ">pass", "resetchannels", *advised, f"-{command}")
    hosts = cluster.url.removeprefix("redis+cluster://")
    client = await make_client(url=f"redis+cluster://good:pass%3A%2F%40word@{hosts}")
    hold = await client.lock("r").hold()
    (task,) = await queue_up(client.lock("r"), 1)
    assert await hold.release()
    permit = await task
    reader = await make_client(url=f"redis+cluster://reader:pass@{hosts}")
    assert (await reader.lock("r").inspect()).holders == (permit,)
    assert [each.resource for each in await Overview(reader._operations).look()] == ["r"]
    assert await client.lock("r").release(permit)
    with pytest.raises(RedleaseError, match="refused the user name or password"):
        await Redlease.from_url(f"redis+cluster://good:wrong@{hosts}", prefix=prefix).__aenter__()
    poor = await make_client(url=f"redis+cluster://no-zadd:pass@{hosts}")
    with pytest.raises(RedleaseError, match=r"lacks rights.*: zadd:"):
        await poor.lock("r").acquire(timeout=5)
    polling = await make_client(url=f"redis+cluster://no-{publish}:pass@{hosts}", poll_interval=0.1)
    hold = await polling.lock("r").hold()
    (task,) = await queue_up(polling.lock("r"), 1)
    await hold.release()
    async with asyncio.timeout(5):  # a heartbeat of the usual kind would come after a third of ten seconds
        assert await client.lock("r").release(await task)
    assert "poll" in repr(polling)


@pytest.mark.parametrize(
    "url",
    [
        "redis+cluster://",
        "redis+cluster://host:port",
        "redis+cluster://host:0",
        "redis+cluster://host/1",
        "redis+sentinel://host",
        "redis+sentinel://host/mymaster/0/1",
        "redis+sentinel://host/mymaster/one",
        "redis+sentinel:///mymaster",
    ],
)
def test_wrong_urls(url: str) -> None:
    """A URL that names no server, or no service, or a database that a cluster has not, is a ValueError."""
    with pytest.raises(ValueError, match=r"."):
        Redlease.from_url(url)
