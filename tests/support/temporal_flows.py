"""Workflows and activities for the tests of the test server itself.

They stand in a module of their own because a workflow's sandbox imports their module again, by its name.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.common import RetryPolicy

with workflow.unsafe.imports_passed_through():
    from children import say

SOON = RetryPolicy(initial_interval=timedelta(milliseconds=100), backoff_coefficient=1)


@activity.defn
async def step(number: int) -> int:
    """Do nothing much."""
    return number + 1


@activity.defn
async def stay(attempts: int) -> int:
    """Stay for ever on so many attempts, and return at once on the next."""
    attempt = activity.info().attempt
    say("stays", attempt=attempt)
    while attempt <= attempts:
        activity.heartbeat()
        await asyncio.sleep(0.1)
    return attempt


@workflow.defn
class Steps:
    """So many activities, one after the other."""

    @workflow.run
    async def run(self, count: int) -> int:
        """Return their number, as they have counted it."""
        number = 0
        for _ in range(count):
            number = await workflow.execute_activity(step, number, start_to_close_timeout=timedelta(seconds=10))
        return number


@workflow.defn
class Stay:
    """One activity, which only a second attempt finishes."""

    @workflow.run
    async def run(self) -> int:
        """Return the attempt that finished it."""
        return await workflow.execute_activity(
            stay,
            1,
            start_to_close_timeout=timedelta(seconds=60),
            heartbeat_timeout=timedelta(seconds=1),
            retry_policy=SOON,
        )


@workflow.defn
class Sleep:
    """An hour, which no test waits for."""

    @workflow.run
    async def run(self) -> float:
        """Return how long it took by the workflow's clock, in seconds."""
        began = workflow.time()
        await workflow.sleep(timedelta(hours=1))
        return workflow.time() - began


@workflow.defn
class Broken:
    """A workflow task that fails as often as it is tried."""

    @workflow.run
    async def run(self) -> None:
        """Raise what is no failure of the workflow, but of its code."""
        raise RuntimeError("broken")
