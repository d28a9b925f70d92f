"""Workers killed and workflows terminated at random moments, while others contend for the same lock.

`REDLEASE_CHAOS=20` repeats each of them twenty times.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import redis.asyncio
from chaos_flows import HEARTBEAT, Contender, Turn
from guarded_effects import Effect, Effects
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import TerminatedError

from redlease import Redlease

from helpers import eventually, watches_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from conftest import MakeClient
    from quiet import Quiet
    from temporal.conftest import StartWorkerProcess
    from temporal_children import WorkerProcess

TIMES = int(os.environ.get("REDLEASE_CHAOS", "2"))
CONTENDERS = 4
WORKERS = 3
SECONDS = 0.8
SERVED_WITHIN = 3.0
# A killed worker's sticky queue and the workflow task that it was at have to time out first.
AND_AFTER_A_KILL = 10.0
# Between an effect and the note of its time, on a busy machine.
CLOCKS = 0.25
WORKER = {"sticky_queue_schedule_to_start_timeout": 2, "max_heartbeat_throttle_interval": HEARTBEAT / 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 + 30 * TIMES)]


class Scene:
    """Some workers, and the contenders of one round."""

    def __init__(self, client: Client, pool: Redlease, database: str, start: Callable[[], object]) -> None:
        self.client = client
        self.pool = pool
        self.database = database
        self.workers: dict[int, WorkerProcess] = {}
        self.handles: list[WorkflowHandle[Contender, int]] = []
        self.resource = ""
        self._start = start

    async def fill(self) -> None:
        """Start workers until there are three."""
        for _ in range(WORKERS - len(self.workers)):
            worker = await self._start()  # type: ignore[misc]
            self.workers[worker.process.pid] = worker

    async def begin(self, name: str, task_queue: str) -> None:
        """Let the contenders start one after the other."""
        self.resource = name
        self.handles = []
        turn = Turn(name, self.database, SECONDS)
        for number in range(CONTENDERS):
            self.handles.append(
                await self.client.start_workflow(
                    Contender.run, turn, id=f"{task_queue}-{name}-{number}", task_queue=task_queue
                )
            )

    def effects(self) -> list[Effect]:
        """Return what was done on the resource so far."""
        with Effects(self.database) as effects:
            return effects.of(self.resource)

    async def held(self, count: int = 1) -> Effect:
        """Wait until the holder of that number, counted from 1, has had its first effect; return that."""

        def first() -> list[Effect]:
            found = {effect.fence: effect for effect in reversed(self.effects())}
            return [found[fence] for fence in sorted(found)][count - 1 : count]

        return (await eventually(first, 30))[0]  # type: ignore[no-any-return]

    async def worker_of(self, handle: WorkflowHandle[Contender, int]) -> int:
        """Return the process that has the workflow in its memory: the one that did its last task."""
        history = await handle.fetch_history()
        identities = [
            event.workflow_task_completed_event_attributes.identity
            for event in history.events
            if event.HasField("workflow_task_completed_event_attributes")
        ]
        return int(identities[-1].split("@")[0]) if identities else random.choice(list(self.workers))

    def kill(self, pid: int) -> None:
        """Kill a worker if it runs, and else any."""
        worker = self.workers.pop(pid if pid in self.workers else random.choice(list(self.workers)))
        worker.kill()

    def handle_of(self, workflow_id: str) -> WorkflowHandle[Contender, int]:
        """Return the contender of that id."""
        return next(handle for handle in self.handles if handle.id == workflow_id)

    def waiting(self) -> list[WorkflowHandle[Contender, int]]:
        """Return the contenders that have had no effect yet."""
        active = {effect.workflow for effect in self.effects()}
        return [handle for handle in self.handles if handle.id not in active]

    async def outcomes(self) -> dict[str, int | None]:
        """Wait for all; return the fences by workflow id, None for one that was terminated."""

        async def outcome(handle: WorkflowHandle[Contender, int]) -> int | None:
            try:
                return await handle.result()
            except WorkflowFailureError as error:
                if not isinstance(error.cause, TerminatedError):
                    raise AssertionError(f"{handle.id}: {error.cause!r}") from error
                return None

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = [group.create_task(outcome(handle)) for handle in self.handles]
        results = [task.result() for task in tasks]
        return {handle.id: result for handle, result in zip(self.handles, results, strict=True)}


@pytest.fixture
async def scene(
    temporal_client: Client,
    worker_process: StartWorkerProcess,
    make_client: MakeClient,
    redis_url: str,
    tmp_path: Path,
    quiet: Quiet,
) -> Scene:
    """Three workers and no contenders."""
    # A worker that is told by a heartbeat that the run is closed logs its activity's end.
    quiet.allow(r"not found|NotFound")
    scene = Scene(
        temporal_client,
        await make_client(url=redis_url),
        str(tmp_path / "effects.db"),
        lambda: worker_process("chaos_flows", worker=WORKER),
    )
    await scene.fill()
    return scene


@pytest.fixture
async def raw_redis(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A plain client, for looking at keys."""
    async with redis.asyncio.Redis.from_url(redis_url, decode_responses=True) as client:
        yield client


def check_order(effects: list[Effect], served_within: float, terminated_at: float) -> tuple[float, float]:
    """No effect under an older fence, no overlap beyond a heartbeat, and each holder soon after the one before.

    Returns the longest overlap, which is negative when there was none, and the longest time that nobody was served.
    """
    taken = [effect.fence for effect in effects if effect.taken]
    assert taken == sorted(taken)
    by_fence: dict[int, list[Effect]] = {}
    for effect in effects:
        by_fence.setdefault(effect.fence, []).append(effect)
    overlaps, gaps = [], []
    for before, after in pairwise(sorted(by_fence)):
        ended, began = by_fence[before][-1].at, by_fence[after][0].at
        assert ended - began <= HEARTBEAT + CLOCKS, f"overlap of {ended - began:.3f} s: {before} and {after}"
        free = terminated_at if began > terminated_at > by_fence[before][0].at else ended
        assert began - free <= served_within, f"{began - free:.3f} s from {before} to {after}"
        overlaps.append(ended - began)
        gaps.append(began - free)
    return max(overlaps), max(gaps)


async def nothing_stuck(scene: Scene, raw: redis.asyncio.Redis, prefix: str) -> bool:
    """Tell whether nobody holds or waits, and no relay tracks anything."""
    snapshot = await scene.pool.lock(scene.resource).inspect()
    assert not snapshot.holders
    assert not snapshot.waiters
    assert not await watches_of(raw, prefix)
    return True


async def disturb(kind: str, scene: Scene, rng: random.Random) -> float:
    """Do it at a random moment; return when a holder was terminated, 0 when none was."""
    if kind == "kill waiting":
        await asyncio.sleep(rng.uniform(0, 1))
        waiting = scene.waiting() or scene.handles
        scene.kill(await scene.worker_of(rng.choice(waiting)))
        return 0.0
    if kind == "terminate waiting":
        await asyncio.sleep(rng.uniform(0, SECONDS))
        await rng.choice(scene.waiting()).terminate()
        return 0.0
    first = await scene.held()
    if kind == "kill releasing":
        pid = await scene.worker_of(scene.handle_of(first.workflow))
        await asyncio.sleep(max(0.0, first.at + SECONDS - time.monotonic() + rng.uniform(0, 0.15)))
        scene.kill(pid)
        return 0.0
    await asyncio.sleep(rng.uniform(0, SECONDS * 0.9))
    if kind == "terminate holding":
        await scene.handle_of(first.workflow).terminate()
        return time.monotonic()
    pid = rng.choice([first.pid, await scene.worker_of(scene.handle_of(first.workflow))])
    scene.kill(pid)
    return 0.0


@pytest.mark.parametrize(
    "kind", ["kill waiting", "kill holding", "kill releasing", "terminate waiting", "terminate holding"]
)
async def test_chaos(kind: str, scene: Scene, raw_redis: redis.asyncio.Redis, prefix: str, task_queue: str) -> None:
    """Killed or terminated at any moment, nobody's effect comes late, the next is served soon, and nothing sticks."""
    rng = random.Random(kind)
    within = SERVED_WITHIN + (AND_AFTER_A_KILL if kind.startswith("kill") else 0)
    figures = []
    for number in range(TIMES):
        await scene.begin(f"r{number}", task_queue)
        terminated_at = await disturb(kind, scene, rng)
        outcomes = await scene.outcomes()
        assert list(outcomes.values()).count(None) == (1 if kind.startswith("terminate") else 0), outcomes
        figures.append(check_order(scene.effects(), within, terminated_at))
        await eventually(lambda: nothing_stuck(scene, raw_redis, prefix), 12)
        await scene.fill()
    overlaps, gaps = zip(*figures, strict=True)
    said = f"{kind}, {TIMES} times: overlap at most {max(overlaps):.2f} s, next served within {max(gaps):.2f} s"
    print(said)  # noqa: T201
