"""Units of work on a pool, each one workflow, for the test that kills workers all the time."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

from redlease_temporal import LeaseLost, semaphore

BEAT = 0.05
HEARTBEAT = 2.0
AGAIN = RetryPolicy(initial_interval=timedelta(milliseconds=100), maximum_interval=timedelta(seconds=1))


@dataclass
class Pool:
    """What the units contend for, and how long each works; times in seconds. `journal`: a file, written by all."""

    resource: str
    backend: str
    capacity: int
    lease: float
    seconds: float
    journal: str


@dataclass(frozen=True)
class Mark:
    """A unit was at work, at a moment of the machine's monotonic clock; the last mark of an attempt is `done`."""

    at: float
    workflow: str
    pid: int
    attempt: int
    done: bool = False

    def write(self, journal: str) -> None:
        """Add it to the journal: so short a line is written whole, whoever else writes."""
        with Path(journal).open("ab", buffering=0) as file:
            file.write(json.dumps(asdict(self)).encode() + b"\n")


def read_marks(journal: str) -> list[Mark]:
    """Return what was written."""
    path = Path(journal)
    return [Mark(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


@activity.defn
async def do_unit(pool: Pool) -> None:
    """Work, leaving a mark every twentieth of a second."""
    info = activity.info()

    def mark(*, done: bool = False) -> None:
        Mark(time.monotonic(), info.workflow_id or "", os.getpid(), info.attempt, done).write(pool.journal)

    ends = time.monotonic() + pool.seconds
    while time.monotonic() < ends:
        activity.heartbeat()
        mark()
        await asyncio.sleep(BEAT)
    mark(done=True)


@workflow.defn
class Unit:
    """One unit: it is done once it was done under a permit that was held to the end."""

    @workflow.run
    async def run(self, pool: Pool) -> int:
        """Return how often the permit was lost."""
        losses = 0
        while True:
            try:
                async with semaphore(pool.resource, pool.capacity, lease=pool.lease, backend=pool.backend).hold():
                    await workflow.execute_activity(
                        do_unit,
                        pool,
                        start_to_close_timeout=timedelta(minutes=1),
                        heartbeat_timeout=timedelta(seconds=HEARTBEAT),
                        retry_policy=AGAIN,
                    )
            except LeaseLost:
                losses += 1
            else:
                return losses
