"""Workflows whose tasks Temporal executes again, or that begin again, while they hold."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

from backend_flows import SOON, On
from temporalio import activity, workflow

from redlease_temporal import AcquireTimeout, Hold, LeaseLost, Permit, all_of, rwlock

TASK_S, TOO_LONG_S = 1.0, 1.4  # how long a workflow task may take, and how long one takes


class Ledger:
    """Who writes under which fence in this process."""

    inside = 0
    most = 0
    fence = 0
    stale: list[int] = []  # noqa: RUF012  it is of the process

    @classmethod
    def clear(cls) -> None:
        """Begin anew."""
        cls.inside = cls.most = cls.fence = 0
        cls.stale = []


@activity.defn
async def write(fence: int) -> None:
    """Write under a fence, and note one that is older than another that was seen."""
    Ledger.inside += 1
    Ledger.most = max(Ledger.most, Ledger.inside)
    if fence < Ledger.fence:
        Ledger.stale.append(fence)
    Ledger.fence = max(Ledger.fence, fence)
    try:
        await asyncio.sleep(0.02)
    finally:
        Ledger.inside -= 1


class Lingering:
    """Where the workflow task stands that is under way."""

    begun = asyncio.Event()
    over = asyncio.Event()


@activity.defn
async def linger() -> None:
    """Keep the workflow task from being recorded until the test says so."""
    Lingering.begun.set()
    await Lingering.over.wait()


async def write_under(fence: int) -> None:
    """Write, from workflow code."""
    await workflow.execute_activity(write, fence, start_to_close_timeout=SOON)


async def enter(stack: AsyncExitStack, on: On, how: str, permit: Permit | None = None) -> Hold:
    """Enter a block of this kind."""
    pool = on.pool()
    if how == "adopt":
        assert permit is not None
        return await stack.enter_async_context(await pool.adopt(permit))
    if how == "two":
        await stack.enter_async_context(On(on.backend, f"{on.resource}-2", lease=on.lease).pool().hold())
    if how == "all_of":
        return (await stack.enter_async_context(all_of(pool)))[0]
    if how == "rwlock":
        sides = rwlock(on.resource, lease=on.lease, backend=on.backend)
        return await stack.enter_async_context(sides.write.hold())
    return await stack.enter_async_context(pool.hold())


@workflow.defn
class Entity:
    """Works off signals under a lock, and leaves when none comes for a while; it may stay a moment in its last task."""

    def __init__(self) -> None:
        self._items: list[int] = []

    @workflow.signal
    def add(self, item: int) -> None:
        """Add work."""
        self._items.append(item)

    @workflow.run
    async def run(self, on: On, how: str, idle: float, lingers: bool, permit: Permit | None = None) -> int:
        """Return how many items it has worked off."""
        done = 0
        async with AsyncExitStack() as stack:
            hold = await enter(stack, on, how, permit)
            await write_under(hold.fence)
            while await self._comes(idle):
                self._items.pop()
                await write_under(hold.fence)
                done += 1
        if lingers:
            await workflow.execute_local_activity(linger, start_to_close_timeout=timedelta(seconds=8))
        return done

    async def _comes(self, idle: float) -> bool:
        try:
            await workflow.wait_condition(lambda: bool(self._items), timeout=idle)
        except TimeoutError:
            return False
        return True


class Mend:
    """Whether the mistake in `Mistaken` is mended."""

    mended = False


@workflow.defn(sandboxed=False)
class Mistaken:
    """A body with a mistake, for which Temporal fails the workflow task until it is mended."""

    @workflow.run
    async def run(self, on: On, how: str, mistake: str, permit: Permit | None = None) -> int:
        """Return the fence."""
        async with AsyncExitStack() as stack:
            hold = await enter(stack, on, how, permit)
            await write_under(hold.fence)
            if not Mend.mended:
                if mistake == "group":
                    async with asyncio.TaskGroup() as group:
                        group.create_task(self._fail())
                        group.create_task(self._held_beside(on))
                await self._fail()
            await write_under(hold.fence)
        return hold.fence

    async def _fail(self) -> None:
        raise KeyError("as asked")

    async def _held_beside(self, on: On) -> None:
        async with On(on.backend, f"{on.resource}-beside", lease=on.lease).pool().hold():
            await asyncio.sleep(60)


@workflow.defn
class Steady:
    """Holds until told to go on, then writes under its fence."""

    def __init__(self) -> None:
        self._fence = self._nudges = 0
        self._go = False

    @workflow.update
    async def until_held(self) -> int:
        """Return the fence as soon as there is one."""
        await workflow.wait_condition(lambda: self._fence != 0)
        return self._fence

    @workflow.signal
    def nudge(self) -> None:
        """Come, and change nothing."""
        self._nudges += 1

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True

    @workflow.run
    async def run(self, on: On, how: str, permit: Permit | None = None) -> Any:
        """Return the fence, or "lost"."""
        try:
            async with AsyncExitStack() as stack:
                hold = await enter(stack, on, how, permit)
                self._fence = hold.fence
                await workflow.wait_condition(lambda: self._go)
                await write_under(hold.fence)
        except LeaseLost:
            return "lost"
        return hold.fence


@workflow.defn
class GivesUp:
    """Gives up waiting in a task that goes on for a while, and stays open."""

    def __init__(self) -> None:
        self._gives_up = self._over = False

    @workflow.signal
    def give_up(self) -> None:
        """Give up."""
        self._gives_up = True

    @workflow.signal
    def end(self) -> None:
        """End."""
        self._over = True

    @workflow.run
    async def run(self, on: On) -> None:
        """Wait in vain."""
        waiting = asyncio.ensure_future(on.pool().hold())
        await workflow.wait_condition(lambda: self._gives_up)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        await workflow.execute_local_activity(linger, start_to_close_timeout=timedelta(seconds=9))
        await workflow.wait_condition(lambda: self._over)


@workflow.defn(sandboxed=False)
class MendedAfterReset:
    """A body with a mistake behind an activity; mended, it ends in the task in which a reset run begins again."""

    def __init__(self) -> None:
        self._is_out = self._over = False

    @workflow.query
    def is_out(self) -> bool:
        """Whether the block has ended."""
        return self._is_out

    @workflow.signal
    def end(self) -> None:
        """End."""
        self._over = True

    @workflow.run
    async def run(self, on: On) -> None:
        """Hold for one write."""
        async with on.pool().hold() as hold:
            await write_under(hold.fence)
            if not Mend.mended:
                raise KeyError("as asked")
        self._is_out = True
        await workflow.wait_condition(lambda: self._over)


@workflow.defn
class TwiceInOneTask:
    """Holds twice in one workflow task, where nobody may wait."""

    @workflow.run
    async def run(self, on: On) -> list[int]:
        """Return both fences."""
        fences = []
        for _ in range(2):
            async with on.pool().hold() as hold:
                fences.append(hold.fence)
        return fences


@workflow.defn
class Again:
    """Leaves a block, and asks for the same without waiting."""

    @workflow.run
    async def run(self, on: On, how: str) -> bool:
        """Return whether it was granted."""
        async with on.pool().hold():
            pass
        if how == "try_acquire":
            return await on.pool().try_acquire() is not None
        try:
            async with on.pool().hold(timeout=0):
                return True
        except AcquireTimeout:
            return False


@workflow.defn(sandboxed=False)
class AsksLater:
    """Asks in a task that fails; mended, it asks when it is told to, after a task that goes on for a while."""

    def __init__(self) -> None:
        self._lingers = self._go = False

    @workflow.signal
    def stay(self) -> None:
        """Stay in a task until the test says so."""
        self._lingers = True

    @workflow.signal
    def proceed(self) -> None:
        """Ask."""
        self._go = True

    @workflow.run
    async def run(self, on: On) -> int:
        """Write under the hold, and return its fence."""
        if not Mend.mended:
            asking = asyncio.ensure_future(on.pool().hold())
            await self._linger()
            del asking
            raise KeyError("as asked")
        await workflow.wait_condition(lambda: self._lingers)
        await self._linger()
        await workflow.wait_condition(lambda: self._go)
        async with on.pool().hold() as hold:
            await write_under(hold.fence)
            return hold.fence

    async def _linger(self) -> None:
        await workflow.execute_local_activity(linger, start_to_close_timeout=timedelta(seconds=8))


class Disturbances:
    """What becomes of the runs in this process: who writes, and which runs are past what was to disturb them."""

    inside: Counter[str] = Counter()  # noqa: RUF012  it is of the process
    fences: dict[str, list[int]] = {}  # noqa: RUF012
    beside: list[str] = []  # noqa: RUF012  where two were inside at once
    past: set[str] = set()  # noqa: RUF012
    again: set[str] = set()  # noqa: RUF012  whose disturbed task was executed again

    @classmethod
    def is_due(cls) -> bool:
        """Whether the run is still to be disturbed; from now on it is not."""
        workflow_id = workflow.info().workflow_id
        due = workflow_id not in cls.past
        (cls.past if due else cls.again).add(workflow_id)
        return due


@activity.defn
async def write_alone(resource: str, fence: int) -> None:
    """Write to what the resource protects."""
    seen = Disturbances
    seen.inside[resource] += 1
    if seen.inside[resource] > 1:
        seen.beside.append(resource)
    seen.fences.setdefault(resource, []).append(fence)
    try:
        await asyncio.sleep(0.05)
    finally:
        seen.inside[resource] -= 1


@workflow.defn(sandboxed=False)
class Disturbed:
    """Holds twice; after its first block its workflow task fails, or takes too long; or it is reset in that block."""

    def __init__(self) -> None:
        self._fence = 0
        self._nudges = 0
        self._go = False

    @workflow.update
    async def until_held(self) -> None:
        """Return when it holds."""
        await workflow.wait_condition(lambda: self._fence != 0)

    @workflow.signal
    def nudge(self) -> None:
        """Come, and change nothing."""
        self._nudges += 1

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True

    @workflow.run
    async def run(self, on: On, how: str) -> None:
        """Write under both holds."""
        async with on.pool().hold() as hold:
            self._fence = hold.fence
            if how == "reset":
                await workflow.wait_condition(lambda: self._go)
            await self._write(on, hold.fence)
        if how == "failed" and Disturbances.is_due():
            raise KeyError("as asked")
        if how == "timed out" and Disturbances.is_due():
            time.sleep(TOO_LONG_S)
        async with on.pool().hold() as hold:
            await self._write(on, hold.fence)

    async def _write(self, on: On, fence: int) -> None:
        await workflow.execute_activity(write_alone, args=[on.resource, fence], start_to_close_timeout=SOON)


@workflow.defn(sandboxed=False)
class Rival:
    """Wants the same."""

    @workflow.run
    async def run(self, on: On) -> None:
        """Write under a hold."""
        async with on.pool().hold() as hold:
            await workflow.execute_activity(write_alone, args=[on.resource, hold.fence], start_to_close_timeout=SOON)


WORKFLOWS = [Again, AsksLater, Disturbed, Entity, GivesUp, MendedAfterReset, Mistaken, Rival, Steady, TwiceInOneTask]
ACTIVITIES = [write, write_alone, linger]
