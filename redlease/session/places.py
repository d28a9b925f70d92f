"""The places in queues that a client keeps alive, one for each resource on which it waits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from redlease import clock
from redlease.log import about
from redlease.protocol import encoding, scripts
from redlease.protocol.arguments import AcquireRequest
from redlease.protocol.encoding import Resource
from redlease.protocol.faults import ErrorReply
from redlease.protocol.replies import Beaten, Queued, Status
from redlease.transport.base import Reply, Transport

from . import refusals
from .leases import LeaseKeeper

logger = logging.getLogger("redlease")

BEATS_A_LEASE = 3
# When a lease may have lapsed, every client with waiters calls the server; each delays its call by its queue position.
STAGGER_MS, STAGGER_PLACES = 1.0, 200
ROUNDING_MS = 2.0  # the server rounds to whole ms


class Waiting(Protocol):
    """A request that waits at a place; `sequence`: None unless it is queued there."""

    ask: AcquireRequest
    sequence: int | None
    due_ms: float | None
    on_lapsed: Callable[[], None] | None

    def on_due(self, now_ms: float) -> bool: ...

    def order(self) -> tuple[float, str]: ...

    def fail(self, error: Exception) -> None: ...


class Places(Protocol):
    """What has the places; `name`: that of every new one."""

    keeper: LeaseKeeper
    connection: Transport
    name: str

    def take_name(self) -> str: ...

    def forget(self, place: QueuePlace) -> None: ...


class QueuePlace:
    """This client's place in the queue of one resource, from the first request that it queued there.

    Places on several resources may share a name; a name whose place may have lapsed is never used again.
    """

    deadline_ms: float | None = None  # None: the server has not confirmed it
    due_ms: float | None = None
    _beating = False
    _beats = 0

    def __init__(self, session: Places, resource: Resource) -> None:
        self.session = session
        self.resource = resource
        self.name = session.name
        self.waiters: dict[str, Waiting] = {}

    def _first(self) -> Waiting | None:
        """Returns the waiter that a heartbeat asks about: the first one; of each key in turn, since any may be next."""
        keys = {waiting.ask.key for waiting in self.waiters.values()}
        waiters: Iterable[Waiting] = self.waiters.values()
        if len(keys) > 1:
            key = sorted(keys)[self._beats % len(keys)]
            waiters = [waiting for waiting in waiters if waiting.ask.key == key]
        first = min(waiters, key=lambda waiting: waiting.order(), default=None)
        return None if first is None or first.sequence is None else first

    def queued(self, sent_ms: float, lease_ms: int, queued: Queued) -> None:
        """Records that the server queued a waiter and keeps the place for at least `lease_ms`."""
        due_ms = self._confirm(sent_ms, lease_ms, queued.ahead, queued.soonest_ms)
        if self.due_ms is None or due_ms < self.due_ms:
            self.session.keeper.schedule.at(due_ms, self)

    def _confirm(self, sent_ms: float, lease_ms: int, ahead: int, soonest_ms: int) -> float:
        """Records that the server extended the place; returns when to call next."""
        self.deadline_ms = max(self.deadline_ms or 0.0, sent_ms + lease_ms - clock.SERVER_TICK_MS)
        due_ms = sent_ms + lease_ms / BEATS_A_LEASE
        if soonest_ms >= 0:
            stagger_ms = STAGGER_MS * min(ahead, STAGGER_PLACES)
            due_ms = min(due_ms, clock.now_ms() + soonest_ms + ROUNDING_MS + stagger_ms)
        return due_ms

    def on_due(self, now_ms: float) -> bool:
        """Sends a heartbeat, or finds that the place has lapsed."""
        if self.deadline_ms is None:
            return False
        if now_ms >= self.deadline_ms:
            self.lapsed(self.name)
            return False
        # A place without waiters is kept until it lapses, so that a request made meanwhile can use it.
        first = self._first()
        if first is None:
            self.session.keeper.schedule.at(self.deadline_ms, self)
            return False
        self.session.keeper.schedule.at(self.deadline_ms, self)  # until a reply sets a later time
        link = self.session.connection.endpoint_for(self.resource)
        if self._beating or not link.ready:
            return False
        lease_ms = max(waiting.ask.terms.waiter_lease_ms for waiting in self.waiters.values())
        tail = encoding.pack(self.name, lease_ms, first.ask.ticket, first.ask.terms.idle_ttl_ms)
        link.send(self.resource, scripts.BEAT, tail, partial(self._beaten, now_ms, self.name, lease_ms, first))
        self._beating = True
        self._beats += 1
        return True

    def _beaten(self, sent_ms: float, name: str, lease_ms: int, first: Waiting, reply: Reply) -> None:
        self._beating = False
        schedule = self.session.keeper.schedule
        if name != self.name:
            return
        if reply is None:  # another connection may serve the resource by now
            schedule.at(clock.now_ms(), self)
        elif isinstance(reply, ErrorReply):
            schedule.at(clock.now_ms() + reply.retry_ms, self)
        elif reply[1] == Status.LAPSED:
            self.lapsed(name)
        elif reply[1] == Status.GRANTED:
            schedule.at(self._confirm(sent_ms, lease_ms, 0, -1), self)
            self._missed(first)
        else:
            beaten = Beaten(*reply[2:])
            schedule.at(self._confirm(sent_ms, lease_ms, beaten.ahead, beaten.soonest_ms), self)
            if beaten.more:
                self.session.keeper.follow_up(self.resource, first.ask.terms)
            for waiting in list(self.waiters.values()):
                if waiting.ask.weight > beaten.capacity:
                    waiting.fail(refusals.weight_never_fits(waiting.ask, beaten.capacity))

    def _missed(self, first: Waiting) -> None:
        """Repeats the first request, which left the queue without a message, and sends the next heartbeat at once."""
        now_ms = clock.now_ms()
        if first.ask.request in self.waiters:
            first.sequence = None
            self.session.keeper.schedule.at(now_ms, first)
        if self._first() is not None:
            self.session.keeper.schedule.at(now_ms, self)

    def lapsed(self, name: str) -> None:
        """Handles the loss of the place of that name: its waiters queue again, in their former order."""
        if name != self.name:
            return
        self.name = self.session.take_name()
        self.deadline_ms = None
        self.session.keeper.schedule.drop(self)
        if not self.waiters:
            self.session.forget(self)
            return
        name = self.resource.name
        logger.warning("resource %r: the place in the queue lapsed; queueing anew", name, extra=about(name))
        now_ms = clock.now_ms()
        for waiting in sorted(self.waiters.values(), key=lambda waiting: waiting.order()):
            waiting.sequence = None
            if waiting.on_lapsed is None:
                self.session.keeper.schedule.at(now_ms, waiting)
            else:
                waiting.on_lapsed()
