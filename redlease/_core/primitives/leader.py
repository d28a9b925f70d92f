"""One leader among the processes that stand for it: a lock, whose fence numbers the terms."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from redlease._core.hold import Hold, lease_of
from redlease.errors import LeaseLost
from redlease.models import Permit

from .semaphore import Lock


class Term:
    """The time for which this process leads: until it steps down, or its lease is lost.

    As an `async with` block it cancels the body when the lease is lost, and the block then ends without an error, also
    if the body found out by `check()`. The end of the block ends the term.

    Attributes:
        number: The fence of the term's permit, greater than the number of every earlier term.
        hold: The hold on the lock, for `hold.check()` and `hold.remaining()`.
    """

    def __init__(self, hold: Hold) -> None:
        self.hold = hold
        self.number = hold.fence

    def __repr__(self) -> str:
        return f"<Term {self.number} of {self.hold.resource!r}>"

    @property
    def lost(self) -> bool:
        """Whether the term has ended without `step_down`."""
        return self.hold.lost

    def check(self) -> None:
        """Raises `LeaseLost` if this process no longer leads. Does no I/O."""
        self.hold.check()

    async def wait_lost(self) -> bool:
        """Waits until the term ends; returns True if its lease was lost, False if this process stepped down."""
        return await self.hold.wait_lost()

    async def step_down(self) -> bool:
        """Ends the term, so that the next candidate leads; returns True if it lasted until now. Idempotent."""
        return await self.hold.release()

    async def __aenter__(self) -> Self:
        """Raises `LeaseLost` if this process stepped down before."""
        lease = lease_of(self.hold)
        if lease.ended and not lease.is_lost():
            raise lease.loss()
        lease.enter(asyncio.current_task())
        if lease.is_lost():
            lease.on_loss()  # lost since the election: the body ends at its first await
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ends the term; a loss of it is no error, whether the body was cancelled for it or found it by `check`."""
        try:
            await self.hold.__aexit__(kind, error, traceback)
        except LeaseLost:
            if error is None or isinstance(error, asyncio.CancelledError):
                return True
            raise
        return isinstance(error, LeaseLost) and error.ticket == self.hold.ticket and self.lost


class Leader:
    """A role that one process at a time has. Made by `Redlease.leader`.

    All processes that iterate over `terms()` are candidates and lead in the order of their arrival.

    Example:
        >>> async for term in client.leader("scheduler").terms():  # doctest: +SKIP
        ...     async with term:
        ...         await run_the_schedule(term.number)
    """

    def __init__(self, lock: Lock) -> None:
        self._lock = lock

    def __repr__(self) -> str:
        return f"<Leader {self.name!r}>"

    @property
    def name(self) -> str:
        """The name of the role, which is that of its lock."""
        return self._lock.name

    async def terms(self, *, metadata: dict[str, str] | None = None) -> AsyncGenerator[Term, None]:
        """Waits to be elected and yields a term, again and again.

        A term ends when its lease is lost, when it steps down, and when the loop asks for the next one. A body that
        does not enter its term (`async with term:`) is not cancelled by a loss: let it ask `term.lost`, or wait for
        `term.wait_lost()`. Use `contextlib.aclosing` around a loop that may be left early, or step down before.

        Args:
            metadata: Shown by `current()` and `inspect()`.

        Raises:
            Withdrawn: The candidate was removed from the queue, or the client was closed.
            RedleaseError: The server refused, or the client is closed.
            ValueError: The metadata is wrong.
        """
        while True:
            try:
                hold = await self._lock.hold(metadata=metadata)
            except LeaseLost:
                continue  # lost before the process could notice that it was elected
            try:
                yield Term(hold)
            finally:
                await hold.release()

    async def current(self) -> Permit | None:
        """Returns the permit of who leads now, with its owner and the term's number as its fence; None if nobody does.

        Raises:
            Unavailable: The server was not reached.
        """
        holders = (await self._lock.inspect(max_items=1)).holders
        return holders[0] if holders else None
