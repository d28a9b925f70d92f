"""`make failover`: kills the master while a lock is held and waited for, and measures who believes to hold when."""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise

from redlease import Lock, Redlease, StaleFence
from redlease.guards.redis import Guard

from clusters import Cluster, Watched, is_replicating, told, until
from helpers import until_waiting
from servers import Server

LEASE_S = 10.0  # longer than the servers take to agree on a new master
WAITERS = 4
BODY_S = 0.05
LATE_WRITES = 20  # how many an overtaken holder tries
WITHIN_S = 90.0
NAME = "failover"
APPEND = "return redis.call('RPUSH', KEYS[1], ARGV[1])"


class RolesChangedError(Exception):
    """On a machine under load a master may count as dead before it is killed."""


@dataclass
class Belief:
    """A hold: its fence, and from when until when its body was told that it holds, in s of the monotonic clock."""

    fence: int
    since: float
    until: float = float("inf")


@dataclass
class Run:
    """What one master's death led to; ``register`` has the fences of the writes that the guard let pass, in order."""

    killed_at: float = 0.0
    promoted_at: float = 0.0
    beliefs: list[Belief] = field(default_factory=list)
    register: list[int] = field(default_factory=list)
    refused: int = 0

    @property
    def served_s(self) -> float:
        """From the master's death until the next grant."""
        return min(belief.since for belief in self.beliefs if belief.since > self.killed_at) - self.killed_at

    @property
    def promoted_s(self) -> float:
        """From the master's death until its replica was a master: the servers' own part."""
        return self.promoted_at - self.killed_at

    @property
    def overlap_s(self) -> float:
        """How long two or more believed to hold."""
        changes = sorted((at, step) for each in self.beliefs for at, step in ((each.since, 1), (each.until, -1)))
        total, holders = 0.0, 0
        for (at, step), (following, _) in pairwise(changes):
            holders += step
            total += following - at if holders > 1 else 0.0
        return total

    def problems(self) -> list[str]:
        """Say what a lease lock with fences must not do and this one did."""
        found = []
        if self.overlap_s > LEASE_S:
            found.append(f"two believed to hold for {self.overlap_s:.1f} s, longer than a lease")
        if self.served_s - self.promoted_s > LEASE_S:
            found.append(
                f"nobody was served for {self.served_s:.1f} s, {self.promoted_s:.1f} s of which without a master"
            )
        fences = [belief.fence for belief in sorted(self.beliefs, key=lambda each: each.since)]
        if any(earlier >= later for earlier, later in pairwise(fences)):
            found.append(f"the fences {fences} do not grow with the grants")
        if any(earlier > later for earlier, later in pairwise(self.register)):
            found.append("a write passed the guard after one with a higher fence")
        if not self.refused:
            found.append("no late write was tried")
        return found


@dataclass
class Pair:
    """A master and the replica that takes its place."""

    master: Server
    replica: Server

    def cut_off(self) -> None:
        """Keep from the replica all that is written from now on."""
        self.master.cli("ACL", "SETUSER", "default", "-psync", "-sync")
        self.master.cli("CLIENT", "KILL", "TYPE", "replica")
        until(lambda: not is_replicating(self.replica))

    def has_changed_roles(self) -> bool:
        """Tell whether the replica is a master already."""
        return told(self.replica, "INFO", "replication")["role"] == "master"

    def promoted(self) -> float:
        """Wait until the replica is a master, and return when that was."""
        until(self.has_changed_roles, WITHIN_S)
        return time.monotonic()

    def catch_up(self) -> None:
        """Wait until the replica has all that was written."""
        until(lambda: self._offset(self.master, "master") == self._offset(self.replica, "slave"))

    @staticmethod
    def _offset(server: Server, role: str) -> str:
        return told(server, "INFO", "replication")[f"{role}_repl_offset"]


class Trial:
    """One run: a holder, waiters, a guarded register on a server of its own, and a master that dies."""

    def __init__(self, pair: Pair, guard: Guard, *, behind: bool) -> None:
        """Prepare; ``behind``: the replica lacks the grant and the queue, so the new master knows nobody."""
        self.run = Run()
        self._pair = pair
        self._guard = guard
        self._behind = behind
        self._register = f"{guard.hash_tag}:register"

    async def measure(self, holder: Lock, waiters: list[Lock]) -> None:
        """Kill the master while the holder holds; end when all waiters were served and late writes were tried."""
        if self._behind:
            await asyncio.to_thread(self._pair.cut_off)
        hold = await holder.hold(on_lost="signal")
        belief = self._begin(hold.fence)
        writing = asyncio.create_task(self._write_on(hold.fence))
        tasks = []
        for number, lock in enumerate(waiters, 1):
            tasks.append(asyncio.create_task(self._take_a_turn(lock)))
            await until_waiting(holder, number)
        if not self._behind:
            await asyncio.to_thread(self._pair.catch_up)
        if await asyncio.to_thread(self._pair.has_changed_roles):
            raise RolesChangedError
        self.run.killed_at = time.monotonic()
        await asyncio.to_thread(self._pair.master.kill)
        promoted = asyncio.create_task(asyncio.to_thread(self._pair.promoted))
        if self._behind:
            await hold.wait_lost()
            belief.until = time.monotonic()
        else:
            belief.until = time.monotonic()
            await hold.release()
        self.run.promoted_at = await promoted
        async with asyncio.timeout(WITHIN_S):
            await asyncio.gather(*tasks, writing)

    async def _take_a_turn(self, lock: Lock) -> None:
        async with lock.hold(on_lost="signal") as hold:
            belief = self._begin(hold.fence)
            await self._write(hold.fence)
            await asyncio.sleep(BODY_S)
            await self._write(hold.fence)
            belief.until = time.monotonic()

    async def _write_on(self, fence: int) -> None:
        """Write as a process does that was not told of its loss: until so many writes were refused."""
        while self.run.refused < LATE_WRITES:
            await self._write(fence)
            await asyncio.sleep(BODY_S / 5)

    async def _write(self, fence: int) -> None:
        try:
            await self._guard.run(fence, APPEND, [self._register], [fence])
        except StaleFence:
            self.run.refused += 1

    def _begin(self, fence: int) -> Belief:
        self.run.beliefs.append(Belief(fence, time.monotonic()))
        return self.run.beliefs[-1]

    async def read_register(self) -> None:
        """Read what the guard let pass."""
        last = self.run.beliefs[-1].fence
        read = "return redis.call('LRANGE', KEYS[1], 0, -1)"
        self.run.register = [int(each) for each in await self._guard.run(last, read, [self._register])]


async def under(servers: Watched | Cluster, pair: Pair, engine: str, *, behind: bool) -> Run:
    """Measure one death of a master of these servers."""
    with Server(engine) as elsewhere:
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Redlease.from_url(servers.url, lease=LEASE_S)) for _ in range(3)]
            other = await stack.enter_async_context(Redlease.from_url(elsewhere.url))
            trial = Trial(pair, other.guard("ledger"), behind=behind)
            locks = [clients[1 + number % 2].lock(NAME) for number in range(WAITERS)]
            await trial.measure(clients[0].lock(NAME), locks)
            await trial.read_register()
    return trial.run


def under_sentinel(engine: str, *, behind: bool) -> Run:
    """Start a primary, a replica and three Sentinels, and kill the primary."""
    with Watched(engine) as watched:
        return asyncio.run(under(watched, Pair(watched.primary, watched.replica), engine, behind=behind))


def under_cluster(engine: str, *, behind: bool) -> Run:
    """Start three masters with a replica each, and kill the master that serves the lock."""
    with Cluster(engine, replicas=3) as cluster:
        master = cluster.master_of(f"{{{NAME}}}")
        pair = Pair(master, cluster.replicas[cluster.masters.index(master)])
        return asyncio.run(under(cluster, pair, engine, behind=behind))


SERVERS: dict[str, Callable[..., Run]] = {"sentinel": under_sentinel, "cluster": under_cluster}


def main() -> None:
    """Do what the options say and print a table; the exit code is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="how many of each kind (20)")
    parser.add_argument("--engine", default="valkey9", help="valkey9, redis7 or redis62 (valkey9)")
    parser.add_argument("--only", choices=tuple(SERVERS), help="the one or the other")
    options = parser.parse_args()
    rows, wrong = [], []
    for name in [options.only] if options.only else SERVERS:
        for behind in (True, False):
            runs = list(measured(name, options.runs, options.engine, behind=behind))
            rows.append(row(name, runs, behind=behind))
            wrong += [problem for run in runs for problem in run.problems()]
    say(
        "",
        "| under | the replica | runs | a master, s | served again, s | overlap, ms | late writes | problems |",
    )
    say("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |", *rows)
    say(*wrong)
    sys.exit(bool(wrong))


def measured(name: str, count: int, engine: str, *, behind: bool) -> Iterator[Run]:
    """Make runs, and tell of each when it has ended."""
    number = 0
    while number < count:
        state = f"{name}, replica {'lacking the grant' if behind else 'up to date'}"
        try:
            run = SERVERS[name](engine, behind=behind)
        except RolesChangedError:
            say(f"{state}: a failover came before ours, so this run does not count")
            continue
        number += 1
        times = f"a master after {run.promoted_s:.2f} s, served after {run.served_s:.2f} s"
        overlap = f"overlap {run.overlap_s * 1000:.0f} ms, {run.refused} late writes refused"
        say(f"{state}, run {number}: {times}, {overlap}", *run.problems())
        yield run


def row(name: str, runs: list[Run], *, behind: bool) -> str:
    """Return a line of the table: medians, and the worst of all runs."""
    names = ("promoted_s", "served_s", "overlap_s")
    promoted, served, overlap = ([getattr(run, what) for run in runs] for what in names)
    cells = [
        name,
        "lacks the grant" if behind else "is up to date",
        str(len(runs)),
        f"{statistics.median(promoted):.1f}, worst {max(promoted):.1f}",
        f"{statistics.median(served):.1f}, worst {max(served):.1f}",
        f"{statistics.median(overlap) * 1000:.0f}, worst {max(overlap) * 1000:.0f}",
        f"{sum(run.refused for run in runs):,}",
        str(sum(len(run.problems()) for run in runs)),
    ]
    return f"| {' | '.join(cells)} |"


def say(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
