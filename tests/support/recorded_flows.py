"""The workflows whose histories are kept: one a pattern of using locks.

Histories of every release replay on this code, so nothing here changes: what is new gets a workflow of its own.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio import activity, workflow

from redlease_temporal import (
    AcquireTimeout,
    LeaseLost,
    Permit,
    Semaphore,
    WorkflowConcurrencyLimitExceeded,
    all_of,
    concurrency,
    lock,
    rwlock,
    semaphore,
    sequence,
)

SOON = timedelta(seconds=30)


@activity.defn
async def fenced(fence: int) -> int:
    """Return the fence."""
    return fence


@workflow.defn
class HoldOnce:
    """A hold around an activity, however long it has to be waited for."""

    @workflow.run
    async def run(self, resource: str, timeout: float | None) -> str:
        """Tell how it ended."""
        try:
            async with semaphore(resource, capacity=1).hold(timeout=timeout) as hold:
                await workflow.execute_activity(fenced, hold.fence, start_to_close_timeout=SOON)
                return "held"
        except AcquireTimeout:
            return "timed out"


@workflow.defn
class HoldLong:
    """A hold that goes on until it is lost, or until a signal comes."""

    def __init__(self) -> None:
        self._go = False
        self._holds = False

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True

    @workflow.query
    def holds(self) -> bool:
        """Tell whether it holds."""
        return self._holds

    @workflow.run
    async def run(self, resource: str, lease: float) -> str:
        """Tell how it ended."""
        try:
            async with lock(resource, lease=lease) as _:
                self._holds = True
                await workflow.wait_condition(lambda: self._go)
        except LeaseLost:
            return "lost"
        return "held"


@workflow.defn
class HandOn:
    """A permit that is adopted after continue-as-new."""

    @workflow.run
    async def run(self, resource: str, permit: Permit | None) -> int:
        """Return the fence."""
        pool = lock(resource)
        if permit is None:
            hold = await pool.hold()
            workflow.continue_as_new(args=[resource, hold.detach()])
        async with await pool.adopt(permit) as hold:
            return await workflow.execute_activity(fenced, hold.fence, start_to_close_timeout=SOON)


async def by_hand(pool: Semaphore) -> list[bool]:
    """Use a permit as data; returns what the calls said."""
    permit = await pool.acquire(metadata={"why": "recorded"})
    other = await pool.try_acquire()
    refused = await pool.try_acquire()
    assert other is not None
    permit = await pool.renew(permit, lease=20)
    snapshot = await pool.inspect()
    return [
        refused is None,
        len(snapshot.holders) == 2,
        await pool.is_held(permit),
        await pool.release(permit),
        await pool.is_held(permit),
        await pool.release(other.ticket),
    ]


@workflow.defn
class ByHand:
    """A permit as data."""

    @workflow.run
    async def run(self, resource: str) -> list[bool]:
        """Return what the calls said."""
        return await by_hand(semaphore(resource, capacity=2))


@workflow.defn
class Child:
    """An activity under what its parent holds."""

    @workflow.run
    async def run(self, fence: int) -> int:
        """Return the fence."""
        return await workflow.execute_activity(fenced, fence, start_to_close_timeout=SOON)


@workflow.defn
class WithChild:
    """A child in a hold."""

    @workflow.run
    async def run(self, resource: str) -> int:
        """Return the fence."""
        async with lock(resource).hold() as hold:
            return await workflow.execute_child_workflow(Child.run, hold.fence)


@workflow.defn
class HoldBy:
    """A hold on some backend around an activity, however long it has to be waited for."""

    @workflow.run
    async def run(self, backend: str, resource: str, timeout: float | None) -> str:
        """Tell how it ended."""
        try:
            async with semaphore(resource, capacity=1, backend=backend).hold(timeout=timeout) as hold:
                await workflow.execute_activity(fenced, hold.fence, start_to_close_timeout=SOON)
                return "held"
        except AcquireTimeout:
            return "timed out"


@workflow.defn
class HandOnBy:
    """A permit on some backend that is adopted after continue-as-new."""

    @workflow.run
    async def run(self, backend: str, resource: str, permit: Permit | None) -> int:
        """Return the fence."""
        pool = lock(resource, backend=backend)
        if permit is None:
            hold = await pool.hold()
            workflow.continue_as_new(args=[backend, resource, hold.detach()])
        async with await pool.adopt(permit) as hold:
            return await workflow.execute_activity(fenced, hold.fence, start_to_close_timeout=SOON)


@workflow.defn
class ByHandBy:
    """A permit on some backend as data."""

    @workflow.run
    async def run(self, backend: str, resource: str) -> list[bool]:
        """Return what the calls said."""
        return await by_hand(semaphore(resource, capacity=2, backend=backend))


@workflow.defn
class LoseBy:
    """A hold on some backend that goes on until it is lost."""

    def __init__(self) -> None:
        self._holds = False

    @workflow.query
    def holds(self) -> bool:
        """Tell whether it holds."""
        return self._holds

    @workflow.run
    async def run(self, backend: str, resource: str) -> str:
        """Tell how it ended."""
        try:
            async with lock(resource, backend=backend) as _:
                self._holds = True
                await workflow.wait_condition(lambda: False)
        except LeaseLost:
            return "lost"
        return "held"


@workflow.defn
class DowngradeBy:
    """A writer on some backend that becomes a reader."""

    @workflow.run
    async def run(self, backend: str, resource: str) -> int:
        """Return the fence."""
        async with rwlock(resource, backend=backend).write.hold() as hold:
            await workflow.execute_activity(fenced, hold.fence, start_to_close_timeout=SOON)
            await hold.downgrade()
            return await workflow.execute_activity(fenced, hold.fence, start_to_close_timeout=SOON)


@workflow.defn
class Together:
    """Several resources at once, one on each backend."""

    @workflow.run
    async def run(self, resource: str, timeout: float | None) -> str:
        """Tell how it ended."""
        parts = (
            semaphore(f"{resource}-d", capacity=3).weighted(2),
            lock(f"{resource}-c", backend="slots"),
            rwlock(f"{resource}-b", backend="coordinator").read,
            lock(f"{resource}-a"),
        )
        try:
            async with all_of(*parts, timeout=timeout) as holds:
                await workflow.execute_activity(fenced, holds[0].fence, start_to_close_timeout=SOON)
                return "held"
        except AcquireTimeout:
            return "timed out"


@workflow.defn
class InSequence:
    """Items that are handed over to a resource's sequence."""

    @workflow.run
    async def run(self, resource: str, items: list[int]) -> list[int]:
        """Return the results."""
        return await sequence(resource, items, fenced, start_to_close_timeout=SOON)


@concurrency(max=1)
@workflow.defn
class Limited:
    """One at a time."""

    def __init__(self) -> None:
        self._proceed = False

    @workflow.signal
    def proceed(self) -> None:
        """Let it go on."""
        self._proceed = True

    @workflow.run
    async def run(self) -> str:
        """Wait for the signal."""
        await workflow.wait_condition(lambda: self._proceed)
        return "done"


@concurrency(max=1, backend="slots")
@workflow.defn
class LimitedBySlots:
    """One at a time, without Redis."""

    @workflow.run
    async def run(self) -> str:
        """Take a while."""
        await workflow.sleep(1)
        return "done"


@workflow.defn
class WithLimitedChildren:
    """A child that is started, and one that is refused."""

    @workflow.run
    async def run(self) -> list[str]:
        """Return how it went."""
        first = await workflow.start_child_workflow(Limited.run)
        try:
            await workflow.start_child_workflow(Limited.run)
        except WorkflowConcurrencyLimitExceeded:
            await first.signal(Limited.proceed)
            return [await first, "refused"]
        return []


WORKFLOWS = [
    *(ByHand, ByHandBy, Child, HandOn, HandOnBy, HoldBy, HoldLong, HoldOnce, LoseBy, WithChild),
    *(DowngradeBy, Together),
    *(InSequence, Limited, LimitedBySlots, WithLimitedChildren),
]
