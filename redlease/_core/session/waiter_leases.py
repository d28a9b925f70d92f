"""The places in queues that a client keeps alive, one for each resource on which it waits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from redlease._core import clock
from redlease._core.log import about
from redlease._core.protocol import encoding, scripts
from redlease._core.protocol.arguments import AcquireRequest
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import HeartbeatReply, Queued, Status
from redlease._core.transport.base import Reply, Transport

from . import acquire_errors
from .leases import LeaseManager

logger = logging.getLogger("redlease")

HEARTBEATS_PER_LEASE = 3
# When a lease may have expired, every client with waiters calls the server; each delays its call by its queue position.
STAGGER_MS, STAGGER_PLACES = 1.0, 200
ROUNDING_MS = 2.0  # the server rounds to whole ms


class Waiting(Protocol):
    """A request that waits at a place; `sequence`: None unless it is queued there."""

    request: AcquireRequest
    sequence: int | None
    due_ms: float | None
    on_expired: Callable[[], None] | None

    def on_due(self, now_ms: float) -> bool: ...

    def order(self) -> tuple[float, str]: ...

    def fail(self, error: Exception) -> None: ...


class Clients(Protocol):
    """What has the places; `name`: that of every new one."""

    manager: LeaseManager
    connection: Transport
    name: str
    poll_ms: float  # how often waiting requests poll, while no messages arrive

    def take_name(self) -> str: ...

    def forget(self, waiter_lease: WaiterLease) -> None: ...


class WaiterLease:
    """This client's place in the queue of one resource, from the first request that it queued there.

    Places on several resources may share a name; a name whose place may have expired is never used again.
    """

    deadline_ms: float | None = None  # None: the server has not confirmed it
    due_ms: float | None = None
    _is_heartbeat_in_flight = False
    _heartbeats = 0

    def __init__(self, session: Clients, resource: Resource) -> None:
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
                key = sorted(keys)[self._heartbeats % len(keys)]
            waiters = [waiting for waiting in waiters if waiting.request.key == key]
        return min(waiters, key=lambda waiting: waiting.order(), default=None)

    def _keys(self) -> set[str]:
        """Returns the keys of those that are queued."""
        return {waiting.request.key for waiting in self.waiters.values() if waiting.sequence is not None}

    def queued(self, sent_ms: float, request: AcquireRequest, queued: Queued) -> None:
        """Records that the server queued a waiter, and keeps the place for at least the waiter lease."""
        due_ms = self._confirm(sent_ms, request.terms.waiter_lease_ms)
        if queued.next_expiry_ms >= 0:
            due_ms = min(due_ms, self._wake(request.key, queued.next_expiry_ms, queued.ahead))
        if self.due_ms is None or due_ms < self.due_ms:
            self.session.manager.schedule.at(due_ms, self)

    def ask_in(self, key: str, wait_ms: int) -> None:
        """Sends a heartbeat for the first waiter of a key so many ms from now."""
        due_ms = self._wake(key, wait_ms or -ROUNDING_MS)
        if self.due_ms is None or due_ms < self.due_ms:
            self.session.manager.schedule.at(due_ms, self)

    def _confirm(self, sent_ms: float, lease_ms: int) -> float:
        """Records that the server extended the place; returns when the next heartbeat is due."""
        self.deadline_ms = max(self.deadline_ms or 0.0, sent_ms + lease_ms - clock.SERVER_TICK_MS)
        return sent_ms + min(lease_ms / HEARTBEATS_PER_LEASE, self.session.poll_ms)

    def _wake(self, key: str, next_expiry_ms: float, ahead: int = 0) -> float:
        """Records when something ends that a waiter with so many `ahead` may wait for; returns when to call."""
        wake_ms = clock.now_ms() + next_expiry_ms + ROUNDING_MS + STAGGER_MS * min(ahead, STAGGER_PLACES)
        if key not in self._wakes or wake_ms < self._wakes[key]:
            self._wakes[key] = wake_ms
        return self._wakes[key]

    def on_due(self, now_ms: float) -> bool:
        """Sends a heartbeat, or finds that the place has expired."""
        if self.deadline_ms is None:
            return False
        if now_ms >= self.deadline_ms:
            self.expired(self.name)
            return False
        # A place without waiters is kept until it expires, so that a request made meanwhile can use it.
        first = self._first(now_ms)
        if first is None:
            self.session.manager.schedule.at(self.deadline_ms, self)
            return False
        self.session.manager.schedule.at(self.deadline_ms, self)  # until a reply sets a later time
        link = self.session.connection.endpoint_for(self.resource)
        if self._is_heartbeat_in_flight or not link.ready:
            return False
        lease_ms = max(waiting.request.terms.waiter_lease_ms for waiting in self.waiters.values())
        tail = encoding.pack(self.name, lease_ms, first.request.ticket, first.request.terms.idle_ttl_ms)
        link.send(self.resource, scripts.BEAT, tail, partial(self._on_heartbeat, now_ms, self.name, lease_ms, first))
        self._wakes.pop(first.request.key, None)
        self._is_heartbeat_in_flight = True
        self._heartbeats += 1
        return True

    def _on_heartbeat(self, sent_ms: float, name: str, lease_ms: int, first: Waiting, reply: Reply) -> None:
        self._is_heartbeat_in_flight = False
        schedule = self.session.manager.schedule
        if name != self.name:
            return
        if reply is None or isinstance(reply, ErrorReply):  # another connection may serve the resource by now
            self._wakes[first.request.key] = clock.now_ms() + (reply.retry_ms if reply else 0)
            schedule.at(self._wakes[first.request.key], self)
        elif reply[1] == Status.LAPSED:
            self.expired(name)
        elif reply[1] == Status.GRANTED:
            self._doubtful.discard(first.request.key)
            self._on_missed_grant(first)
            schedule.at(min((self._confirm(sent_ms, lease_ms), *self._wakes.values())), self)
        else:
            beaten = HeartbeatReply(*reply[2:])
            self._doubtful.discard(first.request.key)
            if beaten.next_expiry_ms >= 0:
                self._wake(first.request.key, beaten.next_expiry_ms, beaten.ahead)
            schedule.at(min((self._confirm(sent_ms, lease_ms), *self._wakes.values())), self)
            if beaten.more:
                self.session.manager.follow_up(self.resource, first.request.terms)
            for waiting in list(self.waiters.values()):
                if waiting.request.weight > beaten.capacity:
                    waiting.fail(acquire_errors.weight_never_fits(waiting.request, beaten.capacity))

    def _on_missed_grant(self, first: Waiting) -> None:
        """Repeats a request that left the queue without a message, and asks about the next one of its key at once.

        Not if a message that came with the reply said when that is due. If no message came, data may be lost: so it
        asks about each other key as well, once.
        """
        now_ms, key = clock.now_ms(), first.request.key
        if first.request.request_id in self.waiters:
            first.sequence = None
            self.session.manager.schedule.at(now_ms, first)
            if not self._doubtful:
                self._doubtful = self._keys() - {key}
                self._wakes |= dict.fromkeys(self._doubtful, now_ms)
        if key in self._keys():
            self._wakes.setdefault(key, now_ms)

    def expired(self, name: str) -> None:
        """Handles the loss of the place of that name: its waiters queue again, in their former order."""
        if name != self.name:
            return
        self.name = self.session.take_name()
        self.deadline_ms = None
        self.session.manager.schedule.drop(self)
        if not self.waiters:
            self.session.forget(self)
            return
        name = self.resource.name
        logger.warning("resource %r: the queue entry expired; requeueing", name, extra=about(name))
        now_ms = clock.now_ms()
        for waiting in sorted(self.waiters.values(), key=lambda waiting: waiting.order()):
            waiting.sequence = None
            if waiting.on_expired is None:
                self.session.manager.schedule.at(now_ms, waiting)
            else:
                waiting.on_expired()
