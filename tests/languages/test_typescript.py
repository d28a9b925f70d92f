"""The TypeScript client, in `adapters/typescript`: golden vectors, faults, and turns with Python on one resource."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from typescript_peers import peer, programs_built

from redlease import Redlease, StaleFence
from redlease._core.protocol import scripts

import vectors
from children import Child, child
from helpers import until_waiting
from node import find_node
from proxy import Chances, Fault

if TYPE_CHECKING:
    from conftest import MakeClient, MakeProxy, OwnServer, Servers
    from proxy import Proxy
    from servers import Server

# A machine that has nothing yet fetches Node.js and the dependencies in the first of them.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def programs() -> Path:
    """Return where the tests in TypeScript are, built."""
    return programs_built()


def run(program: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run a program to its end, and return what it said."""
    command = [str(find_node()), str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def server(servers: Servers) -> Server:
    """One server, which all tests share."""
    return servers["valkey9"]


@pytest.fixture
async def client(make_client: MakeClient, server: Server) -> Redlease:
    """A Python client of it."""
    return await make_client(url=server.url)


@pytest.mark.parametrize("engine", ["redis7", "valkey9"])
def test_golden_vectors(own_server: OwnServer, engine: str, programs: Path) -> None:
    """All of them pass, sent with its encoder and read with its decoder."""
    (played,) = run(programs / "vectors.js", own_server(engine).url, str(vectors.FILE))
    assert played == {"event": "played", "calls": sum(len(scenario.calls) for scenario in vectors.read())}


@pytest.mark.parametrize("engine", ["redis7", "valkey9"])
def test_what_a_program_sees(own_server: OwnServer, engine: str, programs: Path) -> None:
    """Each sentence of behaviour.ts holds."""
    assert run(programs / "behaviour.js", own_server(engine).url)[-1] == {"event": "done"}


@pytest.mark.parametrize(("number", "says"), [(0, "working under fence "), (1, "read under fence ")])
def test_the_examples_run(server: Server, programs: Path, number: int, says: str) -> None:
    """Those of the page and of the README are compiled with strict types, and end well."""
    command = [str(find_node()), str(programs / f"example{number}.js")]
    done = subprocess.run(
        command, env={"REDIS_URL": server.url}, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(says)


async def test_what_a_killed_holder_had_passes_on(
    server: Server, client: Redlease, prefix: str, programs: Path
) -> None:
    """After kill -9 a Python client gets the permit when its lease ends, not before."""
    async with peer(programs, "hold", server.url, prefix=prefix, leaseMs=1000) as holder:
        held = await holder.event("held")
        waiting = asyncio.create_task(client.lock("r").acquire())
        await until_waiting(client.lock("r"), 1)
        holder.kill()
        await holder.process.wait()
        (dead,) = (await client.lock("r").inspect()).holders
        permit = await waiting
    assert permit.fence > held["fence"]
    assert permit.granted_at_ms >= dead.expires_at_ms


async def test_a_waiter_gets_what_a_killed_python_process_held(server: Server, prefix: str, programs: Path) -> None:
    """Nothing is published when a lease ends: the waiter calls at that moment, long before its next heartbeat."""
    async with child("hold", server.url, client={"prefix": prefix, "lease": 1}) as holder:
        fence = (await holder.event("held"))["fence"]
        async with peer(programs, "wait", server.url, prefix=prefix, waiterLeaseMs=120_000) as waiter:
            await waiter.event("waiting")
            holder.kill()
            assert (await waiter.event("held"))["fence"] > fence


async def test_a_killed_waiter_is_passed_over(server: Server, client: Redlease, prefix: str, programs: Path) -> None:
    """Whoever stands behind it gets the permit once its place has lapsed."""
    lock = client.lock("r")
    async with peer(programs, "wait", server.url, prefix=prefix, waiterLeaseMs=1000) as waiter:
        async with lock.hold():
            await waiter.event("waiting")
            behind = asyncio.create_task(lock.acquire())
            await until_waiting(lock, 2)
            waiter.kill()
            await waiter.process.wait()
        assert (await behind).fence


async def test_a_stopped_holder_knows_before_its_body_goes_on(
    server: Server, client: Redlease, prefix: str, programs: Path
) -> None:
    """After SIGSTOP past the lease the first turn of the body finds the signal aborted, and a late write is refused."""
    lock, guard = client.lock("r"), client.guard("r")
    async with peer(programs, "hold", server.url, prefix=prefix, leaseMs=1000) as holder:
        held = await holder.event("held")
        holder.pause()
        async with lock.hold() as successor:
            assert successor.fence > held["fence"]
            await guard.check(successor.fence)
            holder.resume()
            turn = await holder.event("turn")
            assert (turn["lost"], turn["aborted"], turn["reason"]) == (True, True, "LeaseLost")
            late = await holder.event("writes")
            assert (late["fence"], late["released"]) == (held["fence"], False)
            with pytest.raises(StaleFence):
                await guard.check(late["fence"])
            successor.check()


async def acquired_behind(fault: Fault, proxy: Proxy, waiting: Child, name: str) -> int:
    """Return the fence of a lock that a process acquires while that befalls its request."""
    proxy.plan(fault, name="EVALSHA")
    assert waiting.process.stdin is not None
    waiting.process.stdin.write(f"{name}\n".encode())
    fence: int = (await waiting.event("held"))["fence"]
    return fence


async def test_a_lost_reply_acquires_once(
    server: Server, client: Redlease, make_proxy: MakeProxy, prefix: str, programs: Path
) -> None:
    """Whatever befalls request or reply, there is one permit in the end, and one fence was spent."""
    await client.lock("first").inspect()  # loads the scripts, which are the same
    proxy = await make_proxy(server)
    async with peer(programs, "acquire", proxy.url, answers=True, prefix=prefix, leaseMs=2000) as waiting:
        await waiting.event("connected")
        for fault in (Fault.LOSE, Fault.CUT, Fault.DROP, Fault.STALL, Fault.DOUBLE, Fault.ECHO, Fault.DELAY):
            fence = await acquired_behind(fault, proxy, waiting, fault.name)
            assert proxy.faults[fault] == 1
            snapshot = await client.lock(fault.name).inspect()
            assert [holder.fence for holder in snapshot.holders] == [fence]
            assert (snapshot.fence, snapshot.in_use) == (fence, 1)


async def test_counting_behind_faults(
    server: Server, make_client: MakeClient, make_proxy: MakeProxy, prefix: str, programs: Path, tmp_path: Path
) -> None:
    """TypeScript behind a proxy with random faults, and Python: never two inside at once, and nothing stays held."""
    client = await make_client(url=server.url, lease=10)
    proxy = await make_proxy(server, seed=18)
    proxy.chances = Chances(lose=0.02, cut=0.03, delay=0.1, double=0.03, drop=0.02, echo=0.02)
    path, times = tmp_path / "number", 60
    path.write_text("0")
    async with peer(programs, "count", proxy.url, prefix=prefix, path=str(path), times=times) as counter:
        for _ in range(times):
            async with client.lock("r").hold():
                number = int(path.read_text())
                await asyncio.sleep(0.001)
                path.write_text(str(number + 1))
        fences = (await counter.event("counted"))["fences"]
    assert int(path.read_text()) == 2 * times
    assert fences == sorted(set(fences))
    assert sum(proxy.faults.values()) > 5
    assert (await client.lock("r").inspect()).in_use == 0


def plain(server: Server) -> Any:
    """Return a plain client of redis-py, whose commands are not typed."""
    return redis.asyncio.Redis.from_url(server.url)


async def arrivals(server: Server, listening: asyncio.Event) -> dict[str, int]:
    """Return the tickets in the order in which the server ran their first acquire, by what it tells of its commands."""
    order: dict[str, int] = {}
    async with plain(server) as raw, raw.monitor() as monitor:
        listening.set()
        while (words := (await monitor.next_command())["command"].split(" "))[0].lower() != "echo":
            if words[0].lower() == "evalsha" and words[1] == scripts.ACQUIRE.sha:
                order.setdefault(words[8], len(order))
    return order


async def python_turns(client: Redlease, raw: Any, capacity: int, times: int) -> None:
    """Do what the role `turns` does in TypeScript."""
    for _ in range(times):
        async with client.semaphore("r", capacity=capacity).hold() as hold:
            await raw.rpush("log", f"enter {hold.ticket} {hold.fence}")
            await asyncio.sleep(random.random() * 0.004)
            await raw.rpush("log", f"leave {hold.ticket} {hold.fence}")


async def test_both_languages_take_turns(
    own_server: OwnServer, make_client: MakeClient, prefix: str, programs: Path
) -> None:
    """200 grants to three processes: in the order of arrival at the server, never more than two at once."""
    server, capacity = own_server("valkey9"), 2
    client = await make_client(url=server.url, waiter_lease=60, lease=60)
    listening = asyncio.Event()
    arrived = asyncio.create_task(arrivals(server, listening))
    await listening.wait()
    options: dict[str, Any] = {
        "prefix": prefix,
        "tasks": 4,
        "times": 20,
        "capacity": capacity,
        "log": "log",
        "direct": server.url,
    }
    async with (
        plain(server) as raw,
        peer(programs, "turns", server.url, **options) as one,
        peer(programs, "turns", server.url, **options) as other,
    ):
        await asyncio.gather(*(python_turns(client, raw, capacity, 10) for _ in range(4)))
        await one.event("done")
        await other.event("done")
        lines = [line.decode().split() for line in await raw.lrange("log", 0, -1)]
        await raw.echo("all")
    order = await arrived
    fences = {ticket: int(fence) for what, ticket, fence in lines if what == "enter"}
    assert len(fences) == 200
    assert sorted(fences, key=lambda ticket: order[ticket]) == sorted(fences, key=lambda ticket: fences[ticket])
    inside = 0
    for what, _, _ in lines:
        inside += 1 if what == "enter" else -1
        assert 0 <= inside <= capacity


async def test_a_connection_whose_beginning_is_not_answered_is_given_up(
    server: Server, make_proxy: MakeProxy, prefix: str, programs: Path
) -> None:
    """Each of the two connections gets no reply to its first command; the lock is acquired all the same."""
    proxy = await make_proxy(server)
    for _ in range(2):
        proxy.plan(Fault.DROP, name="INFO")
    async with peer(programs, "hold", proxy.url, prefix=prefix, leaseMs=60_000) as holder:
        await holder.event("held")
    assert proxy.faults[Fault.DROP] == 2
    assert proxy.connections_total == 4
