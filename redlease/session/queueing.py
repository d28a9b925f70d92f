"""Pending acquire requests, and the queue places that a client keeps alive for them.

A client has one place per resource, however many of its tasks wait there: one entry with one deadline on the server,
which one heartbeat (`beat`) extends. A lapsed place is never revived; its waiters queue again from a place with a new
epoch.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from itertools import count

from redlease import clock
from redlease.errors import RedleaseError
from redlease.events import Queued as QueuedEvent
from redlease.log import about
from redlease.protocol import arguments, scripts
from redlease.protocol.arguments import AcquireRequest
from redlease.protocol.encoding import Resource
from redlease.protocol.faults import ErrorReply
from redlease.protocol.replies import Granted, Message, Queued, Status
from redlease.protocol.snapshots import LOOKS_AT_ONCE
from redlease.transport.base import CLOSED, PATIENCE_MS, Reached, Reply, Transport, everything

from . import refusals
from .crowding import Crowd, Crowds
from .ids import RequestIds
from .leases import LeaseKeeper, PendingRelease
from .places import QueuePlace
from .remembered import Remembered
from .stuck import Stuck

logger = logging.getLogger("redlease")

FENCE_AHEAD_MS = 1000.0  # how far the fence in a message may be ahead of the server's clock


class PendingAcquire:
    """One acquire request, until it is granted, refused or abandoned.

    `future` gets the grant, valid until `deadline_ms` on the local clock, or None if the request may not wait and no
    capacity was free. `claim`: the caller will not renew, so a queued grant is requested once more to fill its lease.
    """

    place: QueuePlace | None = None  # once it is queued
    sequence: int | None = None
    asked_ms = 0.0
    sent = False
    may_be_duplicated = False  # whether a copy may still reach the server from a lost connection
    deadline_ms = 0.0
    task: asyncio.Task[object] | None = None  # the task that made the request
    has_been_granted = False  # whether it asks once more, since its grant was over before its task went on
    is_handed_over = False  # whether a message delivered the grant: its lease is the rest of the place's
    found_full: list[int] | None = None  # the last refusal, until it is known whether it counts
    crowd: Crowd | None = None  # alike requests that ask one at a time
    due_ms: float | None = None
    buffered_messages: tuple[Message, ...] = ()  # received between the grant and the start of its lease here
    on_queued: Callable[[Queued], None] | None = None
    on_lapsed: Callable[[], None] | None = None  # called when the place is gone, instead of queueing again
    _asked_from = ""
    _server_ahead_ms = 0.0  # upper bound: server clock minus local clock, at the time the request was queued

    def __init__(
        self, session: Session, ask: AcquireRequest, future: asyncio.Future[Granted | None], claim: bool
    ) -> None:
        self.session = session
        self.ask = ask
        self.future = future
        self._claim = claim

    def on_due(self, now_ms: float) -> bool:
        """Sends the request, or repeats it: a repeated request gets its existing permit or place."""
        session, ask = self.session, self.ask
        resource = ask.resource
        link = session.connection.endpoint_for(resource)
        if self.future.done() or not link.ready:
            return False
        place = session.places.get(resource.state_key)
        self._asked_from = asked_from = (session.name or session.take_name()) if place is None else place.name
        tail = arguments.acquire_tail(ask, asked_from, was_queued=self.place is not None)
        if link.send(
            resource,
            scripts.ACQUIRE_FOR_KEY if ask.key else scripts.ACQUIRE,
            tail,
            partial(self._answered, now_ms, asked_from),
            self._departs,
        ):
            self.sent = True
        return True

    def _departs(self) -> bool:
        """Tells whether it is still to be sent, after it had to wait for that."""
        self.sent = self.sent or not self.future.done()
        return not self.future.done()

    def _answered(self, sent_ms: float, asked_from: str, reply: Reply) -> None:
        if reply is None:
            self.may_be_duplicated = True
            self._again(0)  # another connection may serve the resource by now
        elif self.future.done():
            return
        elif isinstance(reply, ErrorReply):
            if reply.is_transient:
                self._again(reply.retry_ms)
            else:
                self.future.set_exception(reply.error(self.ask.resource.name, self.ask.ticket))
        else:
            self._read(sent_ms, asked_from, reply[1], reply[2:])

    def _read(self, sent_ms: float, asked_from: str, status: int, values: list[int]) -> None:
        if status == Status.GRANTED:
            granted = Granted(*values)
            if granted.was_declared:
                self.session.remembered.declared(self.ask, granted.was_declared)
            if granted.more:
                self.session.keeper.follow_up(self.ask.resource, self.ask.terms)
            self.deadline_ms = sent_ms + self.ask.terms.lease_ms - clock.SERVER_TICK_MS
            if self.crowd is not None:
                self.session.crowds.entered(self)
            self.future.set_result(granted)
        elif status == Status.QUEUED:
            self._queued(sent_ms, asked_from, Queued(*values))
        elif status == Status.LAPSED:
            self.session.lapsed(self.ask.resource, asked_from)
            self._again(0)
        elif status == Status.FULL:
            self._full(sent_ms, values)
        elif status == Status.BUSY and values[0]:
            self._again(0)  # the call stopped at its batch limit, with entries left to check
        elif status == Status.BUSY:
            self.future.set_result(None)
        else:
            self.future.set_exception(refusals.refused(self.ask, status, values))

    def _full(self, sent_ms: float, values: list[int]) -> None:
        if values[1]:  # dead waiters are looked for, a few by each call
            self.found_full = values
            self.ask = self.ask._replace(arrival=-values[1])
            self._again(values[3])
        else:
            self.sent = self.may_be_duplicated or self.place is not None  # else there is nothing to give up
            self.session.crowds.refused(self, values, sent_ms)

    def _queued(self, sent_ms: float, asked_from: str, queued: Queued) -> None:
        session = self.session
        self._server_ahead_ms = queued.now_ms - sent_ms
        if queued.was_declared:
            session.remembered.declared(self.ask, queued.was_declared)
        if queued.more:
            session.keeper.follow_up(self.ask.resource, self.ask.terms)
        if session.stuck.due_ms is None:
            session.stuck.begin(sent_ms)
        if (emit := session.keeper.emit) is not None and self.place is None:
            emit(QueuedEvent(*self.ask.subject(), queued.ahead, self.ask.key or None))
        if self.ask.arrival < 0:  # since when it looked for dead waiters
            self.ask = self.ask._replace(arrival=0)
        self.found_full = None
        self.place = place = session.place_on(self.ask.resource)
        place.waiters[self.ask.request] = self
        if asked_from == place.name:
            self.sequence = queued.sequence
            place.queued(sent_ms, self.ask, queued)
        else:  # the place was renamed since, and only the new name is kept alive
            self._again(0)
        if self.on_queued is not None:
            self.on_queued(queued)
        if self.crowd is not None:
            session.crowds.entered(self)

    def on_message(self, message: Message) -> None:
        """Handles a message about this request, which has no outcome yet.

        A grant is trusted if no earlier message has shown the secret request id to others; all else is confirmed.
        """
        if message.kind == "l":
            if (place := self.session.places.get(self.ask.resource.state_key)) is not None:
                place.ask_in(self.ask.key, message.numbers[0])
            return
        if message.kind == "g":
            self._handed_over(Granted(*message.numbers))
        else:
            self._again(0)
        self._claim = True

    def _handed_over(self, granted: Granted) -> None:
        """Takes a grant from a message for the rest of the place's lease, or as the message says: it may be late."""
        now_ms, place = clock.now_ms(), self.place
        deadline_ms = place.deadline_ms if place is not None and place.name == self._asked_from else None
        told_ms = granted.expires_at_ms - self._server_ahead_ms - clock.SERVER_TICK_MS
        if (
            self._claim
            or deadline_ms is None
            or now_ms >= min(deadline_ms, told_ms)
            or granted.fence > (now_ms + self._server_ahead_ms + FENCE_AHEAD_MS) * 1000
        ):
            self._again(0)
        else:
            self.deadline_ms, self.is_handed_over = min(deadline_ms, told_ms), True
            self.future.set_result(granted)

    def _again(self, wait_ms: float) -> None:
        self.session.keeper.schedule.at(clock.now_ms() + wait_ms, self)

    def ask_again(self, wait_ms: float) -> None:
        """Sends the request again though it may be queued; at once after a reconnect."""
        self.sequence = None
        self._again(wait_ms)

    def anew(self, now_ms: float) -> asyncio.Future[Granted | None]:
        """Sends the request again: the granted lease ended before the waiting task resumed."""
        self.session.check_open()
        logger.warning(
            "resource %r: ticket %r was granted, and its lease ended before its task went on; it asks again. "
            "Something blocks the event loop, or the lease is too short for it",
            *(self.ask.resource.name, self.ask.ticket),
            extra=about(self.ask.resource.name, self.ask.ticket),
        )
        self.future = asyncio.get_running_loop().create_future()
        self.sequence, self.is_handed_over, self.buffered_messages = None, False, ()
        self.has_been_granted = True
        if not self.on_due(now_ms):
            self.fail_if_refused()
        return self.future

    def waited(self, now_ms: float) -> tuple[float, bool]:
        """Returns how many seconds the request has waited, and whether it was queued."""
        return (now_ms - self.asked_ms) / 1000, self.place is not None

    def order(self) -> tuple[float, str]:
        """Returns what the server orders the queue by; a request that is not queued comes last."""
        return math.inf if self.sequence is None else self.sequence, self.ask.ticket

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, unless it has an outcome."""
        if not self.future.done():
            self.future.set_exception(error)

    def fail_if_refused(self) -> None:
        """Fails the request if the server refuses this client; otherwise it is sent after the next connect."""
        refusal = self.session.connection.endpoint_for(self.ask.resource).refusal
        if refusal is not None:
            self.fail(refusal)

    def time_out(self, timeout_ms: float, may_wait: bool = True) -> None:
        """Fails the request because its `timeout` is over, or else the time for a call that may not wait."""
        resource, connection = self.ask.resource, self.session.connection
        link = connection.endpoint_for(resource)
        # A server may be there, and need longer for an answer than a short timeout lasts.
        is_late = may_wait and min(timeout_ms, link.silent_ms) < PATIENCE_MS[0]
        if self.sequence is None and self.found_full and link.ready:
            self.fail(refusals.refused(self.ask, Status.FULL, self.found_full))
        elif not link.ready or (self.sequence is None and not is_late):
            self.fail(connection.unavailable(resource, self.ask.ticket, timeout_ms))
        else:
            self.fail(refusals.timed_out(self.ask, timeout_ms, is_queued=self.sequence is not None))


class Session:
    """All acquire requests of a client, and its queue places."""

    def __init__(self, keeper: LeaseKeeper) -> None:
        self.keeper = keeper
        self.connection: Transport = keeper.connection
        self.places: dict[bytes, QueuePlace] = {}
        self.pending: dict[str, PendingAcquire] = {}
        self.ids, self.hold_ids = RequestIds(self.connection), RequestIds(self.connection, "h")
        self._epochs = count(1)
        self.name = ""  # of every new place; made with the first request, because the channel is known only then
        self.remembered = Remembered()
        self.watchers: set[asyncio.Event] = set()
        self.looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        # By request id: callbacks for messages about permits that are kept without a hold.
        self.listeners: dict[str, Callable[[Message], None]] = {}
        self.closed = False
        self.stuck = Stuck(keeper, self.pending)
        self.crowds = Crowds()

    def new_name(self) -> str:
        """Returns a place name that was never used before."""
        return f"{self.connection.channel}|{next(self._epochs)}"

    def take_name(self) -> str:
        """Gives new places a name that was never used before, and returns it."""
        self.name = self.new_name()
        return self.name

    def enter(self, ask: AcquireRequest, *, claim: bool) -> PendingAcquire:
        """Starts a request; the `future` of the returned object gets its outcome."""
        self.check_open()
        future: asyncio.Future[Granted | None] = self.connection.start().create_future()
        waiting = PendingAcquire(self, ask, future, claim)
        waiting.task = asyncio.current_task()
        self.pending[ask.request] = waiting
        waiting.asked_ms = now_ms = clock.now_ms()
        if self.crowds.known and self.crowds.joins(waiting, now_ms):
            return waiting
        if not waiting.on_due(now_ms):
            waiting.fail_if_refused()
        return waiting

    def leave(self, waiting: PendingAcquire) -> None:
        """Forgets a request that has an outcome."""
        request, place = waiting.ask.request, waiting.place
        self.pending.pop(request, None)
        if waiting.crowd is not None:
            self.crowds.left(waiting)
        if waiting.due_ms is not None:
            self.keeper.schedule.drop(waiting)
        if place is not None:
            place.waiters.pop(request, None)
            if not place.waiters and place.deadline_ms is None:
                self.forget(place)

    def place_on(self, resource: Resource) -> QueuePlace:
        """Returns this client's place on a resource; makes one if there is none."""
        place = self.places.get(resource.state_key)
        if place is None:
            place = self.places[resource.state_key] = QueuePlace(self, resource)
        return place

    def lapsed(self, resource: Resource, name: str) -> None:
        """Handles a reply that says that the place of that name is gone."""
        place = self.places.get(resource.state_key)
        if place is not None:
            place.lapsed(name)
        elif name == self.name:
            self.take_name()

    def forget(self, place: QueuePlace) -> None:
        """Drops a place that has no waiters and that the server no longer has."""
        self.keeper.schedule.drop(place)
        if self.places.get(place.resource.state_key) is place:
            del self.places[place.resource.state_key]

    def give_up(self, waiting: PendingAcquire) -> None:
        """Abandons a request and releases, in the background, what it has or may still be granted. Never waits."""
        self.leave(waiting)
        if not waiting.future.done():
            waiting.future.cancel()
        elif not waiting.future.cancelled():
            waiting.future.exception()  # marks it as retrieved, so that asyncio does not log it
        if waiting.sent:
            PendingRelease(self.keeper, waiting.ask, None, math.inf, waiting.may_be_duplicated).start(clock.now_ms())

    def on_ready(self, reached: Reached = everything) -> None:
        """After a reconnect or a refusal: sends requests that are not queued, and a heartbeat for each place."""
        for event in self.watchers:
            event.set()
        schedule, now_ms = self.keeper.schedule, clock.now_ms()
        for waiting in [waiting for waiting in self.pending.values() if reached(waiting.ask.resource)]:
            waiting.fail_if_refused()
            if waiting.sequence is None or waiting.ask.key:  # the heartbeat below asks about one key only
                schedule.at(now_ms, waiting)
        for place in self.places.values():
            if place.deadline_ms is not None and reached(place.resource):
                schedule.at(now_ms, place)

    def on_message(self, message: Message) -> None:
        """Passes a message to the requests that it is about."""
        if message.kind == "c":
            self._smaller(message.about.encode())
            return
        waiting, listener = self.pending.get(message.about), self.listeners.get(message.about)
        if waiting is not None and not waiting.future.done():
            waiting.on_message(message)
            return
        if message.kind == "l":
            return  # it waits no more
        if waiting is not None:
            waiting.buffered_messages += (message,)
        if listener is not None:
            listener(message)

    def _smaller(self, state_key: bytes) -> None:
        """Asks about the requests on a resource whose capacity has become smaller."""
        place, now_ms = self.places.get(state_key), clock.now_ms()
        if place is not None:
            self.keeper.schedule.at(now_ms, place)
        for waiting in self.pending.values():  # the message may overtake the reply that queues one; it is sent again
            if waiting.sequence is None and waiting.ask.resource.state_key == state_key:
                self.keeper.schedule.at(now_ms, waiting)

    def check_open(self) -> None:
        """Raises if the client is closed or closing: nothing would renew or release a permit granted now."""
        if self.closed:
            raise RedleaseError(CLOSED)

    def close(self, error: Callable[[str, str], RedleaseError]) -> None:
        """Ends every request with an error, and refuses new ones."""
        self.closed = True
        for waiting in list(self.pending.values()):
            waiting.fail(error(waiting.ask.resource.name, waiting.ask.ticket))
