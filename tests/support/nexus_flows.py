"""Workflows that take the locks of a lock service in another namespace."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from ending_flows import ONE_ATTEMPT_S, Holding
    from temporal_tools import SHORT_S
from redlease_temporal import AcquireTimeout, LeaseLost, Permit, Semaphore, lock, semaphore
from redlease_temporal._payloads import nexus as calls
from redlease_temporal._payloads.locks import Caller

ENDPOINT = "redlease-locks"


def pool_of(resource: str, capacity: int = 1, **options: Any) -> Semaphore:
    """Return the resource as the service has it."""
    return semaphore(resource, capacity, endpoint=ENDPOINT, **options)


@workflow.defn
class Remote(Holding):
    """A hold whose run ends in the way that is asked for."""

    @workflow.run
    async def run(self, how: str) -> str:
        """Hold, wait until told to go on, and end."""
        if how == "successor":
            await self.told_to_go_on()
            return how
        if how == "abandon":
            request = asyncio.ensure_future(pool_of("r").hold())
            await self.told_to_go_on()
            assert not request.done()
            workflow.continue_as_new("successor")
        if how == "leave":
            self.fence = (await pool_of("r", lease=SHORT_S).hold()).detach().fence
            await self.told_to_go_on()
            workflow.continue_as_new("successor")
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
        again = await pool.acquire(ticket="one")
        none = await pool.try_acquire()
        seen = await pool.inspect()
        renewed = await pool.renew(one, lease=timedelta(minutes=1))
        held = await pool.is_held(one)
        released = [await pool.release(one), await pool.release(one), await pool.release("two")]
        lost: list[str | None] = []
        try:
            await pool.renew(one)
        except LeaseLost as error:
            lost = [error.resource, error.ticket]
        return [
            [one.fence == again.fence < two.fence, none, [holder.ticket for holder in seen.holders], renewed.lease_ms],
            [held, released, await pool.is_held(one), lost],
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


@workflow.defn
class LateCopy:
    """A request that another run made, executed once more."""

    @workflow.run
    async def run(self, ticket: str, caller: Caller) -> Permit:
        """Return what it is granted."""
        client = workflow.create_nexus_client(service=calls.SERVICE, endpoint=ENDPOINT)
        late = calls.AcquireInput("r", ticket=ticket, caller=caller)
        return await client.execute_operation("acquire", late, output_type=Permit)


FENCES: list[int] = []  # of those that have entered, in this order
INSIDE: list[int] = []  # and have not left


@activity.defn
async def enter_and_leave(fence: int) -> None:
    """Enter, check that nobody else is inside, let others run, and leave."""
    assert not INSIDE
    FENCES.append(fence)
    INSIDE.append(fence)
    await asyncio.sleep(0.01)
    INSIDE.remove(fence)


@workflow.defn
class TakesTurns:
    """Enters under the lock, directly or by way of the service."""

    @workflow.run
    async def run(self, endpoint: str | None, turns: int) -> None:
        """Take so many turns."""
        for _ in range(turns):
            async with lock("r", endpoint=endpoint).hold() as hold:
                await workflow.execute_activity(enter_and_leave, hold.fence, schedule_to_close_timeout=ONE_ATTEMPT_S)
