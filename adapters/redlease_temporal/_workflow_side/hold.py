"""A permit that a workflow run holds."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

from redlease._core.block_task import BlockTask
from redlease.models import Permit
from redlease_temporal._payloads.locks import PermitHeader
from redlease_temporal.errors import LeaseLost, lease_lost

from . import metrics
from .run import Run, current, pass_permit_header

T = TypeVar("T")
OnLost = Literal["cancel", "signal"]


class HoldResource(Protocol):
    """The semaphore of a hold."""

    async def end(self, permit: Permit) -> bool:
        """Releases the permit."""

    async def downgrade(self, permit: Permit) -> bool:
        """Gives back all but one unit of the permit; returns whether it is held."""

    async def resume(self, permit: Permit) -> Permit:
        """Takes over the permit for this run, which was reset; raises LeaseLost if it is not held any more."""


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Awaits work that must finish: neither a cancellation of the task nor the end of the run interrupts it.

    A cancellation ends the wait alone. Waiting on would end in a task that never yields: a cancelled scope of anyio
    cancels again whatever its task waits for.
    """
    return await asyncio.shield(current().background(work))


async def until(condition: Callable[[], bool], timeout_s: float | None) -> None:
    """Waits for a condition; raises TimeoutError when that takes longer.

    `workflow.wait_condition` with a timeout swallows a cancellation that arrives together with the condition.
    """
    async with asyncio.timeout(timeout_s):
        await workflow.wait_condition(condition)


class Hold:
    """A permit that this run holds, renewed while the run is open without an event in its history.

    As `async with` block it releases the permit at the end. If the permit is lost meanwhile, the task that entered the
    block is cancelled and the block raises `LeaseLost` (`on_lost="cancel"`), or only `lost` is set
    (`on_lost="signal"`). Activities started in the block do not run once the permit is lost. `lost` and `check()`
    answer from what the run has been notified of; `await pool.is_held(permit)` asks Redis.
    """

    def __init__(
        self,
        run: Run,
        permit: Permit,
        pool: HoldResource,
        on_lost: OnLost,
        *,
        resource_workflow: str | None = "",
    ) -> None:
        self.permit = permit
        self.resource_workflow = resource_workflow
        self.lost = False
        self._run = run
        self._pool = pool
        self._on_lost = on_lost
        self._reason = ""
        self._replaced = False
        self._ended = False
        self._began = workflow.now()
        self._block = BlockTask()
        run.holds.append(self)
        pass_permit_header(self)

    @property
    def fence(self) -> int:
        """The fencing token."""
        return self.permit.fence

    @property
    def permit_header(self) -> PermitHeader | None:
        """The guard for an activity started now; None once the hold has ended, or if no activity can check it."""
        return None if self._ended or self.resource_workflow is None else self._make_permit_header()

    def check(self) -> None:
        """Raises `LeaseLost` if the run knows that the permit is no longer held."""
        if self._ended:
            raise self._loss("it was released or detached here")
        if self.lost:
            raise self._loss(self._reason)

    async def wait_lost(self) -> bool:
        """Waits; returns True when the permit is lost, False if it was released or detached first."""
        await workflow.wait_condition(lambda: self.lost or self._ended)
        return self.lost

    async def release(self) -> bool:
        """Releases the permit; returns whether it was still held. Survives cancellation; may be called again."""
        releasing = self._begin_release()
        return releasing is not None and await asyncio.shield(releasing) and not self.lost

    def _begin_release(self) -> asyncio.Task[bool] | None:
        """Releases the permit in the background; None if there is nothing to release.

        A lost one is given back only if a newer request replaced it, and waits until its grace has ended otherwise.
        """
        if self._ended or (self.lost and not self._replaced):
            return None
        self._replaced = False
        if not self.lost:
            self._end()
            self._measure()
        return self._run.releasing(self.permit.resource, self._pool.end(self.permit))

    async def confirm(self) -> None:
        """Asks, after a reset, whether the run still has the permit: it may have been released since, or be gone.

        The answer comes in the workflow task that begins again. Until then no activity runs under the permit if it is
        lost, since each one asks before it runs.

        Raises:
            Unavailable: The backend was not reached in time.
        """
        if self._has_ended() or self.lost:
            return
        try:
            resumed = await self._pool.resume(self.permit)
        except LeaseLost:
            self.lose("the run was reset, and had released or lost the permit before")
            return
        if self._has_ended():  # its release may have come before this
            await self._pool.end(resumed)
        elif resumed.weight < self.permit.weight:
            self.lose("its run was reset after a downgrade", replaced=True)

    async def downgrade(self) -> None:
        """Makes a writer of an `rwlock` a reader: other readers may enter from then on, and no writer was in between.

        The permit keeps its fence. May be repeated; a hold of weight 1 stays as it is. If this run is reset after a
        downgrade, it loses the permit: the new run may continue from where it was a writer.

        Raises:
            LeaseLost: The permit is no longer held.
            Unavailable: The backend was not reached in time. The permit may be a reader's by then.
        """
        self.check()
        if not await self._pool.downgrade(self.permit):
            raise self._loss("it was gone before it could be downgraded")
        self.permit = dataclasses.replace(self.permit, weight=1)

    def detach(self) -> Permit:
        """Keeps the permit past the block, for the run that continues this one as new: `await pool.adopt(permit)`.

        It is renewed while this run is open, and after `continue_as_new` for the plugin's `adopt_window`.

        Raises:
            LeaseLost: It is no longer held.
        """
        self.check()
        self._end()
        return self.permit

    def lose(self, reason: str, *, replaced: bool = False) -> None:
        """Marks the permit as lost, and cancels the body if `on_lost` says so; `replaced`: as in `locks.LostSignal`."""
        if self.lost or self._ended:
            return
        self._replaced = replaced
        self._note_loss(reason)
        if self._on_lost == "cancel":
            self._block.cancel(reason)

    def _note_loss(self, reason: str) -> None:
        self.lost, self._reason = True, reason
        metrics.lost(self.permit.resource, self._run.resource_label)
        self._measure()

    def _measure(self) -> None:
        metrics.held(self.permit.resource, self._run.resource_label, workflow.now() - self._began)

    def _has_ended(self) -> bool:
        return self._ended

    def _end(self) -> None:
        self._ended = True
        self._run.holds.remove(self)

    def _loss(self, reason: str) -> LeaseLost:
        return lease_lost(self._make_permit_header(), reason)

    def _make_permit_header(self) -> PermitHeader:
        return PermitHeader(self.permit.resource, self.permit.ticket, self.permit.fence, self.resource_workflow or "")

    # The block

    async def __aenter__(self) -> Self:
        self.enter()
        return self

    def enter(self) -> None:
        """Makes the current task the one that a loss cancels."""
        self._block.enter(asyncio.current_task())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):
            return  # eviction: the garbage collector closes the run, in any thread and outside its event loop
        if not self._ended and self._says_lost(error):
            self._note_loss("an activity that was begun under it was not let run")
        cancelled_here = self._block.leave() and error is not None and is_cancelled_exception(error)
        was_lost = self.lost and not self._ended
        try:
            if error is None:
                await self.release()
            elif _ends_the_body(error):
                # Not awaited: a command that is under way when the workflow task fails is dropped with the task.
                self._begin_release()
        finally:
            if was_lost:
                self._end()
        if was_lost and (self._on_lost == "cancel" or self._says_lost(error)):
            self._raise_loss(error, cancelled_here=cancelled_here)

    def _says_lost(self, error: BaseException | None) -> bool:
        """Whether the body ended because an activity was refused for lack of this permit."""
        cause = error.cause if isinstance(error, ActivityError) else None
        return (
            isinstance(cause, ApplicationError)
            and cause.type == LeaseLost.__name__
            and tuple(cause.details) == (self.permit.resource, self.permit.ticket)
        )

    def _raise_loss(self, error: BaseException | None, *, cancelled_here: bool) -> None:
        loss = self._loss(self._reason)
        if error is None or cancelled_here or self._says_lost(error):
            raise loss from error
        if not isinstance(error, LeaseLost):
            error.add_note(f"redlease: {loss}")


def _ends_the_body(error: BaseException | None) -> bool:
    """Whether workflow code continues from here; in an evicted run it does not."""
    return error is None or isinstance(error, Exception | asyncio.CancelledError | workflow.ContinueAsNewError)


class HoldRequest:
    """What `hold(...)` and `adopt(...)` return: `await` it for a `Hold`, or enter it as a block."""

    def __init__(self, acquire: Callable[[], Awaitable[Hold]]) -> None:
        self._acquire = acquire
        self._hold: Hold | None = None

    def __await__(self) -> Generator[Any, None, Hold]:
        return self._acquire().__await__()

    async def __aenter__(self) -> Hold:
        if self._hold is not None:
            raise RuntimeError("this is entered already: call hold() again for another permit")
        self._hold = await self._acquire()
        self._hold.enter()
        return self._hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            await hold.__aexit__(kind, error, traceback)
