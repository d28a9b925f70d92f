"""The operations of the protocol as typed calls, which return the server's replies as named tuples.

The primitives use it, and so do packages that manage permits for others, such as the Temporal adapter; it is the only
internal module that those import. It is not a public interface: it may change without notice.

Times are milliseconds; in fields that end in `_at_ms`, of the server's clock. `limit_ms` bounds a call, by default to
the client's `call_timeout`; None means no limit. A call that takes longer raises `Unavailable`. A call that the server
refuses raises `RedleaseError`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NamedTuple

from redis.exceptions import ConnectionError, ResponseError  # noqa: A004

from redlease.errors import RedleaseError
from redlease.models import HistoryEntry, LimitKind, Position, Snapshot

from . import clock
from .hold import lease_lost, lease_of
from .limits import WAITS, WhenFull
from .protocol import scripts
from .protocol.arguments import WITHOUT_KEY, AcquireRequest, Terms, Turn, label, pack_terms
from .protocol.encoding import Resource, keys_pattern, pack
from .protocol.histories import PAGE_ENTRIES, read_entries
from .protocol.replies import Freed, Granted, LimitSet, Message, Occupancy, Queued, Resized, Status, Totals, read_totals
from .protocol.scripts import Script, read_lua
from .protocol.snapshots import CHECKED_MOST, LIMIT_WORDS, LOSSES_MOST, Reading, allowed
from .session.leases import PendingRelease, Released
from .session.queueing import Session
from .session.replacing import Replacing
from .transport.base import CLIENT_DEFAULT
from .transport.masters import Master, master_connections
from .transport.replication import Demand, Replication

__all__ = [
    "GONE",
    "WITHOUT_KEY",
    "AcquireRequest",
    "Adopted",
    "Freed",
    "Granted",
    "Message",
    "Occupancy",
    "Operations",
    "Queued",
    "Released",
    "Renewed",
    "Resource",
    "Script",
    "Status",
    "Terms",
    "Totals",
    "Turn",
    "label",
    "lease_lost",
    "lease_of",
    "pack_terms",
    "read_lua",
]

ANSWER_S = 0.5  # how much later than the time for replicas the server may say how many there are
GONE = "it expired, was released, or another client adopted it"


class Renewed(NamedTuple):
    """A renewed permit. `expires_at_ms`: 0 if it is no longer held; `waiting`: requests in the queue."""

    expires_at_ms: int
    capacity: int
    waiting: int


class Adopted(NamedTuple):
    """An adopted permit. `sent_ms`: when the call was sent, by the local clock."""

    fence: int
    granted_at_ms: int
    expires_at_ms: int
    weight: int
    capacity: int
    sent_ms: float


class Operations:
    """Operations on tickets.

    Args:
        session: The session of the client.
        prefix: The prefix of the client's keys.
    """

    def __init__(self, session: Session, prefix: str) -> None:
        self.session = session
        self._connection = session.connection
        self._prefix = prefix
        self._replication = Replication()

    def resource(self, name: str) -> Resource:
        """Returns the resource of that name; raises ValueError if the name is not valid."""
        return Resource(self._prefix, name)

    # Requests

    async def queue(
        self,
        request: AcquireRequest,
        *,
        on_queued: Callable[[Queued], None],
        on_expired: Callable[[], Exception],
        full: WhenFull = WAITS,
    ) -> Granted | None:
        """Waits for the grant, and returns it with a full lease; None if it may not wait and no capacity was free.

        If the queue place expires, the request is not queued again: the error that `on_expired` makes is raised. If the
        call is cancelled, what was granted stays on the server.
        """
        waiting = self.session.enter(request, needs_full_lease=True)
        # A request that was queued before, by another relay, is no longer the newest.
        replacing = Replacing(waiting, full) if full.replaces and not request.arrival else None

        def queued(listener: Queued) -> None:
            waiting.request = waiting.request._replace(arrival=listener.sequence)
            on_queued(listener)
            if replacing is not None:
                replacing.queued()

        waiting.on_queued = queued
        waiting.on_expired = lambda: waiting.fail(on_expired())
        try:
            granted = await waiting.future
            while granted is not None and (now_ms := clock.now_ms()) >= waiting.deadline_ms:
                granted = await waiting.restart(now_ms)
        finally:
            self.session.leave(waiting)
            waiting.future.cancel()
        return granted

    async def try_acquire(
        self,
        resource: Resource,
        ticket: str,
        request_id: str,
        *,
        lease_ms: int,
        capacity: int,
        idle_ttl_ms: int,
        label: str,
    ) -> Granted | Status:
        """Acquires a permit of weight 1 without queueing; returns the status if it was not granted."""
        terms = (self.session.new_name(), 0, 1, lease_ms, capacity, 0, -1, idle_ttl_ms, label)
        while True:
            answer = await self._connection.call(resource, scripts.ACQUIRE, ticket, request_id, *terms, ticket=ticket)
            status, *values = answer.values
            if status == Status.GRANTED:
                return Granted(*values)
            if status != Status.BUSY or not values[-1]:  # else it stopped at its batch limit of expired tickets
                return Status(status)

    # Permits

    async def replicate(self, request: AcquireRequest, fence: int) -> int:
        """Waits until replicas have the permit, as its terms ask for; returns how many are known to have it in time.

        Raises:
            LeaseLost: The permit is no longer held.
        """
        resource, terms = request.resource, request.terms
        pool = self._connection.endpoint_for(resource).pool
        if pool is None:
            raise self._connection.unavailable(resource, request.ticket, terms.replicas_ms)
        # A renewal is a write whose reply tells whether the permit is held: WAIT knows only of writes before it.
        tail = pack("", request.ticket, fence, terms.lease_ms, "write", terms.idle_ttl_ms)
        command = scripts.RENEW.head + resource.packed_keys + tail
        demand = Demand(terms.replicas, terms.replicas_ms)
        try:
            async with asyncio.timeout(terms.replicas_ms / 1000 + ANSWER_S):  # the wait before this one included
                written = await self._replication.to(pool, demand).write(command)
        except TimeoutError:
            return 0
        except ResponseError as error:
            raise RedleaseError(
                f"resource {resource.name!r}: the server does not wait for replicas, so the grant of "
                f"{request.ticket!r} is released. `durability` needs WAIT, and the right to call it (server: {error})",
                resource=resource.name,
                ticket=request.ticket,
            ) from error
        except ConnectionError:
            raise self._connection.unavailable(resource, request.ticket, terms.replicas_ms) from None
        if not written.reply[1]:
            raise lease_lost(resource.name, request.ticket, fence, GONE)
        return written.replicas

    async def renew(
        self,
        resource: Resource,
        ticket: str,
        fence: int,
        lease_ms: int,
        *,
        idle_ttl_ms: int,
        shorten: bool = False,
        limit_ms: float | None = CLIENT_DEFAULT,
    ) -> Renewed:
        """Renews a permit. `shorten`: its lease may end earlier than before, which notifies its holder."""
        answer = await self._connection.call(
            *(resource, scripts.RENEW, ticket, fence, lease_ms, "told" if shorten else 0, idle_ttl_ms),
            limit_ms=limit_ms,
            ticket=ticket,
            lease_ms=lease_ms,
        )
        return Renewed(*answer.values)

    async def adopt(
        self,
        resource: Resource,
        ticket: str,
        fence: int,
        request_id: str,
        lease_ms: int,
        *,
        label: str,
        idle_ttl_ms: int,
        refence: bool = True,
        limit_ms: float | None = CLIENT_DEFAULT,
    ) -> Adopted | None:
        """Takes over a permit, with `refence` under a new fence; None if it is no longer held under its fence."""
        answer = await self._connection.call(
            *(resource, scripts.ADOPT, ticket, fence, request_id, self.session.new_name()),
            *(lease_ms, int(refence), idle_ttl_ms, label),
            limit_ms=limit_ms,
            ticket=ticket,
            lease_ms=lease_ms,
        )
        values = answer.values
        return Adopted._make([*values, answer.sent_ms]) if values[0] else None

    async def check(
        self, resource: Resource, ticket: str, fence: int, *, limit_ms: float | None = CLIENT_DEFAULT
    ) -> bool:
        """Returns True if a permit is held now, under its fence."""
        answer = await self._connection.call(resource, scripts.CHECK, ticket, fence, limit_ms=limit_ms, ticket=ticket)
        return bool(answer.values[0])

    async def free(
        self,
        resource: Resource,
        ticket: str | bytes,
        fence: int | Literal[""],
        *,
        idle_ttl_ms: int,
        tombstone_ms: int = 0,
        notify: bool = False,
    ) -> Freed:
        """Removes a ticket: as holder under its fence or, without a fence, also as waiter.

        `tombstone_ms`: how long late copies of its requests grant nothing; `notify`: notifies its client.
        """
        answer = await self._connection.call(
            *(resource, scripts.RELEASE, ticket, "", fence, tombstone_ms, int(notify), idle_ttl_ms),
            ticket=ticket if isinstance(ticket, str) else ticket.decode(errors="backslashreplace"),
        )
        return Freed(*map(bool, answer.values))

    async def release(
        self,
        request: AcquireRequest,
        fence: int | None,
        *,
        lasts_ms: float,
        may_be_duplicated: bool,
        answer_within_ms: float,
    ) -> Released:
        """Releases what a request has; after `answer_within_ms` in the background, for `lasts_ms` at most.

        `fence`: None releases whatever the request has; `may_be_duplicated`: late copies of it may still arrive.
        Returns whether it was held until now, the server's refusal, or None if neither is known within
        `answer_within_ms`.
        """
        future: asyncio.Future[Released] = asyncio.get_running_loop().create_future()
        self._connection.start()
        now_ms = clock.now_ms()
        leaving = PendingRelease(self.session.manager, request, fence, now_ms + lasts_ms, may_be_duplicated, future)
        leaving.answer_within_ms = answer_within_ms
        leaving.start(now_ms)
        return await future

    async def reduce(self, resource: Resource, ticket: str, fence: int, weight: int, *, idle_ttl_ms: int) -> bool:
        """Gives back all but `weight` units of a permit; returns True if it is held, under its fence.

        May be repeated. The permit keeps its fence and its lease.
        """
        answer = await self._connection.call(
            resource, scripts.REDUCE, ticket, fence, weight, idle_ttl_ms, ticket=ticket
        )
        held, more = answer.values
        while more:  # the script stopped at its batch limit of grants
            more = (await self.free(resource, "", "", idle_ttl_ms=idle_ttl_ms)).more
        return bool(held)

    # The resource as a whole

    async def names(self) -> AsyncGenerator[set[str], None]:
        """Yields the names of all resources that the masters know under the prefix, each once, in no order.

        Found by SCAN of any of their keys, those of one SCAN together. What comes or goes meanwhile may be missing.
        """
        seen: set[str] = set()  # SCAN may return a key twice, and so may two masters while a slot moves
        async with self.masters() as masters:
            for master in masters:
                async for keys in master.scan(keys_pattern(self._prefix, Resource.GLOB)):
                    found = {name for key in keys if (name := Resource.named_by(self._prefix, key))} - seen
                    seen |= found
                    yield found

    def masters(self) -> AbstractAsyncContextManager[list[Master]]:
        """Returns every master, for plain commands on connections of their own, which the end of the block closes."""
        return master_connections(self._connection)

    async def inspect(self, resource: Resource, *, declared: int, limit: int, counted: int = CHECKED_MOST) -> Snapshot:
        """The resource with at most `limit` holders and as many waiters, read in pages where one would be too large.

        `declared`: the capacity to show of a resource that nobody has used yet; `counted`: how many waiters are checked
        to leave the dead ones out of the total, which decides what a long queue costs.
        """
        return (await self.contents(resource, limit, declared, counted)).snapshot()

    async def contents(self, resource: Resource, limit: int, declared: int = 0, counted: int = 0) -> Reading:
        """What `inspect` reads, with the tickets of entries that cannot be read."""
        reading = Reading(resource.name, declared, limit, counted)
        while (args := reading.args) is not None:
            reading.add(await self._read_page(resource, scripts.INSPECT, args))
        return reading

    async def _read_page(self, resource: Resource, script: Script, args: tuple[int | str | bytes, ...]) -> list[Any]:
        """Calls a script with a large reply; few of them are unanswered at a time."""
        limit_ms = self._connection.limit_ms
        try:
            async with asyncio.timeout(limit_ms / 1000):
                await self.session.large_reads.acquire()
        except TimeoutError:
            raise self._connection.unavailable(resource, None, limit_ms) from None
        try:
            answer = await self._connection.call(resource, script, *args, losses_most=LOSSES_MOST)
        finally:
            self.session.large_reads.release()
        return answer.values

    async def totals(self, resources: Sequence[Resource], looked_at: int) -> list[Totals | RedleaseError]:
        """Many resources in numbers, at little cost; `looked_at`: how many holders of each are looked at one by one.

        Where a resource cannot be read, its error stands in the place of the numbers.
        """
        replies = await self._connection.call_each(resources, scripts.TOTALS, looked_at)
        return [
            reply if isinstance(reply, RedleaseError) else read_totals(resource.name, reply)
            for resource, reply in zip(resources, replies, strict=True)
        ]

    async def occupancy(self, resource: Resource) -> Occupancy:
        """How much of the resource is in use, and how many requests wait."""
        found = (await self.contents(resource, 0, counted=1)).snapshot()
        return Occupancy(found.capacity, found.in_use, found.waiting, allowed(found.limits))

    async def history(self, resource: Resource, count: int) -> list[HistoryEntry]:
        """The last `count` entries of the history, the newest last, read in pages.

        Entries that another program has added are left out; a line of the log says so, once a resource.
        """
        found: list[Any] = []
        while len(found) < count:
            before, most = found[-1][0] if found else "", min(PAGE_ENTRIES, count - len(found))
            page = await self._read_page(resource, scripts.HISTORY, (before, most))
            found += page
            if len(page) < most:
                break
        entries, foreign = read_entries(found[::-1])
        if foreign:
            self.session.memory.found_foreign(resource.name, foreign)
        return entries

    async def position(self, resource: Resource, ticket: str) -> Position | None:
        """The position of a ticket in the queue; None if it neither waits nor holds a permit."""
        place, wait_ms = (await self._connection.call(resource, scripts.POSITION, ticket, ticket=ticket)).values
        return None if place < 0 else Position(place, None if wait_ms < 0 else wait_ms / 1000)

    async def resize(self, resource: Resource, capacity: int, *, idle_ttl_ms: int) -> Resized:
        """Sets the capacity, unless the resource is a lock or a read-write lock."""
        answer = await self._connection.call(resource, scripts.RESIZE, capacity, idle_ttl_ms)
        return Resized(*answer.values)

    async def limit(
        self,
        resource: Resource,
        kind: LimitKind,
        key: str | None,
        units: int | None,
        until: str,
        *,
        idle_ttl_ms: int,
        label: str,
    ) -> LimitSet:
        """Sets a limit, or lifts it if `units` is None; `until`: ms from now, "@" and ms since the epoch, or ""."""
        words = (LIMIT_WORDS[kind], key or "", "" if units is None else units, until)
        answer = await self._connection.call(resource, scripts.LIMIT, *words, idle_ttl_ms, label)
        return LimitSet(*answer.values)

    # Messages

    def listen(self, request_id: str, listener: Callable[[Message], None]) -> None:
        """Calls `listener` with each message about a request that this client does not wait for or renew."""
        self.session.listeners[request_id] = listener

    def unlisten(self, request_id: str, listener: Callable[[Message], None]) -> None:
        """Ends `listen`, unless another callback has replaced this one."""
        if self.session.listeners.get(request_id) == listener:
            del self.session.listeners[request_id]

    def on_reconnect(self, event: asyncio.Event) -> None:
        """Sets the event after each reconnect."""
        self.session.watchers.add(event)

    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Calls `listener` with each payload published to a channel."""
        await self._connection.subscribe(channel, listener)

    async def close(self) -> None:
        """Closes the connections that wait for replicas."""
        await self._replication.close()

    # Further scripts

    def connect(self, *more: Script) -> None:
        """Starts to connect, and loads these scripts of another package with the client's own."""
        self.load_too(*more)
        self._connection.start()

    def load_too(self, *more: Script) -> None:
        """Loads these scripts with the client's own, without starting to connect."""
        self._connection.load_too(more)

    async def run(
        self,
        keys: Resource,
        script: Script,
        *args: str | int,
        limit_ms: float | None = CLIENT_DEFAULT,
        losses_most: float = math.inf,
    ) -> list[Any]:
        """Calls a further script on its own keys; returns its reply without the tag.

        `losses_most`: how many connections may be lost before it raises `Unavailable`; 0 sends the call only once.
        """
        return (await self._connection.call(keys, script, *args, limit_ms=limit_ms, losses_most=losses_most)).values
