"""Workflows that use a resource on any backend, for the suite that all backends pass."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

from temporalio import activity, workflow
from temporalio.exceptions import ApplicationError

from redlease_temporal import AcquireTimeout, LeaseLost, Permit, Position, Semaphore, Snapshot, semaphore

SOON = timedelta(seconds=30)
ENDPOINT = "redlease-locks"  # of the lock service, as `lock_service` makes it


@dataclass
class On:
    """A resource and what keeps it; times in seconds."""

    backend: str
    resource: str
    capacity: int = 1
    lease: float = 30.0
    max_waiters: int | None = None
    timeout: float | None = None
    on_close: Literal["release", "lease"] = "release"
    max_hold: float | None = None

    def pool(self) -> Semaphore:
        """Return the primitive."""
        # A lock service is not chosen by the name of a backend, but by its endpoint.
        where: dict[str, Any] = {"endpoint": ENDPOINT} if self.backend == "nexus" else {"backend": self.backend}
        return semaphore(self.resource, self.capacity, lease=self.lease, max_waiters=self.max_waiters, **where)


@dataclass
class Asking:
    """The parameters of an acquire."""

    timeout: float | None = None
    ticket: str | None = None
    weight: int = 1
    owner: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        """Return them as they are passed, but for the timeout."""
        return {"ticket": self.ticket, "weight": self.weight, "owner": self.owner, "metadata": self.metadata}


class Inside:
    """How many guarded activities run in this process, and the most that did at one time."""

    now = 0
    most = 0


@activity.defn
async def guarded(fence: int, seconds: float) -> int:
    """Take its time, and be counted."""
    Inside.now += 1
    Inside.most = max(Inside.most, Inside.now)
    try:
        await asyncio.sleep(seconds)
    finally:
        Inside.now -= 1
    return fence


@workflow.defn
class Actor:
    """Does with a resource what it is told to, one update a call."""

    def __init__(self) -> None:
        self._over = False

    @workflow.run
    async def run(self, on: On) -> None:
        """Serve until told that it is over."""
        del on
        await workflow.wait_condition(lambda: self._over and workflow.all_handlers_finished())

    @workflow.signal
    def over(self) -> None:
        """End."""
        self._over = True

    @workflow.update
    async def acquire(self, on: On, asking: Asking) -> Permit:
        """Acquire."""
        return await on.pool().acquire(timeout=asking.timeout, **asking.options())

    @workflow.update
    async def try_acquire(self, on: On, asking: Asking) -> Permit | None:
        """Acquire if that takes no waiting."""
        return await on.pool().try_acquire(**asking.options())

    @workflow.update
    async def release(self, on: On, permit: Permit) -> bool:
        """Release."""
        return await on.pool().release(permit)

    @workflow.update
    async def release_ticket(self, on: On, ticket: str) -> bool:
        """Release by the ticket."""
        return await on.pool().release(ticket)

    @workflow.update
    async def renew(self, on: On, permit: Permit, lease: float | None) -> Permit:
        """Renew."""
        return await on.pool().renew(permit, lease=lease)

    @workflow.update
    async def check(self, on: On, permit: Permit) -> bool:
        """Check."""
        return await on.pool().is_held(permit)

    @workflow.update
    async def inspect(self, on: On) -> Snapshot:
        """Inspect."""
        return await on.pool().inspect()

    @workflow.update
    async def inspect_first(self, on: On, limit: int) -> Snapshot:
        """Inspect, with so many of each listed."""
        return await on.pool().inspect(max_items=limit)

    @workflow.update
    async def position(self, on: On, ticket: str) -> Position | None:
        """Look for a ticket."""
        return await on.pool().position(ticket)

    @workflow.update
    async def adopt(self, on: On, permit: Permit) -> Permit:
        """Adopt, and keep it."""
        hold = await on.pool().adopt(permit)
        return hold.permit


@workflow.defn
class Holder:
    """A hold whose run ends in the way that is asked for."""

    def __init__(self) -> None:
        self._fence = 0
        self._go = False

    @workflow.update
    async def until_held(self) -> int:
        """Return the fence as soon as there is one."""
        await workflow.wait_condition(lambda: self._fence != 0)
        return self._fence

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True

    @workflow.query
    def fence(self) -> int:
        """Return the fence, 0 before there is one."""
        return self._fence

    @workflow.run
    async def run(self, on: On, how: str, permit: Permit | None) -> str:
        """Hold until told to go on, and end."""
        pool = on.pool()
        try:
            if permit is not None:
                async with pool.adopt(permit, on_close=on.on_close, max_hold=on.max_hold) as hold:
                    await self._until_told(hold.fence)
                    return f"adopted {hold.fence}"
            on_lost: Literal["cancel", "signal"] = "signal" if how == "guarded" else "cancel"
            async with pool.hold(
                timeout=on.timeout, on_close=on.on_close, max_hold=on.max_hold, on_lost=on_lost
            ) as hold:
                await self._until_told(hold.fence)
                if how == "fail":
                    raise ApplicationError("as was asked for", non_retryable=True)
                if how == "hand on":
                    workflow.continue_as_new(args=[on, "complete", hold.detach()])
                if how == "guarded":
                    await workflow.execute_activity(guarded, args=[hold.fence, 0.0], start_to_close_timeout=SOON)
                if how != "let go":
                    return f"held {hold.fence}"
            self._go = False
            await self._until_told(0)
        except LeaseLost:
            return "lost"
        except AcquireTimeout:
            return "timed out"
        return "let go"

    async def _until_told(self, fence: int) -> None:
        self._fence = fence
        await workflow.wait_condition(lambda: self._go)
        await workflow.wait_condition(workflow.all_handlers_finished)


@workflow.defn
class Consumer:
    """One guarded activity in a hold, or without one."""

    @workflow.run
    async def run(self, on: On, seconds: float) -> int:
        """Return the fence."""
        if not on.backend:
            return await workflow.execute_activity(guarded, args=[0, seconds], start_to_close_timeout=SOON)
        async with on.pool().hold() as hold:
            return await workflow.execute_activity(guarded, args=[hold.fence, seconds], start_to_close_timeout=SOON)


@workflow.defn
class Timed:
    """What a holder and a waiter see of time, on a server that skips it; times in seconds of the workflow's clock."""

    @workflow.run
    async def run(self, on: On, what: str, seconds: float) -> list[float]:
        """Return when it began to wait, when it had the permit, and when it was over."""
        pool, began = on.pool(), workflow.time()
        held = began
        if what == "acquire":
            await pool.acquire(timeout=on.timeout)
            return [began, workflow.time()]
        try:
            async with pool.hold(timeout=on.timeout, max_hold=on.max_hold):
                held = workflow.time()
                await workflow.sleep(seconds)
        except AcquireTimeout:
            return [began, workflow.time()]
        except LeaseLost:
            return [began, held, workflow.time(), 0.0]
        return [began, held, workflow.time()]


WORKFLOWS = [Actor, Consumer, Holder, Timed]
