"""Workflows that hold and wait for hours, for a server that skips time."""

from __future__ import annotations

from datetime import timedelta

from temporalio import activity, workflow

from redlease_temporal import AcquireTimeout, lock, rwlock


@activity.defn
async def note(fence: int) -> int:
    """Return the fence."""
    return fence


@workflow.defn
class Hours:
    """A hold of an hour."""

    @workflow.run
    async def run(self) -> list[int]:
        """Return the fence and when the hold ended, in seconds."""
        async with lock("r").hold() as hold:
            await workflow.sleep(timedelta(hours=1))
            await workflow.execute_activity(note, hold.fence, start_to_close_timeout=timedelta(minutes=1))
        return [hold.fence, int(workflow.now().timestamp())]


@workflow.defn
class Impatient:
    """A wait of a minute at most."""

    @workflow.run
    async def run(self) -> str:
        """Return how it ended."""
        try:
            async with lock("r").hold(timeout=timedelta(minutes=1)):
                return "held"
        except AcquireTimeout:
            return "timed out"


@workflow.defn
class Writing:
    """An hour as a writer, and an hour more as a reader."""

    @workflow.run
    async def run(self) -> None:
        """Write, and read."""
        async with rwlock("catalog").write.hold() as hold:
            await workflow.sleep(timedelta(hours=1))
            await hold.downgrade()
            await workflow.sleep(timedelta(hours=1))


@workflow.defn
class Reading:
    """A reader that does not wait for two hours."""

    @workflow.run
    async def run(self) -> str:
        """Return how it ended."""
        try:
            async with rwlock("catalog").read.hold(timeout=timedelta(minutes=90)):
                return "held"
        except AcquireTimeout:
            return "timed out"
