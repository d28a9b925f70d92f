"""Acquire requests under way, and the places that this client keeps for them in the queues of resources.

A client has one place on a resource, however many of its tasks wait there: one entry with one deadline on the server,
kept by one beat. A place that has lapsed is never revived; its waiters are asked for anew from a place of a new epoch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from functools import partial
from itertools import count

from . import clock, wire
from .errors import AcquireTimeout, QueueFull, RedleaseError, Withdrawn
from .keeper import Keeper, Leaving
from .route import CLOSED, Reached, Reply, Route, everything
from .wire import Status

logger = logging.getLogger("redlease")

BEATS_A_LEASE = 3
# Every client with waiters calls when something may have lapsed: one after the other, by its place.
STAGGER_MS, STAGGER_PLACES = 1.0, 200
ROUNDING_MS = 2.0  # the server tells whole ms


class Waiting:
    """One acquire request, until it is granted, refused or given up.

    `future` gets the grant, good until `deadline_ms` by the local clock; or None when it was not to queue and had to.
    `claim`: the caller will not renew, so a grant out of the queue is asked for once more, which fills its lease.
    """

    place: Place | None = None  # once it is queued
    sequence: int | None = None
    sent = False
    unsure = False  # whether a copy may still be under way on a connection that was lost
    deadline_ms = 0.0
    is_handed_over = False  # whether a message told of the grant: its lease is what was left of the place's
    due_ms: float | None = None
    early: tuple[wire.Message, ...] = ()  # what was told of the permit before whoever asked for it went on
    on_queued: Callable[[wire.Queued], None] | None = None
    on_lapsed: Callable[[], None] | None = None  # who is told that the place is gone, instead of asking anew
    _asked_from = ""

    def __init__(
        self,
        room: Room,
        ask: wire.Ask,
        future: asyncio.Future[wire.Granted | None],
        claim: bool,
    ) -> None:
        self.room = room
        self.ask = ask
        self.future = future
        self._claim = claim

    def turn(self, now_ms: float) -> bool:
        """Asks, or asks again: the same request finds its permit or its place."""
        room, ask = self.room, self.ask
        resource = ask.resource
        link = room.connection.of(resource)
        if self.future.done() or not link.ready:
            return False
        place = room.places.get(resource.state_key)
        self._asked_from = asked_from = room.name if place is None else place.name
        self.sent = True
        tail = wire.acquire_tail(ask, asked_from)
        link.send(resource, wire.ACQUIRE, tail, partial(self._answered, now_ms, asked_from))
        return True

    def _answered(self, sent_ms: float, asked_from: str, reply: Reply) -> None:
        if reply is None:
            self.unsure = True
            self._again(0)  # another connection may serve it by now
        elif self.future.done():
            return
        elif isinstance(reply, wire.Fault):
            if reply.passes:
                self._again(reply.retry_ms)
            else:
                self.future.set_exception(reply.error(self.ask.resource.name, self.ask.ticket))
        else:
            self._read(sent_ms, asked_from, reply[1], reply[2:])

    def _read(self, sent_ms: float, asked_from: str, status: int, values: list[int]) -> None:
        if status == Status.GRANTED:
            granted = wire.Granted(*values)
            if granted.was_declared:
                self.room.declared(self.ask, granted.was_declared)
            self.deadline_ms = sent_ms + self.ask.terms.lease_ms
            self.future.set_result(granted)
        elif status == Status.QUEUED:
            self._queued(sent_ms, asked_from, wire.Queued(*values))
        elif status == Status.LAPSED:
            self.room.lapsed(self.ask.resource, asked_from)
            self._again(0)
        elif status in (Status.BUSY, Status.FULL) and values[-1]:
            self._again(0)  # the call ended with its batch of dead waiters, not with the last of them
        elif status == Status.BUSY:
            self.future.set_result(None)
        else:
            self.future.set_exception(self._refusal(status, values))

    def _queued(self, sent_ms: float, asked_from: str, queued: wire.Queued) -> None:
        room = self.room
        if queued.was_declared:
            room.declared(self.ask, queued.was_declared)
        if queued.more:
            room.keeper.follow_up(self.ask.resource, self.ask.terms)
        self.place = place = room.place_on(self.ask.resource)
        place.waiters[self.ask.request] = self
        if asked_from == place.name:
            self.sequence = queued.sequence
            place.queued(sent_ms, self.ask.terms.waiter_lease_ms, queued)
        else:  # it has another name by now, and only that one is kept
            self._again(0)
        if self.on_queued is not None:
            self.on_queued(queued)

    def told(self, message: wire.Message) -> None:
        """A message about this request came, which has no outcome yet."""
        name = self.ask.resource.name
        if message.kind == "g":
            self._handed_over(wire.Granted(*message.numbers))
        elif message.kind == "m":
            self.fail(misfit(name, self.ask, *message.numbers))
        elif message.kind == "x":
            self.fail(withdrawn(name, self.ask.ticket))

    def _handed_over(self, granted: wire.Granted) -> None:
        """Its lease is what is left of the place that it was asked from."""
        deadline_ms = None if self.place is None else self.place.confirmed_until_ms(self._asked_from)
        if self._claim or deadline_ms is None or clock.now_ms() >= deadline_ms:
            self._again(0)
        else:
            self.deadline_ms, self.is_handed_over = deadline_ms, True
            self.future.set_result(granted)

    def _again(self, wait_ms: float) -> None:
        self.room.keeper.schedule.at(clock.now_ms() + wait_ms, self)

    def _refusal(self, status: int, values: list[int]) -> Exception:
        name, ticket = self.ask.resource.name, self.ask.ticket
        if status == Status.FULL:
            return QueueFull(
                f"resource {name!r}: {values[0]} requests wait already and max_waiters is "
                f"{self.ask.terms.max_waiters}; this one was not queued. Try again later",
                resource=name,
                ticket=ticket,
            )
        if status == Status.MISFIT:
            return misfit(name, self.ask, values[0])
        if status == Status.OTHER_WEIGHT:
            return ValueError(
                f"resource {name!r}: ticket {ticket!r} is known with weight {values[0]}, not {self.ask.weight}. "
                "Ask with the same weight, or release it first"
            )
        return withdrawn(name, ticket)

    def resized(self, capacity: int) -> None:
        """The resource has this capacity now: one that can never fit is told."""
        if self.ask.weight > capacity:
            self.fail(misfit(self.ask.resource.name, self.ask, capacity))

    def fail(self, error: Exception) -> None:
        """It will not be granted."""
        if not self.future.done():
            self.future.set_exception(error)

    def time_out(self, timeout_ms: float) -> None:
        """The caller's time is over."""
        name, ticket = self.ask.resource.name, self.ask.ticket
        connection = self.room.connection
        if not connection.of(self.ask.resource).ready:
            why = str(connection.unavailable())
        elif self.sequence is None:
            why = "the server has not answered"
        else:
            why = "others hold it or are ahead in the queue; `inspect()` shows them"
        message = f"resource {name!r}: no permit within {timeout_ms / 1000:g} s: {why}. The request is out of the queue"
        self.fail(AcquireTimeout(message, resource=name, ticket=ticket))


def misfit(name: str, ask: wire.Ask, capacity: int) -> ValueError:
    """The error for a weight that can not fit."""
    return ValueError(
        f"resource {name!r}: weight {ask.weight} can never fit, the capacity is {capacity} (ticket {ask.ticket!r})"
    )


def not_queued(name: str, ticket: str | None) -> AcquireTimeout:
    """The error for a request that was not to queue and had to."""
    message = f"resource {name!r}: no permit without waiting, and timeout is 0. The request was not queued"
    return AcquireTimeout(message, resource=name, ticket=ticket)


def withdrawn(name: str, ticket: str) -> Withdrawn:
    """The error for a waiter that somebody took out."""
    message = f"resource {name!r}: ticket {ticket!r} was taken out of the queue by its ticket. Ask again to queue anew"
    return Withdrawn(message, resource=name, ticket=ticket)


class Place:
    """This client's place on one resource, from the moment one of its requests was queued there.

    Places on several resources may have one name; what matters is that one which may have lapsed is not used again.
    """

    deadline_ms: float | None = None  # None: the server has not confirmed it
    due_ms: float | None = None
    _lease_ms = 0  # the longest that was asked for
    _beating = False

    def __init__(self, room: Room, resource: wire.Resource) -> None:
        self.room = room
        self.resource = resource
        self.name = room.name
        self.waiters: dict[str, Waiting] = {}

    def _first(self) -> Waiting | None:
        queued = (waiting for waiting in self.waiters.values() if waiting.sequence is not None)
        return min(queued, key=lambda waiting: waiting.sequence or 0, default=None)

    def confirmed_until_ms(self, name: str) -> float | None:
        """Until when the server keeps the place of that name; None when that is not known."""
        return self.deadline_ms if name == self.name else None

    def queued(self, sent_ms: float, lease_ms: int, queued: wire.Queued) -> None:
        """The server has queued one of the waiters, and keeps the place for at least so long."""
        self._lease_ms = max(self._lease_ms, lease_ms)
        due_ms = self._confirm(sent_ms, lease_ms, queued.ahead, queued.soonest_ms)
        if self.due_ms is None or due_ms < self.due_ms:
            self.room.keeper.schedule.at(due_ms, self)

    def _confirm(self, sent_ms: float, lease_ms: int, ahead: int, soonest_ms: int) -> float:
        """The server has kept the place; returns when to call next."""
        self.deadline_ms = max(self.deadline_ms or 0.0, sent_ms + lease_ms)
        due_ms = sent_ms + lease_ms / BEATS_A_LEASE
        if soonest_ms >= 0:
            stagger_ms = STAGGER_MS * min(ahead, STAGGER_PLACES)
            due_ms = min(due_ms, clock.now_ms() + soonest_ms + ROUNDING_MS + stagger_ms)
        return due_ms

    def turn(self, now_ms: float) -> bool:
        """Beats, or finds that the place has lapsed."""
        if self.deadline_ms is None:
            return False
        if now_ms >= self.deadline_ms:
            self.lapsed(self.name)
            return False
        # With nobody waiting the place is remembered until it lapses: who comes meanwhile needs no new one.
        first = self._first()
        if first is None:
            self.room.keeper.schedule.at(self.deadline_ms, self)
            return False
        self.room.keeper.schedule.at(self.deadline_ms, self)  # until a reply says more
        link = self.room.connection.of(self.resource)
        if self._beating or not link.ready:
            return False
        self._beating = True
        tail = wire.pack(self.name, self._lease_ms, first.ask.ticket, first.ask.terms.idle_ttl_ms)
        link.send(self.resource, wire.BEAT, tail, partial(self._beaten, now_ms, self.name, self._lease_ms, first))
        return True

    def _beaten(self, sent_ms: float, name: str, lease_ms: int, first: Waiting, reply: Reply) -> None:
        self._beating = False
        schedule = self.room.keeper.schedule
        if name != self.name:
            return
        if reply is None:  # another connection may serve the resource by now
            schedule.at(clock.now_ms(), self)
        elif isinstance(reply, wire.Fault):
            schedule.at(clock.now_ms() + reply.retry_ms, self)
        elif reply[1] == Status.LAPSED:
            self.lapsed(name)
        elif reply[1] == Status.GRANTED:
            schedule.at(self._confirm(sent_ms, lease_ms, 0, -1), self)
            self._missed(first)
        else:
            beaten = wire.Beaten(*reply[2:])
            schedule.at(self._confirm(sent_ms, lease_ms, beaten.ahead, beaten.soonest_ms), self)
            if beaten.more:
                self.room.keeper.follow_up(self.resource, first.ask.terms)
            for waiting in list(self.waiters.values()):
                waiting.resized(beaten.capacity)

    def _missed(self, first: Waiting) -> None:
        """The first is queued no longer and no message said so: asks for it, and looks at the next one at once."""
        now_ms = clock.now_ms()
        if first.ask.request in self.waiters:
            first.sequence = None
            self.room.keeper.schedule.at(now_ms, first)
        if self._first() is not None:
            self.room.keeper.schedule.at(now_ms, self)

    def lapsed(self, name: str) -> None:
        """The place of that name is gone: everybody queues anew, in the order they had."""
        if name != self.name:
            return
        self.name = self.room.name = self.room.new_name()
        self.deadline_ms = None
        self.room.keeper.schedule.drop(self)
        if not self.waiters:
            self.room.forget(self)
            return
        logger.warning("resource %r: the place in the queue lapsed; queueing anew", self.resource.name)
        now_ms = clock.now_ms()
        for waiting in sorted(self.waiters.values(), key=lambda waiting: waiting.sequence or 2**62):
            waiting.sequence = None
            if waiting.on_lapsed is None:
                self.room.keeper.schedule.at(now_ms, waiting)
            else:
                waiting.on_lapsed()


class Room:
    """All acquire requests of a client, and its places."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper = keeper
        self.connection: Route = keeper.connection
        self.places: dict[bytes, Place] = {}
        self.waitings: dict[str, Waiting] = {}
        self._id = secrets.token_hex(8)
        self._requests = count(1)
        self._epochs = count(1)
        self.name = self.new_name()  # of every new place
        self._warned: set[tuple[str, int]] = set()
        self._tickets: set[tuple[bytes, str]] = set()
        # Requests of plain permits of which a late copy may still be under way, and until when that matters.
        self.unsure: dict[tuple[bytes, str], tuple[str, float]] = {}
        # The requests of adoptions without an answer, by state key, ticket and fence.
        self.adopting: dict[tuple[bytes, str, int], str] = {}
        self.watchers: set[asyncio.Event] = set()
        # Who else is told of the messages about a request, by its id: one that somebody keeps without a hold.
        self.listeners: dict[str, Callable[[wire.Message], None]] = {}
        self.closed = False

    def new_request(self) -> str:
        """The id of a request, which no other request of any client has."""
        return f"{self._id}-{next(self._requests):x}"

    def new_name(self) -> str:
        """A place's name that was never used before."""
        return f"{self.connection.channel}|{next(self._epochs)}"

    def claim_ticket(self, resource: wire.Resource, ticket: str) -> Callable[[], None]:
        """Marks a ticket as in use here, until what this returns is called; ValueError when it is already."""
        key = (resource.state_key, ticket)
        if key in self._tickets:
            raise ValueError(
                f"resource {resource.name!r}: ticket {ticket!r} is in use in this client already. "
                "One ticket is one request: wait for it to end, or take another ticket"
            )
        self._tickets.add(key)
        return lambda: self._tickets.discard(key)

    def enter(self, ask: wire.Ask, *, claim: bool) -> Waiting:
        """Begins a request, whose outcome is `future` of what it returns."""
        self.check_open()
        future: asyncio.Future[wire.Granted | None] = self.connection.start().create_future()
        waiting = Waiting(self, ask, future, claim)
        self.waitings[ask.request] = waiting
        if not waiting.turn(clock.now_ms()) and (refusal := self.connection.of(ask.resource).refusal) is not None:
            waiting.fail(refusal)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """Ends a request that has its outcome."""
        request, place = waiting.ask.request, waiting.place
        self.waitings.pop(request, None)
        if waiting.due_ms is not None:
            self.keeper.schedule.drop(waiting)
        if place is not None:
            place.waiters.pop(request, None)
            if not place.waiters and place.deadline_ms is None:
                self.forget(place)

    def place_on(self, resource: wire.Resource) -> Place:
        """The place on a resource on which a request was queued."""
        place = self.places.get(resource.state_key)
        if place is None:
            place = self.places[resource.state_key] = Place(self, resource)
        return place

    def lapsed(self, resource: wire.Resource, name: str) -> None:
        """The server says that the place of that name on the resource is gone."""
        place = self.places.get(resource.state_key)
        if place is not None:
            place.lapsed(name)
        elif name == self.name:
            self.name = self.new_name()

    def forget(self, place: Place) -> None:
        """Drops a place that nobody waits in and the server no longer has."""
        self.keeper.schedule.drop(place)
        if self.places.get(place.resource.state_key) is place:
            del self.places[place.resource.state_key]

    def give_up(self, waiting: Waiting) -> None:
        """Ends a request whatever its outcome, and gives back what it has or may yet get. Never waits."""
        self.leave(waiting)
        if not waiting.future.done():
            waiting.future.cancel()
        elif not waiting.future.cancelled():
            waiting.future.exception()  # seen
        if waiting.sent:
            Leaving(self.keeper, waiting.ask, None, math.inf, waiting.unsure).start(clock.now_ms())

    def on_ready(self, reached: Reached = everything) -> None:
        """The connection is back, or the server refuses this client: those without a place ask, and places beat."""
        for event in self.watchers:
            event.set()
        schedule, now_ms = self.keeper.schedule, clock.now_ms()
        for waiting in [waiting for waiting in self.waitings.values() if reached(waiting.ask.resource)]:
            refusal = self.connection.of(waiting.ask.resource).refusal
            if refusal is not None:
                waiting.fail(refusal)
            elif waiting.sequence is None:
                schedule.at(now_ms, waiting)
        for place in self.places.values():
            if place.deadline_ms is not None and reached(place.resource):
                schedule.at(now_ms, place)

    def on_message(self, message: wire.Message) -> None:
        """A message for a waiter of this client."""
        if message.kind in ("c", "l"):
            self._about_all(message.about.encode(), message)
            return
        waiting, listener = self.waitings.get(message.about), self.listeners.get(message.about)
        if waiting is not None and not waiting.future.done():
            waiting.told(message)
            return
        if waiting is not None:
            waiting.early += (message,)
        if listener is not None:
            listener(message)

    def _about_all(self, state_key: bytes, message: wire.Message) -> None:
        place = self.places.get(state_key)
        if message.kind == "c":  # may come before the reply that somebody is queued
            for waiting in [each for each in self.waitings.values() if each.ask.resource.state_key == state_key]:
                waiting.resized(*message.numbers)
        elif place is not None:
            self.keeper.schedule.at(clock.now_ms(), place)

    def declared(self, ask: wire.Ask, was_declared: int) -> None:
        """Warns once when this client's capacity took the place of another declared one."""
        name, capacity = ask.resource.name, ask.terms.capacity
        if (name, was_declared) not in self._warned:
            self._warned.add((name, was_declared))
            logger.warning(
                "resource %r: the capacity declared here is %d, but %d was declared before; it is %d from now on. "
                "Declare the same one everywhere, or use resize()",
                *(name, capacity, was_declared, capacity),
            )

    def check_open(self) -> None:
        """Raises when the client is closed, or has begun to close: nobody would keep or give back what it got now."""
        if self.closed:
            raise RedleaseError(CLOSED)

    def close(self, error: Callable[[str, str], RedleaseError]) -> None:
        """Ends every request with an error, and refuses new ones."""
        self.closed = True
        for waiting in list(self.waitings.values()):
            waiting.fail(error(waiting.ask.resource.name, waiting.ask.ticket))
