"""Workflows that hold a side of a read-write lock, or all of several resources."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from temporalio import workflow

from redlease_temporal import AcquireTimeout, Hold, LeaseLost, Permit, all_of, lock, rwlock, semaphore

with workflow.unsafe.imports_passed_through():
    from backend_flows import SOON, guarded

if TYPE_CHECKING:
    from redlease_temporal import Semaphore
    from redlease_temporal._workflow_side.primitives import Units


@dataclass
class Part:
    """A resource, and how much of it is held; times in seconds.

    Attributes:
        side: Of a read-write lock.
        stays: Whether a loss is only signalled.
    """

    backend: str
    resource: str
    side: Literal["", "read", "write"] = ""
    capacity: int = 1
    weight: int = 1
    lease: float = 5.0
    stays: bool = False

    def pool(self) -> Semaphore:
        """Return the primitive."""
        if self.side:
            both = rwlock(self.resource, lease=self.lease, backend=self.backend)
            return both.read if self.side == "read" else both.write
        if self.capacity == 1:
            return lock(self.resource, lease=self.lease, backend=self.backend)
        return semaphore(self.resource, self.capacity, lease=self.lease, backend=self.backend)

    def units(self) -> Semaphore | Units:
        """Return it as a part of several."""
        return self.pool() if self.weight == 1 else self.pool().weighted(self.weight)


class Holding:
    """What is held, until the run is told to go on."""

    def __init__(self) -> None:
        self.holds: tuple[Hold, ...] = ()
        self._go = False

    @workflow.update
    async def until_held(self) -> list[int]:
        """Return the fences as soon as there are some."""
        await workflow.wait_condition(lambda: bool(self.holds))
        return [hold.fence for hold in self.holds]

    @workflow.query
    def held(self) -> list[int]:
        """Return the weights of the permits, none before they are held."""
        return [hold.permit.weight for hold in self.holds]

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True

    @workflow.update
    async def downgrade(self) -> Permit:
        """Become a reader."""
        await self.holds[0].downgrade()
        return self.holds[0].permit

    async def until_told(self, *holds: Hold) -> None:
        """Wait until told to go on."""
        self.holds = holds
        await workflow.wait_condition(lambda: self._go)
        await workflow.wait_condition(workflow.all_handlers_finished)


@workflow.defn
class Sharing(Holding):
    """A reader or a writer."""

    @workflow.run
    async def run(self, part: Part, timeout: float | None, permit: Permit | None) -> str:
        """Tell how it ended; with a timeout below zero it hands its permit on to the next run."""
        pool = part.pool()
        try:
            if permit is not None:
                async with pool.adopt(permit) as hold:
                    await self.until_told(hold)
                    return f"adopted {hold.fence}"
            limit = None if timeout is None else abs(timeout)
            async with pool.hold(timeout=limit, on_lost="signal" if part.stays else "cancel") as hold:
                await self.until_told(hold)
                if timeout is not None and timeout < 0:
                    workflow.continue_as_new(args=[part, timeout, hold.detach()])
                return f"held {hold.fence}"
        except LeaseLost:
            return "lost"
        except AcquireTimeout:
            return "timed out"


@workflow.defn
class Together(Holding):
    """All of several resources."""

    @workflow.run
    async def run(self, parts: list[Part], timeout: float | None) -> str:
        """Tell how it ended."""
        try:
            async with all_of(*(part.units() for part in parts), timeout=timeout) as holds:
                await self.until_told(*holds)
                holds.check()
                return "held"
        except LeaseLost as error:
            return f"lost {error.resource}"
        except AcquireTimeout as error:
            return f"timed out at {error.resource}"


@workflow.defn
class HandingOn(Holding):
    """All of several resources, held over continue-as-new."""

    @workflow.run
    async def run(self, parts: list[Part], permits: list[Permit]) -> str:
        """Tell how it ended."""
        if not permits:
            async with all_of(*(part.units() for part in parts)) as holds:
                await self.until_told(*holds)
                workflow.continue_as_new(args=[parts, [hold.detach() for hold in holds]])
        async with AsyncExitStack() as stack:
            pools = [part.pool() for part in parts]
            adopted = [await pool.adopt(permit) for pool, permit in zip(pools, permits, strict=True)]
            await self.until_told(*[await stack.enter_async_context(hold) for hold in adopted])
            return "adopted"


@workflow.defn
class Crossing:
    """One guarded activity under all of several resources."""

    @workflow.run
    async def run(self, parts: list[Part], seconds: float) -> int:
        """Return the sum of the fences."""
        async with all_of(*(part.units() for part in parts)) as holds:
            fence = sum(hold.fence for hold in holds)
            return await workflow.execute_activity(guarded, args=[fence, seconds], start_to_close_timeout=SOON)


WORKFLOWS = [Crossing, HandingOn, Sharing, Together]
