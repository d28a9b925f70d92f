"""Exceptions thrown into the loops of a relay while workflows use locks, on a real Temporal server."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from lock_flows import Locked, Use, work
from temporal_tools import Place
from thrown import Thrower

from redlease_temporal._common import run_monitor

from helpers import eventually

if TYPE_CHECKING:
    from redlease import Semaphore

LOOPS = (
    "Relay._beat",
    "Relay._find_untracked",
    "RunMonitor.run",
    "RunMonitor.poll",
    "TicketTracker._track",
    "TicketTracker._run_closed",
)
RUNS = 12


@pytest.mark.timeout(120)
async def test_workflows_are_served_while_exceptions_are_thrown(
    place: Place, pool: Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are served one after the other, under a fence each, and of a terminated run nothing is left."""
    for name in ("IDLE_POLL_MS", "BUSY_POLL_MS"):
        monkeypatch.setattr(run_monitor, name, 200.0)
    thrower = Thrower(LOOPS, 1000, random.Random(1), chance=0.2)
    with thrower.installed():
        async with place.serving([Locked], [work]) as client:
            thrower.throwing = True
            handles = [
                await client.start_workflow(
                    Locked.run,
                    Use("r", lease=5.0, seconds=600 if number == 0 else 0),
                    id=f"{place.task_queue}-{number}",
                    task_queue=place.task_queue,
                )
                for number in range(RUNS)
            ]

            async def is_held() -> bool:
                return bool((await pool.inspect()).holders)

            await eventually(is_held, 20)
            await handles[0].terminate()
            fences = await asyncio.gather(*(handle.result() for handle in handles[1:]))
            thrower.throwing = False
            assert len({fence for each in fences for fence in each}) == RUNS - 1

            async def is_free() -> bool:
                return not (await pool.inspect()).holders

            await eventually(is_free, 10)
    assert sum(thrower.thrown.values()) > 10
