"""Liveness: worker processes are killed all the time; once that stops, every unit of work ends within a bounded time.

By default the workers are killed for some seconds; `REDLEASE_SIEGE=110` does so for that many, with 200 units of work.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import redis.asyncio
from siege_flows import Mark, Pool, Unit, read_marks
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError

from helpers import eventually, left_over, watches_of

if TYPE_CHECKING:
    from pathlib import Path

    from quiet import Quiet
    from temporal.conftest import StartWorkerProcess
    from temporal_children import WorkerProcess

SECONDS = float(os.environ.get("REDLEASE_SIEGE", "8"))
LONG = SECONDS > 60
UNITS = 200 if LONG else 24
WORKERS = 3
CAPACITY = 4
LEASE = 5.0
WORK = 2.0 if LONG else 1.0
KILLED_EVERY = (0.5, 3.0)
WORKER = {"sticky_queue_schedule_to_start_timeout": 2, "max_heartbeat_throttle_interval": 0.5}
# After the last kill: a workflow task that a killed worker had times out after 10 s, and a unit may have to do that
# more than once; those in the line of a slot whose run was ended ask again by themselves, after up to a minute.
SETTLE = {"redis": 40.0, "coordinator": 60.0, "slots": 90.0}
EACH = WORK + 0.5  # a unit and its hand-over, at most, on a busy machine
OVERLAP = 0.75  # between two marks, and a heartbeat that tells of a loss

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 + SECONDS + 2 * UNITS)]

Handle = WorkflowHandle[Unit, int]


class Siege:
    """Worker processes of which one is killed and replaced now and again."""

    def __init__(self, start: StartWorkerProcess) -> None:
        self._start = start
        self._workers: list[WorkerProcess] = []
        self.kills = 0

    async def start(self) -> None:
        """Start one worker."""
        self._workers.append(await self._start("siege_flows", wait=False, worker=WORKER))

    async def go_on(self, seconds: float) -> None:
        """Kill workers at random for so long, each of which is started again at once."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(random.uniform(*KILLED_EVERY))
            worker = self._workers.pop(random.randrange(len(self._workers)))
            worker.kill()
            self.kills += 1
            await self.start()

    async def ready(self) -> None:
        """Wait until all workers poll."""
        await asyncio.gather(*(worker.ready(60) for worker in self._workers))


async def result_of(handle: Handle) -> int:
    """Return the result, however often a server that is busy does not say it in time."""
    while True:
        try:
            return await handle.result()
        except RPCError:
            await asyncio.sleep(1)


def longest_over(marks: list[Mark]) -> float:
    """Return for how many seconds more units than the capacity were at work, each from its first mark to its last."""
    attempts: dict[tuple[str, int, int], list[float]] = {}
    for mark in marks:
        attempts.setdefault((mark.workflow, mark.pid, mark.attempt), []).append(mark.at)
    changes = [(times[0], 1, key[0]) for key, times in attempts.items()]
    changes += [(times[-1], -1, key[0]) for key, times in attempts.items()]
    at_work: Counter[str] = Counter()
    longest, since = 0.0, None
    for at, change, workflow_id in sorted(changes):
        at_work[workflow_id] += change
        over = len(+at_work) > CAPACITY
        if over and since is None:
            since = at
        elif not over and since is not None:
            longest, since = max(longest, at - since), None
    return longest


def test_an_overlap_is_seen() -> None:
    """The judge of the test below tells five units at once, of which two are one unit's attempts, from five units."""
    marks = [Mark(at, f"unit {number}", number, 1) for number in range(CAPACITY) for at in (0.0, 2.0)]
    again = [Mark(at, "unit 0", 9, 2) for at in (1.0, 1.5)]
    assert longest_over(marks + again) == 0
    assert longest_over(marks + [Mark(at, "another", 9, 1) for at in (1.0, 1.5)]) == 0.5


async def nothing_left(client: Client, raw: redis.asyncio.Redis, prefix: str, pool: Pool) -> bool:
    """Tell whether nobody holds or waits."""
    if pool.backend == "redis":
        assert not await left_over(raw, prefix)
        assert not await watches_of(raw, prefix)
    elif pool.backend == "coordinator":
        snapshot = await client.get_workflow_handle(f"lock:{pool.resource}").query("snapshot")
        assert not snapshot["holders"]
        assert not snapshot["waiters"]
    else:
        for slot in range(pool.capacity):
            described = await client.get_workflow_handle(f"permit:{pool.resource}:{slot}").describe()
            assert described.status != WorkflowExecutionStatus.RUNNING
    return True


@pytest.mark.parametrize("backend", ["redis", "coordinator", "slots"])
async def test_everything_ends(
    backend: str,
    temporal_client: Client,
    worker_process: StartWorkerProcess,
    redis_url: str,
    prefix: str,
    task_queue: str,
    tmp_path: Path,
    quiet: Quiet,
) -> None:
    """Workers are killed at random; never do more units work than the pool has, and when it is over all of them end."""
    # A worker that is told by a heartbeat that the run is closed logs its activity's end.
    quiet.allow(r"not found|NotFound")
    # A local activity may end while its run, evicted meanwhile, is replayed: the SDK fails the workflow task, which is
    # repeated (temporalio/sdk-rust#1304).
    quiet.allow(r"Missing associated machine for LocalActivity")
    pool = Pool(f"{prefix}-pool", backend, CAPACITY, LEASE, WORK, str(tmp_path / "journal"))
    siege = Siege(worker_process)
    await asyncio.gather(*(siege.start() for _ in range(WORKERS)))
    await siege.ready()
    handles: list[Handle] = [
        await temporal_client.start_workflow(Unit.run, pool, id=f"{task_queue}-{number}", task_queue=task_queue)
        for number in range(UNITS)
    ]
    began = time.monotonic()
    results = asyncio.gather(*map(result_of, handles))
    await siege.go_on(SECONDS)
    stopped = time.monotonic()
    done = {mark.workflow for mark in read_marks(pool.journal) if mark.done}
    within = SETTLE[backend] + (UNITS - len(done)) * EACH / CAPACITY
    losses = await asyncio.wait_for(results, within)
    took = time.monotonic() - stopped
    marks = read_marks(pool.journal)
    assert {mark.workflow for mark in marks if mark.done} == {handle.id for handle in handles}
    over = longest_over(marks)
    assert over <= OVERLAP
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as raw:
        await eventually(lambda: nothing_left(temporal_client, raw, prefix, pool), 30)
    attempts = len({(mark.workflow, mark.pid, mark.attempt) for mark in marks})
    said = f"{backend}: {siege.kills} kills in {stopped - began:.0f} s, after which {len(done)} of {UNITS} were done"
    said += f" and the rest took {took:.0f} of {within:.0f} s; {attempts} attempts, {sum(losses)} losses"
    print(f"{said}, {over:.2f} s over the capacity")  # noqa: T201
