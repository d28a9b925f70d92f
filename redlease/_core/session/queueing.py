"""Pending acquire requests, and the queue places that a client keeps alive for them.

A client has one place per resource, however many of its tasks wait there: one entry with one deadline on the server,
which one heartbeat (`beat`) extends. An expired place is never revived; its waiters queue again from a place with a new
epoch.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from functools import partial
from itertools import count

from redlease._core import clock
from redlease._core.log import about
from redlease._core.protocol import arguments, scripts
from redlease._core.protocol.arguments import AcquireRequest
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import Granted, Message, Queued, Status
from redlease._core.protocol.snapshots import LARGE_READS_AT_ONCE
from redlease._core.transport.base import SILENCE_MS, Reached, Reply, Transport, all_resources
from redlease._core.transport.opening.manner import Manner
from redlease.errors import ClientClosed, RedleaseError
from redlease.events import Queued as QueuedEvent

from . import acquire_errors
from .client_memory import ClientMemory
from .ids import RequestIds
from .leases import LeaseManager, PendingRelease
from .refusal_batches import RefusalBatch, RefusalBatches
from .self_deadlocks import SelfDeadlockDetector
from .waiter_leases import WaiterLease

logger = logging.getLogger("redlease")

FENCE_AHEAD_MS = 1000.0  # how far the fence in a message may be ahead of the server's clock


class PendingAcquire:
    """One acquire request, until it is granted, refused or abandoned.

    `future` gets the grant, valid until `deadline_ms` on the local clock, or None if the request may not wait and no
    capacity was free. `needs_full_lease`: the caller will not renew, so a queued grant is requested once more to fill
    its lease.
    """

    waiter_lease: WaiterLease | None = None  # once it is queued
    sequence: int | None = None
    requested_ms = 0.0
    sent = False
    may_be_duplicated = False  # whether a copy may still reach the server from a lost connection
    deadline_ms = 0.0
    task: asyncio.Task[object] | None = None  # the task that made the request
    has_been_granted = False  # whether it asks once more, since its grant was over before its task went on
    is_from_queue = False  # whether a message delivered the grant: its lease is the rest of the place's
    last_full: list[int] | None = None  # the last refusal, until it is known whether it counts
    batch: RefusalBatch | None = None  # alike requests that ask one at a time
    due_ms: float | None = None
    buffered_messages: tuple[Message, ...] = ()  # received between the grant and the start of its lease here
    on_queued: Callable[[Queued], None] | None = None
    on_expired: Callable[[], None] | None = None  # called when the place is gone, instead of queueing again
    _sent_as = ""
    _server_ahead_ms = 0.0  # upper bound: server clock minus local clock, at the time the request was queued

    def __init__(
        self, session: Session, request: AcquireRequest, future: asyncio.Future[Granted | None], needs_full_lease: bool
    ) -> None:
        self.session = session
        self.request = request
        self.future = future
        self._needs_full_lease = needs_full_lease

    def on_due(self, now_ms: float) -> bool:
        """Sends the request, or repeats it: a repeated request gets its existing permit or place."""
        session, request = self.session, self.request
        resource = request.resource
        link = session.connection.endpoint_for(resource)
        if self.future.done() or not link.ready:
            return False
        waiter_lease = session.waiter_leases.get(resource.state_key)
        self._sent_as = sent_as = (session.name or session.take_name()) if waiter_lease is None else waiter_lease.name
        tail = arguments.acquire_tail(request, sent_as, was_queued=self.waiter_lease is not None)
        if link.send(
            resource,
            scripts.ACQUIRE_FOR_KEY if request.key else scripts.ACQUIRE,
            tail,
            partial(self._answered, now_ms, sent_as),
            self._departs,
        ):
            self.sent = True
        return True

    def _departs(self) -> bool:
        """Tells whether it is still to be sent, after it had to wait for that."""
        self.sent = self.sent or not self.future.done()
        return not self.future.done()

    def _answered(self, sent_ms: float, sent_as: str, reply: Reply) -> None:
        if reply is None:
            self.may_be_duplicated = True
            self._resend(0)  # another connection may serve the resource by now
        elif self.future.done():
            return
        elif isinstance(reply, ErrorReply):
            if reply.is_transient:
                self._resend(reply.retry_ms)
            else:
                self.future.set_exception(reply.error(self.request.resource.name, self.request.ticket))
        else:
            self._read(sent_ms, sent_as, reply[1], reply[2:])

    def _read(self, sent_ms: float, sent_as: str, status: int, values: list[int]) -> None:
        if status == Status.GRANTED:
            granted = Granted(*values)
            if granted.was_declared:
                self.session.memory.declared(self.request, granted.was_declared)
            if granted.more:
                self.session.manager.follow_up(self.request.resource, self.request.terms)
            self.deadline_ms = sent_ms + self.request.terms.lease_ms - clock.SERVER_TICK_MS
            if self.batch is not None:
                self.session.refusal_batches.entered(self)
            self.future.set_result(granted)
        elif status == Status.QUEUED:
            self._queued(sent_ms, sent_as, Queued(*values))
        elif status == Status.LAPSED:
            self.session.expired(self.request.resource, sent_as)
            self._resend(0)
        elif status == Status.FULL:
            self._full(sent_ms, values)
        elif status == Status.BUSY and values[0]:
            self._resend(0)  # the call stopped at its batch limit, with entries left to check
        elif status == Status.BUSY:
            self.future.set_result(None)
        else:
            self.future.set_exception(acquire_errors.refused(self.request, status, values))

    def _full(self, sent_ms: float, values: list[int]) -> None:
        if values[1]:  # dead waiters are looked for, a few by each call
            self.last_full = values
            self.request = self.request._replace(arrival=-values[1])
            self._resend(values[3])
        else:
            self.sent = self.may_be_duplicated or self.waiter_lease is not None  # else there is nothing to give up
            self.session.refusal_batches.refused(self, values, sent_ms)

    def _queued(self, sent_ms: float, sent_as: str, queued: Queued) -> None:
        session = self.session
        self._server_ahead_ms = queued.now_ms - sent_ms
        if queued.was_declared:
            session.memory.declared(self.request, queued.was_declared)
        if queued.more:
            session.manager.follow_up(self.request.resource, self.request.terms)
        if session.self_deadlocks.due_ms is None:
            session.self_deadlocks.begin(sent_ms)
        if (emit := session.manager.emit) is not None and self.waiter_lease is None:
            emit(QueuedEvent(*self.request.subject(), queued.ahead, self.request.key or None))
        if self.request.arrival < 0:  # since when it looked for dead waiters
            self.request = self.request._replace(arrival=0)
        self.last_full = None
        self.waiter_lease = waiter_lease = session.waiter_lease_on(self.request.resource)
        waiter_lease.waiters[self.request.request_id] = self
        if sent_as == waiter_lease.name:
            self.sequence = queued.sequence
            waiter_lease.queued(sent_ms, self.request, queued)
        else:  # the place was renamed since, and only the new name is kept alive
            self._resend(0)
        if self.on_queued is not None:
            self.on_queued(queued)
        if self.batch is not None:
            session.refusal_batches.entered(self)

    def on_message(self, message: Message) -> None:
        """Handles a message about this request, which has no outcome yet.

        A grant is trusted if no earlier message has shown the secret request id to others; all else is confirmed.
        """
        if message.kind == "l":
            if (waiter_lease := self.session.waiter_leases.get(self.request.resource.state_key)) is not None:
                waiter_lease.ask_in(self.request.key, message.numbers[0])
            return
        if message.kind == "g":
            self._handed_over(Granted(*message.numbers))
        else:
            self._resend(0)
        self._needs_full_lease = True

    def _handed_over(self, granted: Granted) -> None:
        """Takes a grant from a message for the rest of the place's lease, or as the message says: it may be late."""
        now_ms, waiter_lease = clock.now_ms(), self.waiter_lease
        deadline_ms = (
            waiter_lease.deadline_ms if waiter_lease is not None and waiter_lease.name == self._sent_as else None
        )
        granted_until_ms = granted.expires_at_ms - self._server_ahead_ms - clock.SERVER_TICK_MS
        if (
            self._needs_full_lease
            or deadline_ms is None
            or now_ms >= min(deadline_ms, granted_until_ms)
            or granted.fence > (now_ms + self._server_ahead_ms + FENCE_AHEAD_MS) * 1000
        ):
            self._resend(0)
        else:
            self.deadline_ms, self.is_from_queue = min(deadline_ms, granted_until_ms), True
            self.future.set_result(granted)

    def _resend(self, wait_ms: float) -> None:
        self.session.manager.schedule.at(clock.now_ms() + wait_ms, self)

    def resend_after(self, wait_ms: float) -> None:
        """Sends the request again though it may be queued; at once after a reconnect."""
        self.sequence = None
        self._resend(wait_ms)

    def restart(self, now_ms: float) -> asyncio.Future[Granted | None]:
        """Sends the request again: the granted lease ended before the waiting task resumed."""
        self.session.check_open()
        logger.warning(
            "resource %r: ticket %r was granted, and its lease ended before its task went on; it asks again. "
            "Something blocks the event loop, or the lease is too short for it",
            *(self.request.resource.name, self.request.ticket),
            extra=about(self.request.resource.name, self.request.ticket),
        )
        self.future = asyncio.get_running_loop().create_future()
        self.sequence, self.is_from_queue, self.buffered_messages = None, False, ()
        self.has_been_granted = True
        if not self.on_due(now_ms):
            self.fail_if_refused()
        return self.future

    def waited(self, now_ms: float) -> tuple[float, bool]:
        """Returns how many seconds the request has waited, and whether it was queued."""
        return (now_ms - self.requested_ms) / 1000, self.waiter_lease is not None

    def order(self) -> tuple[float, str]:
        """Returns what the server orders the queue by; a request that is not queued comes last."""
        return math.inf if self.sequence is None else self.sequence, self.request.ticket

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, unless it has an outcome."""
        if not self.future.done():
            self.future.set_exception(error)

    def fail_if_refused(self) -> None:
        """Fails the request if the server refuses this client; otherwise it is sent after the next connect."""
        refusal = self.session.connection.endpoint_for(self.request.resource).refusal
        if refusal is not None:
            self.fail(refusal)

    def time_out(self, timeout_ms: float, may_wait: bool = True) -> None:
        """Fails the request because its `timeout` is over, or else the time for a call that may not wait."""
        resource, connection = self.request.resource, self.session.connection
        link = connection.endpoint_for(resource)
        # A server may be there, and need longer for an answer than a short timeout lasts.
        is_late = may_wait and min(timeout_ms, link.silent_ms) < SILENCE_MS[0]
        if self.sequence is None and self.last_full and link.ready:
            self.fail(acquire_errors.refused(self.request, Status.FULL, self.last_full))
        elif not link.ready or (self.sequence is None and not is_late):
            self.fail(connection.unavailable(resource, self.request.ticket, timeout_ms))
        else:
            self.fail(acquire_errors.timed_out(self.request, timeout_ms, is_queued=self.sequence is not None))


class Session:
    """All acquire requests of a client, and its queue places."""

    poll_ms = math.inf  # how often waiting requests poll: never, while messages arrive

    def __init__(self, manager: LeaseManager, poll_interval_ms: float) -> None:
        self.manager = manager
        self.connection: Transport = manager.connection
        self._poll_interval_ms = poll_interval_ms
        self.connection.on_manner = self.on_manner
        self.waiter_leases: dict[bytes, WaiterLease] = {}
        self.pending: dict[str, PendingAcquire] = {}
        self.ids, self.hold_ids = RequestIds(self.connection), RequestIds(self.connection, "h")
        self._epochs = count(1)
        self.name = ""  # of every new place; made with the first request, because the channel is known only then
        self.memory = ClientMemory()
        self.watchers: set[asyncio.Event] = set()
        self.large_reads = asyncio.Semaphore(LARGE_READS_AT_ONCE)
        # By request id: callbacks for messages about permits that are kept without a hold.
        self.listeners: dict[str, Callable[[Message], None]] = {}
        self.closed = False
        self.self_deadlocks = SelfDeadlockDetector(manager, self.pending)
        self.refusal_batches = RefusalBatches()

    def on_manner(self, manner: Manner) -> None:
        """Lets the waiting requests poll if no messages arrive."""
        self.poll_ms = math.inf if manner.silence is None else self._poll_interval_ms
        now_ms = clock.now_ms()
        for waiter_lease in self.waiter_leases.values():
            self.manager.schedule.at(now_ms, waiter_lease)
        for changed in self.watchers:
            changed.set()

    def new_name(self) -> str:
        """Returns a place name that was never used before."""
        return f"{self.connection.channel}|{next(self._epochs)}"

    def take_name(self) -> str:
        """Gives new places a name that was never used before, and returns it."""
        self.name = self.new_name()
        return self.name

    def enter(self, request: AcquireRequest, *, needs_full_lease: bool) -> PendingAcquire:
        """Starts a request; the `future` of the returned object gets its outcome."""
        self.check_open()
        future: asyncio.Future[Granted | None] = self.connection.start().create_future()
        waiting = PendingAcquire(self, request, future, needs_full_lease)
        waiting.task = asyncio.current_task()
        self.pending[request.request_id] = waiting
        waiting.requested_ms = now_ms = clock.now_ms()
        if self.refusal_batches.known and self.refusal_batches.joins(waiting, now_ms):
            return waiting
        if not waiting.on_due(now_ms):
            waiting.fail_if_refused()
        return waiting

    def leave(self, waiting: PendingAcquire) -> None:
        """Forgets a request that has an outcome."""
        request_id, waiter_lease = waiting.request.request_id, waiting.waiter_lease
        self.pending.pop(request_id, None)
        if waiting.batch is not None:
            self.refusal_batches.left(waiting)
        if waiting.due_ms is not None:
            self.manager.schedule.drop(waiting)
        if waiter_lease is not None:
            waiter_lease.waiters.pop(request_id, None)
            if not waiter_lease.waiters and waiter_lease.deadline_ms is None:
                self.forget(waiter_lease)

    def waiter_lease_on(self, resource: Resource) -> WaiterLease:
        """Returns this client's place on a resource; makes one if there is none."""
        waiter_lease = self.waiter_leases.get(resource.state_key)
        if waiter_lease is None:
            waiter_lease = self.waiter_leases[resource.state_key] = WaiterLease(self, resource)
        return waiter_lease

    def expired(self, resource: Resource, name: str) -> None:
        """Handles a reply that says that the place of that name is gone."""
        waiter_lease = self.waiter_leases.get(resource.state_key)
        if waiter_lease is not None:
            waiter_lease.expired(name)
        elif name == self.name:
            self.take_name()

    def forget(self, waiter_lease: WaiterLease) -> None:
        """Drops a place that has no waiters and that the server no longer has."""
        self.manager.schedule.drop(waiter_lease)
        if self.waiter_leases.get(waiter_lease.resource.state_key) is waiter_lease:
            del self.waiter_leases[waiter_lease.resource.state_key]

    def release_request(self, waiting: PendingAcquire) -> None:
        """Abandons a request and releases, in the background, what it has or may still be granted. Never waits."""
        self.leave(waiting)
        if not waiting.future.done():
            waiting.future.cancel()
        elif not waiting.future.cancelled():
            waiting.future.exception()  # marks it as retrieved, so that asyncio does not log it
        if waiting.sent:
            PendingRelease(self.manager, waiting.request, None, math.inf, waiting.may_be_duplicated).start(
                clock.now_ms()
            )

    def on_ready(self, reached: Reached = all_resources) -> None:
        """After a reconnect or a refusal: sends requests that are not queued, and a heartbeat for each place."""
        for event in self.watchers:
            event.set()
        schedule, now_ms = self.manager.schedule, clock.now_ms()
        for waiting in [waiting for waiting in self.pending.values() if reached(waiting.request.resource)]:
            waiting.fail_if_refused()
            if waiting.sequence is None or waiting.request.key:  # the heartbeat below asks about one key only
                schedule.at(now_ms, waiting)
        for waiter_lease in self.waiter_leases.values():
            if waiter_lease.deadline_ms is not None and reached(waiter_lease.resource):
                schedule.at(now_ms, waiter_lease)

    def on_message(self, message: Message) -> None:
        """Passes a message to the requests that it is about."""
        if message.kind == "c":
            self._on_capacity_reduced(message.about.encode())
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

    def _on_capacity_reduced(self, state_key: bytes) -> None:
        """Asks about the requests on a resource whose capacity has become smaller."""
        waiter_lease, now_ms = self.waiter_leases.get(state_key), clock.now_ms()
        if waiter_lease is not None:
            self.manager.schedule.at(now_ms, waiter_lease)
        for waiting in self.pending.values():  # the message may overtake the reply that queues one; it is sent again
            if waiting.sequence is None and waiting.request.resource.state_key == state_key:
                self.manager.schedule.at(now_ms, waiting)

    def check_open(self) -> None:
        """Raises if the client is closed or closing: nothing would renew or release a permit granted now."""
        if self.closed:
            raise ClientClosed

    def close(self, error: Callable[[str, str], RedleaseError]) -> None:
        """Ends every request with an error, and refuses new ones."""
        self.closed = True
        for waiting in list(self.pending.values()):
            waiting.fail(error(waiting.request.resource.name, waiting.request.ticket))
