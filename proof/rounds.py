"""Rounds of the workload: processes on one server, and a fault in each round.

Unless another fault is given, one process is stopped past its leases and one is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from children import freeze
from libraries import Plan
from records import MS, History, now, read

WORKER = Path(__file__).parent / "worker.py"
ROUND_WITHIN = 120.0  # seconds


class Workload(NamedTuple):
    """What is run; durations in seconds."""

    library: str
    histories: int  # of a round: resources that all processes use at once
    lease: float = 1.0
    waiter_lease: float = 0.8  # shorter: a renewal then never ends a lease earlier, and what a client knows lasts
    processes: int = 5
    capacities: tuple[int, ...] = (1, 1, 2, 4)


class Process:
    """One process of the workload."""

    def __init__(self, process: asyncio.subprocess.Process, path: Path) -> None:
        self.process, self.path = process, path

    def begin(self, order: bytes) -> None:
        """Send it a round."""
        assert self.process.stdin is not None
        self.process.stdin.write(order)

    async def over(self) -> None:
        """Wait until it has lived the round."""
        assert self.process.stdout is not None
        said = await asyncio.wait_for(self.process.stdout.readline(), ROUND_WITHIN)
        if said != b"done\n":
            raise RuntimeError(f"a process of the workload ended by itself, with {await self.process.wait()}")


class Rounds:
    """Runs round after round with the same processes, but for those that were killed."""

    def __init__(self, workload: Workload, url: str, directory: Path, seed: int) -> None:
        self.workload, self.url, self.directory, self.seed = workload, url, directory, seed
        self.processes: list[Process] = []
        self.strike: Callable[[random.Random], Awaitable[None]] = self.disturb
        self.stopped = self.killed = self.struck = 0
        self._started = self._round = 0

    async def start(self) -> Process:
        """Start a process, with a file of its own for its records."""
        number, self._started = self._started, self._started + 1
        records = self.directory / f"{number}.jsonl"
        records.touch()
        # The tests run with PYTHONSAFEPATH, which leaves the directory of a script out.
        path = [str(WORKER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(WORKER), self.workload.library, self.url, str(records), str(number)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        )
        return Process(process, records)

    async def run(self) -> list[History]:
        """Run one round, and return its histories."""
        work, self._round = self.workload, self._round + 1
        draw = random.Random(f"{self.seed} {self._round}")
        plans = [
            Plan(f"{self._round}-{number}", draw.choice(work.capacities), work.lease, work.waiter_lease)
            for number in range(work.histories)
        ]
        order = json.dumps({"seed": f"{self.seed}", "plans": plans}).encode() + b"\n"
        for process in self.processes:
            process.begin(order)
        paths = [process.path for process in self.processes]
        await begun(paths)  # processes that have just started import for a while
        await asyncio.sleep(draw.uniform(0.05, 0.6))
        since = now()
        await self.strike(draw)
        struck = (since, now())
        self.struck += 1
        await asyncio.gather(*(process.over() for process in self.processes))
        histories = read(paths, {plan.name: plan.capacity for plan in plans})
        for history in histories:
            history.struck, history.lease_ns = struck, int(work.lease * 1000) * MS
        for path in paths:
            path.write_bytes(b"")
        while len(self.processes) < work.processes:
            self.processes.append(await self.start())
        return histories

    async def disturb(self, draw: random.Random) -> None:
        """Stop one process for longer than a lease and a place last, and kill another meanwhile."""
        stopped, killed = draw.sample(self.processes, 2)
        longest = max(self.workload.lease, self.workload.waiter_lease)
        freeze(stopped.process.pid)
        self.stopped += 1
        try:
            await asyncio.sleep(draw.uniform(0, 0.5))
            killed.process.kill()
            await killed.process.wait()
            self.processes.remove(killed)
            self.killed += 1
            await asyncio.sleep(longest * draw.uniform(1.1, 1.4))
        finally:
            stopped.process.send_signal(signal.SIGCONT)


async def begun(paths: list[Path]) -> None:
    """Wait until a process has recorded something."""
    async with asyncio.timeout(ROUND_WITHIN):
        while not any(path.stat().st_size for path in paths):  # noqa: ASYNC110  another process writes it
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(workload: Workload, url: str, seed: int) -> AsyncIterator[Rounds]:
    """Start the processes, and end them with the block."""
    with tempfile.TemporaryDirectory() as directory:
        rounds = Rounds(workload, url, Path(directory), seed)
        try:
            for _ in range(workload.processes):
                rounds.processes.append(await rounds.start())
            yield rounds
        finally:
            for each in rounds.processes:
                with contextlib.suppress(ProcessLookupError):
                    each.process.kill()
                await each.process.wait()
