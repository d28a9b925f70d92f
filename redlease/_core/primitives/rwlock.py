"""The read-write lock: a semaphore of unlimited capacity, of which a reader holds one unit and a writer all."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from redlease._core.limits import CAPACITY_MAX, Until
from redlease._core.operations import Operations
from redlease._core.options import AcquireSpec
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.snapshots import SNAPSHOT_LIMIT
from redlease.models import Permit, Snapshot, Waiter

from .semaphore import Semaphore


class Side(Semaphore):
    """One side of a read-write lock, with the interface of a semaphore. Its unit of weight is a reader, or a writer."""

    async def resize(self, capacity: int) -> None:
        """Raises ValueError: a read-write lock has no capacity to set."""
        raise ValueError(f"{self.name!r} cannot be resized to {capacity}: a read-write lock has no capacity")

    async def set_limit(
        self,
        capacity: int | None = None,
        *,
        per_key: int | None = None,
        key: str | None = None,
        until: Until = None,
        reason: str = "",
    ) -> None:
        """Raises ValueError: a read-write lock has no capacity to limit; it can be paused."""
        del capacity, per_key, key, until, reason
        raise ValueError(f"{self.name!r} cannot be limited: a read-write lock has no capacity. `pause` stops grants")


class ReadSide(Side):
    """Held by any number of readers at once, while no writer holds the other side. Made by `Redlease.rwlock`."""


class WriteSide(Side):
    """Held by one writer at a time, while no reader holds the other side. Made by `Redlease.rwlock`."""

    async def locked(self) -> bool:
        """Returns True if a writer would have to wait now: somebody reads, writes or waits.

        Raises:
            Unavailable: The server was not reached.
        """
        occupied = await self._operations.occupancy(self._resource)
        return occupied.in_use > 0 or occupied.waiting > 0 or occupied.limit is not None


class RWLock:
    """Any number of readers, or one writer, in the order of arrival. Made by `Redlease.rwlock`.

    Neither side starves: a reader that comes after a waiting writer waits behind it, and readers that wait next to each
    other enter together. The fence of a writer is greater than that of every reader and writer before it, and less than
    that of every one after it. The fences of readers that hold side by side do not order them.

    Attributes:
        read: The side of readers.
        write: The side of writers. `hold.downgrade()` makes a writer a reader.

    Example:
        >>> catalog = client.rwlock("catalog")  # doctest: +SKIP
        >>> async with catalog.read.hold():  # doctest: +SKIP
        ...     await look_up()
        >>> async with catalog.write.hold() as hold:  # doctest: +SKIP
        ...     await update(fence=hold.fence)
    """

    def __init__(self, operations: Operations, resource: Resource, default_spec: AcquireSpec) -> None:
        self.read = ReadSide(operations, resource, default_spec)
        self.write = WriteSide(operations, resource, AcquireSpec.default(default_spec.terms, CAPACITY_MAX))

    def __repr__(self) -> str:
        return f"<RWLock {self.name!r}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self.read.name

    async def inspect(self, *, max_items: int = SNAPSHOT_LIMIT) -> Snapshot:
        """Returns a snapshot of both sides; `is_writer` tells the permits and waiters of writers.

        Raises:
            Unavailable: The server was not reached.
        """
        return await self.read.inspect(max_items=max_items)

    def watch(self) -> AsyncGenerator[Snapshot, None]:
        """Yields a snapshot of both sides, and another one after each change, as `Semaphore.watch` does."""
        return self.read.watch()

    @staticmethod
    def is_writer(permit: Permit | Waiter) -> bool:
        """Returns True if a permit or waiter of a read-write lock is a writer's, False if it is a reader's."""
        return permit.weight == CAPACITY_MAX
