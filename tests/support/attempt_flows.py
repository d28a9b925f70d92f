"""Activities of which one runs at once, and whose first attempts come to a bad end."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError

with workflow.unsafe.imports_passed_through():
    from redlease_temporal.worker import current_hold, exclusive

ended: list[str] = []  # how the attempts of this process have ended


@activity.defn
@exclusive("attempts", key=lambda name, *_: name, lease=6, retry_lease=8)
async def hang(name: str, attempts: int) -> list[int]:
    """Hang in so many attempts; return the attempt that does not, and its fence."""
    info = activity.info()
    try:
        if info.attempt <= attempts:
            await asyncio.sleep(30)
    except asyncio.CancelledError:
        ended.append(f"{info.activity_id} {info.attempt} cancelled")
        raise
    return [info.attempt, current_hold().fence]


@activity.defn
@exclusive("attempts", key=lambda name: name)
async def complete_later(name: str) -> None:
    """Ask to be completed by somebody else."""
    activity.raise_complete_async()


@workflow.defn
class Again:
    """One activity id, used for a second activity when the first one's only attempt has timed out."""

    @workflow.run
    async def run(self, name: str) -> list[int]:
        """Return what the second one returned."""
        once = RetryPolicy(maximum_attempts=1)
        limit = timedelta(seconds=1)
        with contextlib.suppress(ActivityError):
            await workflow.execute_activity(
                hang, args=[name, 1], activity_id="one", start_to_close_timeout=limit, retry_policy=once
            )
        return await workflow.execute_activity(
            hang, args=[name, 0], activity_id="one", start_to_close_timeout=limit * 9, retry_policy=once
        )


@workflow.defn
class Attempts:
    """One such activity, whose attempts have two seconds each."""

    @workflow.run
    async def run(self, name: str, hanging: int, most: int = 9) -> list[int]:
        """Return what it returned."""
        retry = RetryPolicy(initial_interval=timedelta(seconds=0.1), backoff_coefficient=1.0, maximum_attempts=most)
        limit = timedelta(seconds=2)
        if hanging < 0:
            await workflow.execute_activity(complete_later, name, start_to_close_timeout=limit, retry_policy=retry)
        return await workflow.execute_activity(
            hang, args=[name, hanging], start_to_close_timeout=limit, retry_policy=retry
        )
