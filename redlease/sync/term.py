"""The terms of a leader that is a thread: a body cannot be cancelled, so it asks `check()` or `lost`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import TracebackType
from typing import Self

from redlease._core.limits import Duration
from redlease.errors import LeaseLost

from .hold import Hold
from .semaphore import Lock


class Term:
    """The time for which this process leads: until it steps down, or its lease is lost.

    As a `with` block it ends without an error if the lease is lost, also if the body found out by `check()`. The body
    is not cancelled: let it ask `term.lost` or `term.check()`. The end of the block ends the term.

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

    def wait_lost(self, timeout: Duration | None = None) -> bool:
        """Waits until the term ends, at most `timeout` seconds; returns True if its lease was lost."""
        return self.hold.wait_lost(timeout)

    def step_down(self) -> bool:
        """Ends the term, so that the next candidate leads; returns True if it lasted until now. Idempotent."""
        return self.hold.release()

    def __enter__(self) -> Self:
        """Raises `LeaseLost` if this process stepped down before."""
        if not self.lost:
            self.hold.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Ends the term; a loss of it is no error."""
        try:
            self.hold.__exit__(kind, error, traceback)
        except LeaseLost:
            if error is None:
                return True
            raise
        return isinstance(error, LeaseLost) and error.ticket == self.hold.ticket and self.lost


def terms_of(lock: Lock, metadata: dict[str, str] | None) -> Generator[Term, None, None]:
    """Waits to be elected and yields a term, again and again."""
    is_closed = False
    while not is_closed:
        # The loss of a term is no error, nor one before the process could notice that it was elected.
        with contextlib.suppress(LeaseLost), lock.hold(metadata=metadata) as hold:
            try:
                yield Term(hold)
            except GeneratorExit:
                is_closed = True
                raise
