"""Workflows that contend for a lock, and the activity that they guard, for the tests that kill and terminate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from guarded_effects import Effects
from redlease_temporal import lock

HEARTBEAT = 0.5
EFFECT_EVERY = 0.05
AT_ONCE = RetryPolicy(initial_interval=timedelta(milliseconds=100), maximum_attempts=10)


@dataclass
class Turn:
    """What a contender does once it has the lock: effects in a database for so many seconds."""

    resource: str
    database: str
    seconds: float


@activity.defn
async def have_effects(turn: Turn, fence: int) -> int:
    """Have an effect every twentieth of a second, which the database takes unless it has seen a newer fence."""
    info = activity.info()
    loop = asyncio.get_running_loop()
    with Effects(turn.database) as effects:
        ends = loop.time() + turn.seconds
        beat = 0.0
        while loop.time() < ends:
            if loop.time() >= beat:
                activity.heartbeat()
                beat = loop.time() + HEARTBEAT
            effects.attempt(turn.resource, info.workflow_id or "", fence)
            await asyncio.sleep(EFFECT_EVERY)
    return fence


@workflow.defn
class Contender:
    """One hold around the guarded activity."""

    @workflow.run
    async def run(self, turn: Turn) -> int:
        """Return the fence."""
        async with lock(turn.resource, lease=10).hold() as hold:
            return await workflow.execute_activity(
                have_effects,
                args=[turn, hold.fence],
                start_to_close_timeout=timedelta(minutes=5),
                heartbeat_timeout=timedelta(seconds=2),
                retry_policy=AT_ONCE,
            )
