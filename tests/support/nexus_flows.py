"""Workflows that take the locks of a lock service in another namespace."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from ending_flows import Holding
from redlease_temporal import AcquireTimeout, LeaseLost, Permit, Semaphore, semaphore

ENDPOINT = "redlease-locks"


def pool_of(resource: str, capacity: int = 1) -> Semaphore:
    """Return the resource as the service has it."""
    return semaphore(resource, capacity, endpoint=ENDPOINT)


@workflow.defn
class Remote(Holding):
    """A hold whose run ends in the way that is asked for."""

    @workflow.run
    async def run(self, how: str) -> str:
        """Hold, wait until told to go on, and end."""
        if how == "successor":
            await self.told_to_go_on()
            return how
        async with pool_of("r").hold() as hold:
            self.fence = hold.fence
            await self.told_to_go_on()
            if how == "fail":
                raise ApplicationError("as asked", non_retryable=True)
            if how == "continue":
                workflow.continue_as_new("successor")
        return how


@workflow.defn
class RemoteHeirs(Holding):
    """A permit that is passed on to the next run."""

    @workflow.run
    async def run(self, before: Permit | None) -> str:
        """Hold, pass it on to the next run, which ends when told to."""
        pool = pool_of("r")
        if before is None:
            hold = await pool.hold()
            workflow.continue_as_new(hold.detach())
        hold = await pool.adopt(before)
        self.fence = hold.fence
        await self.told_to_go_on()
        await hold.release()
        return "same" if hold.fence == before.fence else "new"


@workflow.defn
class RemoteCalls:
    """Every call of a permit that is plain data."""

    @workflow.run
    async def run(self) -> list[list[Any]]:
        """Return what they answer."""
        pool = pool_of("r", 2)
        one = await pool.acquire(ticket="one")
        two = await pool.try_acquire(ticket="two")
        assert two is not None
        none = await pool.try_acquire()
        seen = await pool.inspect()
        renewed = await pool.renew(one, lease=timedelta(minutes=1))
        held = await pool.check(one)
        released = [await pool.release(one), await pool.release(one), await pool.release("two")]
        lost: list[str | None] = []
        try:
            await pool.renew(one)
        except LeaseLost as error:
            lost = [error.resource, error.ticket]
        return [
            [one.fence < two.fence, none, [holder.ticket for holder in seen.holders], renewed.lease_ms],
            [held, released, await pool.check(one), lost],
        ]


@workflow.defn
class RemoteWaits:
    """A request that is not granted in time."""

    @workflow.run
    async def run(self, timeout: float) -> str:
        """Return what came of it."""
        try:
            async with pool_of("r").hold(timeout=timeout):
                return "held"
        except AcquireTimeout as error:
            return f"timed out: {error.resource}"
