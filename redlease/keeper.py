"""Keeps what a client has: renews its leases, retries what must not be forgotten, and knows what is lost.

Everything here is driven by the schedule's one timer and by replies; nothing awaits, so nothing can be cancelled
half-way. A local deadline is always the local time at which the request that set it was sent, plus its length: the
server's own deadline can only be later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from functools import partial

from . import clock, wire
from .errors import RedleaseError
from .route import PATIENCE_MS, Reached, Reply, Route, backed_off, everything
from .schedule import Schedule

logger = logging.getLogger("redlease")

RENEWALS_A_LEASE = 3
TOGETHER_A_LEASE, TOGETHER_MS = 60.0, 250.0  # how far apart the moments are at which leases of one length are renewed
CLAIM_MS = 250.0  # after which a hold that came out of the queue gets its full lease
Released = bool | None | RedleaseError
RETRY_MS_MAX = 5000.0  # the longest pause after error replies, which begin with `Fault.retry_ms`
RECONNECT_MS = 700.0  # how long a lost connection usually takes to come back, if the server is there


class Lease:
    """What this process knows of one permit, and what keeps it.

    It is renewed a few times a lease until it is ended (released, detached) or lost. Its deadline is checked by
    the local clock, so that it is lost in time with the server out of reach too.
    """

    # What a lease begins with stands here once, not in each: most are over before any of it changes.
    fence = 0
    granted_at_ms = 0
    expires_at_ms = 0
    capacity = 0
    deadline_ms = 0.0
    renew_until_ms: float | None = None
    task: asyncio.Task[object] | None = None  # where the body runs that it guards
    unsure = False  # whether a copy of the acquire may still be under way
    lost = False
    ended = False
    why_lost = ""
    due_ms: float | None = None
    _begun_ms = 0.0
    is_new = True  # whether the keeper has yet to have its first renewal set
    _in_flight = False
    _first = False  # whether its lease is still what was left of a place
    _refusals = 0
    _tail: bytes | None = None

    def __init__(self, keeper: Keeper, ask: wire.Ask) -> None:
        self.keeper = keeper
        self.ask = ask

    def begin(self, granted: wire.Granted, deadline_ms: float, now_ms: float, *, handed_over: bool) -> None:
        """Starts keeping what was granted: at once, or out of the queue by a message."""
        self.fence, self.granted_at_ms, self.expires_at_ms, self.capacity, _ = granted
        self.deadline_ms, self._begun_ms = deadline_ms, now_ms
        if handed_over:
            self._first = True
        self.keeper.keep(self, now_ms)

    def begin_renewing(self, now_ms: float) -> None:
        """Sets the moment of the first renewal, unless something has set it already."""
        self.is_new = False
        if self.due_ms is not None:
            return
        left_ms = self.deadline_ms - self._begun_ms
        wait_ms = left_ms / RENEWALS_A_LEASE
        if self._first:
            # Its first lease is what was left of the waiter's place: the sooner it is its own the better, but a hold
            # that is soon over need not pay for it. One that is shorter than that rest is set at once.
            wait_ms = min(wait_ms, 0.0 if self.ask.terms.lease_ms < left_ms else CLAIM_MS)
        self._plan(now_ms, wait_ms - (now_ms - self._begun_ms))

    def end(self) -> None:
        """Stops keeping it; what becomes of the permit is the caller's."""
        self.ended = True
        self.keeper.forget(self)

    def lose(self, why: str) -> None:
        """It is lost: tells `on_loss` once."""
        if not self.ended and not self.lost:
            self.lost, self.why_lost = True, why
            self.keeper.forget(self)
            logger.warning(
                "resource %r: permit %r (fence %d) is lost: %s",
                self.ask.resource.name,
                self.ask.ticket,
                self.fence,
                why,
            )
            self.on_loss()

    def on_loss(self) -> None:
        """What follows from a loss; for subclasses."""

    def check_deadline(self, now_ms: float) -> bool:
        """Whether it is still held by the local clock; loses it otherwise."""
        if now_ms >= self.deadline_ms and not self.ended and not self.lost:
            stopped = self.renew_until_ms is not None and now_ms >= self.renew_until_ms
            self.lose("max_hold was reached" if stopped else "its lease ended before a renewal came through")
            self.keeper.give_back(self)
        return not self.lost

    def turn(self, now_ms: float) -> bool:
        if not self.check_deadline(now_ms):
            return False
        self.keeper.schedule.at(self.deadline_ms, self)  # until a reply says more
        if self._in_flight or (self.renew_until_ms is not None and now_ms >= self.renew_until_ms):
            return False
        return self._renew(now_ms)

    def _renew(self, now_ms: float) -> bool:
        link = self.keeper.connection.of(self.ask.resource)
        if not link.ready:
            return False
        tail = self._tail
        if tail is None:
            shorten = int(self._first)
            tail = wire.pack(self.ask.ticket, self.fence, self.ask.terms.lease_ms, shorten, self.ask.terms.idle_ttl_ms)
            self._tail = None if self._first else tail
        self._in_flight = True
        # The first renewal after a hand-off may set an earlier deadline than the place had: count with it at once.
        self.deadline_ms = min(self.deadline_ms, now_ms + self.ask.terms.lease_ms)
        self.keeper.schedule.at(self.deadline_ms, self)
        link.send(self.ask.resource, wire.RENEW, tail, partial(self._renewed, now_ms))
        return True

    def _renewed(self, sent_ms: float, reply: Reply) -> None:
        self._in_flight = False
        if self.ended or self.lost:
            return
        now_ms = clock.now_ms()
        if reply is None:
            self.keeper.schedule.at(now_ms, self)  # another connection may serve it by now
        elif isinstance(reply, wire.Fault):
            self._refused(now_ms, reply)
        elif reply[1] == 0:
            self.lose("the server no longer has it: it lapsed, was released by its ticket, or the server lost its data")
        else:
            self.deadline_ms = sent_ms + self.ask.terms.lease_ms
            self.expires_at_ms = reply[1]
            self._first, self._refusals = False, 0
            self._plan(now_ms, self.ask.terms.lease_ms / RENEWALS_A_LEASE - (now_ms - sent_ms))

    def _refused(self, now_ms: float, fault: wire.Fault) -> None:
        if not self._refusals and not fault.is_seen_to:  # said once
            logger.warning(
                "resource %r: renewing permit %r failed, and is tried again while its lease lasts: %s",
                *(self.ask.resource.name, self.ask.ticket, fault.text),
            )
        most_ms = max(fault.retry_ms, min(self.ask.terms.lease_ms / 10, RETRY_MS_MAX))
        wait_ms = backed_off(fault.retry_ms, self._refusals, most_ms)
        self._refusals += not fault.is_seen_to
        self.keeper.schedule.at(min(self.deadline_ms, now_ms + wait_ms), self)

    def fill_lease(self) -> None:
        """Asks for the full lease, should it still be what was left of a place; does not wait."""
        if self._first:
            self._renew(clock.now_ms())

    def told(self, message: wire.Message) -> None:
        """A message about its permit came."""
        if message.kind == "x":
            self.lose("it was released by its ticket, or somebody else adopted it")
        elif message.kind == "r":
            # Somebody has made its lease end earlier: it is filled again, as long as it is held here.
            self._first = False
            self.keeper.schedule.at(clock.now_ms(), self)

    def _plan(self, now_ms: float, wait_ms: float) -> None:
        """The next renewal, a little scattered: leases taken together are not renewed together for ever."""
        keeper = self.keeper
        at_ms = now_ms + wait_ms * (0.9 + 0.1 * random.random())
        # Renewals of one moment leave together, in one write, and are a fraction of the work that single ones are.
        step_ms = step(self.ask.terms.lease_ms)
        at_ms = (at_ms - keeper.phase_ms) // step_ms * step_ms + keeper.phase_ms
        keeper.schedule.at(min(self.deadline_ms, max(now_ms, at_ms)), self)


def step(lease_ms: float) -> float:
    """How far apart, in ms, the moments are at which leases of that length are renewed."""
    return min(TOGETHER_MS, lease_ms / TOGETHER_A_LEASE)


class Leaving:
    """A ticket on its way out: sent until the server has answered, or until it has lapsed by itself.

    `done` gets whether a live permit or place was taken out; or the server's refusal; or None, `patience_ms` after the
    server was found to be out of reach. After the last two the sending goes on.
    """

    due_ms: float | None = None
    patience_ms = RECONNECT_MS
    _timer: asyncio.TimerHandle | None = None
    _refusals = 0
    _unanswered = False
    _in_flight = False  # two copies on the way to two nodes of a cluster would be answered in any order

    def __init__(  # noqa: PLR0917  by position, as one is made for every pair
        self,
        keeper: Keeper,
        ask: wire.Ask,
        fence: int | None,
        until_ms: float,
        unsure: bool,
        done: asyncio.Future[Released] | None = None,
    ) -> None:
        self.keeper = keeper
        self.ask = ask
        self._fence = fence
        self._until_ms = until_ms
        self._unsure = unsure
        self._done = done

    def start(self, now_ms: float) -> None:
        """Sends it now, or as soon as the connection is there."""
        self.keeper.leaving[self] = None
        self.turn(now_ms)

    def turn(self, now_ms: float) -> bool:
        if now_ms >= self._until_ms:
            self._finish(None)
            return False
        if self._in_flight:
            return False
        link = self.keeper.connection.of(self.ask.resource)
        if not link.ready:
            self._delayed()
            return False
        tombstone_ms = self.ask.terms.lease_ms if self._unsure else 0
        tail = wire.release_tail(self.ask, self._fence, tombstone_ms)
        self._in_flight = True
        link.send(self.ask.resource, wire.RELEASE, tail, self._answered)
        return True

    def _answered(self, reply: Reply) -> None:
        self._in_flight = False
        if reply is None:
            self._unsure = self._unanswered = True
            self._delayed()
            self.keeper.schedule.at(clock.now_ms(), self)  # another connection may serve it by now
        elif isinstance(reply, wire.Fault):
            self._refused(reply)
        else:
            if reply[2]:
                self.keeper.follow_up(self.ask.resource, self.ask.terms)
            # Nothing left to take out means that a copy without an answer did it, as far as can be known.
            self._finish(reply[1] == 1 or self._unanswered)

    def _finish(self, released: bool | None) -> None:
        keeper = self.keeper
        if self.due_ms is not None:
            keeper.schedule.drop(self)
        keeper.leaving.pop(self, None)
        keeper.check_idle()
        self._tell(released)

    def _refused(self, fault: wire.Fault) -> None:
        self._unanswered = self._unanswered or fault.is_half_done
        if fault.passes:
            self._delayed()
        else:
            self._tell(fault.error(self.ask.resource.name, self.ask.ticket))
        if not self._refusals and not fault.is_seen_to:  # said once
            logger.warning("resource %r: releasing %r failed: %s", self.ask.resource.name, self.ask.ticket, fault.text)
        most_ms = fault.retry_ms if fault.passes else RETRY_MS_MAX
        wait_ms = backed_off(fault.retry_ms, self._refusals, most_ms)
        self._refusals += not fault.is_seen_to
        self.keeper.schedule.at(clock.now_ms() + wait_ms, self)

    def _delayed(self) -> None:
        if self._done is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.patience_ms / 1000, self._tell, None)

    def _tell(self, released: Released) -> None:
        if self._timer is not None:
            self._timer.cancel()
        done = self._done
        if done is not None and not done.done():
            done.set_result(released)


class Keeper:
    """All leases of a client, and all tickets on their way out."""

    due_ms: float | None = None

    def __init__(self, connection: Route) -> None:
        self.connection = connection
        self.schedule = Schedule(self)
        self.phase_ms = random.uniform(0, TOGETHER_MS)  # so that the clients of one machine do not renew as one
        connection.be_patient_for(self.shortest_ms)
        self.leases: dict[str, Lease] = {}
        self.leaving: dict[Leaving, None] = {}
        self._idle: asyncio.Event | None = None

    def on_ready(self, reached: Reached = everything) -> None:
        """The connection is back: what must not be forgotten goes first, then the leases, most urgent ones soonest."""
        for leaving in list(self.leaving):
            if reached(leaving.ask.resource):
                leaving.turn(clock.now_ms())
        now_ms = clock.now_ms()
        for lease in [lease for lease in self.leases.values() if reached(lease.ask.resource)]:
            within = max(0.0, min(lease.deadline_ms - now_ms, lease.ask.terms.lease_ms)) / 10
            self.schedule.at(now_ms + random.uniform(0, within), lease)

    def stalled(self, now_ms: float) -> None:
        """The loop stood still: what was lost meanwhile is told before anything else is done."""
        for lease in list(self.leases.values()):
            lease.check_deadline(now_ms)

    def keep(self, lease: Lease, now_ms: float) -> None:
        """Keeps the lease from now on."""
        lease_ms = lease.ask.terms.lease_ms
        self.leases[lease.ask.request] = lease
        if lease_ms < PATIENCE_MS[1] * RENEWALS_A_LEASE:
            self.connection.look_sooner(lease_ms / RENEWALS_A_LEASE)
        # Most leases are over before they need a renewal: its moment is set a little later, for those that still last.
        due_ms = now_ms + step(min(lease_ms, lease.deadline_ms - now_ms))
        if self.due_ms is None or due_ms < self.due_ms:
            self.schedule.at(due_ms, self)

    def turn(self, now_ms: float) -> bool:
        """Has the first renewals set of the leases kept since the last time; they are the last of all."""
        for lease in reversed(self.leases.values()):
            if not lease.is_new:
                break
            lease.begin_renewing(now_ms)
        return False

    def shortest_ms(self) -> float:
        """How soon a half-open connection has to be noticed for the shortest lease to be renewed in time."""
        kept_ms = min((lease.ask.terms.lease_ms for lease in self.leases.values()), default=math.inf)
        leaving_ms = min((leaving.ask.terms.lease_ms for leaving in self.leaving), default=math.inf)
        return min(kept_ms, leaving_ms) / RENEWALS_A_LEASE

    def forget(self, lease: Lease) -> None:
        """No longer keeps the lease."""
        if lease.due_ms is not None:
            self.schedule.drop(lease)
        self.leases.pop(lease.ask.request, None)

    def give_back(self, lease: Lease, done: asyncio.Future[Released] | None = None) -> None:
        """Releases what the lease is of, in the background if need be, while it lasts."""
        now_ms = clock.now_ms()
        until_ms = max(lease.deadline_ms, now_ms) + lease.ask.terms.lease_ms
        Leaving(self, lease.ask, lease.fence, until_ms, lease.unsure, done).start(now_ms)

    def follow_up(self, resource: wire.Resource, terms: wire.Terms) -> None:
        """A call ended with its batch and not with its work: goes on until that is done."""

        def go_on(reply: Reply) -> None:
            if isinstance(reply, list) and reply[2]:
                self.follow_up(resource, terms)

        link = self.connection.of(resource)
        if link.ready:
            link.send(resource, wire.RELEASE, wire.pack("", "", "", 0, 0, terms.idle_ttl_ms), go_on)

    def check_idle(self) -> None:
        """Tells `drained` when nothing is on its way out any more."""
        if self._idle is not None and not self.leaving:
            self._idle.set()

    async def drained(self) -> None:
        """Returns when nothing is on its way out any more."""
        self._idle = asyncio.Event()
        while self.leaving:  # what comes after the last of them is waited for too
            self._idle.clear()
            await self._idle.wait()
