"""`make oracle`: load with kills, stops and an operator's orders, each grant of which a model over MONITOR judges."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from monitored import ALL, Oracle, watching

from redlease import Redlease, RedleaseError

from servers import Server

LEASE_S = 1.0
PROCESSES, TASKS = 4, 8
KEYS = ("a", "b", "c", "d")
PER_KEY = 2
CAPACITIES = {"lock": 1, "pool": 3, "keyed": 6, "rw": ALL}  # by resource, as the processes declare them


async def work(url: str, seed: int) -> None:
    """Use every resource in every way until killed: hold, cancel, leave permits to expire, adopt."""
    draw = random.Random(seed)
    async with Redlease.from_url(url, lease=LEASE_S, waiter_lease=LEASE_S, call_timeout=2) as client:
        rw = client.rwlock("rw")
        keyed = client.semaphore("keyed", CAPACITIES["keyed"], per_key=PER_KEY)
        pools = [client.lock("lock"), client.semaphore("pool", CAPACITIES["pool"]), keyed, rw.read, rw.write]

        async def one() -> None:
            pool = draw.choice(pools)
            options: dict[str, Any] = {"key": draw.choice(KEYS)} if pool is keyed else {}
            if pool in pools[1:3]:
                options["weight"] = draw.choice((1, 1, 2))
            if draw.random() < 0.1:
                permit = await pool.acquire(timeout=2, **options)
                if draw.random() < 0.5:
                    await (await pool.adopt(permit)).release()
                return
            async with asyncio.timeout(draw.choice((0.005, 5, 5, 5))), pool.hold(timeout=3, **options):
                await asyncio.sleep(draw.choice((0, 0.002, 0.02)))

        async def loop() -> None:
            while True:
                with contextlib.suppress(RedleaseError, TimeoutError, ValueError):
                    await one()
                await asyncio.sleep(draw.uniform(0, 0.02))

        await asyncio.gather(*(loop() for _ in range(TASKS)))


async def operate(client: Redlease, draw: random.Random) -> str:
    """Give one order, as an operator does; return its name."""
    pool, keyed = client.semaphore("pool", CAPACITIES["pool"]), client.semaphore("keyed", CAPACITIES["keyed"])
    one, brief, key = draw.choice((pool, keyed)), draw.uniform(0.05, 1), draw.choice(KEYS)
    orders: dict[str, Callable[[], Awaitable[object]]] = {
        "pause": lambda: client.lock(draw.choice(list(CAPACITIES))).pause(until=brief),
        "unpause": lambda: client.lock(draw.choice(list(CAPACITIES))).resume(),
        "limit": lambda: one.set_limit(draw.randint(0, 2), until=brief),
        "limit of a key": lambda: keyed.set_limit(draw.randint(0, 1), key=key, until=brief),
        "limit of each key": lambda: keyed.set_limit(per_key=draw.randint(0, 1), until=brief),
        "unlimit": lambda: one.clear_limit(key=draw.choice((None, key)) if one is keyed else None),
        "resize": lambda: one.resize(draw.randint(2, 6)),
        "resize of a lock": lambda: client.semaphore(draw.choice(("lock", "rw")), 2).resize(draw.randint(2, 6)),
        "release": lambda: one.release_all(queue=draw.random() < 0.5),
    }
    name = draw.choice(list(orders))
    with contextlib.suppress(RedleaseError, ValueError):
        await orders[name]()
    return name


async def strike(server: Server, seconds: float, seed: int, counts: Counter[str]) -> None:
    """Kill and stop processes and give orders, for so long."""
    draw, number = random.Random(seed), itertools.count(seed)

    def start() -> subprocess.Popen[bytes]:
        order = [sys.executable, __file__, "--work", server.url, "--seed", str(next(number))]
        return subprocess.Popen(order, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})

    running = [start() for _ in range(PROCESSES)]
    try:
        while counts["granted"] < PROCESSES * TASKS:  # noqa: ASYNC110 - until they work, which a thread counts
            await asyncio.sleep(0.05)
        ends = time.monotonic() + seconds
        async with Redlease.from_url(server.url) as client:
            while time.monotonic() < ends:
                at, chance = draw.randrange(PROCESSES), draw.random()
                if chance < 0.06:
                    running[at].kill()
                    await asyncio.to_thread(running[at].wait)
                    running[at] = start()
                    counts["kills"] += 1
                elif chance < 0.1:
                    os.kill(running[at].pid, signal.SIGSTOP)
                    await asyncio.sleep(draw.uniform(0.2, 2 * LEASE_S))
                    os.kill(running[at].pid, signal.SIGCONT)
                    counts["stops"] += 1
                else:
                    counts[await operate(client, draw)] += 1
                await asyncio.sleep(draw.uniform(0, 0.2))
    finally:
        for process in running:
            process.kill()
            process.wait()


def judge(engine: str, seconds: float, seed: int) -> Oracle:
    """Run the load on a server of that engine, and return the oracle with what it saw."""
    oracle = Oracle(CAPACITIES, {"keyed": PER_KEY})
    with Server(engine) as server, watching(server, oracle):
        asyncio.run(strike(server, seconds, seed, oracle.counts))
    return oracle


def main() -> int:
    """Judge for some minutes; return 1 if there was a violation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="valkey9")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        asyncio.run(work(asked.work, asked.seed))
        return 0
    oracle = judge(asked.engine, asked.minutes * 60, asked.seed)
    found = [f"{len(oracle.violations)} violations", *oracle.violations[:20]]
    sys.stdout.write("\n".join([f"{asked.engine}: {dict(oracle.counts)}", *found, ""]))
    return 1 if oracle.violations or not oracle.counts["granted"] else 0


if __name__ == "__main__":
    sys.exit(main())
