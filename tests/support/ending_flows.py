"""Workflows that hold a permit and end in every way there is, for the tests of `redlease_temporal`."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from lock_flows import Use

    from children import say
from redlease_temporal import LeaseLost, Permit, lock, semaphore

ONE_ATTEMPT_S = timedelta(seconds=30)


@activity.defn
async def guarded(fence: int) -> int:
    """Say that it ran."""
    say("guarded", fence=fence)
    return fence


@activity.defn
async def slow(seconds: float) -> None:
    """Say that it began, and take its time."""
    say("slow")
    await asyncio.sleep(seconds)


class Holding:
    """What all of these workflows have: what they hold can be asked for, and they wait until they are told to go on."""

    def __init__(self) -> None:
        self.fence = 0
        self.go = False

    @workflow.update
    async def until_held(self) -> int:
        """Return the fence as soon as there is one."""
        await workflow.wait_condition(lambda: self.fence != 0)
        return self.fence

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self.go = True

    @workflow.signal
    def nudge(self) -> None:
        """Make one more workflow task."""

    async def told_to_go_on(self) -> None:
        """Wait for the signal."""
        await workflow.wait_condition(lambda: self.go)
        await workflow.wait_condition(workflow.all_handlers_finished)


@workflow.defn
class Ending(Holding):
    """A hold whose run ends in the way that is asked for."""

    @workflow.run
    async def run(self, use: Use, how: str) -> str:
        """Hold, wait until told to go on, and end."""
        if how == "successor":
            await self.told_to_go_on()
            return how
        cleaned = False
        pool = semaphore(use.resource, use.capacity, lease=use.lease)
        async with pool.hold(on_close=use.on_close) as hold:
            self.fence = hold.fence
            try:
                await self.told_to_go_on()
            finally:
                cleaned = True
            if how == "fail":
                raise ApplicationError("as was asked for", non_retryable=True)
            if how == "continue":
                workflow.continue_as_new(args=[use, "successor"])
            if how == "forget":
                hold.detach()
                workflow.continue_as_new(args=[use, "successor"])
        return f"{how} {cleaned}"


@workflow.defn
class Cleaning(Holding):
    """A hold whose body has something to clean up that takes a workflow task of its own."""

    @workflow.run
    async def run(self, use: Use) -> None:
        """Hold until cancelled, then run an activity under the permit."""
        async with lock(use.resource, lease=use.lease).hold() as hold:
            self.fence = hold.fence
            try:
                await self.told_to_go_on()
            finally:
                await workflow.execute_activity(guarded, hold.fence, start_to_close_timeout=ONE_ATTEMPT_S)


@workflow.defn
class Heirs(Holding):
    """A permit that goes from run to run, each of which may hold it for a while."""

    @workflow.run
    async def run(self, use: Use, permit: Permit | None, runs: int) -> int:
        """Return the fence that the last run has."""
        pool = semaphore(use.resource, use.capacity, lease=use.lease)
        hold = await pool.hold() if permit is None else await pool.adopt(permit)
        self.fence = hold.fence
        await workflow.execute_activity(guarded, hold.fence, start_to_close_timeout=ONE_ATTEMPT_S)
        await workflow.sleep(use.seconds)
        if runs > 1:
            workflow.continue_as_new(args=[use, hold.detach(), runs - 1])
        await self.told_to_go_on()
        return hold.fence


@workflow.defn
class Orphaning(Holding):
    """An acquire whose marker is not recorded as long as another local activity runs in the same workflow task."""

    def __init__(self) -> None:
        super().__init__()
        self.other_way = False

    @workflow.signal
    def turn(self) -> None:
        """Take the other way, which asks for no permit."""
        self.other_way = True

    @workflow.run
    async def run(self, use: Use) -> str:
        """Hold, unless told before the first step to take the other way."""
        if self.other_way:
            await self.told_to_go_on()
            return "the other way"
        aside = workflow.start_local_activity(slow, 60.0, start_to_close_timeout=timedelta(seconds=90))
        try:
            async with lock(use.resource, lease=use.lease).hold() as hold:
                self.fence = hold.fence
                await self.told_to_go_on()
                await aside
        except LeaseLost:
            return "lost"
        return "kept"
