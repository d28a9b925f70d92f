"""The semaphore and the lock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Literal

from redlease.protocol.arguments import AcquireRequest
from redlease.protocol.encoding import Resource
from redlease.protocol.replies import Granted, Message

from . import clock, limits
from .errors import RedleaseError
from .hold import Blocks, HeldLease, Hold, HoldRequest, Obtained, lease_lost
from .limits import Duration
from .log import about
from .models import Permit, Snapshot
from .options import AcquireOptions, HoldOptions, OnLost, checked_hold_options, own_name
from .protocol import arguments, snapshots
from .session.ids import RequestIds
from .session.queueing import PendingAcquire
from .session.refusals import not_queued
from .session.watching import snapshots_of
from .tickets import GONE, Adopted, Tickets

logger = logging.getLogger("redlease")


class Semaphore:
    """At most `capacity` units of a resource are held at once, granted in the order of arrival.

    Made by `Redlease.semaphore`. Any number of tasks may share one object; all objects with the same name and prefix,
    in any process, are the same semaphore.

    Example:
        >>> pool = client.semaphore("gpu", capacity=3, lease=30)  # doctest: +SKIP
        >>> async with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     await train(fence=hold.fence)
    """

    def __init__(self, tickets: Tickets, resource: Resource, usual: AcquireOptions) -> None:
        self._tickets = tickets
        self._session = session = tickets.session
        self._connection = session.connection
        self._resource = resource
        self._terms = usual.terms
        self._usual = usual
        self._blocks = Blocks()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} capacity={self._terms.capacity}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._resource.name

    # Acquiring

    def hold(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        on_lost: OnLost = "cancel",
        max_hold: Duration | None = None,
    ) -> HoldRequest:
        """Acquires a permit and renews it: `async with pool.hold() as hold:`, or `hold = await pool.hold()`.

        Do not `yield` from an async generator inside the block, except in an `asynccontextmanager`: a loss cancels the
        task, which at a `yield` runs the code that iterates. With `contextlib.aclosing`, that code gets `LeaseLost`.

        Args:
            timeout: Seconds to wait for the grant, outages included; None waits for ever.
            ticket: The id of the request. A repeated request with the same ticket gets the same permit or place.
            weight: Units to hold.
            owner: The name shown as holder.
            metadata: Shown by `inspect()`.
            on_lost: "cancel" cancels the body when the permit is lost, "signal" only sets `hold.lost`.
            max_hold: Seconds after which renewal stops and the lease runs out.

        Raises:
            AcquireTimeout: No capacity was free within `timeout`; the request is out of the queue.
            QueueFull: `max_waiters` requests wait already.
            Withdrawn: The request was removed from the queue by its ticket, or the client was closed.
            LeaseLost: The permit was lost while the body ran, or before it began.
            NotReplicated: The server requires more replicas than it has.
            Unavailable: The server was unreachable when `timeout` was over, or, with a `timeout` of 0, during the
                client's `call_timeout`. Like AcquireTimeout, it is a TimeoutError.
            RedleaseError: The server refused, or the client is closed.
            ValueError: A parameter is wrong, or the weight can never fit.
        """
        fate = checked_hold_options(on_lost, max_hold)
        wish = self._usual.changed(timeout, ticket, weight, owner, metadata)
        return HoldRequest(self._resource.name, self._obtain, wish, fate)

    async def acquire(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Permit:
        """Acquires a permit as data, which redlease does not renew: it expires after `lease` seconds.

        The caller renews it with `renew` and ends it with `release`; `hold()` does both by itself. The parameters and
        errors are those of `hold`, except `on_lost`, `max_hold` and `LeaseLost`.
        """
        permit = await self._acquire_permit(self._usual.changed(timeout, ticket, weight, owner, metadata))
        if permit is None:
            raise not_queued(self.name, ticket)
        return permit

    async def try_acquire(
        self,
        *,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Permit | None:
        """Acquires a permit if capacity is free, else returns None. Never queues, and never passes a waiter.

        The parameters are those of `acquire`, without `timeout`.

        Raises:
            Unavailable: The server was not reached within the client's `call_timeout`.
            RedleaseError: The server refused, or the client is closed.
            ValueError: A parameter is wrong, or the weight can never fit.
        """
        return await self._acquire_permit(self._usual.changed(0.0, ticket, weight, owner, metadata))

    async def adopt(
        self, permit: Permit, *, refence: bool = True, on_lost: OnLost = "cancel", max_hold: Duration | None = None
    ) -> Hold:
        """Takes over a permit, stored before a restart or received from another process, and renews it from then on.

        The permit gets a new fence, so that its former holder is refused. `refence=False` keeps the fence: use it only
        if no former holder can still run. `on_lost` and `max_hold` are those of `hold`.

        Raises:
            LeaseLost: The permit is no longer held under its fence: it expired, or was released or adopted elsewhere.
            Unavailable: The server was not reached. A repeated call gets what this one may have been granted.
            ValueError: It is not a permit of this resource, or its ticket is in use in this client.
        """
        limits.checked_permit(permit, self.name)
        fate = checked_hold_options(on_lost, max_hold)
        self._session.check_open()
        terms = self._terms._replace(owner=self._terms.owner or own_name())
        written = arguments.label(terms.owner, limits.checked_metadata(permit.metadata, is_new=False))
        forget_ticket = self._session.remembered.claim_ticket(self._resource, permit.ticket)
        # A repeated call uses the same request id, so that it gets what a call with a lost reply was granted.
        key = (self._resource.state_key, permit.ticket, permit.fence)
        # A permit granted to a lost call has expired by then, unless another process renews it.
        lasts_ms = self._connection.limit_ms + terms.lease_ms
        request = self._session.remembered.adoption(key, self._session.hold_ids, lasts_ms)
        ask = AcquireRequest(self._resource, terms, permit.ticket, request, permit.weight)
        told: list[Message] = []
        self._tickets.listen(request, told.append)
        try:
            adopted = await self._tickets.adopt(
                *(self._resource, ask.ticket, permit.fence, ask.request, terms.lease_ms),
                refence=refence,
                idle_ttl_ms=terms.idle_ttl_ms,
                label=written,
            )
            self._session.remembered.adopting.pop(key, None)
            if adopted is None:
                raise lease_lost(self.name, permit.ticket, permit.fence, GONE)
        except BaseException:
            forget_ticket()
            raise
        finally:
            self._tickets.unlisten(request, told.append)
        lease = self._kept(ask, adopted, fate, told, forget_ticket)
        if lease.lost and (on_lost == "cancel" or self._session.closed):
            raise lease.loss()
        return Hold(lease, dict(permit.metadata))

    def _kept(
        self, ask: AcquireRequest, adopted: Adopted, fate: HoldOptions, told: list[Message], forget: Callable[[], None]
    ) -> HeldLease:
        fence, granted_at_ms, expires_at_ms, weight, capacity, sent_ms = adopted
        granted, terms = Granted(fence, granted_at_ms, expires_at_ms, capacity), ask.terms
        lease = HeldLease(self._session.keeper, ask._replace(weight=weight), forget)
        lease.start(granted, sent_ms + terms.lease_ms - clock.SERVER_TICK_MS, fate, clock.now_ms(), told=told)
        if self._session.closed:  # closed before the reply came: `close` has released all other holds
            lease.lose("its client was closed")
            self._session.keeper.give_back(lease)
        return lease

    # Permits

    async def renew(self, permit: Permit, *, lease: Duration | None = None) -> Permit:
        """Renews a permit for its full lease, or for `lease` (seconds or a timedelta).

        Returns the permit with its new deadline.

        Raises:
            LeaseLost: The permit is no longer held under its fence.
            Unavailable: The server was not reached.
        """
        limits.checked_permit(permit, self.name)
        lease_ms = permit.lease_ms if lease is None else limits.milliseconds("lease", lease, limits.LEASE_MS_MIN)
        renewed = await self._tickets.renew(
            *(self._resource, permit.ticket, permit.fence, lease_ms),
            idle_ttl_ms=self._terms.idle_ttl_ms,
            shorten=True,
        )
        if not renewed.expires_at_ms:
            raise lease_lost(self.name, permit.ticket, permit.fence, GONE)
        return replace(permit, lease_ms=lease_ms, expires_at_ms=renewed.expires_at_ms, capacity=renewed.capacity)

    async def release(self, permit: Permit | str) -> bool:
        """Releases a permit; returns True if it was held until now. Idempotent.

        With a ticket instead of a permit, this is an administrative call: it checks no fence, and removes a waiter from
        the queue too. If a permit is no longer held, logs a warning: its holder may have worked without it.

        Raises:
            Unavailable: The server was not reached. The release of a permit is retried until its lease has expired.
        """
        if isinstance(permit, str):
            limits.checked_text("ticket", permit, limits.TICKET_BYTES_MAX)
            return await self._force_release(permit, "")
        limits.checked_permit(permit, self.name)
        request, may_be_duplicated = self._session.remembered.take_unsure(self._resource, permit.ticket)
        terms = self._terms._replace(lease_ms=permit.lease_ms)
        ask = AcquireRequest(self._resource, terms, permit.ticket, request, permit.weight)
        limit_ms = self._connection.limit_ms
        released = await self._tickets.give_back(
            ask, permit.fence, lasts_ms=permit.lease_ms, may_be_duplicated=may_be_duplicated, patience_ms=limit_ms
        )
        if released is None:
            raise self._connection.unavailable(self._resource, permit.ticket, limit_ms)
        if isinstance(released, RedleaseError):
            raise released
        if not released:
            logger.warning(
                "resource %r: permit %r (fence %d) was no longer held when it was released: %s. "
                "Nobody renews what acquire() returns; hold() does",
                *(self.name, permit.ticket, permit.fence, GONE),
                extra=about(self.name, permit.ticket, permit.fence),
            )
        return released

    async def check(self, permit: Permit) -> bool:
        """Returns True if the permit is held now, under its fence.

        Raises:
            Unavailable: The server was not reached.
        """
        limits.checked_permit(permit, self.name)
        return await self._tickets.check(self._resource, permit.ticket, permit.fence)

    # The resource as a whole

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

    # A plain `async with pool as hold:`

    async def __aenter__(self) -> Hold:
        request = self.hold()
        hold = await request.__aenter__()
        self._blocks.entered(request)
        return hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._blocks.left(self).__aexit__(kind, error, traceback)

    # Internals

    def _ask(self, wish: AcquireOptions, ids: RequestIds) -> tuple[AcquireRequest, Callable[[], None]]:
        """Returns the request, and a callback that frees its ticket for reuse in this client."""
        session, ticket = self._session, wish.ticket
        own_ticket, request, packed_ids = ids.draw()
        if not wish.terms.owner:
            wish = self._owned(wish)
        if ticket is None:
            ask = AcquireRequest(
                self._resource, wish.terms, own_ticket, request, wish.weight, wish.packed, 0, packed_ids
            )
            return ask, _nothing
        ask = AcquireRequest(self._resource, wish.terms, ticket, request, wish.weight, wish.packed)
        return ask, session.remembered.claim_ticket(self._resource, ticket)

    def _owned(self, wish: AcquireOptions) -> AcquireOptions:
        """Returns the options with the default owner, which names the current process."""
        owned = wish.packed_for(own_name())
        if wish is self._usual:
            self._usual = owned
        return owned

    async def _acquire_permit(self, wish: AcquireOptions) -> Permit | None:
        waiting, granted, forget_ticket, _ = await self._obtain(wish, claim=True)
        forget_ticket()
        if granted is None:
            return None
        ask, terms = waiting.ask, waiting.ask.terms
        if waiting.may_be_duplicated:
            self._session.remembered.note_unsure(ask, max(self._terms.lease_ms, self._connection.limit_ms))
        return Permit(
            *(self.name, ask.ticket, granted.fence, ask.weight, granted.capacity, terms.lease_ms),
            *(granted.granted_at_ms, granted.expires_at_ms, terms.owner, dict(wish.metadata)),
        )

    async def _obtain(self, wish: AcquireOptions, *, claim: bool = False) -> Obtained:
        """Sends a request and waits for its outcome; if the wait fails, releases what it has or may yet be granted."""
        ask, forget_ticket = self._ask(wish, self._session.ids if claim else self._session.hold_ids)
        try:
            waiting = self._session.enter(ask, claim=claim)
        except BaseException:
            forget_ticket()
            raise
        timer = None if wish.timeout_ms is None else self._timer(waiting, wish.timeout_ms)
        try:
            granted = await waiting.future
            # The event loop may have been blocked for longer than the lease: then ask again.
            while (now_ms := clock.now_ms()) >= waiting.deadline_ms and granted is not None:
                granted = await waiting.anew(now_ms)
        except BaseException:
            self._session.give_up(waiting)
            forget_ticket()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self._session.leave(waiting)
        return waiting, granted, forget_ticket, now_ms

    def _timer(self, waiting: PendingAcquire, timeout_ms: int) -> asyncio.TimerHandle:
        limit_ms = timeout_ms or self._connection.limit_ms  # with 0 the server grants or refuses at once
        return asyncio.get_running_loop().call_later(limit_ms / 1000, waiting.time_out, limit_ms)


class Lock(Semaphore):
    """A semaphore of capacity 1: one holder at a time, in the order of arrival. Made by `Redlease.lock`.

    Example:
        >>> async with client.lock("invoice:42", lease=30) as hold:  # doctest: +SKIP
        ...     await pay(fence=hold.fence)
    """


def _nothing() -> None:
    """Frees a ticket that was drawn at random: no other request can use it, so there is nothing to do."""
