"""The read-write lock, for threads."""

from __future__ import annotations

from collections.abc import Callable

import redlease
from redlease._core.protocol.snapshots import SNAPSHOT_LIMIT
from redlease.models import Permit, Snapshot, Waiter

from .semaphore import Semaphore
from .thread.bound import ProcessClient
from .watching import Watch


class RWLock:
    """Any number of readers, or one writer, in the order of arrival; as `redlease.RWLock`. Made by `Redlease.rwlock`.

    Attributes:
        read: The side of readers.
        write: The side of writers. `hold.downgrade()` makes a writer a reader.

    Example:
        >>> catalog = client.rwlock("catalog")  # doctest: +SKIP
        >>> with catalog.write.hold() as hold:  # doctest: +SKIP
        ...     update(fence=hold.fence)
    """

    def __init__(self, client: ProcessClient, make: Callable[[redlease.Redlease], redlease.RWLock]) -> None:
        self.read = Semaphore(client, lambda client: make(client).read)
        self.write = Semaphore(client, lambda client: make(client).write)

    def __repr__(self) -> str:
        return f"<RWLock {self.name!r}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self.read.name

    def inspect(self, *, max_items: int = SNAPSHOT_LIMIT) -> Snapshot:
        """Returns a snapshot of both sides; `is_writer` tells the permits and waiters of writers."""
        return self.read.inspect(max_items=max_items)

    def watch(self) -> Watch:
        """Yields a snapshot of both sides, and another one after each change, as `Semaphore.watch` does."""
        return self.read.watch()

    @staticmethod
    def is_writer(permit: Permit | Waiter) -> bool:
        """Returns True if a permit or waiter of a read-write lock is a writer's, False if it is a reader's."""
        return redlease.RWLock.is_writer(permit)
