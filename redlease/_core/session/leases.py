"""Renews the leases of a client, detects lost ones, and retries releases until the server has answered.

The schedule's one timer and the replies drive everything here; nothing awaits, so nothing can be cancelled half-way.
A local deadline is the local time at which the request was sent, plus the length of the lease: the deadline on the
server can only be later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from functools import partial

from redlease._core import clock
from redlease._core.block_task import BlockTask
from redlease._core.log import about
from redlease._core.protocol import arguments, encoding, scripts
from redlease._core.protocol.arguments import AcquireRequest, Terms
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import Message
from redlease._core.transport.base import SILENCE_MS, Reached, Reply, Transport, all_resources, backed_off
from redlease.errors import LossReason, RedleaseError
from redlease.events import Lost, OnEvent, RenewalFailed
from redlease.events import Released as ReleasedEvent

from .schedule import Schedule

logger = logging.getLogger("redlease")

RENEWALS_PER_LEASE = 3
TOGETHER_A_LEASE, TOGETHER_MS = 60.0, 250.0  # the interval between joint renewals of leases of one length
FULL_LEASE_MS = 250.0  # after which a hold granted from the queue is renewed to its full lease
Released = bool | None | RedleaseError
RETRY_MS_MAX = 5000.0  # the longest pause after error replies; the first is `ErrorReply.retry_ms`
RECOVER_MS = 250.0  # after a reconnect, all leases are renewed within this time
RECONNECT_MS = 700.0  # how long a lost connection usually takes to come back, if the server is there


class Lease(BlockTask):
    """One permit that this process renews.

    Its block task runs the body of the hold. The keeper renews it a few times per lease until it is ended (released,
    detached) or lost. The deadline is checked against the local clock, so that the loss is noticed in time even if the
    server is unreachable.
    """

    # Defaults are class attributes, not set per instance: most leases end before any of them changes.
    fence = 0
    granted_at_ms = 0
    expires_at_ms = 0
    capacity = 0
    deadline_ms = 0.0
    renew_until_ms: float | None = None
    requester: asyncio.Task[object] | None = None  # the task that requested it, while it is kept
    may_be_duplicated = False  # whether a copy of the acquire may still reach the server
    lost = False  # as noticed by the event loop; `is_lost` compares with the clock
    ended = False
    why_lost = ""
    loss_reason: LossReason | None = None
    replaced = False  # whether a newer request waits until its body has ended
    due_ms: float | None = None
    begun_ms = 0.0
    is_new = True  # whether its first renewal is still to be scheduled
    _in_flight = False
    _first = False  # whether its lease is still the rest of a waiter lease
    _refusals = 0
    _tail: bytes | None = None

    def __init__(self, manager: LeaseManager, request: AcquireRequest, forget_ticket: Callable[[], None]) -> None:
        self.manager = manager
        self.request = request
        self.forget_ticket = forget_ticket

    def begin_renewing(self, now_ms: float) -> None:
        """Schedules the first renewal, unless it is scheduled already."""
        self.is_new = False
        if self.due_ms is not None:
            return
        left_ms = self.deadline_ms - self.begun_ms
        wait_ms = left_ms / RENEWALS_PER_LEASE
        if self._first:
            # A queued grant starts with the time left on its waiter lease. Renew it early, after FULL_LEASE_MS, so that
            # short holds skip the cost; at once if its own lease is shorter than the time left.
            wait_ms = min(wait_ms, 0.0 if self.request.terms.lease_ms < left_ms else FULL_LEASE_MS)
        self._plan(now_ms, wait_ms - (now_ms - self.begun_ms))

    def lose(self, why: str, reason: LossReason) -> None:
        """Marks the permit as lost, calls `on_loss`, and reports the loss; once."""
        if not self.ended and not self.lost:
            self.mark_lost(why, reason)
            self.manager.forget(self)
            self.on_loss()
            self.report_loss(reason)

    def mark_lost(self, why: str, reason: LossReason) -> None:
        """Records that it is lost, and why."""
        self.lost, self.why_lost, self.loss_reason = True, why, reason

    def report_loss(self, reason: LossReason) -> None:
        """Logs the loss, and emits its event."""
        (name, ticket, weight), key = self.request.subject(), self.request.key or None
        extra = about(name, ticket, self.fence)
        logger.warning(
            "resource %r: permit %r (fence %d) is lost: %s", name, ticket, self.fence, self.why_lost, extra=extra
        )
        if (emit := self.manager.emit) is not None:
            emit(Lost(name, ticket, weight, self.fence, (clock.now_ms() - self.begun_ms) / 1000, reason, key))

    def on_loss(self) -> None:
        """Reacts to the loss; for subclasses."""

    def is_lost(self) -> bool:
        """Whether it is lost, also by the clock. Safe in any thread: it changes nothing."""
        return self.lost or (not self.ended and clock.now_ms() >= self.deadline_ms)

    def why(self) -> str:
        """Why it is lost. Safe in any thread."""
        by_clock = "max_hold was reached" if self._is_stopped else "its lease ended before a renewal came through"
        return self.why_lost or by_clock

    @property
    def reason_by_clock(self) -> LossReason:
        """Why it is lost, if only the clock says so."""
        return "max_hold" if self._is_stopped else "expired"

    @property
    def _is_stopped(self) -> bool:
        """Whether `max_hold` ends its lease, and not a renewal that failed."""
        return self.renew_until_ms is not None and self.deadline_ms >= self.renew_until_ms

    def check_deadline(self, now_ms: float) -> bool:
        """Whether it is not lost; marks it as lost if its deadline has passed. Only in the loop's thread."""
        if now_ms >= self.deadline_ms and not self.ended and not self.lost:
            self.lose(self.why(), self.reason_by_clock)
            self.manager.release_request(self, now_ms)
        return not self.lost

    def on_due(self, now_ms: float) -> bool:
        if not self.check_deadline(now_ms):
            return False
        self.manager.schedule.at(self.deadline_ms, self)  # until a reply sets a later time
        if self._in_flight or (self.renew_until_ms is not None and now_ms >= self.renew_until_ms):
            return False
        return self._renew(now_ms)

    def _renew(self, now_ms: float) -> bool:
        link = self.manager.connection.endpoint_for(self.request.resource)
        if not link.ready:
            return False
        tail = self._tail
        if tail is None:
            shorten = int(self._first)
            tail = encoding.pack(
                self.request.ticket, self.fence, self.request.terms.lease_ms, shorten, self.request.terms.idle_ttl_ms
            )
            self._tail = None if self._first else tail
        # The first renewal of a queued grant may move its deadline to an earlier time: apply that when it is sent.
        until_ms = now_ms + self.request.terms.lease_ms - clock.SERVER_TICK_MS
        if until_ms < self.deadline_ms:
            self.deadline_ms = until_ms
            self.manager.schedule.at(until_ms, self)
        link.send(self.request.resource, scripts.RENEW, tail, partial(self._renewed, now_ms))
        self._in_flight = True
        return True

    def _renewed(self, sent_ms: float, reply: Reply) -> None:
        self._in_flight = False
        if reply is None:
            self._report_failure("no answer")
        now_ms = clock.now_ms()
        if self.ended or not self.check_deadline(now_ms):  # a reported loss is final
            return
        if reply is None:
            self.manager.schedule.at(now_ms, self)  # another connection may serve the resource by now
        elif isinstance(reply, ErrorReply):
            self._refused(now_ms, reply)
        elif reply[1] == 0:
            self.replaced = True  # perhaps: the message that says so may have been lost
            why = "the server no longer has it: it expired, was released or replaced, or the server lost its data"
            self.lose(why, "gone")
        else:
            self.deadline_ms = sent_ms + self.request.terms.lease_ms - clock.SERVER_TICK_MS
            self.expires_at_ms = reply[1]
            self._first, self._refusals = False, 0
            self._plan(now_ms, self.request.terms.lease_ms / RENEWALS_PER_LEASE - (now_ms - sent_ms))

    def _refused(self, now_ms: float, fault: ErrorReply) -> None:
        if not self._refusals and not fault.is_handled:  # logged once
            logger.warning(
                "resource %r: renewing permit %r failed, and is tried again while its lease lasts: %s",
                *(self.request.resource.name, self.request.ticket, fault.text),
                extra=about(self.request.resource.name, self.request.ticket, self.fence),
            )
        most_ms = max(fault.retry_ms, min(self.request.terms.lease_ms / 10, RETRY_MS_MAX))
        wait_ms = backed_off(fault.retry_ms, self._refusals, most_ms)
        self._refusals += not fault.is_handled
        self.manager.schedule.at(min(self.deadline_ms, now_ms + wait_ms), self)
        if not fault.is_handled:
            self._report_failure(fault.text)

    def _report_failure(self, error: str) -> None:
        if (emit := self.manager.emit) is not None:
            (name, ticket, _), key = self.request.subject(), self.request.key or None
            emit(RenewalFailed(name, ticket, self.fence, error, key))

    def fill_lease(self) -> None:
        """Sends the first renewal if the lease is still the rest of a waiter lease; does not wait for the reply."""
        if self._first:
            self._renew(clock.now_ms())

    def on_message(self, message: Message) -> None:
        """Handles a message about its permit."""
        if message.kind == "x":
            self.lose("it was released by its ticket, or somebody else adopted it", "taken")
        elif message.kind == "s":
            self.replaced = not self.ended
            self.lose(f"the newer request {message.by!r} replaced it", "superseded")
        elif message.kind == "r":
            self._first = False  # another client made its lease end earlier: renew it to the full lease
            if not self.ended and not self.lost:
                self.manager.schedule.at(clock.now_ms(), self)

    def _plan(self, now_ms: float, wait_ms: float) -> None:
        """Schedules the next renewal with jitter, so that leases granted together spread out over time."""
        manager = self.manager
        at_ms = now_ms + wait_ms * (0.9 + 0.1 * random.random())
        # Round to a shared moment: renewals sent in one write cost a fraction of single ones.
        step_ms = step(self.request.terms.lease_ms)
        at_ms = (at_ms - manager.phase_ms) // step_ms * step_ms + manager.phase_ms
        manager.schedule.at(min(self.deadline_ms, max(now_ms, at_ms)), self)


def step(lease_ms: float) -> float:
    """Returns the interval, in ms, between joint renewals of leases of that length."""
    return min(TOGETHER_MS, lease_ms / TOGETHER_A_LEASE)


class PendingRelease:
    """A release that is retried until the server has answered, or until the lease has expired and nobody waits for it.

    `done` gets whether a live permit or place was removed; or the server's refusal; or None if the server stays
    unreachable for `answer_within_ms`. After the last two the retries continue.
    """

    due_ms: float | None = None
    answer_within_ms = RECONNECT_MS
    _timer: asyncio.TimerHandle | None = None
    _refusals = 0
    _unanswered = False
    _in_flight = False  # two copies sent to two nodes of a cluster could be answered in any order

    def __init__(  # noqa: PLR0917  positional for speed: one is made for every acquire and release
        self,
        manager: LeaseManager,
        request: AcquireRequest,
        fence: int | None,
        until_ms: float,
        may_be_duplicated: bool,
        done: asyncio.Future[Released] | None = None,
    ) -> None:
        self.manager = manager
        self.request = request
        self._fence = fence
        self._until_ms = until_ms
        self._may_be_duplicated = may_be_duplicated
        self._done = done

    def start(self, now_ms: float) -> None:
        """Sends it now, or as soon as the client is connected."""
        self.manager.leaving[self] = None
        self.resume(now_ms)

    def resume(self, now_ms: float) -> None:
        """Sends it now if it can be sent; an exception is reported and retried, never raised to the caller."""
        try:
            self.on_due(now_ms)
        except Exception as error:  # noqa: BLE001  the release must be retried
            self.manager.schedule.failed(self, error)

    def on_due(self, now_ms: float) -> bool:
        if now_ms >= self._until_ms and (self._done is None or self._done.done()):
            self._finish(None)  # nobody waits for the answer
            return False
        if self._in_flight:
            return False
        link = self.manager.connection.endpoint_for(self.request.resource)
        if not link.ready:
            self._delayed()
            return False
        tombstone_ms = self.request.terms.lease_ms if self._may_be_duplicated else 0
        tail = arguments.release_tail(self.request, self._fence, tombstone_ms)
        link.send(self.request.resource, scripts.RELEASE, tail, self._answered)
        self._in_flight = True
        return True

    def _answered(self, reply: Reply) -> None:
        self._in_flight = False
        if reply is None:
            self._may_be_duplicated = self._unanswered = True
            self._delayed()
            self.manager.schedule.at(clock.now_ms(), self)  # another connection may serve the resource by now
        elif isinstance(reply, ErrorReply):
            self._refused(reply)
        else:
            if reply[2]:
                self.manager.follow_up(self.request.resource, self.request.terms)
            # If there is nothing left to remove, assume that an earlier copy, whose reply was lost, removed it: unless
            # the lease has expired since.
            self._finish(reply[1] == 1 or (self._unanswered and clock.now_ms() < self._until_ms))

    def _finish(self, released: bool | None) -> None:
        manager = self.manager
        if self.due_ms is not None:
            manager.schedule.drop(self)
        manager.leaving.pop(self, None)
        manager.check_idle()
        self._notify(released)

    def _refused(self, fault: ErrorReply) -> None:
        self._unanswered = self._unanswered or fault.partially_executed
        if fault.is_transient:
            self._delayed()
        else:
            self._notify(fault.error(self.request.resource.name, self.request.ticket))
        if not self._refusals and not fault.is_handled:  # logged once
            name, ticket = self.request.resource.name, self.request.ticket
            extra = about(name, ticket, self._fence)
            logger.warning("resource %r: releasing %r failed: %s", name, ticket, fault.text, extra=extra)
        most_ms = fault.retry_ms if fault.is_transient else RETRY_MS_MAX
        wait_ms = backed_off(fault.retry_ms, self._refusals, most_ms)
        self._refusals += not fault.is_handled
        self.manager.schedule.at(clock.now_ms() + wait_ms, self)

    def _delayed(self) -> None:
        if self._done is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.answer_within_ms / 1000, self._notify, None)

    def _notify(self, released: Released) -> None:
        if self._timer is not None:
            self._timer.cancel()
        done = self._done
        if done is not None and not done.done():
            done.set_result(released)


class LeaseManager:
    """All leases of a client, and all its pending releases.

    `emit` gets the events of the client; None if nobody asked for them.
    """

    due_ms: float | None = None
    emit: OnEvent | None = None

    def __init__(self, connection: Transport) -> None:
        self.connection = connection
        self.schedule = Schedule(self)
        self.phase_ms = 0.0
        connection.set_silence_limit(self.shortest_ms)
        self.leases: dict[str, Lease] = {}
        self.leaving: dict[PendingRelease, None] = {}
        self._idle: asyncio.Event | None = None

    def on_ready(self, reached: Reached = all_resources) -> None:
        """After a reconnect: sends pending releases at once and renews every lease soon, the most urgent ones first."""
        for leaving in list(self.leaving):
            if reached(leaving.request.resource):
                leaving.resume(clock.now_ms())
        now_ms = clock.now_ms()
        for lease in [lease for lease in self.leases.values() if reached(lease.request.resource)]:
            # Soon: messages published meanwhile are lost, and the permit may have been released, adopted or shortened.
            within = min(RECOVER_MS, max(0.0, min(lease.deadline_ms - now_ms, lease.request.terms.lease_ms)) / 10)
            due_ms = now_ms + random.uniform(0, within)
            # Never later than scheduled: repeated reconnects would postpone the renewal forever.
            self.schedule.at(due_ms if lease.due_ms is None else min(due_ms, lease.due_ms), lease)

    def stalled(self, now_ms: float) -> None:
        """After the event loop was blocked: reports the leases that expired meanwhile, before anything else runs."""
        for lease in list(self.leases.values()):
            try:
                lease.check_deadline(now_ms)
            except Exception as error:  # noqa: BLE001  the other leases must be checked as well
                self.schedule.failed(lease, error)

    def keep(self, lease: Lease, now_ms: float) -> None:
        """Starts to renew the lease."""
        lease_ms = lease.request.terms.lease_ms
        self.leases[lease.request.request_id] = lease
        if lease_ms < SILENCE_MS[1] * RENEWALS_PER_LEASE:
            self.connection.check_silence_by(lease_ms / RENEWALS_PER_LEASE)
        # Most leases end before they need a renewal: the first one is scheduled a little later, for those still held.
        due_ms = now_ms + step(min(lease_ms, lease.deadline_ms - now_ms))
        if self.due_ms is None or due_ms < self.due_ms:
            self.schedule.at(due_ms, self)

    def on_due(self, now_ms: float) -> bool:
        """Schedules the first renewals of the leases added since the last call; they are the last in `leases`."""
        # Drawn here and not in the constructor, so that clients in forked processes renew at different moments.
        self.phase_ms = self.phase_ms or random.uniform(0, TOGETHER_MS)
        for lease in reversed(self.leases.values()):
            if not lease.is_new:
                break
            try:
                lease.begin_renewing(now_ms)
            except Exception as error:  # noqa: BLE001  the other leases must be renewed as well
                self.schedule.failed(lease, error)
        return False

    def shortest_ms(self) -> float:
        """How soon, in ms, a half-open connection must be detected so that the shortest lease is renewed in time."""
        kept_ms = min((lease.request.terms.lease_ms for lease in self.leases.values()), default=math.inf)
        leaving_ms = min((leaving.request.terms.lease_ms for leaving in self.leaving), default=math.inf)
        return min(kept_ms, leaving_ms) / RENEWALS_PER_LEASE

    def forget(self, lease: Lease) -> None:
        """Stops renewing the lease."""
        if lease.due_ms is not None:
            self.schedule.drop(lease)
        self.leases.pop(lease.request.request_id, None)

    def release(self, lease: Lease, done: asyncio.Future[Released] | None = None, now_ms: float | None = None) -> None:
        """Releases the permit of the lease; retries in the background until the lease has expired."""
        request, now_ms = lease.request, clock.now_ms() if now_ms is None else now_ms
        until_ms = max(lease.deadline_ms, now_ms) + request.terms.lease_ms
        PendingRelease(self, request, lease.fence, until_ms, lease.may_be_duplicated, done).start(now_ms)
        if self.emit is not None and not lease.lost:
            self.emit(
                ReleasedEvent(*request.subject(), lease.fence, (now_ms - lease.begun_ms) / 1000, request.key or None)
            )

    def release_request(self, lease: Lease, now_ms: float) -> None:
        """Releases this request's share of a permit that expired by the local clock; others on its ticket keep it."""
        PendingRelease(self, lease.request, None, now_ms + lease.request.terms.lease_ms, lease.may_be_duplicated).start(
            now_ms
        )

    def follow_up(self, resource: Resource, terms: Terms) -> None:
        """Repeats a call that stopped at its batch limit, until no work is left."""

        def continue_release(reply: Reply) -> None:
            if isinstance(reply, list) and reply[2]:
                self.follow_up(resource, terms)

        link = self.connection.endpoint_for(resource)
        if link.ready:
            link.send(resource, scripts.RELEASE, encoding.pack("", "", "", 0, 0, terms.idle_ttl_ms), continue_release)

    def check_idle(self) -> None:
        """Wakes `drained` if no release is pending."""
        if self._idle is not None and not self.leaving:
            self._idle.set()

    async def drained(self) -> None:
        """Returns when no release is pending."""
        self._idle = asyncio.Event()
        while self.leaving:  # releases that start meanwhile are waited for too
            self._idle.clear()
            await self._idle.wait()
