"""A live handle on a permit in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self

from . import clock, wire
from .errors import LeaseLost, RedleaseError
from .keeper import Keeper, Lease, Released
from .models import Permit
from .waiting import Waiting, not_queued
from .wish import USUAL_FATE, Fate, OnLost, Wish

logger = logging.getLogger("redlease")


def lease_lost(resource: str, ticket: str, fence: int, why: str) -> LeaseLost:
    """The error for a permit that is no longer held."""
    message = (
        f"resource {resource!r}: permit {ticket!r} (fence {fence}) is no longer held: {why}. "
        "Stop the work that needs it, or acquire again"
    )
    return LeaseLost(message, resource=resource, ticket=ticket)


class Hold(Lease):
    """A permit that is held here: renewed in the background, and known to be lost when it is.

    As `async with` block it releases the permit at the end. If the permit is lost meanwhile, the task that entered the
    block is cancelled and `LeaseLost` is raised from the block (`on_lost="cancel"`), or nothing but `lost` tells of it
    (`on_lost="signal"`).

    Attributes:
        fence: The fencing token of the permit.
        lost: Whether it was held and is so no longer.

    Example:
        >>> async with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     await work(fence=hold.fence)
    """

    on_lost: OnLost = "cancel"
    _cancelling = 0
    _cancelled = False
    _over: asyncio.Event | None = None

    def __init__(
        self,
        keeper: Keeper,
        ask: wire.Ask,
        metadata: dict[str, str],
        forget_ticket: Callable[[], None],
    ) -> None:
        super().__init__(keeper, ask)
        self._metadata = metadata
        self._forget_ticket = forget_ticket

    def start(
        self,
        granted: wire.Granted,
        deadline_ms: float,
        fate: Fate,
        *,
        handed_over: bool = False,
        told: Sequence[wire.Message] = (),
    ) -> None:
        """Keeps what was granted until then, from now on; `told`: what was said of it since.

        Raises:
            LeaseLost: It is lost already, and that is to end its body.
        """
        now_ms = clock.now_ms()
        if fate is not USUAL_FATE:
            self.on_lost = fate.on_lost
            self.renew_until_ms = None if fate.max_hold_ms is None else now_ms + fate.max_hold_ms
        self.begin(granted, deadline_ms, now_ms, handed_over=handed_over)
        for message in told:
            self.told(message)
        if self.lost and self.on_lost == "cancel":
            self.check()

    @property
    def permit(self) -> Permit:
        """The permit as it is known now."""
        return Permit(
            *(self.ask.resource.name, self.ask.ticket, self.fence, self.ask.weight, self.capacity),
            *(
                self.ask.terms.lease_ms,
                self.granted_at_ms,
                self.expires_at_ms,
                self.ask.terms.owner,
                dict(self._metadata),
            ),
        )

    def remaining(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 when it is lost or given up."""
        if self.lost or self.ended:
            return 0.0
        return max(0.0, (self.deadline_ms - clock.now_ms()) / 1000)

    def check(self) -> None:
        """Raises `LeaseLost` if the permit is no longer held. Does no I/O and does not await."""
        if self.ended:
            raise self._loss("it was released or detached here")
        if not self.check_deadline(clock.now_ms()):
            raise self._loss(self.why_lost)

    async def wait_lost(self) -> bool:
        """Returns True when the permit is lost, False when it was released or detached before that."""
        if not self.lost and not self.ended:
            self._over = self._over or asyncio.Event()
            await self._over.wait()
        return self.lost

    async def release(self) -> bool:
        """Gives the permit back; whether it was held until now. May be called again.

        With the server out of reach it returns False soon, and goes on trying in the background while the lease lasts.
        """
        if self.lost or self.ended:
            return False
        return self._released(await self._give_back())

    def _give_back(self) -> asyncio.Future[Released]:
        future: asyncio.Future[Released] = asyncio.get_running_loop().create_future()
        self.keeper.give_back(self, future)  # sent first, so that the server works while the rest is done here
        self.end()
        return future

    def _released(self, released: Released) -> bool:
        if released is None or isinstance(released, RedleaseError):
            self._log_pending()
            return False
        if not released:
            self.lost, self.why_lost = True, "the server no longer had it when it was released"
        return released

    def detach(self) -> Permit:
        """Stops renewing and returns the permit: its lease runs on, and who has it may renew, adopt or release it.

        Raises:
            LeaseLost: It is no longer held.
        """
        self.check()
        self.fill_lease()
        permit = self.permit
        self.end()
        return permit

    def end(self) -> None:
        super().end()
        self._finish()

    def on_loss(self) -> None:
        self._finish()
        task = self.task
        if self.on_lost == "cancel" and task is not None and not task.done():
            self._cancelled = True
            task.cancel(f"redlease: {self.why_lost}")

    def _finish(self) -> None:
        self._forget_ticket()
        if self._over is not None:
            self._over.set()

    def _loss(self, why: str) -> LeaseLost:
        return lease_lost(self.ask.resource.name, self.ask.ticket, self.fence, why)

    def _log_pending(self) -> None:
        logger.warning(
            "resource %r: permit %r could not be released yet; that goes on in the background while its lease lasts",
            *(self.ask.resource.name, self.ask.ticket),
        )

    # The block

    async def __aenter__(self) -> Self:
        self.enter()
        return self

    def enter(self) -> None:
        """This task runs the body: it is the one to cancel."""
        self.task = asyncio.current_task()
        self._cancelling = self.task.cancelling() if self.task is not None else 0

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self.task = self.task, None
        cancelled_here = self._cancelled and await self._take_back_cancel(task, error)
        if not self.lost and not self.ended:
            if error is None or isinstance(error, Exception):
                self._released(await self._give_back())
            else:  # cancelled, or the process is to end: never waits for the network
                self.end()
                self.keeper.give_back(self)
        if self.lost and self.on_lost == "cancel":
            self._raise_loss(error, cancelled_here=cancelled_here)

    async def _take_back_cancel(self, task: asyncio.Task[object] | None, error: BaseException | None) -> bool:
        """Undoes the cancellation that a loss has asked for; whether the error that ends the body is just that one."""
        current = asyncio.current_task()
        if current is None or current is not task:
            return False
        self._cancelled = False
        only_ours = current.uncancel() <= self._cancelling
        if only_ours and not isinstance(error, asyncio.CancelledError):
            # The body ended before the cancellation reached it; it is still to be delivered, here.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            if current.cancelling() > self._cancelling:
                raise asyncio.CancelledError  # somebody else's came just then
        return only_ours and isinstance(error, asyncio.CancelledError)

    def _raise_loss(self, error: BaseException | None, *, cancelled_here: bool) -> None:
        loss = self._loss(self.why_lost)
        if error is None or cancelled_here:
            raise loss from error
        if not isinstance(error, LeaseLost):
            error.add_note(f"redlease: {loss}")


# The request that came to its end; what it was granted, None where it was not to queue and had to; and what ends the
# use of its ticket in this client.
Obtained = tuple[Waiting, wire.Granted | None, Callable[[], None]]


class HoldRequest:
    """What `hold(...)` returns: `await` it for a `Hold`, or enter it as a block."""

    _entered = False
    _hold: Hold | None = None

    def __init__(self, obtain: Callable[[Wish], Coroutine[Any, Any, Obtained]], wish: Wish, fate: Fate) -> None:
        self._obtain = obtain
        self._wish = wish
        self._fate = fate

    def __await__(self) -> Generator[object, None, Hold]:
        return self._acquire().__await__()

    async def _acquire(self) -> Hold:
        return self._begun(*await self._obtain(self._wish))

    def _begun(self, waiting: Waiting, granted: wire.Granted | None, forget_ticket: Callable[[], None]) -> Hold:
        if granted is None:
            forget_ticket()
            raise not_queued(waiting.ask.resource.name, self._wish.ticket)
        hold = Hold(waiting.room.keeper, waiting.ask, self._wish.metadata, forget_ticket)
        hold.unsure = waiting.unsure
        hold.start(granted, waiting.deadline_ms, self._fate, handed_over=waiting.is_handed_over, told=waiting.early)
        return hold

    async def __aenter__(self) -> Hold:
        if self._entered:
            raise RuntimeError("this hold() is entered already: call hold() again for another permit")
        self._entered = True
        try:
            hold = self._hold = self._begun(*await self._obtain(self._wish))
        except BaseException:
            self._entered = False
            raise
        hold.enter()
        return hold

    @property
    def task_is_over(self) -> bool:
        """Whether the task that entered the block has ended without leaving it."""
        return self._hold is not None and self._hold.task is not None and self._hold.task.done()

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        hold, self._hold, self._entered = self._hold, None, False
        if hold is None:
            raise RuntimeError("this hold() is not entered")
        return hold.__aexit__(kind, error, traceback)
