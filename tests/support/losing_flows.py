"""Workflows that lose a permit while they hold it, for the tests of `redlease_temporal`."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from ending_flows import Holding
    from lock_flows import Use

    import redlease
import redlease_temporal
from redlease_temporal import LeaseLost, Permit, lock, semaphore

TEN_S = timedelta(seconds=10)


async def watched(fence: int) -> str:
    """Run the activity that the test watches."""
    said: str = await workflow.execute_activity(
        "watched", fence, result_type=str, start_to_close_timeout=TEN_S, heartbeat_timeout=timedelta(seconds=5)
    )
    return said


@workflow.defn
class Losing(Holding):
    """A body that meets the loss in the way that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.clean_up = False

    @workflow.signal
    def finish(self) -> None:
        """End the clean-up."""
        self.clean_up = True

    @workflow.run
    async def run(self, use: Use, how: str, max_hold: float | None) -> list[Any]:
        """Return what came of it."""
        try:
            async with lock(use.resource, lease=use.lease).hold(max_hold=max_hold) as hold:
                self.fence = hold.fence
                await getattr(self, how)(hold)
        except redlease.LeaseLost as error:
            if how in {"uncaught", "clean"}:
                raise
            return [type(error).__name__, isinstance(error, redlease_temporal.LeaseLost), self.fence]
        except ApplicationError as error:
            return [error.message, *getattr(error, "__notes__", [])]
        return ["kept", hold.lost]

    async def uncaught(self, _: redlease_temporal.Hold) -> None:
        """Let it through."""
        await self.told_to_go_on()

    async def catch_core(self, _: redlease_temporal.Hold) -> None:
        """Catch the core's error around the block."""
        await self.told_to_go_on()

    async def swallow(self, _: redlease_temporal.Hold) -> None:
        """Take the cancellation for nothing."""
        try:
            await self.told_to_go_on()
        except asyncio.CancelledError:
            await workflow.sleep(0.01)

    async def check(self, hold: redlease_temporal.Hold) -> None:
        """Look at the hold, and go on regardless."""
        before = hold.lost
        hold.check()
        try:
            await self.told_to_go_on()
        except asyncio.CancelledError:
            if before or not hold.lost:
                raise ApplicationError("`hold.lost` says the wrong thing", non_retryable=True) from None
            hold.check()

    async def other_error(self, _: redlease_temporal.Hold) -> None:
        """Raise something else because of it."""
        try:
            await self.told_to_go_on()
        except asyncio.CancelledError:
            raise ApplicationError("mine", non_retryable=True) from None

    async def clean(self, _: redlease_temporal.Hold) -> None:
        """Take long over the clean-up, during which the run is cancelled."""
        try:
            await self.told_to_go_on()
        finally:
            await workflow.wait_condition(lambda: self.clean_up)

    async def activity(self, hold: redlease_temporal.Hold) -> None:
        """Run a guarded activity."""
        await watched(hold.fence)


@workflow.defn
class CatchOwn(Holding):
    """The adapter's own error, caught."""

    @workflow.run
    async def run(self, use: Use) -> str:
        """Return the resource that the error names."""
        try:
            async with lock(use.resource, lease=use.lease) as hold:
                self.fence = hold.fence
                await self.told_to_go_on()
        except LeaseLost as error:
            return str(error.resource)
        return "kept"


@workflow.defn
class Signalled(Holding):
    """A hold that only says when it is lost."""

    @workflow.run
    async def run(self, use: Use, then: str) -> list[Any]:
        """Return what the hold says, and what happens to an activity that is begun afterwards."""
        said: list[Any] = []
        async with lock(use.resource, lease=use.lease).hold(on_lost="signal") as hold:
            self.fence = hold.fence
            said += [await hold.wait_lost(), hold.lost]
            try:
                hold.check()
            except LeaseLost:
                said.append("check")
            if then:
                await watched(hold.fence)
        return said


@workflow.defn
class Blockless(Holding):
    """A hold without a block."""

    @workflow.run
    async def run(self, use: Use) -> list[Any]:
        """Return what each release says, and the check afterwards."""
        hold = await lock(use.resource, lease=use.lease).hold()
        self.fence = hold.fence
        await self.told_to_go_on()
        said: list[Any] = [hold.lost, await hold.release(), await hold.release()]
        try:
            hold.check()
        except LeaseLost:
            said.append("check")
        return said


@workflow.defn
class Child(Holding):
    """A child that runs an activity once it is told to."""

    @workflow.run
    async def run(self) -> str:
        """Return what the activity says."""
        await self.told_to_go_on()
        return await watched(0)


@workflow.defn
class Parent(Holding):
    """A hold around two children, one of which is to outlive it."""

    @workflow.run
    async def run(self, use: Use, child_id: str, other_id: str) -> bool:
        """Return whether the permit was lost, once told to go on."""
        abandon = workflow.ParentClosePolicy.ABANDON
        async with lock(use.resource, lease=use.lease).hold(on_lost="signal") as hold:
            child = await workflow.start_child_workflow(Child.run, id=child_id)
            await workflow.start_child_workflow(Child.run, id=other_id, parent_close_policy=abandon)
            self.fence = hold.fence
            await hold.wait_lost()
            await self.told_to_go_on()
            await workflow.wait([child])
            return hold.lost


async def hold_until_lost(holding: Holding, use: Use, seen: list[str]) -> list[str]:
    """Hold until told to go on; returns what was seen meanwhile, the loss included."""
    try:
        async with lock(use.resource, lease=use.lease).hold() as hold:
            holding.fence = hold.fence
            await holding.told_to_go_on()
    except LeaseLost:
        seen.append("lost")
    return seen


@workflow.defn
class Dynamic(Holding):
    """A user's handler for every signal, as it is written today."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @workflow.signal(dynamic=True)
    def any_signal(self, name: str, _: Sequence[RawValue]) -> None:
        """Take it down."""
        self.seen.append(name)

    @workflow.run
    async def run(self, use: Use) -> list[str]:
        """Return what the handler has seen."""
        return await hold_until_lost(self, use, self.seen)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    @workflow.defn
    class OldDynamic(Holding):
        """A user's handler for every signal, as it was written."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        @workflow.signal(dynamic=True)
        def any_signal(self, name: str, *_: Any) -> None:
            """Take it down."""
            self.seen.append(name)

        @workflow.run
        async def run(self, use: Use) -> list[str]:
            """Return what the handler has seen."""
            return await hold_until_lost(self, use, self.seen)


@workflow.defn
class Misusing:
    """What a workflow may ask for by mistake."""

    @workflow.run
    async def run(self, what: Literal["capacity", "name", "weight", "permit", "on_lost"]) -> None:
        """Make the mistake."""
        if what == "capacity":
            semaphore("r", 0)
        elif what == "name":
            lock("")
        elif what == "weight":
            await semaphore("r", 2).acquire(weight=3)
        elif what == "permit":
            permit = await lock("r").acquire()
            await lock("other").release(permit)
        else:
            lock("r").hold(on_lost="shout")  # type: ignore[arg-type]


@workflow.defn
class Twice(Holding):
    """Two holds one after the other, by the same ticket."""

    @workflow.run
    async def run(self, use: Use) -> list[Any]:
        """Return both fences, and whether the second was kept."""
        pool = lock(use.resource, lease=use.lease)
        async with pool.hold(ticket="t") as first:
            pass
        try:
            async with pool.hold(ticket="t") as second:
                self.fence = second.fence
                await self.told_to_go_on()
        except LeaseLost:
            return [first.fence, "lost"]
        return [first.fence, second.fence, second.lost]


@workflow.defn
class Again(Holding):
    """A hold that is lost, and another one after that."""

    @workflow.run
    async def run(self, use: Use) -> list[Any]:
        """Return how often it was lost, and the fence that was kept."""
        lost = 0
        while True:
            try:
                async with lock(use.resource, lease=use.lease).hold() as hold:
                    self.fence = hold.fence
                    await self.told_to_go_on()
                    return [lost, hold.fence]
            except LeaseLost:
                lost += 1


@workflow.defn
class Adopting(Holding):
    """A permit that was handed over from outside."""

    @workflow.run
    async def run(self, use: Use, permit: Permit) -> list[int]:
        """Return the fence that it has here."""
        hold = await lock(use.resource, lease=use.lease).adopt(permit)
        await hold.release()
        return [permit.fence, hold.fence]


@workflow.defn
class Delayed(Holding):
    """A grant whose marker comes late, as another local activity runs in the same workflow task."""

    @workflow.run
    async def run(self, use: Use) -> str:
        """Return "lost" when the body is told of it."""
        aside = workflow.start_local_activity("slow", use.seconds, start_to_close_timeout=timedelta(seconds=30))
        try:
            async with lock(use.resource, lease=use.lease).hold():
                await aside
                await self.told_to_go_on()
        except LeaseLost:
            return "lost"
        return "kept"
