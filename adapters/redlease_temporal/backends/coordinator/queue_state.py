"""Who holds and who waits for one resource: the state of a coordinator, and its transitions.

Pure: no clock, no workflow. Times are milliseconds since the epoch, `now_us` microseconds. Each method completes its
change of the state first, then returns the notifications that follow from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from redlease.models import Permit
from redlease_temporal.common.owner_looks import is_kept
from redlease_temporal.payloads.coordinator import Adoption, Confirmed, Downgrade, Release, Renewal, Request, Requester
from redlease_temporal.payloads.locks import Terms

from .entries import Holder, Notification, Outcome, QueuedTicket
from .replacing import replace_holders, superseded
from .sizes import entry_size, state_size
from .turns import lead, misfit, next_in_turn

LOOK_MS = 10_000  # how often a holder's run is checked at first while somebody waits, if its lease is longer
IDLE_MS = 60_000  # how long a coordinator stays open unused
REMEMBERED = 500  # withdrawn requests, and outcomes of releases
BYTES_MAX = 1_000_000  # of the state as a whole
UNKNOWN_MAX = 2  # consecutive looks without an answer for which a permit is kept
WAITERS_A_LOOK = 20
RESET_LATER = "its run was reset after a downgrade"


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
        used_ms: When the resource was last used.
        lasted_ms: How long holds lasted of late whose release others waited for.
        per_key: Units that requests of one key may hold; 0 for any number.
        virtual: The tag of the last turn.
    """

    resource: str
    capacity: int = 0
    declared: int = 0
    fence: int = 0
    holders: list[Holder] = field(default_factory=list)
    queue: list[QueuedTicket] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    used_ms: int = 0
    lasted_ms: float | None = None
    per_key: int = 0
    virtual: int = 0

    # Requests

    def request(self, asked: Request, now_us: int) -> list[Notification]:
        """Handles a request, or a copy of one."""
        if refusal := self._refusal_of_all(asked):
            return [refusal]  # what it declares is not taken either
        effects = self._declare(asked.terms, now_us)
        holder, place = self.holder(asked.ticket), self._place(asked.ticket)
        if holder is not None and holder.downgraded and holder.requester.is_reset_as(asked.requester):
            self.holders.remove(holder)
            effects += _lost(holder, RESET_LATER)
            holder = None
        if refusal := self._refusal(asked, holder, place):
            return [*effects, refusal]
        if holder is not None:
            return [*effects, self._again(holder, asked, now_us)]
        deadline_ms = None if asked.timeout_ms is None else now_us // 1000 + asked.timeout_ms
        if place is not None:
            stay = place.without(lambda requester, _: requester.request == asked.requester.request)
            place.requesters = [*stay.requesters, asked.requester]
            place.deadlines_ms = [*stay.deadlines_ms, deadline_ms]
            return effects
        waits = self._waits(asked)
        self.queue.append(QueuedTicket(asked, now_us // 1000, [asked.requester], [deadline_ms]))
        more = self._replace(asked, now_us) if waits and asked.replaces else self._grant(now_us)
        return effects + more

    def _refusal_of_all(self, asked: Request) -> Notification | None:
        """The refusal of a request that was withdrawn, replaced, or can never be granted."""
        if asked.requester.request in self.withdrawn:
            return _refused(asked, "Stale", "it was withdrawn before")
        holder = self.holder(asked.ticket)
        if holder is not None and holder.replaced_by:
            return superseded(holder.replaced_by, [asked.requester])[0]
        is_known = holder or self._place(asked.ticket)
        why = "" if is_known else misfit(asked, *self._wanted(asked.terms))
        return _refused(asked, "ValueError", why) if why else None

    def _replace(self, asked: Request, now_us: int) -> list[Notification]:
        """Lets the newest waiter take the place of those of its key, and of holders too if it asks for that."""
        left = self._leave(
            lambda place, _each, _ms: place.request.key == asked.key and place.request.ticket != asked.ticket
        )
        self.withdrawn = [*self.withdrawn, *(each.request for each in left)][-REMEMBERED:]
        effects = superseded(asked.ticket, left)
        if asked.full == "replace-holder":
            lacking = self.held + asked.weight - self.capacity
            if self.per_key and asked.key:
                lacking = max(lacking, self._held_by(asked.key) + asked.weight - self.per_key)
            effects += replace_holders(asked, self.holders, lacking, now_us // 1000)
        return effects + self._grant(now_us)

    def _refusal(self, asked: Request, holder: Holder | None, place: QueuedTicket | None) -> Notification | None:
        known = holder.permit if holder else place.request if place else asked
        if known.weight != asked.weight:
            return _refused(asked, "ValueError", f"ticket {asked.ticket!r} is known with weight {known.weight}")
        if (known.key or "") != asked.key:
            return _refused(asked, "ValueError", f"ticket {asked.ticket!r} is known with the key {known.key or ''!r}")
        return None if holder or place else self._no_room(asked)

    def _no_room(self, asked: Request) -> Notification | None:
        """The refusal of a new request that cannot be queued."""
        waits = self._waits(asked)
        if waits and not asked.queue:
            return _refused(asked, "Busy", "it would have to wait")
        waiters_max = asked.terms.max_waiters
        if waits and waiters_max is not None and len(self.queue) >= waiters_max and not asked.replaces:
            return _refused(asked, "QueueFull", f"{len(self.queue)} wait already. Try again later")
        of_key = sum(each.request.key == asked.key for each in self.queue) if asked.key else 0
        most_of_key = asked.terms.max_waiters_per_key
        if waits and asked.key and most_of_key is not None and of_key >= most_of_key and not asked.replaces:
            return _refused(asked, "QueueFull", f"{of_key} of key {asked.key!r} wait already. Try again later")
        who = asked.requester.workflow_id
        if self.size() + entry_size(who, asked.ticket, asked.owner, asked.metadata, asked.key) > BYTES_MAX:
            why = f"a coordinator keeps no more than these {len(self.holders)} holders and {len(self.queue)} waiters"
            return _refused(asked, "QueueFull", f"{why}. Try again later")
        return None

    def _waits(self, asked: Request) -> bool:
        """Whether a new request has to wait: there is no room for it, or it is not its turn."""
        place, first = QueuedTicket(asked, 0, [], []), self._next(self.queue)
        if asked.weight > self.capacity - self.held or self._next([*self.queue, place]) is not place:
            return True
        return first is not None and (first.tag or 0) <= (place.tag or 0)

    def _again(self, holder: Holder, asked: Request, now_us: int) -> Notification:
        """Answers a request that is granted already: the same permit, renewed for a full lease."""
        self._extend(holder, now_us // 1000, asked.terms.lease_ms)
        if holder.requester.request == asked.requester.request:
            holder.requester, holder.leaving = asked.requester, False  # the run may have been reset
        else:
            others = [each for each in holder.sharers if each.request != asked.requester.request]
            holder.sharers = [*others, asked.requester]
        return Notification("granted", asked.requester, holder.permit)

    def _wanted(self, terms: Terms) -> tuple[int, int]:
        """The capacity and the limit of keys after a request with these terms."""
        capacity = self.capacity if terms.capacity == self.declared else terms.capacity
        return capacity, self.per_key if terms.per_key is None else terms.per_key

    def _declare(self, terms: Terms, now_us: int) -> list[Notification]:
        capacity, per_key = self._wanted(terms)
        if (terms.capacity, per_key) == (self.declared, self.per_key):
            return []
        self.declared, self.per_key = terms.capacity, per_key
        return self.resize(capacity, now_us)

    def resize(self, capacity: int, now_us: int) -> list[Notification]:
        """Changes the capacity; refuses waiters that can never be granted now."""
        self.capacity = capacity
        fates = [(place, misfit(place.request, capacity, self.per_key)) for place in self.queue]
        self.queue = [place for place, why in fates if not why]
        refused = [
            _refused(replace(place.request, requester=each), "ValueError", why)
            for place, why in fates
            for each in (place.requesters if why else ())
        ]
        return refused + self._grant(now_us)

    def _next(self, queue: list[QueuedTicket]) -> QueuedTicket | None:
        """Whose turn it is: the first of a key that is not at its limit."""
        if not any(each.permit.key for each in self.holders) and not any(each.request.key for each in self.queue):
            self.virtual = 0  # nothing is remembered of keys that are gone
            for place in self.queue[:1]:
                place.tag = None
        return next_in_turn(queue, self.virtual, self._is_below_limit)

    def _is_below_limit(self, asked: Request) -> bool:
        return not (self.per_key and asked.key) or self._held_by(asked.key) + asked.weight <= self.per_key

    def _held_by(self, key: str) -> int:
        return sum(each.permit.weight for each in self.holders if each.permit.key == key)

    def _grant(self, now_us: int) -> list[Notification]:
        """Grants to whose turn it is, while the next fits."""
        effects = []
        while (place := self._next(self.queue)) and place.request.weight <= self.capacity - self.held:
            self.queue = [other for other in self.queue if other is not place]
            self.virtual = max(self.virtual, place.tag or 0)
            asked, now_ms = place.request, now_us // 1000
            # Fences follow the clock, so they keep growing if a coordinator ends or is lost.
            self.fence = max(self.fence + 1, now_us)
            permit = Permit(
                *(self.resource, asked.ticket, self.fence, asked.weight, self.capacity, asked.terms.lease_ms),
                *(now_ms, now_ms + asked.terms.lease_ms, asked.owner, asked.metadata, asked.key or None),
            )
            until_ms = None if asked.max_hold_ms is None else now_ms + asked.max_hold_ms
            first, *others = place.requesters
            self.holders.append(
                Holder(permit, first, asked.keep, asked.on_close, until_ms, looked_ms=now_ms, sharers=others)
            )
            effects += [Notification("granted", each, permit) for each in place.requesters]
        self.used_ms = max(self.used_ms, now_us // 1000)
        return effects

    # Releases

    def release(self, release: Release, now_us: int) -> list[Notification]:
        """Releases or withdraws a ticket; ignores a release by anyone who neither holds nor requested it."""
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
            if not holder.passes_on():
                self._remove(holder)
        elif holder is not None and release.request:
            holder.sharers = [each for each in holder.sharers if each.request != release.request]
        if release.request:
            self.withdrawn = [*self.withdrawn, release.request][-REMEMBERED:]
        if release.fence is None:
            left = self._leave(
                lambda place, each, _: (
                    place.request.ticket == release.ticket and (by_admin or each.request == release.request)
                )
            )
            released = released or bool(left)
            why = "somebody took this request out of the queue by its ticket"
            effects += [Notification("refused", each, error="Withdrawn", why=why) for each in left if by_admin]
        if release.call:
            self.outcomes = [*self.outcomes, Outcome(release.call, released)][-REMEMBERED:]
        return effects + self._grant(now_us)

    def gone(self, effect: Notification, now_us: int) -> list[Notification]:
        """Takes a grant back whose run could not be notified, as it is closed."""
        permit = effect.permit
        holder = None if permit is None else self.holder(permit.ticket)
        if holder is None or permit is None or holder.permit.fence != permit.fence:
            return []
        if holder.requester != effect.to:  # another run shares the ticket, or has adopted the permit
            holder.sharers = [each for each in holder.sharers if each != effect.to]
            return []
        if not holder.passes_on():
            self._remove(holder)
        return self._grant(now_us)

    def _remove(self, holder: Holder) -> None:
        """Frees the units of a permit; of one that was replaced they are for the next waiter of its key."""
        self.holders.remove(holder)
        if holder.replaced_by:
            lead(self.queue, holder.permit.key or "", self._next(self.queue))

    def _leave(self, leaves: Callable[[QueuedTicket, Requester, int | None], bool]) -> list[Requester]:
        """Removes requesters from the queue, and tickets without any; returns the removed requesters."""
        left, queue = [], []
        for place in self.queue:
            stays = place.without(functools.partial(leaves, place))
            left += [each for each in place.requesters if each not in stays.requesters]
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
        holder.requester, holder.keep, holder.leaving = adoption.requester, True, False
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
        holder.looked_ms = now_ms
        if not holder.replaced_by:  # else it lasts for the grace time that it was given
            holder.permit = replace(holder.permit, lease_ms=lease_ms, expires_at_ms=now_ms + lease_ms)

    # Time

    def lapse(self, now_us: int) -> list[Notification]:
        """Expires permits that are not kept, and waiters whose deadline has passed."""
        now_ms = now_us // 1000
        over = [each for each in self.holders if each.permit.expires_at_ms <= now_ms and not each.kept(now_ms)]
        for each in over:
            self._remove(each)
        self._leave(lambda _place, _each, deadline_ms: deadline_ms is not None and deadline_ms <= now_ms)
        lost = [effect for each in over for effect in _lost(each, "its lease ran out")]
        return lost + self._grant_if_any(now_us)

    def _grant_if_any(self, now_us: int) -> list[Notification]:
        # Time passing does not count as use.
        return self._grant(now_us) if self.queue or self.holders else []

    def due(self, now_ms: int) -> list[Requester]:
        """The runs to look at now: those whose permits are kept and, if there are any, the first waiters too."""
        holders = [each.requester for each in self.holders if each.kept(now_ms) and self._look_ms(each) <= now_ms]
        waiters = [each for place in self.queue[:WAITERS_A_LOOK] for each in place.requesters] if holders else []
        return holders + waiters

    def looked(self, at: Requester, fate: str, now_us: int) -> list[Notification]:
        """Applies the result of a look at a run: open, closed, continued, reset or unknown."""
        now_ms, effects = now_us // 1000, []
        for holder in [each for each in self.holders if each.requester == at]:
            lease_ms = holder.permit.lease_ms
            stays = is_kept(fate, holder.unknown, UNKNOWN_MAX)
            holder.unknown = holder.unknown + 1 if fate == "unknown" else 0
            if stays or (fate == "closed" and holder.passes_on()):
                self._extend(holder, now_ms, lease_ms)
            elif fate == "closed" and holder.on_close == "release":
                self._remove(holder)
            elif fate == "reset" and holder.downgraded:  # the new run may continue from before the downgrade
                self.holders.remove(holder)
                effects += _lost(holder, RESET_LATER)
            elif fate in {"continued", "reset"}:
                # The next run has one lease to adopt the permit, or to confirm that it holds it.
                self._extend(holder, now_ms, lease_ms)
                holder.leaving = True
                effects += [Notification("confirm", at, holder.permit)] if fate == "reset" else []
            else:
                holder.leaving = True
        if fate in {"closed", "continued"}:
            self._leave(lambda _place, each, _deadline_ms: each == at)
        return effects + self._grant_if_any(now_us)

    def next_ms(self, now_ms: int) -> int:
        """When the next look, expiry or idle end is due."""
        times = [self._look_ms(each) if each.kept(now_ms) else each.permit.expires_at_ms for each in self.holders]
        times += [ms for place in self.queue for ms in place.deadlines_ms if ms is not None]
        return min(times, default=self.used_ms + IDLE_MS)

    def _look_ms(self, holder: Holder) -> int:
        if holder.on_close == "lease" or not self.queue:
            return holder.permit.expires_at_ms
        # Long holds are looked at less and less often: each look costs the coordinator some events.
        pause_ms = LOOK_MS + (holder.looked_ms - holder.permit.granted_at_ms) // 4
        return min(holder.permit.expires_at_ms, holder.looked_ms + pause_ms)

    def contended(self, now_ms: int) -> dict[Requester, str]:
        """The holders whose end somebody waits for, with the ticket of each."""
        ends = [each for each in self.holders if each.kept(now_ms) and each.on_close == "release"] if self.queue else []
        return {each.requester: each.permit.ticket for each in ends}

    def idle(self, now_ms: int) -> bool:
        """Whether the coordinator has been unused for so long that it may end."""
        return not self.holders and not self.queue and now_ms >= self.used_ms + IDLE_MS

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

    def _place(self, ticket: str) -> QueuedTicket | None:
        return next((each for each in self.queue if each.request.ticket == ticket), None)

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
            mean_ms = lasted_ms if self.lasted_ms is None else self.lasted_ms
            self.lasted_ms = (7 * mean_ms + lasted_ms) / 8

    def size(self) -> int:
        """The approximate size of the state in bytes."""
        return state_size(self.holders, self.queue)


def _refused(asked: Request, error: str, why: str) -> Notification:
    return Notification("refused", asked.requester, error=error, why=why)


def _lost(holder: Holder, why: str) -> list[Notification]:
    """The notifications of a loss; none for a permit that is plain data, as nobody waits for its loss."""
    told = [holder.requester, *holder.sharers] if holder.keep else []
    return [Notification("lost", each, holder.permit, why=why) for each in told]
