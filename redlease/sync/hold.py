"""A live handle on a permit, for threads."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, Self

import redlease
from redlease._core import limits
from redlease._core.hold import lease_lost, lease_of
from redlease._core.limits import Duration
from redlease.errors import LeaseLost, RedleaseError
from redlease.models import Permit

from .thread.block import Block, Exiting, Manager, drop
from .thread.bound import ProcessClient, thread_blocks

OnLost = Literal["exit", "raise", "signal"]
FORKED = "this process was forked from the one that holds it"


def checked_on_lost(on_lost: OnLost) -> OnLost:
    """Returns the value; raises ValueError for a wrong one."""
    if on_lost not in ("exit", "raise", "signal"):
        raise ValueError(f"on_lost must be 'exit', 'raise' or 'signal', not {on_lost!r}")
    return on_lost


class Hold(Manager):
    """A permit that this process holds: renewed in the background, with its loss detected.

    As a `with` block it releases the permit at the end. A thread cannot be cancelled, so a body goes on when the permit
    is lost. `lost`, `check()` and `wait_lost()` tell; and, unless it has `on_lost="signal"`, leaving the block raises
    `LeaseLost`. With `on_lost="raise"` the thread that entered the block also gets `LeaseLost` at its next call of
    redlease, once, save from calls that release or close.

    Any thread may use it. In a forked child it is lost, and the child does not release what the parent holds.

    Example:
        >>> with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     work(fence=hold.fence)
    """

    _was_raised = False
    _block: Block | None = None  # that which it is entered in, if no `with` statement keeps it

    def __init__(self, client: ProcessClient, twin: redlease.Hold, on_lost: OnLost) -> None:
        self._client = client
        self._background = client.background
        self._twin = twin
        self._on_lost = on_lost

    def __repr__(self) -> str:
        return f"<Hold of {self.resource!r} in the parent process>" if self._background.is_foreign else repr(self._twin)

    @property
    def resource(self) -> str:
        """The name of the resource."""
        return self._twin.resource

    @property
    def ticket(self) -> str:
        """The id of the request and of its permit."""
        return self._twin.ticket

    @property
    def fence(self) -> int:
        """The fencing token of the permit."""
        return self._twin.fence

    @property
    def lost(self) -> bool:
        """Whether the permit was held and no longer is; true from the end of its lease on, by the local clock."""
        return self._background.is_foreign or self._twin.lost

    @property
    def permit(self) -> Permit:
        """The permit, with the deadline of its last renewal."""
        return self._twin.permit

    def remaining(self) -> float:
        """Seconds until the lease ends unless it is renewed; 0.0 if it is lost, released or detached."""
        return 0.0 if self._background.is_foreign else self._twin.remaining()

    def check(self) -> None:
        """Raises `LeaseLost` if the permit is no longer held. Does no I/O."""
        thread_blocks.raise_loss()
        if self._background.is_foreign:
            raise self._loss()
        self._twin.check()

    def wait_lost(self, timeout: Duration | None = None) -> bool:
        """Waits until the permit is lost, then returns True; False if it is released or detached, or after `timeout`.

        Args:
            timeout: Seconds to wait; None waits forever.
        """
        timeout_s = None if timeout is None else limits.milliseconds("timeout", timeout) / 1000

        async def wait() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._twin.wait_lost()

        if not self._is_over():
            try:
                self._background.run(self._client, wait)
            except RedleaseError:
                if not self._is_over():  # else its client was closed meanwhile
                    raise
        return self.lost

    def release(self) -> bool:
        """Releases the permit; returns True if it was held until now. Idempotent, as `redlease.Hold.release`."""
        return not self._is_over() and self._released(self._twin.release) is True

    def downgrade(self) -> None:
        """Makes a writer of an `rwlock` a reader; as `redlease.Hold.downgrade`, with its errors."""
        self.check()
        self._client.call(self._twin.downgrade)

    def detach(self) -> Permit:
        """Stops renewing and returns the permit; as `redlease.Hold.detach`, with its errors."""

        async def detach() -> Permit:
            return self._twin.detach()

        self.check()
        return self._client.call(detach)

    # The block

    def __enter__(self) -> Self:
        """Raises `LeaseLost` if it was released or detached, or, unless `on_lost` is "signal", if it is lost."""
        lease = lease_of(self._twin)
        if lease.ended or (self._on_lost != "signal" and self.lost):
            raise self._loss()
        block = self._entering()
        try:
            block.begin(self._background, (self,))
            self._enter()
        except BaseException:
            self._failed(block)
            raise
        return self

    def _enter(self) -> None:
        if self._on_lost == "raise":
            thread_blocks.add(self)

    def _leave(self, block: Block, error: BaseException | None, exiting: Exiting) -> None:
        if not self._is_over():
            # With an error like KeyboardInterrupt the twin does not wait for the network.
            self._released(lambda: exiting(self._twin))
        block.end(self._background)
        self._left(error)

    def _left(self, error: BaseException | None) -> None:
        """Ends the block, whose permit is released: raises its loss, or notes it on the error of the body."""
        if self._on_lost == "raise":
            thread_blocks.discard(self)
        if self.lost and self._on_lost != "signal":
            loss = self._loss()
            if error is None or isinstance(error, GeneratorExit):
                raise loss from error
            if not isinstance(error, LeaseLost):
                error.add_note(f"redlease: {loss}")

    # Internals

    def _take_loss(self) -> LeaseLost | None:
        """Returns the error if it is lost and its thread has not been notified yet."""
        if self._was_raised or not self.lost:
            return None
        self._was_raised = True
        return self._loss()

    def _check_at_start(self) -> None:
        """Raises `LeaseLost` if it was lost before its thread got it, unless it is only to signal that."""
        if self._on_lost != "signal" and self.lost:
            raise self._loss()

    async def _give_up(self) -> None:
        """Gives the permit back; never waits for the network. For the loop's thread."""
        drop(self._twin)

    def _is_over(self) -> bool:
        """Whether there is nothing left to release here."""
        lease = lease_of(self._twin)
        return self._background.ended or lease.ended or (lease.lost and not lease.replaced)

    def _released(self, how: Callable[[], Any]) -> bool | None:
        """Has the loop release it; it is lost if the client is closed at the same time."""
        if self._background.is_own_thread:  # by the end of a generator that is collected there
            self._background.post(lambda: drop(self._twin))
            return None
        try:
            released: bool | None = self._background.run(self._client, how, must_finish=True)
        except RedleaseError:
            if not self._is_over():
                raise
            released = False
        return released

    def _loss(self) -> LeaseLost:
        if self._background.is_foreign:
            return lease_lost(self.resource, self.ticket, self.fence, FORKED, None)
        return lease_of(self._twin).loss()


class Unused(weakref.ref["HoldRequest"]):
    """Refers to a request that is not used yet, and warns of it if it goes.

    Used requests have no finalizer, which would swallow an exception that comes just then from another thread.
    """

    resource: str = ""


def warn_of(unused: Unused) -> None:
    """Warns of a request that nobody has used."""
    message = f"hold() of resource {unused.resource!r} was neither acquired nor entered: nothing was acquired"
    warnings.warn(message, RuntimeWarning, stacklevel=2)


class HoldRequest(Manager):
    """What `hold(...)` returns: enter it with `with`, or call `acquire()` to get a `Hold`."""

    _is_entered = False

    def __init__(self, client: ProcessClient, make: Callable[[], redlease.HoldRequest], on_lost: OnLost) -> None:
        self._on_lost = checked_on_lost(on_lost)
        self._client = client
        self._make = make
        twin = self._twin(make())
        self._resource = twin._resource
        self._made: tuple[redlease.Redlease, redlease.HoldRequest] | None = (client.twin, twin)
        self._unused: Unused | None = Unused(self, warn_of)
        self._unused.resource = self._resource

    def __repr__(self) -> str:
        used = "acquired" if self._unused is None else "neither acquired nor entered yet"
        return f"<hold() of {self._resource!r}, {'entered' if self._is_entered else used}>"

    def acquire(self) -> Hold:
        """Waits for the permit; returns its hold, which `hold.release()` ends. Raises what `redlease` says of `hold`.

        Each call is a request of its own. The permit is renewed until it is released, also if nobody keeps the hold.
        """
        self._unused = None
        return self._client.call(self._obtain, undo=Hold._give_up)

    async def _obtain(self) -> Hold:
        made, self._made = self._made, None  # it has a finalizer (see Unused), and goes in the loop's thread
        is_new = made is not None and made[0] is self._client.twin  # else it was used, or made before a fork
        twin = made[1] if made is not None and is_new else self._twin(self._make())
        hold = Hold(self._client, await twin, self._on_lost)
        hold._check_at_start()
        return hold

    @staticmethod
    def _twin(request: redlease.HoldRequest) -> redlease.HoldRequest:
        request._used = True  # it is this object that warns if nobody uses it
        return request

    def __enter__(self) -> Hold:
        return self._enter(self._entering())

    def _enter(self, block: Block) -> Hold:
        """Enters a block, of this request or of its pool."""
        if self._is_entered:
            raise RuntimeError("this hold() is entered already: call hold() again for another permit")
        self._unused, self._is_entered = None, True

        async def obtain() -> Hold:
            hold = await self._obtain()
            block.begin(hold._background, (hold,))
            return hold

        try:
            hold = self._client.call(obtain, undo=Hold._give_up)
            hold._enter()
        except BaseException:
            self._is_entered = False
            block.manager._failed(block)
            raise
        return hold

    def _leave(self, block: Block, error: BaseException | None, exiting: Exiting) -> None:
        self._is_entered = False
        block.holds[0]._leave(block, error, exiting)
