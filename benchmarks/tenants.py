"""`make bench-tenants`: how long a tenant waits for a lock of its own, alone and beside others that attack the server.

The honest tenant takes an unrelated lock and gives it back, again and again, in a process of its own; the attackers are
tasks of another process. As both share the processors of one machine, it is measured a third time, while the attackers
do the same on a second server: the difference between the two is what the attack costs through the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import redis
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redlease import AcquireTimeout, Rate, Redlease, RedleaseError, Semaphore
from redlease._core.limits import METADATA_BYTES_MAX, Full
from redlease._core.primitives.overview import Overview

from filling import LARGE, Filling
from server import any_binary, describe, running_server

TASKS, FLOOD, WAITERS, KEYS = 20, 512, 5000, 5000
SLOW_US = 300  # what the log of slow scripts has

Attack = Callable[[Redlease, Filling], Awaitable[list[Callable[[], Awaitable[Any]]]]]


async def again(call: Callable[[], Awaitable[Any]]) -> None:
    """Makes a call without end, whatever it raises."""
    while True:
        with contextlib.suppress(RedleaseError, AcquireTimeout):
            await call()
        await asyncio.sleep(0)


def lapsing(filling: Filling, name: str) -> Callable[[], Awaitable[None]]:
    """Returns what has a place of that resource lapse a hundred times a second."""
    numbers = itertools.count()

    async def lapse() -> None:
        await asyncio.sleep(0.01)
        filling.die(name, f"gone|{next(numbers)}")

    return lapse


async def flood(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:  # noqa: ARG001
    """Hundreds of tasks that take and give back a lock each."""
    return [partial(hold, client.lock(f"r{number}")) for number in range(FLOOD)]


async def metadata(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """Requests with the largest metadata, of which some wait and time out."""
    filling.hold("r")
    largest = {"m": "x" * (METADATA_BYTES_MAX - 1)}
    lock, pool = client.lock("r"), client.semaphore("s", TASKS)

    async def held() -> None:
        async with pool.hold(metadata=largest):
            pass

    return [held, lambda: lock.acquire(metadata=largest, timeout=0.01)] * TASKS


async def cancelled(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """Requests that are cancelled at once."""
    filling.hold("r")
    lock = client.lock("r")

    async def ask() -> None:
        task = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])

    return [ask] * TASKS


async def tries(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """`try_acquire` without a pause, on a lock that is held and has many waiters."""
    filling.hold("r")
    filling.wait("r", [""] * WAITERS)
    return [client.lock("r").try_acquire] * TASKS


async def replacing(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:  # noqa: ARG001
    """Requests of which each replaces who holds, or who waits, of the same key."""
    pool, numbers = client.semaphore("r", 1), itertools.count()

    async def replace(mode: Full) -> None:
        await pool.acquire(key=f"k{next(numbers) % 10}", timeout=1, when_full=mode)

    return [partial(replace, "replace-holder"), partial(replace, "replace-waiter")] * (TASKS // 2)


async def full(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """Tasks at `max_waiters`, while places lapse."""
    filling.hold("r")
    filling.wait("r", [""] * WAITERS)
    pool = client.lock("r", max_waiters=WAITERS)
    return [pool.acquire] * TASKS + [lapsing(filling, "r")]


async def full_key(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """Tasks at `max_waiters_per_key`, while places lapse."""
    filling.hold("r")
    filling.wait("r", ["k"] * WAITERS)
    pool = client.semaphore("r", 1, max_waiters_per_key=WAITERS)
    return [lambda: pool.acquire(key="k")] * TASKS + [lapsing(filling, "r")]


async def short(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """Requests with timeout=0.001, behind many waiters with keys."""
    filling.hold("r")
    filling.wait("r", (f"k{number % KEYS}" for number in range(WAITERS)))
    pool = client.semaphore("r", 1)
    return [lambda: pool.acquire(key="k", timeout=0.001)] * TASKS


async def dead_heads(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """Grants in a resource whose waiters are dead, in thousands of keys."""
    filling.hold("r")
    filling.wait("r", (f"k{number % KEYS}" for number in range(10 * WAITERS)))
    filling.die("r")
    filling.make([filling.release("r", "holder")])
    pool = client.semaphore("r", 1)
    numbers = itertools.count()
    return [lambda: hold(pool, f"k{next(numbers) % KEYS}")] * TASKS


async def hold(pool: Semaphore, key: str | None = None) -> None:
    """Takes a unit and gives it back."""
    async with pool.hold(key=key, timeout=1):
        pass


async def looks(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """`inspect`, `position`, and the list of all resources, of one with many waiters with the largest metadata."""
    filling.hold("r", label=LARGE)
    filling.wait("r", [""] * WAITERS, label=LARGE)
    (reply,) = filling.make([filling.acquire("r", ticket="last", label=LARGE)])
    assert reply[1] == 2
    lock, overview = client.lock("r"), Overview(client._operations, "*")
    return [lock.inspect] * 4 + [lambda: lock.position("last")] * 4 + [overview.look]


async def rates(client: Redlease, filling: Filling) -> list[Callable[[], Awaitable[Any]]]:
    """Requests of thousands of keys that wait for tokens of their own."""
    pool = client.semaphore("r", 100, per_key_rate=Rate(1, per=1))
    filling.hold("s")
    numbers = itertools.count()
    return [lambda: pool.acquire(key=f"k{next(numbers) % KEYS}", timeout=0.001)] * TASKS


ATTACKS: dict[str, Attack] = {
    "flood": flood,
    "metadata": metadata,
    "cancelled": cancelled,
    "try_acquire": tries,
    "replace": replacing,
    "max_waiters": full,
    "max_waiters_per_key": full_key,
    "timeout=0.001": short,
    "dead heads": dead_heads,
    "inspect": looks,
    "rates": rates,
}


async def attack(name: str, url: str) -> None:
    """Fills the server, says that it is ready, and attacks until it is killed."""
    filling = Filling(url)
    async with Redlease.from_url(url) as client:
        calls = await ATTACKS[name](client, filling)
        print("ready", flush=True)  # noqa: T201
        await asyncio.gather(*(again(call) for call in calls))


async def honest(url: str, seconds: float) -> None:
    """Takes an unrelated lock again and again; prints how long each pair took, in ms."""
    took: list[float] = []
    async with Redlease.from_url(url) as client:
        lock = client.lock("unrelated")
        ends = time.perf_counter() + seconds
        while (began := time.perf_counter()) < ends or not took:
            async with lock.hold():
                pass
            took.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.001)
    print(json.dumps(sorted(took)))  # noqa: T201


def measured(url: str, seconds: float) -> list[float]:
    """What the honest tenant measures."""
    command = [sys.executable, __file__, "--honest", url, "--seconds", str(seconds)]
    took: list[float] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return took


def beside(name: str, url: str, attacked: str, seconds: float) -> dict[str, float]:
    """What the honest tenant measures on a server while that or another one is attacked."""
    with redis.Redis.from_url(attacked) as server:
        command = [sys.executable, __file__, "--attack", name, attacked]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
            assert attacker.stdout
            assert attacker.stdout.readline() == b"ready\n"
            server.config_set("slowlog-log-slower-than", SLOW_US)
            server.slowlog_reset()
            scripts, cpu = scripts_of(server), cpu_of(server)
            began = time.perf_counter()
            took = measured(url, seconds)
            wall_s = time.perf_counter() - began
            scripts, cpu = scripts_of(server) - scripts, cpu_of(server) - cpu
            slowest: Any = server.slowlog_get(128)
            attacker.kill()
    return {
        "p50": took[len(took) // 2],
        "p99": took[len(took) * 99 // 100],
        "slowest": max((each["duration"] for each in slowest), default=0) / 1000,
        "scripts": scripts / wall_s,
        "busy": 100 * cpu / wall_s,
    }


def scripts_of(server: Any) -> int:
    """How many scripts the server has run."""
    return int(server.info("commandstats").get("cmdstat_evalsha", {}).get("calls", 0))


def cpu_of(server: Any) -> float:
    """How many seconds of a processor the server has used."""
    info = server.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


def main() -> None:
    """Measures each attack that is named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", help=", ".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=10, help="for each of the three measurements")
    parser.add_argument("--honest", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "URL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.honest:
        asyncio.run(honest(asked.honest, asked.seconds))
        return
    if asked.attack:
        asyncio.run(attack(*asked.attack))
        return
    table = Table("attack", "alone p50", "p99", "beside p50", "p99", "elsewhere p50", "p99", box=SIMPLE_HEAD)
    for column in ("slowest script ms", "scripts/s", "server busy %"):
        table.add_column(column, justify="right")
    for name in asked.attacks or ATTACKS:
        with ExitStack() as servers:
            url, other = (servers.enter_context(running_server(any_binary())) for _ in range(2))
            table.title = describe(url)
            alone = measured(url, asked.seconds)
            elsewhere = beside(name, url, other, asked.seconds)
            here = beside(name, url, url, asked.seconds)
        figures = [alone[len(alone) // 2], alone[len(alone) * 99 // 100], here["p50"], here["p99"]]
        figures += [elsewhere["p50"], elsewhere["p99"], here["slowest"], here["scripts"], here["busy"]]
        table.add_row(name, *(f"{figure:,.2f}" if figure < 100 else f"{figure:,.0f}" for figure in figures))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
