"""`make soak`: load with random faults for long; what a process and a server have at rest in between stays the same."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from redlease import Redlease, RedleaseError
from redlease._core.primitives.semaphore import Semaphore

from episodes import FAULTS, Scene
from servers import Server

CLIENTS, TASKS, RESOURCES = 3, 20, 12  # tasks of each client
LOAD_S = 7.0  # of a cycle, with one fault
REST_S = 4.0  # longer than all leases, and than keys of names that are used once
LEASE_S, IDLE_TTL_S = 1.0, 2.0
CALL_S = 60.0  # longer than a machine under load may take to answer
GROWTH_MB = 8.0  # of a process, from its first to its last third: the allocator's own unrest
STRIKES = {name: fault for name, fault in FAULTS.items() if not fault.by_proxy and not fault.arguments}


class Sample(NamedTuple):
    """What there is at rest."""

    tasks: int
    timers: int
    connections: int
    channels: int
    keys: int
    held: int
    memory_mb: float


def capacity(number: int) -> int:
    """Return the capacity of a resource: half of them are locks."""
    return 1 + 2 * (number % 2)


async def work(client: Redlease, draw: random.Random, until: float, done: Counter[str]) -> None:
    """Use locks and semaphores in every way until that time; faults may fail any call."""
    while time.monotonic() < until:
        number = draw.randrange(RESOURCES)
        name = f"r{number}" if draw.random() < 0.9 else f"once-{draw.getrandbits(64)}"
        pool = client.semaphore(name, capacity(number), lease=LEASE_S, waiter_lease=LEASE_S, idle_ttl=IDLE_TTL_S)
        try:
            await draw.choice((hold, hold, permit, give_up))(pool, draw)
            done["done"] += 1
        except RedleaseError as error:
            done[type(error).__name__] += 1


async def hold(pool: Semaphore, draw: random.Random) -> None:
    """Hold for a moment, and sometimes for longer than a lease."""
    async with pool.hold(timeout=5):
        await asyncio.sleep(draw.choice((0.001, 0.01, 0.05)) if draw.random() < 0.98 else 1.5 * LEASE_S)


async def permit(pool: Semaphore, draw: random.Random) -> None:
    """Acquire a permit as data, and release it or leave it to expire."""
    got = await pool.acquire(timeout=5)
    if draw.random() < 0.9:
        await pool.release(got)


async def give_up(pool: Semaphore, draw: random.Random) -> None:
    """Cancel a request, wherever it is."""
    asking = asyncio.create_task(pool.acquire(timeout=5))
    await asyncio.sleep(draw.uniform(0, 0.01))
    asking.cancel()
    await asyncio.wait([asking])
    if not asking.cancelled():
        await pool.release(asking.result())


async def sampled(server: Server, clients: list[Redlease]) -> Sample:
    """Count what there is now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tasks = len(asyncio.all_tasks())
    timers = len([each for each in getattr(asyncio.get_running_loop(), "_scheduled", ()) if not each.cancelled()])
    seen = [await clients[0].semaphore(f"r{number}", capacity(number)).inspect() for number in range(RESOURCES)]
    return Sample(
        tasks,
        timers,
        len(server.cli("CLIENT", "LIST").splitlines()) - 1,
        len(server.cli("PUBSUB", "CHANNELS")),
        int(server.cli("DBSIZE")),
        sum(each.in_use + each.waiting for each in seen),
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
    )


async def soak(seconds: float, seed: int, engine: str = "valkey9") -> tuple[list[Sample], Counter[str]]:
    """Alternate load and rest for that long, twice at least; return what there was at each rest, and what was done."""
    draw, done, samples = random.Random(seed), Counter[str](), list[Sample]()
    ends = time.monotonic() + seconds
    with Server(engine) as server:
        async with AsyncExitStack() as stack:
            made = [Redlease.from_url(server.url, call_timeout=CALL_S) for _ in range(CLIENTS)]
            clients = [await stack.enter_async_context(each) for each in made]
            while len(samples) < 2 or time.monotonic() < ends:
                until = time.monotonic() + min(LOAD_S, seconds / 2)
                seeds = [draw.getrandbits(32) for _ in range(CLIENTS * TASKS)]
                busy = [
                    asyncio.create_task(work(clients[number % CLIENTS], random.Random(each), until, done))
                    for number, each in enumerate(seeds)
                ]
                name = draw.choice(sorted(STRIKES))
                await asyncio.sleep(draw.uniform(0, 1))
                await STRIKES[name].strike(Scene(server, None, draw))
                done[f"fault: {name}"] += 1
                await asyncio.gather(*busy)
                await asyncio.sleep(REST_S)
                samples.append(await sampled(server, clients))
    return samples, done


def problems(samples: list[Sample]) -> Iterator[str]:
    """Say what has grown: counts must be at the end what they were at the beginning, and nobody may hold at rest."""
    third = max(1, len(samples) // 3)
    first, last = samples[:third], samples[-third:]
    for name in ("tasks", "timers", "connections", "channels", "keys"):
        before, after = (max(getattr(sample, name) for sample in part) for part in (first, last))
        # The timer that looks for silent connections goes on for a while after the last call.
        if after > before + (CLIENTS if name == "timers" else 0):
            yield f"{name} grew from {before} to {after}"
    if held := max(sample.held for sample in samples):
        yield f"{held} permits or places were left at rest"
    before_mb, after_mb = (statistics.median(sample.memory_mb for sample in part) for part in (first, last))
    if after_mb > before_mb + GROWTH_MB:
        yield f"memory grew from {before_mb:.0f} to {after_mb:.0f} MB"


def main() -> None:
    """Do what the options say and print a report; the exit code is 1 if anything has grown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="how long (30)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of load and faults")
    parser.add_argument("--engine", default="valkey9", help="valkey9, redis7 or redis62 (valkey9)")
    options = parser.parse_args()
    logging.disable()  # of the losses that are provoked
    samples, done = asyncio.run(soak(options.minutes * 60, options.seed, options.engine))
    lines = [f"# make soak: {options.minutes:g} minutes, seed {options.seed}, {options.engine}", ""]
    lines += [f"| at rest | {' | '.join(Sample._fields)} |", f"| --- |{' ---: |' * len(Sample._fields)}"]
    third = max(1, len(samples) // 3)
    for when, part in (("first third", samples[:third]), ("last third", samples[-third:])):
        lines.append(f"| {when}, at most | {' | '.join(f'{max(values):g}' for values in zip(*part, strict=True))} |")
    wrong = list(problems(samples))
    lines += ["", ", ".join(f"{number:,} of {what}" for what, number in sorted(done.items())), "", *wrong]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
