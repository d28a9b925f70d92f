"""What can be seen and changed of a resource as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal

from redlease import limits
from redlease.models import HistoryEntry, Position, Snapshot
from redlease.options import AcquireOptions
from redlease.protocol import snapshots
from redlease.protocol.encoding import Resource
from redlease.protocol.histories import HISTORY_COUNT
from redlease.session.watching import snapshots_of
from redlease.tickets import Tickets


class ResourceControl:
    """Operations on a resource as a whole: the base of the primitives."""

    def __init__(self, tickets: Tickets, resource: Resource, usual: AcquireOptions) -> None:
        self._tickets = tickets
        self._session = session = tickets.session
        self._connection = session.connection
        self._resource = resource
        self._terms = usual.terms
        self._usual = usual

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} capacity={self._terms.capacity}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._resource.name

    async def inspect(self, *, limit: int = snapshots.SNAPSHOT_LIMIT) -> Snapshot:
        """Returns a snapshot of the resource, with at most `limit` holders and `limit` waiters.

        A snapshot of more than about 500 kB is read in pages, each consistent in itself: a ticket that comes or goes
        meanwhile may be missing, none is listed twice. `server_time_ms` and `fence` are those of the last page.

        Raises:
            Unavailable: The server was not reached, or the connection was lost repeatedly meanwhile.
        """
        limits.checked_count("limit", limit)
        return await self._tickets.inspect(self._resource, declared=self._terms.capacity, limit=limit)

    async def locked(self) -> bool:
        """Returns True if an acquire of weight 1 would have to wait now.

        Raises:
            Unavailable: The server was not reached.
        """
        capacity, in_use, waiting = await self._tickets.occupancy(self._resource)
        return waiting > 0 or in_use >= (capacity or self._terms.capacity)

    async def position(self, ticket: str) -> Position | None:
        """Returns where a request stands in the queue, and about how long it will wait, by its ticket.

        Returns None if the ticket neither waits nor holds a permit.

        Raises:
            Unavailable: The server was not reached.
            ValueError: It is not a valid ticket.

        Example:
            >>> (await pool.position("order-42")).place  # doctest: +SKIP
            3
        """
        limits.checked_text("ticket", ticket, limits.TICKET_BYTES_MAX)
        return await self._tickets.position(self._resource, ticket)

    async def history(self, count: int = HISTORY_COUNT) -> list[HistoryEntry]:
        """Returns what happened to the resource of late, the newest last, at most `count` entries.

        The server writes a history only where `history=` of the client or the primitive asks for one, from the next
        acquire on. It keeps the newest entries, about as many as
        asked for, as long as the rest of the resource's state.

        Raises:
            Unavailable: The server was not reached.
            ValueError: `count` is no number from 1 to 100,000.

        Example:
            >>> pool = client.semaphore("gpu", capacity=3, history=1000)  # doctest: +SKIP
            >>> [entry.event for entry in await pool.history(2)]  # doctest: +SKIP
            ['granted', 'released']
        """
        return await self._tickets.history(self._resource, limits.checked_count("count", count, 1, limits.HISTORY_MAX))

    async def resize(self, capacity: int) -> None:
        """Sets the capacity. Granted permits stay; a waiter whose weight no longer fits gets ValueError.

        The value stays until a process declares a capacity that differs from the last declared one.

        Raises:
            Unavailable: The server was not reached.
        """
        limits.checked_count("capacity", capacity)
        if await self._tickets.resize(self._resource, capacity, idle_ttl_ms=self._terms.idle_ttl_ms):
            self._session.keeper.follow_up(self._resource, self._terms)

    async def release_all(self, *, queue: bool = False) -> int:
        """Releases the permits of all holders, with `queue` first all waiters, and notifies their clients.

        Returns how many.

        Raises:
            Unavailable: The server was not reached. Some permits may be released by then; the call may be repeated.
        """
        freed = 0
        while True:
            snapshot = await self.inspect()
            waiters = snapshot.waiters if queue else ()
            freed += sum(await asyncio.gather(*(self._force_release(waiter.ticket, "") for waiter in waiters)))
            if len(waiters) == snapshots.SNAPSHOT_LIMIT:
                continue  # there may be more waiters: a freed holder would grant one of them
            freed += sum(
                await asyncio.gather(*(self._force_release(held.ticket, held.fence) for held in snapshot.holders))
            )
            if len(snapshot.holders) < snapshots.SNAPSHOT_LIMIT:
                return freed

    async def _force_release(self, ticket: str, fence: int | Literal[""]) -> bool:
        terms = self._terms
        freed = await self._tickets.free(
            *(self._resource, ticket, fence), tombstone_ms=terms.lease_ms, notify=True, idle_ttl_ms=terms.idle_ttl_ms
        )
        if freed.more:
            self._session.keeper.follow_up(self._resource, terms)
        return freed.released

    def watch(self) -> AsyncGenerator[Snapshot, None]:
        """Yields a snapshot of the resource, and another one after each change, which the server publishes.

        Changes in quick succession may be seen as one. Costs the server nothing while no client watches. Waits while
        the server is unreachable. Wrap it in `contextlib.aclosing` if the loop may be left early.
        """
        return snapshots_of(self._session, self._resource, self.inspect)
