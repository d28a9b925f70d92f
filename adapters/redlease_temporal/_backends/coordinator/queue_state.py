"""The holders and the waiters of one resource: the state of a coordinator, and its transitions.

Pure: no clock, no workflow. Times are milliseconds since the epoch, `now_us` microseconds. Each method completes its
change of the state first, then returns the notifications that follow from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from redlease.models import Permit
from redlease_temporal._common.status_polls import is_renewed_after
from redlease_temporal._payloads.coordinator import (
    Adoption,
    Confirmed,
    CoordinatorRequest,
    Downgrade,
    Release,
    Renewal,
    Requester,
)
from redlease_temporal._payloads.locks import ResourceTerms

from .entries import Holder, Notification, QueuedTicket, ReleaseOutcome
from .replacing import replace_holders, superseded
from .sizes import entry_size, state_size
from .turns import never_fits, next_in_turn, promote

POLL_MS = 10_000  # how often a holder's run is checked at first while somebody waits, if its lease is longer
IDLE_MS = 60_000  # how long a coordinator stays open unused
REMEMBERED = 500  # withdrawn requests, and outcomes of releases
BYTES_MAX = 1_000_000  # of the state as a whole
UNKNOWN_MAX = 2  # consecutive looks without an answer for which a permit is kept
WAITERS_PER_POLL = 20
RESET_AFTER_DOWNGRADE = "its run was reset after a downgrade"


@dataclass
class QueueState:
    """One resource.

    Attributes:
        capacity: Units that may be held at once.
        declared: The capacity that a request last declared; a resize is no declaration.
        fence: The last one granted.
        holders: In the order of their grants.
        queue: In the order of arrival.
        withdrawn: Requests that must not be granted if a late copy arrives.
        last_used_ms: When the resource was last used.
        mean_hold_ms: How long holds lasted recently, of those whose release others waited for.
        per_key: Units that requests of one key may hold; 0 for any number.
        virtual_time: The tag of the last turn.
    """

    resource: str
    capacity: int = 0
    declared: int = 0
    fence: int = 0
    holders: list[Holder] = field(default_factory=list)
    queue: list[QueuedTicket] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    outcomes: list[ReleaseOutcome] = field(default_factory=list)
    last_used_ms: int = 0
    mean_hold_ms: float | None = None
    per_key: int = 0
    virtual_time: int = 0

    # Requests

    def request(self, request: CoordinatorRequest, now_us: int) -> list[Notification]:
        """Handles a request, or a copy of one."""
        if refusal := self._refusal_of_all(request):
            return [refusal]  # what it declares is not taken either
        effects = self._declare(request.terms, now_us)
        holder, queued = self.holder(request.spec.ticket), self._queued_ticket(request.spec.ticket)
        if holder is not None and holder.downgraded and holder.requester.is_reset_as(request.requester):
            self.holders.remove(holder)
            effects += _lost(holder, RESET_AFTER_DOWNGRADE)
            holder = None
        if refusal := self._refusal(request, holder, queued):
            return [*effects, refusal]
        if holder is not None:
            return [*effects, self._grant_again(holder, request, now_us)]
        deadline_ms = None if request.timeout_ms is None else now_us // 1000 + request.timeout_ms
        if queued is not None:
            stay = queued.without(lambda requester, _: requester.request == request.requester.request)
            queued.requesters = [*stay.requesters, request.requester]
            queued.deadlines_ms = [*stay.deadlines_ms, deadline_ms]
            return effects
        waits = self._waits(request)
        self.queue.append(QueuedTicket(request, now_us // 1000, [request.requester], [deadline_ms]))
        more = self._replace(request, now_us) if waits and request.spec.replaces else self._grant(now_us)
        return effects + more

    def _refusal_of_all(self, request: CoordinatorRequest) -> Notification | None:
        """The refusal of a request that was withdrawn, replaced, or can never be granted."""
        if request.requester.request in self.withdrawn:
            return _refused(request, "Stale", "it was withdrawn before")
        holder = self.holder(request.spec.ticket)
        if holder is not None and holder.replaced_by:
            return superseded(holder.replaced_by, [request.requester])[0]
        is_known = holder or self._queued_ticket(request.spec.ticket)
        reason = "" if is_known else never_fits(request, *self._declared_by(request.terms))
        return _refused(request, "ValueError", reason) if reason else None

    def _replace(self, request: CoordinatorRequest, now_us: int) -> list[Notification]:
        """Lets the newest waiter take the place of those of its key, and of holders too if it asks for that."""
        spec = request.spec
        removed = self._remove_requesters(
            lambda queued, _each, _ms: queued.request.spec.key == spec.key and queued.request.spec.ticket != spec.ticket
        )
        self.withdrawn = [*self.withdrawn, *(each.request for each in removed)][-REMEMBERED:]
        effects = superseded(spec.ticket, removed)
        if spec.full == "replace-holder":
            units_missing = self.held + spec.weight - self.capacity
            if self.per_key and spec.key:
                units_missing = max(units_missing, self._held_by(spec.key) + spec.weight - self.per_key)
            effects += replace_holders(request, self.holders, units_missing, now_us // 1000)
        return effects + self._grant(now_us)

    def _refusal(
        self, request: CoordinatorRequest, holder: Holder | None, queued: QueuedTicket | None
    ) -> Notification | None:
        spec = request.spec
        existing = holder.permit if holder else queued.request.spec if queued else spec
        if existing.weight != spec.weight:
            return _refused(request, "ValueError", f"ticket {spec.ticket!r} is known with weight {existing.weight}")
        if (existing.key or "") != spec.key:
            reason = f"ticket {spec.ticket!r} is known with the key {existing.key or ''!r}"
            return _refused(request, "ValueError", reason)
        return None if holder or queued else self._queue_refusal(request)

    def _queue_refusal(self, request: CoordinatorRequest) -> Notification | None:
        """The refusal of a new request that cannot be queued."""
        waits, spec, terms = self._waits(request), request.spec, request.terms
        if waits and not spec.queue:
            return _refused(request, "Busy", "it would have to wait")
        counts = waits and not spec.replaces
        if counts and terms.max_waiters is not None and len(self.queue) >= terms.max_waiters:
            return _refused(request, "QueueFull", f"{len(self.queue)} wait already. Try again later")
        of_key = sum(each.request.spec.key == spec.key for each in self.queue) if spec.key else 0
        if counts and spec.key and terms.max_waiters_per_key is not None and of_key >= terms.max_waiters_per_key:
            return _refused(request, "QueueFull", f"{of_key} of key {spec.key!r} wait already. Try again later")
        size = entry_size(request.requester.workflow_id, spec.ticket, spec.owner, spec.metadata, spec.key)
        if self.size() + size > BYTES_MAX:
            reason = f"a coordinator keeps no more than these {len(self.holders)} holders and {len(self.queue)} waiters"
            return _refused(request, "QueueFull", f"{reason}. Try again later")
        return None

    def _waits(self, request: CoordinatorRequest) -> bool:
        """Whether a new request has to wait: there is no room for it, or it is not its turn."""
        queued, first = QueuedTicket(request, 0, [], []), self._next(self.queue)
        if request.spec.weight > self.capacity - self.held or self._next([*self.queue, queued]) is not queued:
            return True
        return first is not None and (first.tag or 0) <= (queued.tag or 0)

    def _grant_again(self, holder: Holder, request: CoordinatorRequest, now_us: int) -> Notification:
        """Answers a request that is granted already: the same permit, renewed for a full lease."""
        self._extend(holder, now_us // 1000, request.terms.lease_ms)
        if holder.requester.request == request.requester.request:
            holder.requester, holder.leaving = request.requester, False  # the run may have been reset
        else:
            others = [each for each in holder.sharers if each.request != request.requester.request]
            holder.sharers = [*others, request.requester]
        return Notification("granted", request.requester, holder.permit)

    def _declared_by(self, terms: ResourceTerms) -> tuple[int, int]:
        """The capacity and the limit of keys after a request with these terms."""
        capacity = self.capacity if terms.capacity == self.declared else terms.capacity
        return capacity, self.per_key if terms.per_key is None else terms.per_key

    def _declare(self, terms: ResourceTerms, now_us: int) -> list[Notification]:
        capacity, per_key = self._declared_by(terms)
        if (terms.capacity, per_key) == (self.declared, self.per_key):
            return []
        self.declared, self.per_key = terms.capacity, per_key
        return self.resize(capacity, now_us)

    def resize(self, capacity: int, now_us: int) -> list[Notification]:
        """Changes the capacity; refuses waiters that can never be granted now."""
        self.capacity = capacity
        reasons = [(queued, never_fits(queued.request, capacity, self.per_key)) for queued in self.queue]
        self.queue = [queued for queued, reason in reasons if not reason]
        refused = [
            _refused(replace(queued.request, requester=each), "ValueError", reason)
            for queued, reason in reasons
            for each in (queued.requesters if reason else ())
        ]
        return refused + self._grant(now_us)

    def _next(self, queue: list[QueuedTicket]) -> QueuedTicket | None:
        """Whose turn it is: the first of a key that is not at its limit."""
        if not any(each.permit.key for each in self.holders) and not any(each.request.spec.key for each in self.queue):
            self.virtual_time = 0  # nothing is remembered of keys that are gone
            for queued in self.queue[:1]:
                queued.tag = None
        return next_in_turn(queue, self.virtual_time, self._is_below_limit)

    def _is_below_limit(self, request: CoordinatorRequest) -> bool:
        key, weight = request.spec.key, request.spec.weight
        return not (self.per_key and key) or self._held_by(key) + weight <= self.per_key

    def _held_by(self, key: str) -> int:
        return sum(each.permit.weight for each in self.holders if each.permit.key == key)

    def _grant(self, now_us: int) -> list[Notification]:
        """Grants to whose turn it is, while the next fits."""
        effects = []
        while (queued := self._next(self.queue)) and queued.request.spec.weight <= self.capacity - self.held:
            self.queue = [other for other in self.queue if other is not queued]
            self.virtual_time = max(self.virtual_time, queued.tag or 0)
            spec, lease_ms, now_ms = queued.request.spec, queued.request.terms.lease_ms, now_us // 1000
            # Fences follow the clock, so they keep growing if a coordinator ends or is lost.
            self.fence = max(self.fence + 1, now_us)
            permit = Permit(
                *(self.resource, spec.ticket, self.fence, spec.weight, self.capacity, lease_ms),
                *(now_ms, now_ms + lease_ms, spec.owner, spec.metadata, spec.key or None),
            )
            until_ms = None if spec.max_hold_ms is None else now_ms + spec.max_hold_ms
            first, *others = queued.requesters
            self.holders.append(
                Holder(permit, first, spec.renewed, spec.on_close, until_ms, polled_ms=now_ms, sharers=others)
            )
            effects += [Notification("granted", each, permit) for each in queued.requesters]
        self.last_used_ms = max(self.last_used_ms, now_us // 1000)
        return effects

    # Releases

    def release(self, release: Release, now_us: int) -> list[Notification]:
        """Releases or withdraws a ticket; ignores a release by anyone who neither holds nor requested it."""
        if self._was_reset(release):
            return []
        by_admin = release.fence is None and not release.request
        holder = self.holder(release.ticket)
        effects, released = [], False
        if holder is not None and (by_admin or release.fence == holder.permit.fence):
            self._remove(holder)
            released = True
            self._note_duration(now_us // 1000 - holder.permit.granted_at_ms)
            # Of several runs that share a permit, one releases it for all.
            effects += _lost(holder, "it was released by its ticket") if by_admin or holder.sharers else []
        elif holder is not None and release.request == holder.requester.request:
            released = True
            if not holder.pass_to_sharer():
                self._remove(holder)
        elif holder is not None and release.request:
            holder.sharers = [each for each in holder.sharers if each.request != release.request]
        if release.request:
            self.withdrawn = [*self.withdrawn, release.request][-REMEMBERED:]
        if release.fence is None:
            removed = self._remove_requesters(
                lambda queued, each, _: (
                    queued.request.spec.ticket == release.ticket and (by_admin or each.request == release.request)
                )
            )
            released = released or bool(removed)
            reason = "somebody took this request out of the queue by its ticket"
            effects += [Notification("refused", each, error="Withdrawn", reason=reason) for each in removed if by_admin]
        if release.call:
            self.outcomes = [*self.outcomes, ReleaseOutcome(release.call, released)][-REMEMBERED:]
        return effects + self._grant(now_us)

    def _was_reset(self, release: Release) -> bool:
        """Whether the closed run of a release was reset meanwhile, and its new run has made the same request."""
        requesters = [each.requester for each in self.holders]
        requesters += [each for queued in self.queue for each in queued.requesters]
        return bool(release.run_id) and any(
            each.request == release.request and each.run_id != release.run_id for each in requesters
        )

    def take_back(self, effect: Notification, now_us: int) -> list[Notification]:
        """Takes a grant back whose run could not be notified, as it is closed."""
        permit = effect.permit
        holder = None if permit is None else self.holder(permit.ticket)
        if holder is None or permit is None or holder.permit.fence != permit.fence:
            return []
        if holder.requester != effect.to:  # another run shares the ticket, or has adopted the permit
            holder.sharers = [each for each in holder.sharers if each != effect.to]
            return []
        if not holder.pass_to_sharer():
            self._remove(holder)
        return self._grant(now_us)

    def _remove(self, holder: Holder) -> None:
        """Frees the units of a permit; of one that was replaced they are for the next waiter of its key."""
        self.holders.remove(holder)
        if holder.replaced_by:
            promote(self.queue, holder.permit.key or "", self._next(self.queue))

    def _remove_requesters(self, leaves: Callable[[QueuedTicket, Requester, int | None], bool]) -> list[Requester]:
        """Removes requesters from the queue, and tickets without any; returns the removed requesters."""
        left, queue = [], []
        for queued in self.queue:
            stays = queued.without(functools.partial(leaves, queued))
            left += [each for each in queued.requesters if each not in stays.requesters]
            if stays.requesters:
                queue.append(stays)
        self.queue = queue
        return left

    # Keeping permits

    def renew(self, renewal: Renewal, now_us: int) -> list[Notification]:
        """Renews a permit for a full lease."""
        holder = self._held(renewal.ticket, renewal.fence)
        if holder is not None:
            self._extend(holder, now_us // 1000, renewal.lease_ms)
        return []

    def downgrade(self, downgrade: Downgrade, now_us: int) -> list[Notification]:
        """Gives back all but one unit of a permit, which keeps its fence and its lease."""
        holder = self._held(downgrade.ticket, downgrade.fence)
        if holder is None or holder.permit.weight == 1:
            return []
        holder.permit, holder.downgraded = replace(holder.permit, weight=1), True
        return self._grant(now_us)

    def adopt(self, adoption: Adoption, now_us: int) -> list[Notification]:
        """A run takes a permit over; of two that adopt it the first wins."""
        holder = self._held(adoption.ticket, adoption.fence)
        if holder is None:
            return []
        before, now_ms = holder.requester, now_us // 1000
        same = (before.workflow_id, before.chain) == (adoption.requester.workflow_id, adoption.requester.chain)
        if adoption.refence if adoption.refence is not None else not same:
            self.fence = max(self.fence + 1, now_us)
            holder.permit, holder.sharers = replace(holder.permit, fence=self.fence), []
        holder.requester, holder.renewed, holder.leaving = adoption.requester, True, False
        holder.downgraded = False
        holder.on_close = adoption.on_close
        holder.until_ms = None if adoption.max_hold_ms is None else now_ms + adoption.max_hold_ms
        self._extend(holder, now_ms, adoption.lease_ms)
        return []

    def confirmed(self, confirmed: Confirmed, now_us: int) -> list[Notification]:
        """After a reset: the new run holds what the old one held."""
        holder = self._held(confirmed.ticket, confirmed.fence)
        if holder is not None:
            holder.requester, holder.leaving = replace(holder.requester, run_id=confirmed.run_id), False
            self._extend(holder, now_us // 1000, holder.permit.lease_ms)
        return []

    def _extend(self, holder: Holder, now_ms: int, lease_ms: int) -> None:
        holder.polled_ms = now_ms
        if not holder.replaced_by:  # else it lasts for the grace time that it was given
            holder.permit = replace(holder.permit, lease_ms=lease_ms, expires_at_ms=now_ms + lease_ms)

    # Time

    def expire(self, now_us: int) -> list[Notification]:
        """Expires permits that are not kept, and waiters whose deadline has passed."""
        now_ms = now_us // 1000
        expired = [each for each in self.holders if each.permit.expires_at_ms <= now_ms and not each.is_renewed(now_ms)]
        for each in expired:
            self._remove(each)
        self._remove_requesters(
            lambda _queued_ticket, _each, deadline_ms: deadline_ms is not None and deadline_ms <= now_ms
        )
        lost = [effect for each in expired for effect in _lost(each, "its lease ran out")]
        return lost + self._grant_if_any(now_us)

    def _grant_if_any(self, now_us: int) -> list[Notification]:
        # Time passing does not count as use.
        return self._grant(now_us) if self.queue or self.holders else []

    def due(self, now_ms: int) -> list[Requester]:
        """The runs to look at now: those whose permits are kept and, if there are any, the first waiters too."""
        holders = [
            each.requester for each in self.holders if each.is_renewed(now_ms) and self._next_poll_ms(each) <= now_ms
        ]
        waiters = [each for queued in self.queue[:WAITERS_PER_POLL] for each in queued.requesters] if holders else []
        return holders + waiters

    def apply_status(self, at: Requester, status: str, now_us: int) -> list[Notification]:
        """Applies the result of a look at a run: open, closed, continued, reset or unknown."""
        now_ms, effects = now_us // 1000, []
        for holder in [each for each in self.holders if each.requester == at]:
            lease_ms = holder.permit.lease_ms
            stays = is_renewed_after(status, holder.unknown_polls, UNKNOWN_MAX)
            holder.unknown_polls = holder.unknown_polls + 1 if status == "unknown" else 0
            if stays or (status == "closed" and holder.pass_to_sharer()):
                self._extend(holder, now_ms, lease_ms)
            elif status == "closed" and holder.on_close == "release":
                self._remove(holder)
            elif status == "reset" and holder.downgraded:  # the new run may continue from before the downgrade
                self.holders.remove(holder)
                effects += _lost(holder, RESET_AFTER_DOWNGRADE)
            elif status in {"continued", "reset"}:
                # The next run has one lease to adopt the permit, or to confirm that it holds it.
                self._extend(holder, now_ms, lease_ms)
                holder.leaving = True
                effects += [Notification("confirm", at, holder.permit)] if status == "reset" else []
            else:
                holder.leaving = True
        if status in {"closed", "continued"}:
            self._remove_requesters(lambda _queued_ticket, each, _deadline_ms: each == at)
        return effects + self._grant_if_any(now_us)

    def next_ms(self, now_ms: int) -> int:
        """When the next look, expiry or idle end is due."""
        times = [
            self._next_poll_ms(each) if each.is_renewed(now_ms) else each.permit.expires_at_ms for each in self.holders
        ]
        times += [ms for queued in self.queue for ms in queued.deadlines_ms if ms is not None]
        return min(times, default=self.last_used_ms + IDLE_MS)

    def _next_poll_ms(self, holder: Holder) -> int:
        if holder.on_close == "lease" or not self.queue:
            return holder.permit.expires_at_ms
        # Long holds are looked at less and less often: each look costs the coordinator some events.
        pause_ms = POLL_MS + (holder.polled_ms - holder.permit.granted_at_ms) // 4
        return min(holder.permit.expires_at_ms, holder.polled_ms + pause_ms)

    def contended(self, now_ms: int) -> dict[Requester, str]:
        """The holders whose end somebody waits for, with the ticket of each."""
        ends = (
            [each for each in self.holders if each.is_renewed(now_ms) and each.on_close == "release"]
            if self.queue
            else []
        )
        return {each.requester: each.permit.ticket for each in ends}

    def idle(self, now_ms: int) -> bool:
        """Whether the coordinator has been unused for so long that it may end."""
        return not self.holders and not self.queue and now_ms >= self.last_used_ms + IDLE_MS

    # Queries

    @property
    def held(self) -> int:
        """Units held."""
        return sum(each.permit.weight for each in self.holders)

    def holder(self, ticket: str) -> Holder | None:
        """The holder with that ticket."""
        return next((each for each in self.holders if each.permit.ticket == ticket), None)

    def _held(self, ticket: str, fence: int) -> Holder | None:
        holder = self.holder(ticket)
        return None if holder is None or holder.replaced_by or holder.permit.fence != fence else holder

    def _queued_ticket(self, ticket: str) -> QueuedTicket | None:
        return next((each for each in self.queue if each.request.spec.ticket == ticket), None)

    def permit(self, ticket: str, fence: int) -> Permit | None:
        """The permit, if it is held with that fence."""
        holder = self._held(ticket, fence)
        return None if holder is None else holder.permit

    def adopted(self, ticket: str, request: str) -> Permit | None:
        """The permit, if that request holds it."""
        holder = self.holder(ticket)
        return holder.permit if holder is not None and holder.requester.request == request else None

    def outcome(self, call: str) -> bool:
        """Whether a call of `release` released something; if calls share a name, whether the first did."""
        return next((each.released for each in self.outcomes if each.call == call), False)

    def _note_duration(self, lasted_ms: int) -> None:
        if self.queue:
            mean_ms = lasted_ms if self.mean_hold_ms is None else self.mean_hold_ms
            self.mean_hold_ms = (7 * mean_ms + lasted_ms) / 8

    def size(self) -> int:
        """The approximate size of the state in bytes."""
        return state_size(self.holders, self.queue)


def _refused(request: CoordinatorRequest, error: str, reason: str) -> Notification:
    return Notification("refused", request.requester, error=error, reason=reason)


def _lost(holder: Holder, reason: str) -> list[Notification]:
    """The notifications of a loss; none for a permit that is plain data, as nobody waits for its loss."""
    notified = [holder.requester, *holder.sharers] if holder.renewed else []
    return [Notification("lost", each, holder.permit, reason=reason) for each in notified]
