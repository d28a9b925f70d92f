"""What can be seen and changed of a resource as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal

from redlease._core import limits
from redlease._core.limits import Duration, Until
from redlease._core.operations import Operations
from redlease._core.options import AcquireSpec, own_name
from redlease._core.protocol import arguments, snapshots
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.histories import HISTORY_COUNT
from redlease._core.protocol.replies import LimitSet
from redlease._core.session.watching import snapshots_of
from redlease.models import HistoryEntry, LimitKind, Position, Snapshot

RELEASED_AT_ONCE = 100  # permits of others, each of which costs a message


class ResourceControl:
    """Operations on a resource as a whole: the base of the primitives."""

    def __init__(self, operations: Operations, resource: Resource, default_spec: AcquireSpec) -> None:
        self._operations = operations
        self._session = session = operations.session
        self._connection = session.connection
        self._resource = resource
        self._terms = default_spec.terms
        self._default_spec = default_spec

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} capacity={self._terms.capacity}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._resource.name

    async def inspect(self, *, max_items: int = snapshots.SNAPSHOT_LIMIT) -> Snapshot:
        """Returns a snapshot of the resource, with at most `max_items` holders and as many waiters.

        A snapshot of more than about 150 entries is read in pages, each consistent in itself: a ticket that comes or
        goes meanwhile may be missing, none is listed twice. `server_time_ms` and `fence` are those of the last page.

        Raises:
            Unavailable: The server was not reached, or the connection was lost repeatedly meanwhile.
        """
        limits.checked_count("max_items", max_items)
        return await self._operations.inspect(self._resource, declared=self._terms.capacity, limit=max_items)

    async def locked(self) -> bool:
        """Returns True if no unit is free, or somebody waits: an acquire of weight 1 would have to wait now.

        Waiters of keys at their limits count too, though they hold up nobody.

        Raises:
            Unavailable: The server was not reached.
        """
        capacity, in_use, waiting, limit = await self._operations.occupancy(self._resource)
        capacity = capacity or self._terms.capacity
        return waiting > 0 or in_use >= (capacity if limit is None else min(capacity, limit))

    async def position(self, ticket: str) -> Position | None:
        """Returns the position of a request in the queue, and about how long it will wait, by its ticket.

        Returns None if the ticket neither waits nor holds a permit. Behind more than forty requests both are estimates,
        from a sample of those: who has died is not ahead.

        Raises:
            Unavailable: The server was not reached.
            ValueError: It is not a valid ticket.

        Example:
            >>> (await pool.position("order-42")).rank  # doctest: +SKIP
            3
        """
        limits.checked_text("ticket", ticket, limits.TICKET_BYTES_MAX)
        return await self._operations.position(self._resource, ticket)

    async def history(self, count: int = HISTORY_COUNT) -> list[HistoryEntry]:
        """Returns what happened to the resource recently, the newest last, at most `count` entries.

        The server writes a history only where `history=` of the client or the primitive asks for one, from the next
        acquire on. It keeps the newest entries, about as many as asked for, as long as the rest of the state.

        Raises:
            Unavailable: The server was not reached.
            ValueError: `count` is no number from 1 to 100,000.

        Example:
            >>> pool = client.semaphore("gpu", capacity=3, history=1000)  # doctest: +SKIP
            >>> [entry.event for entry in await pool.history(2)]  # doctest: +SKIP
            ['granted', 'released']
        """
        return await self._operations.history(
            self._resource, limits.checked_count("count", count, 1, limits.HISTORY_MAX)
        )

    async def resize(self, capacity: int) -> None:
        """Sets the capacity. Granted permits stay; a waiter whose weight no longer fits gets `NeverFits`.

        The value stays until a process declares a capacity that differs from the last declared one.

        Raises:
            Unavailable: The server was not reached.
            ValueError: It is a lock, or another resource whose processes declare a capacity of 1, or a read-write lock:
                what excludes others stays so. Nothing was changed.
        """
        limits.checked_count("capacity", capacity)
        done = await self._operations.resize(self._resource, capacity, idle_ttl_ms=self._terms.idle_ttl_ms)
        if done.refused_for:
            kind = "a lock: its processes declare a capacity of 1" if done.refused_for == 1 else "a read-write lock"
            raise ValueError(f"{self.name!r} cannot be resized to {capacity}: it is {kind}")
        if done.more:
            self._session.manager.follow_up(self._resource, self._terms)

    # Limits

    async def set_limit(
        self,
        capacity: int | None = None,
        *,
        per_key: int | None = None,
        key: str | None = None,
        until: Until = None,
        reason: str = "",
    ) -> None:
        """Limits how many units may be held, whatever processes declare, until that ends or `clear_limit` lifts it.

        It takes effect at once and for all processes: what is held stays, and nothing is granted until fewer units are
        held than the limit. A request that is heavier than the limit waits until that ends, and those of its key that
        are behind it wait with it. Requests of other keys pass it: afterwards it waits for one more turn of each.
        Requests without a key are one key too.

        Args:
            capacity: How many units, of the resource or, with `key`, of that key; 0: none.
            per_key: How many units each key may have that has no limit of its own.
            key: The key whose units are limited.
            until: When it ends: so many seconds from now, a timedelta, or a datetime with a time zone, which is
                compared with the server's clock. None: when it is lifted.
            reason: Shown by `inspect()`, with the client's `owner`.

        Raises:
            Unavailable: The server was not reached. The call may be repeated.
            ValueError: A parameter is wrong, or the time is over already.

        Example:
            >>> await pool.set_limit(2, until=3600, reason="the vendor asked us to")  # doctest: +SKIP
            >>> await pool.set_limit(1, key="acme")  # doctest: +SKIP
        """
        if (capacity is None) == (per_key is None):
            raise ValueError("give either capacity or per_key")
        if per_key is not None:
            if key is not None:
                raise ValueError("per_key limits each key: a limit of one key is its capacity")
            await self._set_limit("per_key", None, limits.checked_count("per_key", per_key, 0), until, reason)
        elif capacity is not None:
            await self._set_limit("limit", key, limits.checked_count("capacity", capacity, 0), until, reason)

    async def clear_limit(self, *, key: str | None = None) -> bool:
        """Lifts what `set_limit` has set for the resource and for each key, or with `key` for that key.

        A limit that was set for a single key stays until it is lifted with that `key`. A vendor's answer outranks an
        operator: what `back_off` has set stays until it ends, or `end_back_off`.

        Returns whether there was a limit.

        Raises:
            Unavailable: The server was not reached. The call may be repeated.
        """
        kinds: tuple[LimitKind, ...] = ("limit",) if key else ("limit", "per_key")
        return any([await self._lift_limit(kind, key) for kind in kinds])

    async def pause(self, *, until: Until = None, reason: str = "") -> None:
        """Grants nothing until that ends or `resume`; holders continue. A limit stays what it is.

        Parameters and errors are those of `set_limit`.
        """
        await self._set_limit("pause", None, 0, until, reason)

    async def resume(self) -> bool:
        """Ends a pause; returns whether there was one.

        Raises:
            Unavailable: The server was not reached. The call may be repeated.
        """
        return await self._lift_limit("pause", None)

    async def back_off(self, key: str | None, delay: Duration, *, reason: str = "") -> None:
        """Grants nothing of that key so long, as after a vendor's answer 429 with Retry-After; None: nothing at all.

        Call it while you hold, so that nobody begins in between. Of several calls the one counts that ends last.

        Args:
            key: The key, or None for the whole resource.
            delay: Seconds or a timedelta; 0 changes nothing.
            reason: Shown by `inspect()`.

        Raises:
            Unavailable: The server was not reached. The call may be repeated.
            ValueError: A parameter is wrong.

        Example:
            >>> async with pool.hold(key="acme"):  # doctest: +SKIP
            ...     response = await client.get(url)
            ...     if response.status_code == 429:
            ...         await pool.back_off("acme", float(response.headers["Retry-After"]))
        """
        delay_ms = limits.milliseconds("delay", delay)
        await self._change_limit("back_off", key, 0, str(delay_ms), limits.checked_reason(reason))

    async def end_back_off(self, key: str | None) -> bool:
        """Ends what `back_off` has set for that key or, with None, for the whole resource, earlier.

        Returns whether there was anything to end.

        Raises:
            Unavailable: The server was not reached. The call may be repeated.
        """
        return await self._lift_limit("back_off", key)

    async def _set_limit(self, kind: LimitKind, key: str | None, units: int, until: Until, reason: str) -> None:
        reasons = limits.checked_reason(reason)
        if not (await self._change_limit(kind, key, units, limits.checked_until(until), reasons)).until_ms:
            raise ValueError(f"until must be in the future: {until!r} is in the past by the server's clock")

    async def _lift_limit(self, kind: LimitKind, key: str | None) -> bool:
        return (await self._change_limit(kind, key, None, "", {})).until_ms > 0

    async def _change_limit(
        self, kind: LimitKind, key: str | None, units: int | None, until: str, reasons: dict[str, str]
    ) -> LimitSet:
        if key is not None:
            limits.checked_text("key", key, limits.KEY_BYTES_MAX)
        terms = self._terms
        label = arguments.label(terms.owner or own_name(), reasons)
        done = await self._operations.limit(
            self._resource, kind, key, units, until, idle_ttl_ms=terms.idle_ttl_ms, label=label
        )
        if done.more:
            self._session.manager.follow_up(self._resource, terms)
        return done

    async def release_all(self, *, queue: bool = False) -> int:
        """Releases the permits of all holders, with `queue` first all waiters, and notifies their clients.

        Returns how many.

        Raises:
            Unavailable: The server was not reached. Some permits may be released by then; the call may be repeated.
        """
        freed, before = 0, None
        while True:
            found = await self._operations.contents(self._resource, snapshots.SNAPSHOT_LIMIT)
            queued = found.queued if queue else []
            if before == (before := (queued, found.held)):
                return freed  # nothing removes these: they are none of redlease
            freed += await self._force_all([(ticket, "") for ticket in queued])
            if len(queued) == snapshots.SNAPSHOT_LIMIT:
                continue  # there may be more waiters: a freed holder would grant one of them
            freed += await self._force_all(found.held)
            if len(found.held) < snapshots.SNAPSHOT_LIMIT:
                return freed

    async def _force_all(self, permits: list[tuple[bytes, int | Literal[""]]]) -> int:
        """Releases them in batches: a server sets 16 kB aside for each message to the client whose call it runs."""
        freed = 0
        for first in range(0, len(permits), RELEASED_AT_ONCE):
            batch = permits[first : first + RELEASED_AT_ONCE]
            freed += sum(await asyncio.gather(*(self._force_release(*permit) for permit in batch)))
        return freed

    async def _force_release(self, ticket: str | bytes, fence: int | Literal[""]) -> bool:
        terms = self._terms
        freed = await self._operations.free(
            *(self._resource, ticket, fence), tombstone_ms=terms.lease_ms, notify=True, idle_ttl_ms=terms.idle_ttl_ms
        )
        if freed.more:
            self._session.manager.follow_up(self._resource, terms)
        return freed.released

    def watch(self) -> AsyncGenerator[Snapshot, None]:
        """Yields a snapshot of the resource, and another one after each change, which the server publishes.

        Changes in quick succession may be seen as one. Costs the server nothing while no client watches. Waits while
        the server is unreachable. Wrap it in `contextlib.aclosing` if the loop may be left early.
        """
        return snapshots_of(self._session, self._resource, self.inspect)
