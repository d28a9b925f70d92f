"""The semaphore and the lock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple, Self

from redlease import events
from redlease._core import clock, limits
from redlease._core.hold import Blocks, Hold, HoldRequest, Obtained, lease_lost
from redlease._core.limits import GRACE_S, WAITS, Duration, Full
from redlease._core.log import about
from redlease._core.operations import GONE
from redlease._core.options import AcquireSpec, HoldOptions, OnLost, checked_hold_options, own_name
from redlease._core.protocol import arguments
from redlease._core.protocol.arguments import AcquireRequest
from redlease._core.protocol.replies import Message
from redlease._core.session.acquire_errors import not_replicated, refused_without_waiting
from redlease._core.session.ids import RequestIds
from redlease._core.session.queueing import PendingAcquire
from redlease._core.session.replacing import Replacing
from redlease.errors import RedleaseError
from redlease.models import Permit

from .adoption import AdoptRequest, subscribed_keys
from .control import ResourceControl
from .decorator import Decorator, requests_of

logger = logging.getLogger("redlease")


class Units(NamedTuple):
    """So many units of a semaphore, for `Redlease.all`. Made by `Semaphore.weighted`."""

    pool: Semaphore
    weight: int

    @property
    def total(self) -> int:
        """The weight of the permit that is acquired."""
        return self.weight * self.pool._default_spec.weight

    def check(self, options: dict[str, Any]) -> None:
        """Raises ValueError for a parameter that an acquire of these units would refuse."""
        self.pool._default_spec.changed(weight=self.weight, **options)


class Semaphore(ResourceControl):
    """At most `capacity` units of a resource are held at once, granted in the order of arrival.

    Made by `Redlease.semaphore`. Any number of tasks may share one object; all objects with the same name and prefix,
    in any process, are the same semaphore.

    Example:
        >>> pool = client.semaphore("gpu", capacity=3, lease=30)  # doctest: +SKIP
        >>> async with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     await train(fence=hold.fence)
    """

    _blocks: Blocks | None = None

    # Acquiring

    def hold(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        priority: int = 0,
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
        on_lost: OnLost = "cancel",
        max_hold: Duration | None = None,
    ) -> HoldRequest:
        """Acquires a permit and renews it: `async with pool.hold() as hold:`, or `hold = await pool.hold()`.

        Do not `yield` from an async generator inside it, except in an `asynccontextmanager`: a loss cancels the task,
        which at a `yield` runs the code that iterates. With `contextlib.aclosing`, that code gets `LeaseLost`.

        Args:
            timeout: Seconds to wait for the grant, outages included; None waits forever.
            ticket: The id of the request. A repeated request with the same ticket gets the same permit or place.
            weight: Units to hold.
            owner: The name shown as holder.
            metadata: Shown by `inspect()`.
            priority: From 0 to 100. For each step that it is above theirs, up to ten earlier requests may wait longer.
            key: A customer, say: those of one key are served in the order of arrival, and different keys take turns.
            share: How large a share of the turns its key gets, from 0.001 to 1000.
            when_full: "wait", "refuse" (`QueueFull`), "replace-waiter" (older waiters of its key get `Superseded`),
                or "replace-holder": older holders of its key too.
            grace: Seconds that the body of such a hold has to end.
            on_lost: "cancel" cancels the body when the permit is lost, "signal" only sets `hold.lost`.
            max_hold: Seconds after which renewal stops and the lease runs out.

        Raises:
            AcquireTimeout: No capacity was free within `timeout`; the request is out of the queue.
            QueueFull: `max_waiters` requests wait already, or `when_full` is "refuse".
            Withdrawn: It was removed from the queue by its ticket, replaced (`Superseded`), or its client was closed.
            LeaseLost: The permit was lost while the body ran, or before it began.
            NotReplicated: The server, or `durability`, asks for more replicas than there are.
            Unavailable: The server was unreachable when `timeout` was over, or with 0 during `call_timeout`.
            RedleaseError: The server refused, or the client is closed.
            ValueError: A parameter is wrong, or the weight can never fit: `NeverFits`.
        """
        spec = self._default_spec.changed(
            *(timeout, ticket, weight, owner, metadata, priority, key, share, when_full, grace)
        )
        return HoldRequest(self._resource.name, self._obtain, spec, checked_hold_options(on_lost, max_hold))

    def holding(
        self,
        *,
        name_for: Callable[..., str] | None = None,
        timeout: Duration | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        priority: int = 0,
        key: str | Callable[..., str] | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
        on_lost: OnLost = "cancel",
        max_hold: Duration | None = None,
    ) -> Decorator:
        """Makes a decorator: each call of the decorated `async def` function runs while it holds a permit.

        A parameter that is annotated as `Hold` gets the hold, unless a call passes it: `hold: Hold | None = None`.

        Args:
            name_for: Gets the arguments of a call and returns a string: calls with different ones do not exclude each
                other. The name of a call's resource is that of this primitive, a colon and the string.
            timeout: This and the following are those of `hold`.
            weight: See `hold`.
            owner: See `hold`.
            metadata: See `hold`.
            priority: See `hold`.
            key: See `hold`; or what returns it from the arguments of a call.
            share: See `hold`.
            when_full: See `hold`.
            grace: See `hold`.
            on_lost: See `hold`.
            max_hold: See `hold`.

        Raises:
            ValueError: A parameter is wrong, or it decorates no `async def` function. Calls raise what `hold` does.

        Example:
            >>> @client.lock("customer").holding(name_for=lambda order: order.customer)  # doctest: +SKIP
            ... async def ship(order: Order, hold: Hold | None = None) -> None: ...
        """

        def spec(key: str | None) -> AcquireSpec:
            given = (timeout, None, weight, owner, metadata, priority)
            return self._default_spec.changed(*given, key, share, when_full, grace)

        spec("any" if callable(key) else key)  # checks them
        return Decorator(requests_of(self, spec, checked_hold_options(on_lost, max_hold)), name_for, key)

    def weighted(self, weight: int) -> Units:
        """Returns so many units of this semaphore, to be acquired with others by `Redlease.all`.

        Raises:
            ValueError: The weight is not a whole number above 0.
        """
        return Units(self, limits.checked_count("weight", weight))

    async def acquire(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        priority: int = 0,
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
    ) -> Permit:
        """Acquires a permit as data, which redlease does not renew: it expires after `lease` seconds.

        The caller renews it with `renew` and ends it with `release`; `hold()` does both by itself. The parameters and
        errors are those of `hold`, except `on_lost`, `max_hold` and `LeaseLost`.
        """
        spec = self._default_spec.changed(
            *(timeout, ticket, weight, owner, metadata, priority, key, share, when_full, grace)
        )
        permit = await self._acquire_permit(spec)
        if permit is None:
            raise refused_without_waiting(self.name, ticket, refuses=spec.full.refuses)
        return permit

    async def try_acquire(
        self,
        *,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        key: str | None = None,
    ) -> Permit | None:
        """Acquires a permit if capacity is free, else returns None. Never queues, and never passes a waiter.

        The parameters are those of `acquire`, without `timeout`.

        Raises:
            Unavailable: The server was not reached within the client's `call_timeout`.
            RedleaseError: The server refused, or the client is closed.
            ValueError: A parameter is wrong, or the weight can never fit: `NeverFits`.
        """
        return await self._acquire_permit(self._default_spec.changed(0.0, ticket, weight, owner, metadata, key=key))

    def adopt(
        self, permit: Permit, *, refence: bool = True, on_lost: OnLost = "cancel", max_hold: Duration | None = None
    ) -> HoldRequest:
        """Takes over a permit, stored before a restart or received from another process, and renews it from then on.

        The permit gets a new fence, so that its former holder is refused. `refence=False` keeps the fence: use it only
        if no former holder can still run. `on_lost` and `max_hold` are those of `hold`, and as that it is awaited or
        entered: `async with pool.adopt(permit) as hold:`.

        Raises:
            LeaseLost: The permit is no longer held under its fence: it expired, or was released or adopted elsewhere.
            Unavailable: The server was not reached. A repeated call gets what this one may have been granted.
            ValueError: It is not a permit of this resource, or its ticket is in use in this client.
        """
        limits.checked_permit(permit, self.name)
        hold_options = checked_hold_options(on_lost, max_hold)
        return AdoptRequest(self.name, lambda: self._adopt(permit, hold_options, refence=refence))

    async def _adopt(self, permit: Permit, hold_options: HoldOptions, *, refence: bool) -> Hold:
        self._session.check_open()
        terms = self._terms._replace(owner=self._terms.owner or own_name())
        written = arguments.label(terms.owner, limits.checked_metadata(permit.metadata, is_new=False), permit.key or "")
        forget_ticket = self._session.memory.reserve_ticket(self._resource, permit.ticket)
        # A repeated call uses the same request id, so that it gets what a call with a lost reply was granted.
        key = (self._resource.state_key, permit.ticket, permit.fence)
        # A permit granted to a lost call has expired by then, unless another process renews it.
        lasts_ms = self._connection.limit_ms + terms.lease_ms
        request_id = self._session.memory.adoption(key, self._session.hold_ids, lasts_ms)
        request = AcquireRequest(self._resource, terms, permit.ticket, request_id, permit.weight, key=permit.key or "")
        messages: list[Message] = []
        self._operations.listen(request_id, messages.append)
        try:
            adopted = await self._operations.adopt(
                *(self._resource, request.ticket, permit.fence, request.request_id, terms.lease_ms),
                refence=refence,
                idle_ttl_ms=terms.idle_ttl_ms,
                label=written,
            )
            self._session.memory.adopting.pop(key, None)
            if adopted is None:
                raise lease_lost(self.name, permit.ticket, permit.fence, GONE)
        except BaseException:
            forget_ticket()
            raise
        finally:
            self._operations.unlisten(request_id, messages.append)
        lease = subscribed_keys(self._session, request, adopted, hold_options, messages, forget_ticket=forget_ticket)
        if lease.lost and (lease.on_lost == "cancel" or self._session.closed):
            raise lease.loss()
        return Hold(lease, dict(permit.metadata))

    # Permits

    async def renew(self, permit: Permit, *, lease: Duration | None = None) -> Permit:
        """Renews a permit for its full lease, or for `lease` (seconds or a timedelta).

        Returns the permit with its new deadline.

        Raises:
            LeaseLost: The permit is no longer held under its fence.
            Unavailable: The server was not reached.
        """
        limits.checked_permit(permit, self._resource.name)
        lease_ms = permit.lease_ms if lease is None else limits.milliseconds("lease", lease, limits.LEASE_MS_MIN)
        renewed = await self._operations.renew(
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
            Unavailable: The server was not reached within the client's `call_timeout`. The release of a permit is
                retried in the background until its lease has expired.
        """
        if isinstance(permit, str):
            limits.checked_text("ticket", permit, limits.TICKET_BYTES_MAX)
            return await self._force_release(permit, "")
        limits.checked_permit(permit, self._resource.name)
        request_id, may_be_duplicated = self._session.memory.take_possible_duplicate(self._resource, permit.ticket)
        default_spec, lease_ms = self._terms, permit.lease_ms
        terms = default_spec if lease_ms == default_spec.lease_ms else default_spec._replace(lease_ms=lease_ms)
        request = AcquireRequest(self._resource, terms, permit.ticket, request_id, permit.weight)
        limit_ms = self._connection.limit_ms
        released = await self._operations.release(
            request, permit.fence, lasts_ms=lease_ms, may_be_duplicated=may_be_duplicated, answer_within_ms=limit_ms
        )
        if released is None:
            raise self._connection.unavailable(self._resource, permit.ticket, limit_ms)
        if isinstance(released, RedleaseError):
            raise released
        if released and (emit := self._session.manager.emit) is not None:
            emit(events.Released(self.name, permit.ticket, permit.weight, permit.fence, None, permit.key))
        if not released:
            logger.warning(
                "resource %r: permit %r (fence %d) was no longer held when it was released: %s. "
                "Nobody renews what acquire() returns; hold() does",
                *(self.name, permit.ticket, permit.fence, GONE),
                extra=about(self.name, permit.ticket, permit.fence),
            )
        return released

    async def is_held(self, permit: Permit) -> bool:
        """Returns True if the permit is held now, under its fence.

        Raises:
            Unavailable: The server was not reached.
        """
        limits.checked_permit(permit, self.name)
        return await self._operations.check(self._resource, permit.ticket, permit.fence)

    # A plain `async with pool as hold:`

    async def __aenter__(self) -> Hold:
        request = self.hold()
        hold = await request.__aenter__()
        self._blocks = self._blocks or Blocks()
        self._blocks.entered(request)
        return hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await (self._blocks or Blocks()).left(self).__aexit__(kind, error, traceback)

    # Internals

    def _named(self, name: str) -> Self:
        """Returns the same of another name."""
        return type(self)(self._operations, self._operations.resource(name), self._default_spec)

    def _ask(self, spec: AcquireSpec, ids: RequestIds) -> tuple[AcquireRequest, Callable[[], None]]:
        """Returns the request, and a callback that frees its ticket for reuse in this client."""
        drawn, request_id, packed_ids = ids.draw()
        if not spec.terms.owner:
            spec = self._owned(spec)
        terms, weight, packed, key = spec.terms, spec.weight, spec.packed, spec.turn.key
        if spec.ticket is None:
            return AcquireRequest(
                self._resource, terms, drawn, request_id, weight, packed, 0, packed_ids, key
            ), _nothing
        request = AcquireRequest(self._resource, terms, spec.ticket, request_id, weight, packed, key=key)
        return request, self._session.memory.reserve_ticket(self._resource, spec.ticket)

    def _owned(self, spec: AcquireSpec) -> AcquireSpec:
        """Returns the options with the default owner, which names the current process."""
        owned = spec.packed_for(own_name())
        if spec is self._default_spec:
            self._default_spec = owned
        return owned

    async def _acquire_permit(self, spec: AcquireSpec) -> Permit | None:
        waiting, granted, forget_ticket, _ = await self._obtain(spec, needs_full_lease=True)
        forget_ticket()
        if granted is None:
            return None
        request, terms = waiting.request, waiting.request.terms
        if waiting.may_be_duplicated:
            self._session.memory.note_possible_duplicate(request, max(self._terms.lease_ms, self._connection.limit_ms))
        return Permit(
            *(self._resource.name, request.ticket, granted.fence, request.weight, granted.capacity, terms.lease_ms),
            *(granted.granted_at_ms, granted.expires_at_ms, terms.owner, dict(spec.metadata)),
            key=spec.turn.key or None,
        )

    async def _obtain(self, spec: AcquireSpec, *, needs_full_lease: bool = False) -> Obtained:
        """Sends a request and waits for its outcome; if the wait fails, releases what it has or may yet be granted."""
        request, forget_ticket = self._ask(spec, self._session.ids if needs_full_lease else self._session.hold_ids)
        try:
            waiting = self._session.enter(request, needs_full_lease=needs_full_lease)
        except BaseException:
            forget_ticket()
            raise
        if spec.full is not WAITS and spec.full.replaces:
            waiting.on_queued = Replacing(waiting, spec.full).queued
        timer = None if spec.timeout_ms is None else self._timer(waiting, spec.timeout_ms)
        try:
            granted = await waiting.future
            # The event loop may have been blocked for longer than the lease: then ask again.
            while (now_ms := clock.now_ms()) >= waiting.deadline_ms and granted is not None:
                granted = await waiting.restart(now_ms)
            if request.terms.replicas and granted is not None:
                await self._replicated(waiting, granted.fence)
            if (emit := self._session.manager.emit) is not None and granted is not None:
                emit(
                    events.Granted(
                        *waiting.request.subject(), granted.fence, *waiting.waited(now_ms), request.key or None
                    )
                )
        except BaseException as error:
            self._session.release_request(waiting)
            forget_ticket()
            if (emit := self._session.manager.emit) is not None:
                waited, why = waiting.waited(clock.now_ms()), type(error).__name__
                emit(events.Abandoned(*waiting.request.subject(), *waited, why, request.key or None))
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self._session.leave(waiting)
        return waiting, granted, forget_ticket, now_ms

    async def _replicated(self, waiting: PendingAcquire, fence: int) -> None:
        """Waits until replicas have a grant; raises `NotReplicated` if too few have it in time."""
        terms, sent_ms = waiting.request.terms, clock.now_ms()
        if (replicas := await self._operations.replicate(waiting.request, fence)) < terms.replicas:
            raise not_replicated(waiting.request, replicas)
        waiting.deadline_ms = sent_ms + terms.lease_ms - clock.SERVER_TICK_MS

    def _timer(self, waiting: PendingAcquire, timeout_ms: int) -> asyncio.TimerHandle:
        limit_ms = timeout_ms or self._connection.limit_ms  # with 0 the server grants or refuses at once
        return asyncio.get_running_loop().call_later(limit_ms / 1000, waiting.time_out, limit_ms, timeout_ms > 0)


class Lock(Semaphore):
    """A semaphore of capacity 1: one holder at a time, in the order of arrival. Made by `Redlease.lock`.

    Example:
        >>> async with client.lock("invoice:42", lease=30) as hold:  # doctest: +SKIP
        ...     await pay(fence=hold.fence)
    """


def as_declared(pool: Semaphore) -> Semaphore:
    """Returns the semaphore with the capacity that others declare; its own counts only if nobody has declared one."""
    default_spec = pool._default_spec
    terms = default_spec.terms._replace(declares=False)
    return Semaphore(pool._operations, pool._resource, default_spec._replace(terms=terms))


def _nothing() -> None:
    """Frees a ticket that was drawn at random: no other request can use it, so there is nothing to do."""
