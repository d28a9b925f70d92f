"""A live handle on a permit in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self

from redlease._core.protocol import scripts
from redlease._core.protocol.replies import Granted, Message
from redlease.errors import LeaseLost, LossReason, RedleaseError
from redlease.events import Detached
from redlease.models import Permit

from . import clock
from .log import about
from .options import DEFAULT_HOLD_OPTIONS, AcquireSpec, HoldOptions, OnLost
from .session.acquire_errors import refused_without_waiting
from .session.leases import Lease, Released
from .session.queueing import PendingAcquire

logger = logging.getLogger("redlease")


def lease_lost(resource: str, ticket: str, fence: int, why: str, reason: LossReason | None = "gone") -> LeaseLost:
    """Returns the error for a permit that is no longer held."""
    message = (
        f"resource {resource!r}: permit {ticket!r} (fence {fence}) is no longer held: {why}. "
        "Stop the work that needs it, or acquire again"
    )
    return LeaseLost(message, resource=resource, ticket=ticket, reason=reason)


class HeldLease(Lease):
    """The lease behind a `Hold`, and what its loss causes. For the loop's thread only, except `is_lost`."""

    on_lost: OnLost = "cancel"
    over: asyncio.Event | None = None  # set when it ends or is lost

    def start(
        self,
        granted: Granted,
        deadline_ms: float,
        hold_options: HoldOptions,
        now_ms: float,
        *,
        from_queue: bool = False,
        messages: Sequence[Message] = (),
    ) -> None:
        """Starts to renew a grant that is valid until `deadline_ms`; `messages`: messages about it received since."""
        if hold_options is not DEFAULT_HOLD_OPTIONS:
            self.on_lost = hold_options.on_lost
            self.renew_until_ms = None if hold_options.max_hold_ms is None else now_ms + hold_options.max_hold_ms
        self.fence, self.granted_at_ms, self.expires_at_ms, self.capacity = granted[:4]
        self.deadline_ms, self.begun_ms = deadline_ms, now_ms
        if from_queue:
            self._first = True
        self.manager.keep(self, now_ms)
        for message in messages:
            self.on_message(message)

    def end(self) -> None:
        """Stops renewing; the caller decides what happens to the permit."""
        self.ended = True
        self.manager.forget(self)
        self._finish()

    def on_loss(self) -> None:
        self._finish()
        if self.on_lost == "cancel":
            self.cancel(self.why_lost)

    def make_room(self, now_ms: float) -> None:
        """Lets the request begin that has replaced it, as its body has ended."""
        if self.replaced:
            self.replaced = False
            self.manager.release_request(self, now_ms)

    def _finish(self) -> None:
        self.requester = None
        self.forget_ticket()
        if self.over is not None:
            self.over.set()

    def release(self, now_ms: float) -> asyncio.Future[Released]:
        """Releases the permit; the future gets the outcome."""
        future: asyncio.Future[Released] = asyncio.get_running_loop().create_future()
        self.manager.release(self, future, now_ms)  # sent first: the server works meanwhile
        self.end()
        return future

    async def undo_cancellation(self, error: BaseException | None) -> bool:
        """Undoes the cancellation that a loss requested; returns True if `error` is that cancellation and no other."""
        only_ours = self.leave()
        if only_ours and not isinstance(error, asyncio.CancelledError):
            # The body ended before asyncio delivered the cancellation; let it be delivered here.
            before = _cancellations()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
            if _cancellations() > before:
                raise asyncio.CancelledError  # another cancellation arrived meanwhile
        return only_ours and isinstance(error, asyncio.CancelledError)

    def loss(self) -> LeaseLost:
        """Returns the error that says why the permit is no longer held."""
        name, ticket = self.request.resource.name, self.request.ticket
        if self.ended and not self.lost:
            return lease_lost(name, ticket, self.fence, "it was released or detached here", None)
        return lease_lost(name, ticket, self.fence, self.why(), self.loss_reason or self.reason_by_clock)


class Hold:
    """A permit that this process holds: renewed in the background, with its loss detected.

    As an `async with` block it releases the permit at the end. If the permit is lost meanwhile, the task that entered
    the block is cancelled and the block raises `LeaseLost` (`on_lost="cancel"`), or only `lost` becomes true
    (`on_lost="signal"`).

    `check()`, `lost` and `remaining()` compare the lease with the clock: they do no I/O, need no event loop, and may be
    called in any thread, also while the event loop is blocked. Call everything else in the loop's thread.

    Example:
        >>> async with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     await work(fence=hold.fence)
    """

    def __init__(self, lease: HeldLease, metadata: dict[str, str]) -> None:
        self._lease = lease
        self._metadata = metadata

    def __repr__(self) -> str:
        lease = self._lease
        left = "lost" if lease.is_lost() else "given up" if lease.ended else f"{self.remaining():.1f} s left"
        return f"<Hold of {self.resource!r}: ticket {self.ticket!r}, fence {self.fence}, {left}>"

    @property
    def resource(self) -> str:
        """The name of the resource."""
        return self._lease.request.resource.name

    @property
    def ticket(self) -> str:
        """The id of the request and of its permit."""
        return self._lease.request.ticket

    @property
    def fence(self) -> int:
        """The fencing token of the permit."""
        return self._lease.fence

    @property
    def lost(self) -> bool:
        """Whether the permit was held and no longer is; true from the end of its lease on, by the local clock."""
        return self._lease.is_lost()

    @property
    def permit(self) -> Permit:
        """The permit, with the deadline of its last renewal."""
        lease, terms = self._lease, self._lease.request.terms
        return Permit(
            *(self.resource, self.ticket, lease.fence, lease.request.weight, lease.capacity, terms.lease_ms),
            *(lease.granted_at_ms, lease.expires_at_ms, terms.owner, dict(self._metadata)),
            key=lease.request.key or None,
        )

    def remaining(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 if it is lost, released or detached."""
        lease = self._lease
        if lease.lost or lease.ended:
            return 0.0
        return max(0.0, (lease.deadline_ms - clock.now_ms()) / 1000)

    def check(self) -> None:
        """Raises `LeaseLost` if the permit is no longer held. Does no I/O and no await; safe in any thread."""
        if self._lease.ended or self._lease.is_lost():
            raise self._lease.loss()

    async def wait_lost(self) -> bool:
        """Waits until the permit is lost, then returns True; False if it is released or detached first."""
        lease = self._lease
        if not lease.ended and not lease.is_lost():
            lease.over = lease.over or asyncio.Event()
            await lease.over.wait()
        return lease.is_lost()

    async def release(self) -> bool:
        """Releases the permit; returns True if it was held until now. Idempotent.

        If the server is unreachable, returns False soon and retries in the background until the lease has expired.
        """
        now_ms = clock.now_ms()
        if self._lease.ended or not self._lease.check_deadline(now_ms):
            self._lease.make_room(now_ms)
            return False
        return self._released(await self._lease.release(now_ms))

    def _released(self, released: Released) -> bool:
        if released is None or isinstance(released, RedleaseError):
            logger.warning(
                "resource %r: permit %r could not be released yet; redlease will retry until its lease expires",
                *(self.resource, self.ticket),
                extra=about(self.resource, self.ticket, self.fence),
            )
            return False
        if not released:
            self._lease.mark_lost("the server no longer had it when it was released", "gone")
            self._lease.report_loss("gone")
        return released

    async def downgrade(self) -> None:
        """Makes a writer of an `rwlock` a reader: other readers may enter from then on, and no writer was in between.

        The permit keeps its fence and its lease. Idempotent; a hold of weight 1 stays as it is.

        Raises:
            LeaseLost: The permit is no longer held.
            Unavailable: The server was not reached. The permit may be a reader's by then; the call may be repeated.
        """
        self.check()
        lease = self._lease
        request = lease.request
        answer = await lease.manager.connection.call(
            *(request.resource, scripts.REDUCE, request.ticket, lease.fence, 1, request.terms.idle_ttl_ms),
            ticket=request.ticket,
        )
        held, more = answer.values
        if not held:
            raise lease_lost(self.resource, request.ticket, lease.fence, "the server no longer had it to downgrade it")
        lease.request = request._replace(weight=1)
        if more:
            lease.manager.follow_up(request.resource, request.terms)

    def detach(self) -> Permit:
        """Stops renewing and returns the permit. Its lease keeps running; any process may renew, adopt or release it.

        Raises:
            LeaseLost: The permit is no longer held.
        """
        self.check()
        lease = self._lease
        lease.fill_lease()
        permit = self.permit
        lease.end()
        if (emit := lease.manager.emit) is not None:
            held = (clock.now_ms() - lease.begun_ms) / 1000
            emit(Detached(*lease.request.subject(), lease.fence, held, lease.request.key or None))
        return permit

    # The block

    async def __aenter__(self) -> Self:
        """Raises `LeaseLost` if it was released or detached, or, with `on_lost="cancel"`, if it is lost."""
        lease = self._lease
        if lease.ended or (lease.on_lost == "cancel" and lease.is_lost()):
            raise lease.loss()
        lease.enter(asyncio.current_task())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        lease = self._lease
        cancelled_here = lease.cancelled and await lease.undo_cancellation(error)
        lease.task = None
        if not lease.ended and lease.check_deadline(now_ms := clock.now_ms()):
            if error is None or isinstance(error, Exception):
                self._released(await lease.release(now_ms))
            else:  # cancelled, or the process is exiting: never wait for the network
                lease.end()
                lease.manager.release(lease)
        if lease.replaced:
            lease.make_room(clock.now_ms())
        if lease.lost and lease.on_lost == "cancel":
            loss = lease.loss()
            # GeneratorExit: an async generator was closed at a `yield` in the block; only its closer can get the error.
            if error is None or cancelled_here or isinstance(error, GeneratorExit):
                raise loss from error
            if not isinstance(error, LeaseLost):
                error.add_note(f"redlease: {loss}")


def _cancellations() -> int:
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def lease_of(hold: Hold) -> HeldLease:
    """Returns the lease behind a hold. Internal: for adapters that manage holds, not for users."""
    return hold._lease


# The finished request; its grant, None if the request may not wait and no capacity was free; a callback that frees its
# ticket for reuse in this client; and the local time in ms.
Obtained = tuple[PendingAcquire, Granted | None, Callable[[], None], float]


class HoldRequest:
    """What `hold(...)` and `adopt(...)` return: `await` it to get a `Hold`, or enter it with `async with`."""

    _made_by = "hold()"
    _used = True  # until it is made: an interrupted constructor leaves nothing to warn of
    _entered = False
    _hold: Hold | None = None

    def __init__(
        self,
        resource: str,
        obtain: Callable[[AcquireSpec], Coroutine[Any, Any, Obtained]],
        spec: AcquireSpec,
        hold_options: HoldOptions,
    ) -> None:
        self._resource = resource
        self._obtain = obtain
        self._spec = spec
        self._hold_options = hold_options
        self._used = False

    def __repr__(self) -> str:
        state = "entered" if self._entered else "awaited" if self._used else "neither awaited nor entered yet"
        return f"<{self._made_by} of {self._resource!r}, {state}>"

    def __del__(self) -> None:
        if not self._used:
            message = (
                f"{self._made_by} of resource {self._resource!r} was neither awaited nor entered: nothing was acquired"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2, source=self)

    def __await__(self) -> Generator[object, None, Hold]:
        self._used = True
        return self._acquire().__await__()

    async def _acquire(self) -> Hold:
        return self._begun(*await self._obtain(self._spec))

    def _begun(
        self, waiting: PendingAcquire, granted: Granted | None, forget_ticket: Callable[[], None], now_ms: float
    ) -> Hold:
        if granted is None:
            forget_ticket()
            raise refused_without_waiting(
                waiting.request.resource.name, self._spec.ticket, refuses=self._spec.full.refuses
            )
        lease = HeldLease(waiting.session.manager, waiting.request, forget_ticket)
        lease.may_be_duplicated, lease.requester = waiting.may_be_duplicated, waiting.task
        lease.start(
            *(granted, waiting.deadline_ms, self._hold_options, now_ms),
            from_queue=waiting.is_from_queue,
            messages=waiting.buffered_messages,
        )
        if lease.lost and lease.on_lost == "cancel":
            lease.make_room(now_ms)
            raise lease.loss()
        return Hold(lease, self._spec.metadata)

    async def __aenter__(self) -> Hold:
        if self._entered:
            raise RuntimeError(f"this {self._made_by} is entered already: call hold() again for another permit")
        self._used = self._entered = True
        try:
            hold = self._hold = self._begun(*await self._obtain(self._spec))
        except BaseException:
            self._entered = False
            raise
        hold._lease.enter(hold._lease.requester)
        return hold

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> Coroutine[Any, Any, None]:
        hold, self._hold, self._entered = self._hold, None, False
        if hold is None:
            raise RuntimeError(f"this {self._made_by} is not entered")
        return hold.__aexit__(kind, error, traceback)


def is_abandoned(request: HoldRequest) -> bool:
    """Whether the task that entered the block has ended without leaving it."""
    task = None if request._hold is None else request._hold._lease.task
    return task is not None and task.done()


class Blocks:
    """The open `async with pool:` blocks of one primitive, to find the one that is being left."""

    def __init__(self) -> None:
        self._entered: list[tuple[asyncio.Task[Any] | None, HoldRequest]] = []

    def entered(self, request: HoldRequest) -> None:
        """Records that the current task entered a block."""
        self._entered.append((asyncio.current_task(), request))

    def left(self, pool: object) -> HoldRequest:
        """Returns the block that is being left: the current task's last one, or else one whose task has ended."""
        current = asyncio.current_task()
        own = [entry for entry in self._entered if entry[0] is current]
        over = [entry for entry in self._entered if is_abandoned(entry[1])]
        chosen = own or over or (self._entered if len(self._entered) == 1 else [])
        if not chosen:
            raise RuntimeError(f"{pool!r} is left by a task that did not enter it: use `async with pool.hold():`")
        self._entered.remove(chosen[-1])
        return chosen[-1][1]
