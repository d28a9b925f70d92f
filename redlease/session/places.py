"""The places in queues that a client keeps alive, one for each resource on which it waits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
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
        # By key: when something ends that the first of its waiters here may wait for, as the server told.
        self._wakes: dict[str, float] = {}
        self._doubtful: set[str] = set()  # keys of which the waiters may have left the queue without a message

    def _first(self, now_ms: float) -> Waiting | None:
        """Returns the waiter that a heartbeat asks about: the first one.

        Of several keys it is that for which something has ended, else each in turn, since any may be next.
        """
        waiters = [waiting for waiting in self.waiters.values() if waiting.sequence is not None]
        keys = self._keys()
        self._doubtful &= keys
        self._wakes = {key: wake_ms for key, wake_ms in self._wakes.items() if key in keys}
        if len(keys) > 1:
            wake_ms, key = min((wake_ms, key) for key, wake_ms in (self._wakes or {"": math.inf}).items())
            if wake_ms > now_ms:
                key = sorted(keys)[self._beats % len(keys)]
            waiters = [waiting for waiting in waiters if waiting.ask.key == key]
        return min(waiters, key=lambda waiting: waiting.order(), default=None)

    def _keys(self) -> set[str]:
        """Returns the keys of those that are queued."""
        return {waiting.ask.key for waiting in self.waiters.values() if waiting.sequence is not None}

    def queued(self, sent_ms: float, ask: AcquireRequest, queued: Queued) -> None:
        """Records that the server queued a waiter, and keeps the place for at least the waiter lease."""
        due_ms = self._confirm(sent_ms, ask.terms.waiter_lease_ms)
        if queued.soonest_ms >= 0:
            due_ms = min(due_ms, self._wake(ask.key, queued.soonest_ms, queued.ahead))
        if self.due_ms is None or due_ms < self.due_ms:
            self.session.keeper.schedule.at(due_ms, self)

    def ask_in(self, key: str, wait_ms: int) -> None:
        """Sends a heartbeat for the first waiter of a key so many ms from now."""
        due_ms = self._wake(key, wait_ms or -ROUNDING_MS)
        if self.due_ms is None or due_ms < self.due_ms:
            self.session.keeper.schedule.at(due_ms, self)

    def _confirm(self, sent_ms: float, lease_ms: int) -> float:
        """Records that the server extended the place; returns when the next heartbeat is due."""
        self.deadline_ms = max(self.deadline_ms or 0.0, sent_ms + lease_ms - clock.SERVER_TICK_MS)
        return sent_ms + lease_ms / BEATS_A_LEASE

    def _wake(self, key: str, soonest_ms: float, ahead: int = 0) -> float:
        """Records when something ends that a waiter with so many `ahead` may wait for; returns when to call."""
        wake_ms = clock.now_ms() + soonest_ms + ROUNDING_MS + STAGGER_MS * min(ahead, STAGGER_PLACES)
        if key not in self._wakes or wake_ms < self._wakes[key]:
            self._wakes[key] = wake_ms
        return self._wakes[key]

    def on_due(self, now_ms: float) -> bool:
        """Sends a heartbeat, or finds that the place has lapsed."""
        if self.deadline_ms is None:
            return False
        if now_ms >= self.deadline_ms:
            self.lapsed(self.name)
            return False
        # A place without waiters is kept until it lapses, so that a request made meanwhile can use it.
        first = self._first(now_ms)
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
        self._wakes.pop(first.ask.key, None)
        self._beating = True
        self._beats += 1
        return True

    def _beaten(self, sent_ms: float, name: str, lease_ms: int, first: Waiting, reply: Reply) -> None:
        self._beating = False
        schedule = self.session.keeper.schedule
        if name != self.name:
            return
        if reply is None or isinstance(reply, ErrorReply):  # another connection may serve the resource by now
            self._wakes[first.ask.key] = clock.now_ms() + (reply.retry_ms if reply else 0)
            schedule.at(self._wakes[first.ask.key], self)
        elif reply[1] == Status.LAPSED:
            self.lapsed(name)
        elif reply[1] == Status.GRANTED:
            self._doubtful.discard(first.ask.key)
            self._missed(first)
            schedule.at(min((self._confirm(sent_ms, lease_ms), *self._wakes.values())), self)
        else:
            beaten = Beaten(*reply[2:])
            self._doubtful.discard(first.ask.key)
            if beaten.soonest_ms >= 0:
                self._wake(first.ask.key, beaten.soonest_ms, beaten.ahead)
            schedule.at(min((self._confirm(sent_ms, lease_ms), *self._wakes.values())), self)
            if beaten.more:
                self.session.keeper.follow_up(self.resource, first.ask.terms)
            for waiting in list(self.waiters.values()):
                if waiting.ask.weight > beaten.capacity:
                    waiting.fail(refusals.weight_never_fits(waiting.ask, beaten.capacity))

    def _missed(self, first: Waiting) -> None:
        """Repeats a request that left the queue without a message, and asks about the next one of its key at once.

        Not if a message that came with the reply said when that is due. If no message came, data may be lost: so it
        asks about each other key as well, once.
        """
        now_ms, key = clock.now_ms(), first.ask.key
        if first.ask.request in self.waiters:
            first.sequence = None
            self.session.keeper.schedule.at(now_ms, first)
            if not self._doubtful:
                self._doubtful = self._keys() - {key}
                self._wakes |= dict.fromkeys(self._doubtful, now_ms)
        if key in self._keys():
            self._wakes.setdefault(key, now_ms)

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
