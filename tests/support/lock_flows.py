"""Workflows that take locks, and the activities they guard, for the tests of `redlease_temporal`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from temporalio import activity, workflow

with workflow.unsafe.imports_passed_through():
    from children import say
from redlease_temporal import LeaseLost, Permit, lock, semaphore


@dataclass
class Use:
    """How a workflow uses a resource; times in seconds."""

    resource: str
    capacity: int = 1
    seconds: float = 0.0
    lease: float = 30.0
    timeout: float | None = None
    rounds: int = 1
    on_close: Literal["release", "lease"] = "release"


@activity.defn
async def work(seconds: float, fence: int) -> int:
    """Work under a fence, heartbeating; say when it begins and ends."""
    info = activity.info()
    say("begin", fence=fence, workflow=info.workflow_id, attempt=info.attempt)
    try:
        left = seconds
        while left > 0:
            activity.heartbeat()
            await asyncio.sleep(min(0.5, left))
            left -= 0.5
    finally:
        say("end", fence=fence, workflow=info.workflow_id)
    return fence


@activity.defn
async def plain() -> str:
    """Do something that needs no lock."""
    return "done"


def working(use: Use, fence: int) -> workflow.ActivityHandle[int]:
    """Begin the guarded activity."""
    return workflow.start_activity(
        work,
        args=[use.seconds, fence],
        start_to_close_timeout=timedelta(minutes=5),
        heartbeat_timeout=timedelta(seconds=5),
    )


@workflow.defn
class Unlocked:
    """The guarded activity without a lock."""

    @workflow.run
    async def run(self, use: Use) -> int:
        """Work."""
        return await working(use, 0)


@workflow.defn
class Locked:
    """A hold around an activity, so many times."""

    @workflow.run
    async def run(self, use: Use) -> list[int]:
        """Return the fences."""
        pool = semaphore(use.resource, use.capacity, lease=use.lease)
        fences = []
        for _ in range(use.rounds):
            async with pool.hold(timeout=use.timeout, on_close=use.on_close) as hold:
                await working(use, hold.fence)
                fences.append(hold.fence)
        return fences


@workflow.defn
class Plain:
    """An activity that needs no lock."""

    @workflow.run
    async def run(self) -> str:
        """Return what it says."""
        return await workflow.execute_activity(plain, start_to_close_timeout=timedelta(seconds=10))


@workflow.defn
class Sleeper:
    """A hold around a timer, then a guarded activity; told to go on by a signal."""

    def __init__(self) -> None:
        self.fence = 0
        self.go = False

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self.go = True

    @workflow.query
    def held(self) -> int:
        """Return the fence that is held, 0 before that."""
        return self.fence

    @workflow.run
    async def run(self, use: Use) -> str:
        """Return "lost" when the permit was lost in the body, and else "kept <fence>"."""
        try:
            async with semaphore(use.resource, use.capacity, lease=use.lease).hold(on_close=use.on_close) as hold:
                self.fence = hold.fence
                await workflow.wait_condition(lambda: self.go)
                await working(use, hold.fence)
        except LeaseLost:
            return "lost"
        return f"kept {self.fence}"


@workflow.defn
class Chain:
    """A permit that is handed from run to run."""

    @workflow.run
    async def run(self, use: Use, permit: Permit | None, fences: list[int]) -> list[int]:
        """Return the fences of all runs."""
        pool = lock(use.resource, lease=use.lease)
        hold = await pool.hold() if permit is None else await pool.adopt(permit)
        await working(use, hold.fence)
        fences.append(hold.fence)
        if len(fences) < use.rounds:
            workflow.continue_as_new(args=[use, hold.detach(), fences])
        await hold.release()
        return fences
