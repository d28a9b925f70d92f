"""The semaphore, from which everything else is a thin skin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from . import clock, limits, wire
from .errors import RedleaseError
from .hold import Hold, HoldRequest, Obtained, lease_lost
from .keeper import Leaving, Released
from .limits import Duration
from .models import Permit, Snapshot
from .route import LIMIT_MS
from .waiting import Room, Waiting, not_queued
from .wish import OnLost, Wish, checked_fate

GONE = "it lapsed, was released, or somebody else adopted it"
WATCH_MS = 30_000  # for how long one call asks that changes be published


class Semaphore:
    """At most `capacity` units of a resource are held at once, granted in the order of arrival.

    Made by `Redlease.semaphore`. One object may be shared by any number of tasks; objects of one name, in whatever
    process, are one semaphore.

    Example:
        >>> pool = client.semaphore("gpu", capacity=3, lease=30)  # doctest: +SKIP
        >>> async with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     await train(fence=hold.fence)
    """

    def __init__(self, room: Room, resource: wire.Resource, usual: Wish) -> None:
        self._room = room
        self._connection = room.connection
        self._resource = resource
        self._terms = usual.terms
        self._usual = usual
        self._entered: list[tuple[asyncio.Task[Any] | None, HoldRequest]] = []

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
        """Acquires and keeps a permit: `async with pool.hold() as hold:`, or `hold = await pool.hold()`.

        Args:
            timeout: Seconds to wait for the grant, outages included; None waits for ever.
            ticket: The id of the request. A repeated request with its ticket finds its permit or its place.
            weight: Units to hold.
            owner: Who is shown as holder.
            metadata: Shown by `inspect()`.
            on_lost: "cancel" cancels the body when the permit is lost, "signal" only sets `hold.lost`.
            max_hold: Seconds after which renewal stops and the lease runs out.

        Raises:
            AcquireTimeout: No grant within `timeout`; the request is out of the queue.
            QueueFull: `max_waiters` wait already.
            Withdrawn: Somebody took the request out of the queue by its ticket, or closed the client.
            LeaseLost: The permit was lost while the body ran, or before it began.
            NotReplicated: The server wants more replicas than it has.
            Unavailable: With a `timeout` of 0, the server was not reached.
            RedleaseError: The server refused, or the client is closed.
            ValueError: A parameter is wrong, or the weight can never fit.
        """
        fate = checked_fate(on_lost, max_hold)
        return HoldRequest(self._obtain, self._usual.changed(timeout, ticket, weight, owner, metadata), fate)

    async def acquire(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Permit:
        """Acquires a permit as data: nobody renews it, and it is the caller's to release.

        Takes what `hold` takes for the request, and raises what that raises, save `LeaseLost`.
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
        """Acquires a permit if that takes no waiting; None otherwise. Never queues, and never passes one who does.

        Takes what `acquire` takes, save `timeout`.

        Raises:
            Unavailable: The server was not reached.
            RedleaseError: The server refused, or the client is closed.
            ValueError: A parameter is wrong, or the weight can never fit.
        """
        return await self._acquire_permit(self._usual.changed(0.0, ticket, weight, owner, metadata))

    async def adopt(
        self, permit: Permit, *, refence: bool = True, on_lost: OnLost = "cancel", max_hold: Duration | None = None
    ) -> Hold:
        """Takes over a permit, stored before a restart or handed over by another process, and keeps it from then on.

        It gets a new fence, so that whoever had it before is refused; `refence=False` keeps the fence, for where no
        former holder can be left. `on_lost` and `max_hold` are those of `hold`.

        Raises:
            LeaseLost: It is no longer held under its fence: it lapsed, was released, or another has adopted it.
            Unavailable: The server was not reached. A repeated call gets what this one may have got.
            ValueError: It is no permit of this resource, or its ticket is in use in this client.
        """
        limits.checked_permit(permit, self.name)
        fate = checked_fate(on_lost, max_hold)
        self._room.check_open()
        terms = self._terms
        written = wire.label(terms.owner, limits.checked_metadata(permit.metadata))
        forget_ticket = self._room.claim_ticket(self._resource, permit.ticket)
        # A repeated call is the same request, so that it gets what one without an answer may have got.
        key = (self._resource.state_key, permit.ticket, permit.fence)
        request = self._room.adopting.setdefault(key, self._room.new_request())
        ask = wire.Ask(self._resource, terms, permit.ticket, request, permit.weight)
        told: list[wire.Message] = []
        self._room.listeners[request] = told.append
        try:
            answer = await self._connection.call(
                *(self._resource, wire.ADOPT, ask.ticket, permit.fence, ask.request, self._room.new_name()),
                *(terms.lease_ms, int(refence), terms.idle_ttl_ms, written),
                ticket=permit.ticket,
            )
            del self._room.adopting[key]
            if answer.values[0] == 0:
                raise lease_lost(self.name, permit.ticket, permit.fence, GONE)
        except BaseException:
            forget_ticket()
            raise
        finally:
            self._room.listeners.pop(request, None)
        fence, granted_at_ms, expires_at_ms, weight, capacity = answer.values
        granted = wire.Granted(fence, granted_at_ms, expires_at_ms, capacity)
        hold = Hold(self._room.keeper, ask._replace(weight=weight), dict(permit.metadata), forget_ticket)
        hold.start(granted, answer.sent_ms + terms.lease_ms, fate, told=told)
        if self._room.closed:  # while the answer was under way: closing has seen to all other holds
            hold.lose("its client was closed")
            self._room.keeper.give_back(hold)
            hold.check()
        return hold

    # Permits

    async def renew(self, permit: Permit, *, lease: Duration | None = None) -> Permit:
        """Gives a permit a full lease again, of another length (seconds or a timedelta) if given.

        Returns it with its new deadline.

        Raises:
            LeaseLost: It is no longer held under its fence.
            Unavailable: The server was not reached.
        """
        limits.checked_permit(permit, self.name)
        lease_ms = permit.lease_ms if lease is None else limits.milliseconds("lease", lease, limits.LEASE_MS_MIN)
        answer = await self._connection.call(
            *(self._resource, wire.RENEW, permit.ticket, permit.fence, lease_ms, "told", self._terms.idle_ttl_ms),
            ticket=permit.ticket,
        )
        deadline, capacity, _ = answer.values
        if deadline == 0:
            raise lease_lost(self.name, permit.ticket, permit.fence, GONE)
        return replace(permit, lease_ms=lease_ms, expires_at_ms=deadline, capacity=capacity)

    async def release(self, permit: Permit | str) -> bool:
        """Gives a permit back; whether it was held until now. May be repeated.

        With a ticket instead of a permit this is administrative: no fence is checked, and a waiter is taken out of the
        queue too.

        Raises:
            Unavailable: The server was not reached. A permit is still released in the background while it lasts.
        """
        if isinstance(permit, str):
            limits.checked_text("ticket", permit, limits.TICKET_BYTES_MAX)
            return await self._expel(permit, "")
        limits.checked_permit(permit, self.name)
        future: asyncio.Future[Released] = asyncio.get_running_loop().create_future()
        now_ms = clock.now_ms()
        request, until_ms = self._room.unsure.pop((self._resource.state_key, permit.ticket), ("", 0.0))
        self._connection.start()
        terms = self._terms._replace(lease_ms=permit.lease_ms)
        ask = wire.Ask(self._resource, terms, permit.ticket, request, permit.weight)
        until_lapsed_ms, unsure = now_ms + permit.lease_ms, now_ms < until_ms
        leaving = Leaving(self._room.keeper, ask, permit.fence, until_lapsed_ms, unsure, future)
        leaving.patience_ms = LIMIT_MS
        leaving.start(now_ms)
        released = await future
        if released is None:
            raise self._connection.unavailable(self.name, permit.ticket)
        if isinstance(released, RedleaseError):
            raise released
        return released

    async def check(self, permit: Permit) -> bool:
        """Whether the permit is held now, under its fence.

        Raises:
            Unavailable: The server was not reached.
        """
        limits.checked_permit(permit, self.name)
        answer = await self._connection.call(
            *(self._resource, wire.CHECK, permit.ticket, permit.fence), ticket=permit.ticket
        )
        return bool(answer.values[0])

    # The resource as a whole

    async def inspect(self, *, limit: int = wire.SNAPSHOT_LIMIT) -> Snapshot:
        """The resource as it is at one moment, with at most `limit` holders and as many waiters.

        Raises:
            Unavailable: The server was not reached.
        """
        limits.checked_count("limit", limit)
        answer = await self._connection.call(self._resource, wire.INSPECT, limit)
        return wire.read_snapshot(self.name, self._terms.capacity, answer.values)

    async def locked(self) -> bool:
        """Whether an acquire of weight 1 would have to wait now.

        Raises:
            Unavailable: The server was not reached.
        """
        answer = await self._connection.call(self._resource, wire.INSPECT, 0)
        _, _, capacity, in_use, waiting, _, _ = answer.values
        return bool(waiting > 0 or in_use >= (capacity or self._terms.capacity))

    async def resize(self, capacity: int) -> None:
        """Sets the capacity. Permits granted before stay; a waiter that can never fit any more gets ValueError.

        It lasts until a process declares a capacity that differs from the one last declared.

        Raises:
            Unavailable: The server was not reached.
        """
        limits.checked_count("capacity", capacity)
        answer = await self._connection.call(self._resource, wire.RESIZE, capacity, self._terms.idle_ttl_ms)
        if answer.values[0]:
            self._room.keeper.follow_up(self._resource, self._terms)

    async def release_all(self, *, queue: bool = False) -> int:
        """Frees every holder there is, with `queue` every waiter first; how many. Their clients are told at once.

        Raises:
            Unavailable: The server was not reached. Some may be freed by then; it may be repeated.
        """
        freed = 0
        while True:
            snapshot = await self.inspect()
            waiters = snapshot.waiters if queue else ()
            freed += sum(await asyncio.gather(*(self._expel(waiter.ticket, "") for waiter in waiters)))
            if len(waiters) == wire.SNAPSHOT_LIMIT:
                continue  # as long as any may wait that was not seen, no holder makes room for it
            freed += sum(await asyncio.gather(*(self._expel(held.ticket, held.fence) for held in snapshot.holders)))
            if len(snapshot.holders) < wire.SNAPSHOT_LIMIT:
                return freed

    async def _expel(self, ticket: str, fence: int | str) -> bool:
        answer = await self._connection.call(
            *(self._resource, wire.RELEASE, ticket, fence, "", self._terms.lease_ms, 1, self._terms.idle_ttl_ms),
            ticket=ticket,
        )
        released, more = answer.values
        if more:
            self._room.keeper.follow_up(self._resource, self._terms)
        return bool(released)

    async def watch(self) -> AsyncGenerator[Snapshot, None]:
        """Yields the resource as it is, and again each time it has changed; changes are pushed.

        Changes in quick succession may be seen as one. Costs nothing on the server while nobody watches. With the
        server away it waits; who breaks off the loop closes it (`contextlib.aclosing`).
        """
        changed = asyncio.Event()
        channel = self._resource.watch_channel

        def tell(_: bytes) -> None:
            changed.set()

        self._room.watchers.add(changed)
        try:
            await self._connection.subscribe(channel, tell)
            seen = None
            while True:
                changed.clear()
                answer = await self._connection.call(self._resource, wire.WATCH, WATCH_MS, limit_ms=None)
                snapshot = await self.inspect()
                if _shape(snapshot) != seen:
                    seen = _shape(snapshot)
                    yield snapshot
                soonest_ms = answer.values[0]  # until something lapses; below 0: nothing does
                wait_ms = min(WATCH_MS / 3, soonest_ms + 2) if soonest_ms >= 0 else WATCH_MS / 3
                await clock.pause(changed, wait_ms / 1000)
        finally:
            self._room.watchers.discard(changed)
            self._connection.unsubscribe(channel, tell)

    # A plain `async with pool as hold:`

    async def __aenter__(self) -> Hold:
        request = self.hold()
        hold = await request.__aenter__()
        self._entered.append((asyncio.current_task(), request))
        return hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._left().__aexit__(kind, error, traceback)

    def _left(self) -> HoldRequest:
        """The block that is left now: this task's last one, or else the one whose task cannot leave it any more."""
        current = asyncio.current_task()
        own = [entry for entry in self._entered if entry[0] is current]
        over = [entry for entry in self._entered if entry[1].task_is_over]
        chosen = own or over or (self._entered if len(self._entered) == 1 else [])
        if not chosen:
            raise RuntimeError(f"{self!r} is left by a task that did not enter it: use `async with pool.hold():`")
        self._entered.remove(chosen[-1])
        return chosen[-1][1]

    # How it is done

    def _ask(self, wish: Wish) -> tuple[wire.Ask, Callable[[], None]]:
        """The wish as a request, and what ends the use of its ticket in this client."""
        request, ticket = self._room.new_request(), wish.ticket
        if ticket is None:
            ticket, forget_ticket = request, _nothing
        else:
            forget_ticket = self._room.claim_ticket(self._resource, ticket)
        return wire.Ask(self._resource, wish.terms, ticket, request, wish.weight, wish.packed), forget_ticket

    async def _acquire_permit(self, wish: Wish) -> Permit | None:
        waiting, granted, forget_ticket = await self._obtain(wish, claim=True)
        forget_ticket()
        if granted is None:
            return None
        ask, terms = waiting.ask, wish.terms
        if waiting.unsure:
            self._remember_unsure(ask)
        return Permit(
            *(self.name, ask.ticket, granted.fence, ask.weight, granted.capacity, terms.lease_ms),
            *(granted.granted_at_ms, granted.expires_at_ms, terms.owner, dict(wish.metadata)),
        )

    def _remember_unsure(self, ask: wire.Ask) -> None:
        now_ms, unsure = clock.now_ms(), self._room.unsure
        for key in [key for key, (_, until_ms) in unsure.items() if until_ms < now_ms]:
            del unsure[key]
        unsure[self._resource.state_key, ask.ticket] = (ask.request, now_ms + max(self._terms.lease_ms, LIMIT_MS))

    async def _obtain(self, wish: Wish, *, claim: bool = False) -> Obtained:
        """Asks and waits. Whatever ends this but an outcome gives back what the request has or may yet get."""
        ask, forget_ticket = self._ask(wish)
        try:
            waiting = self._room.enter(ask, claim=claim)
        except BaseException:
            forget_ticket()
            raise
        timer = None if wish.timeout_ms is None else self._timer(waiting, wish.timeout_ms)
        try:
            granted = await waiting.future
        except BaseException:
            self._room.give_up(waiting)
            forget_ticket()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        self._room.leave(waiting)
        return waiting, granted, forget_ticket

    def _timer(self, waiting: Waiting, timeout_ms: int) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        if timeout_ms == 0:
            return loop.call_later(LIMIT_MS / 1000, self._unreached, waiting)
        return loop.call_later(timeout_ms / 1000, waiting.time_out, timeout_ms)

    def _unreached(self, waiting: Waiting) -> None:
        waiting.fail(self._connection.unavailable(self.name, waiting.ask.ticket))


class Lock(Semaphore):
    """A semaphore of capacity 1: one holder at a time, in the order of arrival. Made by `Redlease.lock`.

    Example:
        >>> async with client.lock("invoice:42", lease=30) as hold:  # doctest: +SKIP
        ...     await pay(fence=hold.fence)
    """


def _nothing() -> None:
    """Ends the use of a ticket that nobody else can ask with."""


def _shape(snapshot: Snapshot) -> tuple[object, ...]:
    """What counts as a change: renewals do not."""
    holders = tuple((permit.ticket, permit.fence) for permit in snapshot.holders)
    return snapshot.capacity, snapshot.fence, holders, tuple(waiter.ticket for waiter in snapshot.waiters)
