"""The read-write lock: a semaphore of unlimited capacity, of which a reader holds one unit and a writer all.

The same as the core's, so that workflows and services that use the same Redis share it.
"""

from __future__ import annotations

from redlease._core.limits import CAPACITY_MAX
from redlease.models import Permit, Snapshot, Waiter
from redlease_temporal._payloads import locks

from .backend import Backend
from .primitives import Semaphore


class ReadSide(Semaphore):
    """Held by any number of readers at once, while no writer holds the other side. Made by `rwlock`."""


class WriteSide(Semaphore):
    """Held by one writer at a time, while no reader holds the other side. Made by `rwlock`."""

    _unit = CAPACITY_MAX


class RWLock:
    """Any number of readers, or one writer, in the order of arrival. Made by `rwlock`.

    Neither side starves: a reader that comes after a waiting writer waits behind it, and readers that wait next to each
    other enter together. The fence of a writer is greater than that of every reader and writer before it, and less than
    that of every one after it. The fences of readers that hold side by side do not order them.

    Attributes:
        read: The side of readers.
        write: The side of writers. `hold.downgrade()` makes a writer a reader.

    Example:
        >>> catalog = rwlock("catalog")  # doctest: +SKIP
        >>> async with catalog.write.hold() as hold:  # doctest: +SKIP
        ...     await workflow.execute_activity(update, hold.fence, start_to_close_timeout=SOON)
        ...     await hold.downgrade()
        ...     await workflow.execute_activity(publish, start_to_close_timeout=SOON)
    """

    def __init__(self, terms: locks.ResourceTerms, backend: Backend) -> None:
        self.read = ReadSide(terms, backend)
        self.write = WriteSide(terms, backend)

    def __repr__(self) -> str:
        return f"<RWLock {self.name!r}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self.read.name

    async def inspect(self, *, max_items: int = 100) -> Snapshot:
        """Both sides as they are at one moment; `is_writer` tells the permits and waiters of writers.

        Raises:
            Unavailable: The backend was not reached in time.
        """
        return await self.read.inspect(max_items=max_items)

    @staticmethod
    def is_writer(permit: Permit | Waiter) -> bool:
        """Whether a permit or waiter of a read-write lock is a writer's; otherwise it is a reader's."""
        return permit.weight == CAPACITY_MAX
