"""Workflows whose holds are in scopes of anyio and in task groups and timeouts of asyncio, which cancel them.

They are not sandboxed: anyio cannot be loaded in the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from anyio import CancelScope, create_task_group, current_time, fail_after, move_on_after
from temporalio import activity, workflow

from redlease_temporal import Semaphore, Unavailable, all_of, rwlock, semaphore, sequence

with workflow.unsafe.imports_passed_through():
    # anyio imports what is used of it only then, which the sandbox refuses.
    from backend_flows import guarded
    from nexus_flows import ENDPOINT

Inside = Callable[[], Coroutine[Any, Any, None]]  # what a block does
Block = Callable[[Inside], Coroutine[Any, Any, None]]  # runs a block that does this

SOON_S = 0.3  # when a scope is cancelled
GRANTED_WITHIN_S = 60.0
SETTLED_WITHIN_S = 60.0


@dataclass(frozen=True)
class Where:
    """A resource and what keeps it, which may be a lock service."""

    backend: str
    resource: str

    def pool(self, suffix: str = "") -> Semaphore:
        """Return it, or one beside it."""
        if self.backend == "nexus":
            return semaphore(self.resource + suffix, 1, endpoint=ENDPOINT)
        return semaphore(self.resource + suffix, 1, backend=self.backend)


# The ways to hold something


@contextlib.asynccontextmanager
async def _acquired(pool: Semaphore) -> AsyncIterator[None]:
    permit = await pool.acquire()
    try:
        yield
    finally:
        await pool.release(permit)


@contextlib.asynccontextmanager
async def _tried(pool: Semaphore) -> AsyncIterator[None]:
    permit = await pool.try_acquire()
    assert permit is not None
    try:
        yield
    finally:
        await pool.release(permit)


@contextlib.asynccontextmanager
async def _adopted(pool: Semaphore) -> AsyncIterator[None]:
    async with pool.adopt(await pool.acquire()):
        yield


@contextlib.asynccontextmanager
async def _downgraded(where: Where) -> AsyncIterator[None]:
    async with rwlock(where.resource, backend=where.backend).write.hold() as hold:
        await hold.downgrade()
        yield


WAYS: dict[str, Callable[[Where], AbstractAsyncContextManager[Any]]] = {
    "hold": lambda where: where.pool().hold(),
    "plain": lambda where: where.pool(),
    "acquire": lambda where: _acquired(where.pool()),
    "try_acquire": lambda where: _tried(where.pool()),
    "adopt": lambda where: _adopted(where.pool()),
    "all_of": lambda where: all_of(where.pool(), where.pool(":2")),
    "read": lambda where: rwlock(where.resource, backend=where.backend).read.hold(),
    "write": lambda where: rwlock(where.resource, backend=where.backend).write.hold(),
    "downgrade": _downgraded,
}


# What is around a block, and ends it


@dataclass
class Case:
    """A block to run, and when its scope is cancelled: soon after it was entered, or after so long if not."""

    block: Block
    patience_s: float
    entered: bool = False
    scope: CancelScope | None = None

    async def until_then(self) -> None:
        """Wait for that moment."""
        with contextlib.suppress(TimeoutError):
            await workflow.wait_condition(lambda: self.entered, timeout=self.patience_s)
        await asyncio.sleep(SOON_S)

    async def run(self) -> None:
        """Run the block; it waits for more than any test takes."""
        await self.block(for_ever)

    async def run_in(self, *scopes: CancelScope) -> None:
        """Run the block; once it is entered, the scopes have their deadlines soon."""

        async def inside() -> None:
            for scope in scopes:
                scope.deadline = current_time() + SOON_S
            await for_ever()

        await self.block(inside)

    async def run_within(self, timeout: asyncio.Timeout, *scopes: CancelScope) -> None:
        """Run the block; once it is entered, the timeout and the scopes have their deadlines soon."""

        async def inside() -> None:
            deadline = asyncio.get_running_loop().time() + SOON_S
            timeout.reschedule(deadline)
            for scope in scopes:
                scope.deadline = deadline
            await for_ever()

        await self.block(inside)


async def for_ever() -> None:
    """Wait for more than any test takes."""
    await asyncio.sleep(3600)


async def expires(case: Case) -> None:
    """A scope with a deadline."""
    with move_on_after(case.patience_s) as scope:
        await case.run_in(scope)
    assert scope.cancelled_caught


async def fails(case: Case) -> None:
    """A scope that raises TimeoutError."""
    with contextlib.suppress(TimeoutError), fail_after(case.patience_s) as scope:
        await case.run_in(scope)


async def inner(case: Case) -> None:
    """A scope with a deadline in one without."""
    with CancelScope() as around, move_on_after(case.patience_s) as scope:
        await case.run_in(scope)
    assert not around.cancelled_caught


async def outer(case: Case) -> None:
    """A scope without a deadline in one with one."""
    with move_on_after(case.patience_s) as scope, CancelScope() as between:
        await case.run_in(scope)
    assert not between.cancelled_caught


async def both(case: Case) -> None:
    """Two scopes with the same deadline."""
    with move_on_after(case.patience_s) as around, move_on_after(case.patience_s) as scope:
        await case.run_in(around, scope)


async def cancels_itself(case: Case) -> None:
    """A scope that its own block cancels, and then waits."""
    with CancelScope() as scope:

        async def inside() -> None:
            scope.cancel()
            await for_ever()

        await case.block(inside)
    assert scope.cancelled_caught


async def cancels_itself_last(case: Case) -> None:
    """A scope that its own block cancels as it ends."""
    with CancelScope() as scope:

        async def inside() -> None:
            scope.cancel()

        await case.block(inside)


async def cancelled_before(case: Case) -> None:
    """A scope that is cancelled before the block begins."""
    with CancelScope() as scope:
        scope.cancel()
        await case.run()
    assert scope.cancelled_caught


async def when_told(case: Case) -> None:
    """A scope that is cancelled by hand."""
    with CancelScope() as case.scope:
        await case.run()


async def shielded_work(case: Case) -> None:
    """A scope whose deadline comes while an activity runs that the block shields."""
    with CancelScope() as scope:

        async def inside() -> None:
            scope.deadline = current_time() + SOON_S
            with CancelScope(shield=True):
                await workflow.execute_activity(guarded, args=[0, 1.0], start_to_close_timeout=timedelta(seconds=60))
            await for_ever()

        await case.block(inside)
    assert scope.cancelled_caught


async def within(case: Case) -> None:
    """A scope with a deadline inside the block."""

    async def inside() -> None:
        with move_on_after(SOON_S):
            await for_ever()

    await case.block(inside)


async def group_of_anyio(case: Case) -> None:
    """A task group whose scope is cancelled."""
    async with create_task_group() as group:
        group.start_soon(case.run)
        await case.until_then()
        group.cancel_scope.cancel()


async def failing_group_of_anyio(case: Case) -> None:
    """A task group of which another task fails."""
    with contextlib.suppress(ExceptionGroup):
        async with create_task_group() as group:
            group.start_soon(case.run)
            await case.until_then()
            raise ValueError("as asked")


async def failing_group(case: Case) -> None:
    """A task group of asyncio of which another task fails."""
    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(case.run())
            await case.until_then()
            raise ValueError("as asked")


async def times_out(case: Case) -> None:
    """A timeout of asyncio."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(case.patience_s) as timeout:
            await case.run_within(timeout)


async def times_out_within(case: Case) -> None:
    """A timeout of asyncio inside the block."""

    async def inside() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await for_ever()

    await case.block(inside)


async def times_out_in_a_scope(case: Case) -> None:
    """A timeout of asyncio in a scope that is cancelled at the same moment."""
    with move_on_after(case.patience_s) as scope, contextlib.suppress(TimeoutError):
        async with asyncio.timeout(case.patience_s) as timeout:
            await case.run_within(timeout, scope)


Shape = Callable[[Case], Awaitable[None]]

# Those in which a block that is never entered ends too, and the others.
PATIENT = (
    expires,
    fails,
    inner,
    outer,
    both,
    cancelled_before,
    group_of_anyio,
    failing_group_of_anyio,
    failing_group,
    times_out,
    times_out_in_a_scope,
)
OTHERS = (cancels_itself, cancels_itself_last, shielded_work, within, times_out_within)
ENDED_WHILE_WAITING: dict[str, Shape] = {shape.__name__: shape for shape in PATIENT}
SHAPES: dict[str, Shape] = ENDED_WHILE_WAITING | {shape.__name__: shape for shape in OTHERS}


# Runs that are cancelled from outside, while they hold


async def in_a_scope(case: Case) -> None:
    """A scope that nothing cancels."""
    with CancelScope():
        await case.run()


async def in_a_group_of_anyio(case: Case) -> None:
    """A task group of anyio that nothing cancels."""
    async with create_task_group() as group:
        group.start_soon(case.run)


async def in_a_group(case: Case) -> None:
    """A task group of asyncio."""
    async with asyncio.TaskGroup() as group:
        group.create_task(case.run())


async def as_it_expires(case: Case) -> None:
    """A scope that is cancelled by itself too while the permit is given back."""
    with CancelScope() as scope:

        async def inside() -> None:
            try:
                await for_ever()
            finally:
                scope.cancel()

        await case.block(inside)


CANCELLED: dict[str, Shape] = {
    shape.__name__: shape for shape in (in_a_scope, in_a_group_of_anyio, in_a_group, as_it_expires)
}
BY_HAND: dict[str, Shape] = {"when_told": when_told}


@workflow.defn(sandboxed=False)
class Scoped:
    """Holds in a scope, and then tells who holds and who waits."""

    def __init__(self) -> None:
        self._entered = False
        self._case: Case | None = None

    @workflow.run
    async def run(self, where: Where, way: str, shape: str, others: int) -> list[Any]:
        """Return whether it held, and in the end how many hold and wait; `others`: of whom it has not to be rid."""

        async def block(inside: Inside) -> None:
            async with WAYS[way](where):
                self._entered = case.entered = True
                await inside()

        self._case = case = Case(block, SOON_S if others else GRANTED_WITHIN_S)
        await (SHAPES | CANCELLED | BY_HAND)[shape](case)
        return [self._entered, *await _settled(where, others)]

    @workflow.update
    async def until_entered(self) -> None:
        """Return when it holds."""
        await workflow.wait_condition(lambda: self._entered)

    @workflow.update
    async def cancel(self) -> None:
        """Cancel the scope."""
        assert self._case is not None
        assert self._case.scope is not None
        self._case.scope.cancel()


async def _settled(where: Where, others: int) -> list[int]:
    until = workflow.now() + timedelta(seconds=SETTLED_WITHIN_S)
    while True:
        with contextlib.suppress(Unavailable):
            seen = await where.pool().inspect()
            if (seen.in_use, seen.waiting) == (others, 0) or workflow.now() > until:
                return [seen.in_use, seen.waiting]
        await asyncio.sleep(0.2)


@workflow.defn(sandboxed=False)
class Keeps:
    """Holds until it is told to go on."""

    def __init__(self) -> None:
        self._go = False
        self._held = False

    @workflow.run
    async def run(self, where: Where) -> None:
        """Hold."""
        async with where.pool().hold():
            self._held = True
            await workflow.wait_condition(lambda: self._go)

    @workflow.update
    async def until_held(self) -> None:
        """Return when it holds."""
        await workflow.wait_condition(lambda: self._held)

    @workflow.signal
    def proceed(self) -> None:
        """Go on."""
        self._go = True


@activity.defn(name="scoped-echo")
async def echo(item: int) -> int:
    """Return the item; a negative one takes longer than its scope lasts."""
    await asyncio.sleep(1.0 if item < 0 else 0)
    return item


@workflow.defn(sandboxed=False)
class ScopedSequence:
    """Hands items over in a scope, and then others."""

    @workflow.run
    async def run(self, resource: str, shape: str) -> list[int]:
        """Return what came of the others."""

        async def block(_: Inside) -> None:
            await sequence(resource, [-1, -1], echo, start_to_close_timeout=60)

        await SHAPES[shape](Case(block, SOON_S))
        return await sequence(resource, [1, 2], echo, start_to_close_timeout=60)


WORKFLOWS = [Keeps, Scoped, ScopedSequence]
ACTIVITIES = [echo, guarded]
