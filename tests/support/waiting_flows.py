"""Workflows that wait for locks, for the tests of waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from temporalio import workflow

from redlease_temporal import AcquireTimeout, QueueFull, Withdrawn, lock, semaphore


@dataclass
class Wait:
    """What a workflow waits for, and for how long it then holds it; times in seconds."""

    resource: str
    seconds: float = 0.0
    timeout: float | None = None
    lease: float = 30.0
    capacity: int = 1
    weight: int = 1
    max_waiters: int | None = None


@dataclass
class Got:
    """What came of it."""

    what: str
    fence: int = 0


@workflow.defn
class Waiter:
    """One hold around a timer."""

    @workflow.run
    async def run(self, wait: Wait) -> Got:
        """Return the fence, or why there is none."""
        pool = semaphore(wait.resource, wait.capacity, lease=wait.lease, max_waiters=wait.max_waiters)
        try:
            async with pool.hold(timeout=wait.timeout, weight=wait.weight) as hold:
                if wait.seconds:
                    await workflow.sleep(wait.seconds)
                return Got("held", hold.fence)
        except AcquireTimeout:
            return Got("timed out")
        except QueueFull:
            return Got("full")
        except Withdrawn:
            return Got("withdrawn")


@workflow.defn
class Many:
    """Holds many locks, until it is told to go on."""

    def __init__(self) -> None:
        self._all = False
        self._go = False

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True

    @workflow.update
    async def held(self) -> None:
        """Return when it has all of them."""
        await workflow.wait_condition(lambda: self._all)

    @workflow.run
    async def run(self, name: str, count: int, lease: float) -> int:
        """Return how many were kept to the end."""
        locks = [lock(f"{name}-{number}", lease=lease) for number in range(count)]
        holds = await asyncio.gather(*(each.hold(on_lost="signal") for each in locks))
        self._all = True
        await workflow.wait_condition(lambda: self._go)
        kept = sum(not hold.lost for hold in holds)
        await asyncio.gather(*(hold.release() for hold in holds))
        return kept
