"""Who holds and who waits for one resource: the state of a coordinator, and what follows from each thing that happens.

Pure: no clock, no workflow. Times are milliseconds since the epoch, `now_us` microseconds. Each method leaves the books
complete before anybody is told of anything, and returns what is to be told, to whom.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from redlease.models import Permit, Snapshot, Waiter

from .calls import OnClose
from .coordinator_calls import Adoption, Confirmed, Release, Renewal, Request, Requester

LOOK_MS = 10_000  # after which a holder is looked at while somebody waits, if its lease is longer
IDLE_MS = 60_000  # after which a coordinator that nobody uses ends
REMEMBERED = 500  # requests that were withdrawn, and outcomes of releases
BYTES_MAX = 1_000_000  # of all that stands in the books: a run takes over at most 2 MB from the one before it
ENTRY_BYTES = 600  # what an entry takes as JSON, besides the texts of its users
UNKNOWN_MAX = 3  # looks in a row that found nothing out, for which a permit is kept
WAITERS_A_LOOK = 20


@dataclass(frozen=True)
class Effect:
    """Something to be told to a run.

    Attributes:
        kind: "granted", "refused", "lost", or "confirm": whether it holds a permit is to be said.
        permit: The permit that this is about; None for a refusal.
        error: The name of the error of a refusal.
        why: For a refusal and a loss.
    """

    kind: Literal["granted", "refused", "lost", "confirm"]
    to: Requester
    permit: Permit | None = None
    error: str = ""
    why: str = ""


@dataclass
class Holder:
    """A ticket that holds a permit.

    Attributes:
        until_ms: When it is no longer kept; None: as long as its run is open.
        looked_ms: When its run was last known to be open.
        leaving: Its run is gone or has moved on: it lapses with its lease unless it is adopted or confirmed.
        unknown: Looks since then that found nothing out.
        sharers: Who else has asked under its ticket, and was told of it.
    """

    permit: Permit
    requester: Requester
    keep: bool
    on_close: OnClose
    until_ms: int | None
    looked_ms: int
    leaving: bool = False
    unknown: int = 0
    sharers: list[Requester] = field(default_factory=list)

    def passes_on(self) -> bool:
        """Whether somebody else who shares it has it from now on, in place of whoever has it."""
        if not self.sharers:
            return False
        self.requester, *self.sharers = self.sharers
        return True

    def kept(self, now_ms: int) -> bool:
        """Whether it is kept, if its run is open."""
        return self.keep and not self.leaving and (self.until_ms is None or now_ms < self.until_ms)


@dataclass
class Place:
    """A ticket that waits, for one run or several that share it; each with its deadline, None for none."""

    request: Request
    queued_at_ms: int
    requesters: list[Requester]
    deadlines_ms: list[int | None]

    def without(self, leaves: Callable[[Requester, int | None], bool]) -> Place:
        """The place when some of its requesters have left it."""
        pairs = zip(self.requesters, self.deadlines_ms, strict=True)
        stay = [pair for pair in pairs if not leaves(*pair)]
        return replace(self, requesters=[pair[0] for pair in stay], deadlines_ms=[pair[1] for pair in stay])


@dataclass
class Outcome:
    """Whether one call of `release` took something out."""

    call: str
    released: bool


@dataclass
class Books:
    """One resource.

    Attributes:
        capacity: Units that may be held at once.
        declared: The capacity that a request last declared; a resize is no declaration.
        fence: The last that was granted.
        holders: By their grant.
        queue: By arrival.
        withdrawn: Requests that must grant nothing should a late copy arrive.
        used_ms: When there was last anything.
    """

    resource: str
    capacity: int = 0
    declared: int = 0
    fence: int = 0
    holders: list[Holder] = field(default_factory=list)
    queue: list[Place] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    used_ms: int = 0

    # Asking

    def request(self, asked: Request, now_us: int) -> list[Effect]:
        """A request arrives, or a copy of one."""
        effects = self._declare(asked.terms.capacity, now_us)
        holder, place = self.holder(asked.ticket), self._place(asked.ticket)
        if asked.requester.request in self.withdrawn:
            return [*effects, _refused(asked, "Stale", "it was withdrawn before")]
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
        self.queue.append(Place(asked, now_us // 1000, [asked.requester], [deadline_ms]))
        return effects + self._grant(now_us)

    def _refusal(self, asked: Request, holder: Holder | None, place: Place | None) -> Effect | None:
        known = holder.permit.weight if holder else place.request.weight if place else asked.weight
        if known != asked.weight:
            return _refused(asked, "ValueError", f"ticket {asked.ticket!r} is known with weight {known}")
        return None if holder or place else self._no_room(asked)

    def _no_room(self, asked: Request) -> Effect | None:
        """Why there is no place for a new request."""
        if asked.weight > self.capacity:
            why = f"a weight of {asked.weight} can never fit into a capacity of {self.capacity}"
            return _refused(asked, "ValueError", why)
        waits = bool(self.queue) or asked.weight > self.capacity - self.held
        if waits and not asked.queue:
            return _refused(asked, "Busy", "it would have to wait")
        waiters_max = asked.terms.max_waiters
        if waits and waiters_max is not None and len(self.queue) >= waiters_max:
            return _refused(asked, "QueueFull", f"{len(self.queue)} wait already. Try again later")
        who = asked.requester.workflow_id
        if self.size() + _size(who, asked.ticket, asked.owner, asked.metadata) > BYTES_MAX:
            why = f"a coordinator keeps no more than these {len(self.holders)} holders and {len(self.queue)} waiters"
            return _refused(asked, "QueueFull", f"{why}. Try again later")
        return None

    def _again(self, holder: Holder, asked: Request, now_us: int) -> Effect:
        """A request that is granted already has the same permit, its lease full again."""
        self._extend(holder, now_us // 1000, asked.terms.lease_ms)
        if holder.requester.request == asked.requester.request:
            holder.requester, holder.leaving = asked.requester, False  # of a run that was reset, perhaps
        else:
            others = [each for each in holder.sharers if each.request != asked.requester.request]
            holder.sharers = [*others, asked.requester]
        return Effect("granted", asked.requester, holder.permit)

    def _declare(self, capacity: int, now_us: int) -> list[Effect]:
        if capacity == self.declared:
            return []
        self.declared = capacity
        return self.resize(capacity, now_us)

    def resize(self, capacity: int, now_us: int) -> list[Effect]:
        """Changes the capacity; who waits for more than that is refused."""
        self.capacity = capacity
        never = [place for place in self.queue if place.request.weight > capacity]
        self.queue = [place for place in self.queue if place.request.weight <= capacity]
        why = f"the capacity is {capacity} now, so that this weight can never fit"
        refused = [
            _refused(replace(place.request, requester=each), "ValueError", why)
            for place in never
            for each in place.requesters
        ]
        return refused + self._grant(now_us)

    def _grant(self, now_us: int) -> list[Effect]:
        """Grants from the head of the queue while the next fits."""
        effects = []
        while self.queue and self.queue[0].request.weight <= self.capacity - self.held:
            place = self.queue.pop(0)
            asked, now_ms = place.request, now_us // 1000
            # Time carries the fence over the end of a coordinator, and over the loss of it.
            self.fence = max(self.fence + 1, now_us)
            permit = Permit(
                *(self.resource, asked.ticket, self.fence, asked.weight, self.capacity, asked.terms.lease_ms),
                *(now_ms, now_ms + asked.terms.lease_ms, asked.owner, asked.metadata),
            )
            until_ms = None if asked.max_hold_ms is None else now_ms + asked.max_hold_ms
            first, *others = place.requesters
            self.holders.append(
                Holder(permit, first, asked.keep, asked.on_close, until_ms, looked_ms=now_ms, sharers=others)
            )
            effects += [Effect("granted", each, permit) for each in place.requesters]
        self.used_ms = max(self.used_ms, now_us // 1000)
        return effects

    # Giving back

    def release(self, release: Release, now_us: int) -> list[Effect]:
        """A ticket is taken out, as holder or as waiter; a release by whoever has it not changes nothing."""
        by_admin = release.fence is None and not release.request
        holder = self.holder(release.ticket)
        effects, released = [], False
        if holder is not None and (by_admin or release.fence == holder.permit.fence):
            self.holders.remove(holder)
            released = True
            # Of several who share it one releases it for all.
            effects += _lost(holder, "it was released by its ticket") if by_admin or holder.sharers else []
        elif holder is not None and release.request == holder.requester.request:
            released = True
            if not holder.passes_on():
                self.holders.remove(holder)
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
            effects += [Effect("refused", each, error="Withdrawn", why=why) for each in left if by_admin]
        if release.call:
            self.outcomes = [*self.outcomes, Outcome(release.call, released)][-REMEMBERED:]
        return effects + self._grant(now_us)

    def gone(self, effect: Effect, now_us: int) -> list[Effect]:
        """Whoever was to be told of a grant is not there any more."""
        permit = effect.permit
        holder = None if permit is None else self.holder(permit.ticket)
        if holder is None or permit is None or holder.permit.fence != permit.fence:
            return []
        if holder.requester != effect.to:  # another run shares the ticket, or has adopted the permit
            holder.sharers = [each for each in holder.sharers if each != effect.to]
            return []
        if not holder.passes_on():
            self.holders.remove(holder)
        return self._grant(now_us)

    def _leave(self, leaves: Callable[[Place, Requester, int | None], bool]) -> list[Requester]:
        """Takes requesters out of the queue, and the places that nobody is left at; returns them."""
        left, queue = [], []
        for place in self.queue:
            stays = place.without(functools.partial(leaves, place))
            left += [each for each in place.requesters if each not in stays.requesters]
            if stays.requesters:
                queue.append(stays)
        self.queue = queue
        return left

    # Holding on

    def renew(self, renewal: Renewal, now_us: int) -> list[Effect]:
        """Gives a permit a full lease again."""
        holder = self._held(renewal.ticket, renewal.fence)
        if holder is not None:
            self._extend(holder, now_us // 1000, renewal.lease_ms)
        return []

    def adopt(self, adoption: Adoption, now_us: int) -> list[Effect]:
        """A run takes a permit over; of two that adopt one permit the first wins."""
        holder = self._held(adoption.ticket, adoption.fence)
        if holder is None:
            return []
        before, now_ms = holder.requester, now_us // 1000
        same = (before.workflow_id, before.chain) == (adoption.requester.workflow_id, adoption.requester.chain)
        if adoption.refence if adoption.refence is not None else not same:
            self.fence = max(self.fence + 1, now_us)
            holder.permit, holder.sharers = replace(holder.permit, fence=self.fence), []
        holder.requester, holder.keep, holder.leaving = adoption.requester, True, False
        holder.on_close = adoption.on_close
        holder.until_ms = None if adoption.max_hold_ms is None else now_ms + adoption.max_hold_ms
        self._extend(holder, now_ms, adoption.lease_ms)
        return []

    def confirmed(self, confirmed: Confirmed, now_us: int) -> list[Effect]:
        """A run that came out of a reset holds what the run before it held."""
        holder = self._held(confirmed.ticket, confirmed.fence)
        if holder is not None:
            holder.requester, holder.leaving = replace(holder.requester, run_id=confirmed.run_id), False
            self._extend(holder, now_us // 1000, holder.permit.lease_ms)
        return []

    def _extend(self, holder: Holder, now_ms: int, lease_ms: int) -> None:
        holder.looked_ms = now_ms
        holder.permit = replace(holder.permit, lease_ms=lease_ms, expires_at_ms=now_ms + lease_ms)

    # Time

    def lapse(self, now_us: int) -> list[Effect]:
        """What time takes: permits that nobody keeps, and waiters whose deadline is past."""
        now_ms = now_us // 1000
        over = [each for each in self.holders if each.permit.expires_at_ms <= now_ms and not each.kept(now_ms)]
        self.holders = [each for each in self.holders if each not in over]
        self._leave(lambda _place, _each, deadline_ms: deadline_ms is not None and deadline_ms <= now_ms)
        lost = [effect for each in over for effect in _lost(each, "its lease ran out")]
        return lost + self._grant_if_any(now_us)

    def _grant_if_any(self, now_us: int) -> list[Effect]:
        # A coordinator that nobody uses has not been used because time went by.
        return self._grant(now_us) if self.queue or self.holders else []

    def due(self, now_ms: int) -> list[Requester]:
        """The runs that are to be looked at now: of permits that are kept, and then of the first waiters too."""
        holders = [each.requester for each in self.holders if each.kept(now_ms) and self._look_ms(each) <= now_ms]
        waiters = [each for place in self.queue[:WAITERS_A_LOOK] for each in place.requesters] if holders else []
        return holders + waiters

    def looked(self, at: Requester, fate: str, now_us: int) -> list[Effect]:
        """A look at a run found it open, closed, continued as new or reset, or found nothing out."""
        now_ms, effects = now_us // 1000, []
        for holder in [each for each in self.holders if each.requester == at]:
            lease_ms = holder.permit.lease_ms
            holder.unknown = holder.unknown + 1 if fate == "unknown" else 0
            stays = fate == "open" or (fate == "unknown" and holder.unknown < UNKNOWN_MAX)
            if stays or (fate == "closed" and holder.passes_on()):
                self._extend(holder, now_ms, lease_ms)
            elif fate == "closed" and holder.on_close == "release":
                self.holders.remove(holder)
            elif fate in {"continued", "reset"}:
                # The next run has a lease's time to adopt it, or to say that it holds it.
                self._extend(holder, now_ms, lease_ms)
                holder.leaving = True
                effects += [Effect("confirm", at, holder.permit)] if fate == "reset" else []
            else:
                holder.leaving = True
        if fate in {"closed", "continued"}:
            self._leave(lambda _place, each, _deadline_ms: each == at)
        return effects + self._grant_if_any(now_us)

    def next_ms(self, now_ms: int) -> int:
        """When something is due by the clock: a look, a lapse, or the end of a coordinator that nobody uses."""
        times = [self._look_ms(each) if each.kept(now_ms) else each.permit.expires_at_ms for each in self.holders]
        times += [ms for place in self.queue for ms in place.deadlines_ms if ms is not None]
        return min(times, default=self.used_ms + IDLE_MS)

    def _look_ms(self, holder: Holder) -> int:
        if holder.on_close == "lease" or not self.queue:
            return holder.permit.expires_at_ms
        # Long holds are looked at ever more seldom: each look costs the coordinator some events.
        pause_ms = LOOK_MS + (holder.looked_ms - holder.permit.granted_at_ms) // 4
        return min(holder.permit.expires_at_ms, holder.looked_ms + pause_ms)

    def idle(self, now_ms: int) -> bool:
        """Whether nobody has used it for so long that it may end."""
        return not self.holders and not self.queue and now_ms >= self.used_ms + IDLE_MS

    # Looking

    @property
    def held(self) -> int:
        """Units held."""
        return sum(each.permit.weight for each in self.holders)

    def holder(self, ticket: str) -> Holder | None:
        """The holder with that ticket."""
        return next((each for each in self.holders if each.permit.ticket == ticket), None)

    def _held(self, ticket: str, fence: int) -> Holder | None:
        holder = self.holder(ticket)
        return holder if holder is not None and holder.permit.fence == fence else None

    def _place(self, ticket: str) -> Place | None:
        return next((each for each in self.queue if each.request.ticket == ticket), None)

    def permit(self, ticket: str, fence: int) -> Permit | None:
        """The permit, if it is held under that fence."""
        holder = self._held(ticket, fence)
        return None if holder is None else holder.permit

    def adopted(self, ticket: str, request: str) -> Permit | None:
        """The permit, if it is held by that request."""
        holder = self.holder(ticket)
        return holder.permit if holder is not None and holder.requester.request == request else None

    def outcome(self, call: str) -> bool:
        """Whether a call of `release` took something out; of two with one name, whether the first did."""
        return next((each.released for each in self.outcomes if each.call == call), False)

    def snapshot(self, limit: int, now_ms: int) -> Snapshot:
        """The resource, with at most so many holders and waiters."""
        waiters = [
            Waiter(
                each.request.ticket, each.request.weight, each.request.owner, each.request.metadata, each.queued_at_ms
            )
            for each in self.queue[:limit]
        ]
        permits = tuple(each.permit for each in self.holders[:limit])
        return Snapshot(self.resource, self.capacity, permits, tuple(waiters), self.fence, now_ms)

    def size(self) -> int:
        """About how many bytes the books take."""
        return sum(_size(*texts) for texts in self._texts())

    def _texts(self) -> Iterator[tuple[str, str, str, dict[str, str]]]:
        for holder in self.holders:
            for each in (holder.requester, *holder.sharers):
                yield each.workflow_id, holder.permit.ticket, holder.permit.owner, holder.permit.metadata
        for place in self.queue:
            for each in place.requesters:
                yield each.workflow_id, place.request.ticket, place.request.owner, place.request.metadata


def _size(workflow_id: str, ticket: str, owner: str, metadata: dict[str, str]) -> int:
    # The id stands in a place twice.
    texts = [workflow_id, workflow_id, ticket, owner, *metadata, *metadata.values()]
    return ENTRY_BYTES + sum(map(_json_size, texts))


def _json_size(text: str) -> int:
    """Its size as JSON, which has all but ASCII escaped."""
    plain = text.isascii() and text.isprintable() and not {'"', "\\"} & set(text)
    return len(text) if plain else len(json.dumps(text))


def _refused(asked: Request, error: str, why: str) -> Effect:
    return Effect("refused", asked.requester, error=error, why=why)


def _lost(holder: Holder, why: str) -> list[Effect]:
    """What is told of a loss: of a permit that is plain data nothing, as nobody waits to hear of it."""
    told = [holder.requester, *holder.sharers] if holder.keep else []
    return [Effect("lost", each, holder.permit, why=why) for each in told]
