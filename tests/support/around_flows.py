"""Workflows that do with holds what asyncio lets them do."""

from __future__ import annotations

import asyncio

from temporalio import workflow

from redlease_temporal import LeaseLost, lock

passes: dict[str, int] = {}


@workflow.defn
class TimedOut:
    """A hold waited for inside `asyncio.timeout`."""

    @workflow.run
    async def run(self) -> str:
        """Return how it ended."""
        try:
            async with asyncio.timeout(0.5), lock("r").hold():
                return "held"
        except TimeoutError:
            return "timed out"


@workflow.defn
class Grouped:
    """Two tasks: one waits for a lock, and the other fails meanwhile."""

    @workflow.run
    async def run(self) -> str:
        """Return the errors that the group ended with."""
        failed = ""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.wait())
                group.create_task(self.fail())
        except* ValueError as errors:
            failed = ", ".join(str(error) for error in errors.exceptions)
        return failed

    async def wait(self) -> None:
        """Wait."""
        async with lock("r").hold():
            pass

    async def fail(self) -> None:
        """Fail a little later."""
        await workflow.sleep(0.2)
        raise ValueError("as asked")


@workflow.defn(sandboxed=False)
class Repeated:
    """A workflow task that fails after it has released, so that all of it is done again."""

    @workflow.run
    async def run(self, failures: int) -> int:
        """Return at which pass it came through."""
        run_id = workflow.info().run_id
        async with lock("r").hold():
            pass
        passes[run_id] = passes.get(run_id, 0) + 1
        if passes[run_id] <= failures:
            raise RuntimeError("as asked")
        return passes[run_id]


@workflow.defn
class Ticketed:
    """A hold with a ticket that others have too, for so many seconds."""

    @workflow.run
    async def run(self, seconds: float) -> str:
        """Return how it ended."""
        try:
            async with lock("r", lease=2).hold(ticket="T"):
                await workflow.sleep(seconds)
        except LeaseLost:
            return "lost"
        return "kept"
