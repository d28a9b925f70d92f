"""The block of a `with` statement, whose permits are released with it, at whatever step an exception interrupts it.

An exception that a signal handler raises, or that another thread has this one raise, may come before the first step of
`__exit__`, which then does nothing. So what a `with` statement keeps to leave its block is an object of its own, and
nothing else refers to it: no variable of the program, and no frame of a traceback. When it goes, so do the permits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from threading import local
from types import TracebackType
from typing import Any, Protocol, overload

import redlease
from redlease._core import clock
from redlease._core.hold import lease_of

Leave = Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]
Exiting = Callable[[Any], Coroutine[Any, Any, object]]  # calls `__aexit__` of the asyncio twin


class Loop(Protocol):
    """The background thread, as far as it is needed here."""

    posted: deque[Callable[[], object]]
    gone: dict[int, object]

    def wake(self, _: object) -> None:
        """Has the loop's thread do what is posted."""


class Held(Protocol):
    """A blocking hold, as far as it is needed here."""

    _twin: redlease.Hold
    _block: Block | None

    def _leave(self, block: Block, error: BaseException | None, exiting: Exiting) -> None:
        """Leaves its block."""


def _nothing() -> None:
    return None


def drop(twin: redlease.Hold) -> None:
    """Gives a permit back, if it is still held; never waits for the network. For the loop's thread."""
    lease = lease_of(twin)
    if not lease.ended and not lease.lost:
        lease.end()
        lease.manager.release(lease)
    lease.make_room(clock.now_ms())


class Block:
    """One block of one thread.

    Attributes:
        manager: What is entered.
        holds: What it holds, once it is entered.
        leave: Refers to what leaves it, as long as that is there.
        kept: What leaves it, if no `with` statement keeps that.
    """

    __slots__ = ("_gone", "holds", "kept", "leave", "manager")

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.holds: tuple[Held, ...] = ()
        self.leave: Callable[[], Leave | None] = _nothing
        self.kept: Leave | None = None
        self._gone: Gone | None = None

    def begin(self, loop: Loop, holds: tuple[Held, ...]) -> None:
        """From here on the permits are released when what leaves the block goes, unless it is left before."""
        leave = self.leave()
        if leave is None:  # its thread is interrupted, and gives back what it gets
            return
        self.holds = holds
        # The callback that is made last is called first. It is a function of C, which no other exception interrupts; if
        # one interrupts the wake, the next call wakes the loop.
        twins = (holds[0]._twin,) if len(holds) == 1 else tuple([hold._twin for hold in holds])
        wakes = weakref.ref(leave, loop.wake)
        gone = Gone(leave, loop.posted.append)
        gone.wakes, gone.kept_in, gone.twins = wakes, loop.gone, twins
        self._gone = gone
        loop.gone[id(gone)] = gone
        if self.kept is not None:
            for hold in holds:
                hold._block = self

    def end(self, loop: Loop) -> None:
        """Ends it, as its permits are released."""
        loop.gone.pop(id(self._gone), None)
        self._gone = None
        if self.kept is not None:
            self.kept = None
            for hold in self.holds:
                hold._block = None


class Gone(weakref.ref[Leave]):
    """Refers to what leaves a block. When that is gone, the loop's thread calls this, which releases the permits."""

    __slots__ = ("kept_in", "twins", "wakes")
    twins: tuple[redlease.Hold, ...]
    wakes: weakref.ref[Leave]
    kept_in: dict[int, object]

    def __call__(self) -> None:
        for twin in self.twins:
            drop(twin)
        self.kept_in.pop(id(self), None)


class LookedUp(local):
    """What the current thread has looked up last to leave a block, as long as that is there."""

    leave: Callable[[], Any] = staticmethod(_nothing)


looked_up = LookedUp()


class Exit:
    """The attribute `__exit__`, which each `with` statement looks up before it enters: each time another object."""

    @overload
    def __get__(self, manager: None, owner: object) -> Exit: ...
    @overload
    def __get__(self, manager: Manager, owner: object) -> Leave: ...
    def __get__(self, manager: Manager | None, owner: object) -> Exit | Leave:
        if manager is None:
            return self
        block = Block(manager)
        leave = partial(_leave, block)
        looked_up.leave = block.leave = weakref.ref(leave)
        return leave

    def __call__(
        self,
        manager: Manager,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leaves the block that was entered last: `ExitStack` looks this up on the class."""
        manager._leave_kept(kind, error, traceback)


def _leave(
    block: Block, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
) -> None:
    if block.holds:
        block.manager._leave(block, error, lambda twin: twin.__aexit__(kind, error, traceback))
    else:  # a call of `__exit__`, and not the end of a block
        block.manager._leave_kept(kind, error, traceback)


class Manager:
    """What a `with` statement enters, and what leaves the blocks that were entered otherwise, as by an `ExitStack`."""

    __exit__ = Exit()

    def _entering(self) -> Block:
        """Returns the block that is being entered."""
        leave: Any = looked_up.leave()
        looked_up.leave = _nothing
        if leave is not None and leave.args[0].manager is self:
            looked_up_block: Block = leave.args[0]
            return looked_up_block
        block = Block(self)
        block.kept = partial(_leave, block)
        block.leave = weakref.ref(block.kept)
        self._kept_here.append(block.kept)
        return block

    @property
    def _kept_here(self) -> list[Leave]:
        """What leaves the blocks that no `with` statement keeps."""
        kept: list[Leave] = self.__dict__.setdefault("_kept", [])
        return kept

    def _failed(self, block: Block) -> None:
        """Keeps nothing of a block that was not entered."""
        if block.kept is not None:
            self._kept_here.remove(block.kept)
            block.kept = None

    def _leave_kept(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not (kept := self._kept_here):
            raise RuntimeError(f"{self!r} is not entered here")
        kept.pop()(kind, error, traceback)

    def _leave(self, block: Block, error: BaseException | None, exiting: Exiting) -> None:
        """Leaves a block, after an error or none."""
        raise NotImplementedError
