"""What the model of the protocol keeps of a resource: time, capacity, the queue, and what is granted from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Self

from redlease._core.limits import CAPACITY_MAX
from redlease._core.protocol.snapshots import FOR_GOOD_MS

from .entries import Delay, Entry, Limit
from .turns import Turns, is_barred

EXCLUSIVE = (1, CAPACITY_MAX)  # what locks and read-write locks declare, which no resize changes


@dataclass
class ResourceState:
    """One resource, as the server keeps it. All times are in ms of the server's clock, save `clock`.

    Attributes:
        clock: The server's time in µs, as fences are.
        capacity: How many units may be held; 0 until a request declares it.
        declared: The capacity that was declared last; `resize` changes `capacity` only.
        fence: The last one granted.
        sequence: The order of arrival of the last request that was queued.
        kept_until: The server keeps the resource at least until then, and may delete it later.
        fence_before: The last fence before the resource was deleted.
        held: The permits by ticket, expired ones included that no call has removed yet.
        queue: The waiters by ticket, dead ones included that no call has removed yet.
        places: When each client's place expires.
        tombstones: Until when late copies of a request grant nothing.
        replaced: Those of them that a newer request has replaced.
        lock_delay: How long the units of an expired permit stay in use.
        delays: Those that do.
        lasted: How long holds lasted recently, of those whose release others waited for, if there were any.
        turns: The turns that keys take.
        limits: What outranks the capacity, or the limit of keys, by name.
        rate: The µs between two grants and how many may come at once; empty for any number.
        tat: By which µs all of those may come at once again.
    """

    clock: int = 0
    capacity: int = 0
    declared: int = 0
    fence: int = 0
    sequence: int = 0
    kept_until: int = 0
    fence_before: int = 0
    held: dict[str, Entry] = field(default_factory=dict)
    queue: dict[str, Entry] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    tombstones: dict[str, int] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    lock_delay: int = 0
    delays: list[Delay] = field(default_factory=list)
    lasted: float | None = None
    turns: Turns = field(default_factory=Turns)
    limits: dict[bytes, Limit] = field(default_factory=dict)
    rate: tuple[int, ...] = ()
    tat: int = 0

    # Time, and what it ends

    @property
    def now(self) -> int:
        """The server's time in ms."""
        return self.clock // 1000

    def forgotten(self) -> Self:
        """Return what is left when the server has deleted the keys: nothing but the order of the fences."""
        return type(self)(self.clock, fence_before=max(self.fence, self.fence_before))

    def keep(self, idle: int) -> None:
        """The keys are kept for `idle` ms past now and the last fence, and as long as anything in them lasts."""
        ends = [self.now + idle, self.fence // 1000 + idle]
        ends += [held.deadline for held in self.held.values()]
        ends += [*self.places.values(), *self.tombstones.values(), *(limit.until for limit in self.limits.values())]
        ends += [self.tat // 1000] if self.rate else []
        self.kept_until = max(self.kept_until, *ends)
        self.note_keys()

    def note_keys(self) -> None:
        """Forget the virtual time with the last ticket that has a key, and let it begin again before its end."""
        self.turns.restart(self.queue.values())
        if not self.has_keys:
            self.turns.reset()

    @property
    def has_keys(self) -> bool:
        """Whether a ticket has a key, or a limit is one of keys."""
        return self.has_key_limits or any(entry.key for entry in (*self.users(), *self.queue.values()))

    @property
    def has_key_limits(self) -> bool:
        """Whether a limit is one of keys, be it over or not."""
        return any(limit.of_keys for limit in self.limits.values())

    def is_live(self, entry: Entry) -> bool:
        """Tell whether the lease of a permit, or one of the places of a waiter, is unexpired."""
        return (entry.deadline if entry.fence else self.place_ends(entry)) > self.now

    def place_ends(self, entry: Entry) -> int:
        """Return when the last of the places of a waiter expires."""
        return max(self.places.get(place, 0) for place, _ in entry.claims)

    # Capacity and the queue

    def used(self) -> int:
        """Return the units in use, or kept back; those of what has expired among them, until a call removes it."""
        kept = sum(limit.kept(self.capacity) for limit in self.limits.values())
        return kept + sum(user.weight for user in self.users())

    def users(self) -> list[Entry | Delay]:
        """Return what is in use: the permits, and what stands for expired ones."""
        return [*self.held.values(), *self.delays]

    def waiters(self) -> list[Entry]:
        """Return the queue in its order, dead waiters included."""
        return sorted(self.queue.values(), key=lambda queued: queued.position)

    def fits(self, weight: int) -> bool:
        """Tell whether so many units are free."""
        return self.used() + weight <= self.capacity

    def reap(self) -> None:
        """Remove the expired permits, and the delays that are over, in the order in which they ended."""
        ends: list[tuple[int, bytes, Entry | Delay]] = []
        ends += [(delay.until, delay.name, delay) for delay in self.delays if delay.until <= self.now]
        ends += [(held.deadline, held.ticket.encode(), held) for held in self.held.values() if not self.is_live(held)]
        for _, _, ended in sorted(ends, key=lambda end: end[:2]):
            if isinstance(ended, Entry):
                self.remove(ended)
            else:
                self.delays.remove(ended)
                self.give_turn(ended.key)
        lifted = [limit for limit in self.limits.values() if limit.until <= self.now]
        for limit in sorted(lifted, key=lambda limit: (limit.score, limit.name)):
            self.lift(limit.name)

    def lift(self, name: bytes) -> None:
        """Remove a limit."""
        limit = self.limits.pop(name)
        if limit.of_keys or limit.kind == "limit":
            self.look_again(limit.key)

    def look_again(self, key: str) -> None:
        """Give a key a turn if it may have one now; with the key "" each key that has none."""
        if key:
            self.give_turn(key)
        else:
            self.look_at_all()

    def look_at_all(self) -> None:
        """Give turns to the keys that may have one now."""
        self.turns.is_raised = False
        for key in list(self.turns.numbers):
            self.give_turn(key)

    def next_fence(self) -> int:
        """Return a fence above all before it."""
        self.fence = max(self.fence + 1, self.clock)
        assert self.fence > self.fence_before, "P3: a fence after the loss of the data is not above those before it"
        return self.fence

    def grant(self, entry: Entry, deadline: int) -> None:
        """Make a holder of a ticket."""
        entry.fence, entry.since, entry.deadline = self.next_fence(), self.now, deadline
        self.held[entry.ticket] = entry
        if self.rate:  # the generic cell rate algorithm
            self.tat = max(self.tat, self.clock) + self.rate[0]
            self.await_token()
        if entry.key and self.turns.rate:
            self.spend(entry.key, *self.turns.rate)

    def spend(self, key: str, interval: int, burst: int) -> None:
        """Take a token of a key, as `grant` does of the resource."""
        known = self.limits.get(Limit.named("tat", key))
        tat = max(known.tat if known else 0, self.clock) + interval
        due = tat - (burst - 1) * interval
        kept = [("tat", tat, tat)] if burst > 1 else []
        kept += [("rate", due, 0)] if due > self.clock else []
        for kind, until, number in kept:
            name = Limit.named(kind, key)
            self.limits[name] = Limit(name, 0, math.ceil(until / 1000), self.now, kind, key, number)

    def await_token(self) -> None:
        """Grant nothing more until the next token is due, should none be left."""
        interval, burst = self.rate
        due = self.tat - (burst - 1) * interval
        if due > self.clock:
            name = Limit.named("rate", "")
            self.limits[name] = Limit(name, 0, math.ceil(due / 1000), self.now, "rate")

    def first(self) -> Entry | None:
        """Return who is granted next; None if nobody has a turn."""
        return self.turns.first(list(self.queue.values()), self.allowed)

    def published_expiry(self, queued: Entry, soonest: int) -> int:
        """Return the ms until an expiry can let a waiter proceed, of what `soonest` returns; -1 if none can.

        While there is no token, only who is granted next calls when it is due.
        """
        if waiting := self.turns.without_turn(self.queue.values(), queued.key):
            return self.notified_by_key(queued, waiting)
        if due := self.token_due(""):
            return due - self.now if self.first() is queued else -1
        return soonest

    def notified_by_key(self, queued: Entry, waiting: list[Entry]) -> int:
        """Return the same for one of the waiters of a key that has no turn."""
        if due := self.token_due(queued.key):
            return due - self.now if waiting[0] is queued else -1
        others = [limit.until for limit in self.limits.values() if not limit.of_keys and limit.kind != "rate"]
        ends = [*(held.deadline for held in self.held.values()), *(delay.until for delay in self.delays), *others]
        if limit := self.limit_on(queued.key):
            ends = [*(ends if limit.units else ()), limit.until]
        return max(0, min(ends) - self.now) if ends else -1

    def token_due(self, key: str) -> int:
        """Return when the next token is due, of a key or of all; 0 if there is one now.

        For a key that is an interval after the last one at the latest: the rate may be another now.
        """
        gate, rate = self.limits.get(Limit.named("rate", key)), self.turns.rate if key else self.rate
        if gate is None or not rate:
            return 0
        due = min(gate.until, gate.since + 1 + math.ceil(rate[0] / 1000)) if key else gate.until
        return due if due > self.now else 0

    def advance(self) -> None:
        """Grant from the head of the queue while the next fits; a grant lasts as long as the place that waited."""
        if not self.capacity:
            return
        if self.used() >= self.capacity:
            self.reap()
        self.after_raise()
        while self.used() < self.capacity:
            queued = self.first()
            if queued is None:  # nobody waits, or all at the limits of their keys, maybe by expired permits
                if not self.queue or not self.has_expired:
                    return
                self.reap()
            elif not self.is_live(queued) or queued.weight > self.capacity or self.never_fits(queued):
                self.remove(queued)
            elif self.over_limit(queued):
                self.park(queued)  # the limit has become lower
            elif self.fits(queued.weight):
                self.take(queued)
            elif self.has_expired:
                self.reap()
            else:
                return

    def park(self, queued: Entry) -> None:
        """Take the turn of a waiter away."""
        queued.tag = None

    def after_raise(self) -> None:
        """Give turns to the keys that may have more units since their limit was raised."""
        if self.turns.is_raised and self.used() < self.capacity:
            self.look_at_all()

    @property
    def has_expired(self) -> bool:
        """Whether `reap` would remove something."""
        until = [*(delay.until for delay in self.delays), *(limit.until for limit in self.limits.values())]
        return any(not self.is_live(held) for held in self.held.values()) or min(until, default=math.inf) <= self.now

    def take(self, queued: Entry) -> None:
        """Grant a waiter, whose turn it is."""
        tag = self.turns.tag_of(queued)
        self.grant(queued, self.place_ends(queued))
        del self.queue[queued.ticket]
        if self.has_keys:
            self.turns.taken(queued, tag)
        self.give_turn(queued.key)

    def give_turn(self, key: str, begun: int | None = None) -> None:
        """Let the next waiter of a key be its first, if none is; those that are dead or can never fit are removed."""
        while waiting := self.turns.without_turn(self.queue.values(), key):
            if self.is_live(waiting[0]) and not self.never_fits(waiting[0]):
                break
            del self.queue[waiting[0].ticket]
        if waiting and not self.over_limit(waiting[0]):
            waiting[0].tag = max(0, (self.turns.virtual if begun is None else begun) + self.turns.cost(waiting[0]))
        if not any(entry.key == key for entry in (*self.queue.values(), *self.users())):
            self.turns.numbers.pop(key, None)

    def limit_on(self, key: str, *, lasting: bool = False) -> Limit | None:
        """Return what an operator has set for a key, or for each; `lasting`: not the time for which it is held back."""
        names = (Limit.named("back", key), Limit.named("limit", key), Limit.named("each", ""))
        found = [self.limits[name] for name in names[lasting:] if name in self.limits]
        return next((limit for limit in found if limit.until > self.now), None)

    def over_limit(self, entry: Entry) -> bool:
        """Tell whether the key of a request may not have so many units more."""
        limit = self.limit_on(entry.key)
        most = limit.units if limit else self.turns.limit or None
        held = sum(user.weight for user in self.users() if user.key == entry.key)
        is_over = (most is not None and held + entry.weight > most) or is_barred(entry, self.allowed)
        return bool(entry.key) and (is_over or self.token_due(entry.key) > 0)

    @property
    def allowed(self) -> int | None:
        """How many units an operator allows to be held, if some are, but not all."""
        limit = self.limits.get(Limit.named("limit", ""))
        return limit.units if limit and limit.units and limit.until > self.now else None

    def never_fits(self, queued: Entry, limit: int | None = None) -> bool:
        """Tell whether a weight is more than its key may ever have; a limit of an operator may allow it for now."""
        limit = self.turns.limit if limit is None else limit
        allowed = self.limit_on(queued.key, lasting=True)
        return bool(queued.key) and 0 < limit < queued.weight and (not allowed or allowed.units < queued.weight)

    def make_way(self, weight: int, key: str) -> None:
        """Grant the queue before a request is refused or queued, and remove expired permits if it does not fit then."""
        if key and (self.turns.limit or self.turns.rate or self.has_key_limits):
            self.reap()
            if self.used() < self.capacity:
                self.give_turn(key)
        self.advance()
        if not self.queue and not self.fits(weight):
            self.reap()

    def soonest(self) -> int:
        """Return the ms until an expiry can let a waiter proceed; -1: there is none."""
        ends = [held.deadline for held in self.held.values()]
        ends += [delay.until for delay in self.delays]
        ends += [limit.until for limit in self.limits.values() if not limit.of_keys]
        first = self.first()
        if first is not None and self.used() < self.capacity:
            ends.append(self.place_ends(first) or self.now)
        return max(0, min(ends) - self.now) if ends else -1

    def ending(self, until: str) -> int:
        """Return when a limit ends that is set now."""
        return int(until[1:]) if until.startswith("@") else self.now + int(until or FOR_GOOD_MS)

    def estimated(self, units: int) -> int:
        """Return about how long so many units take under the limits of the resource; -1 if that is not known."""
        limits = [self.limits.get(Limit.named(kind, "")) for kind in ("pause", "back", "limit")]
        live = [limit for limit in limits if limit and limit.until > self.now]
        paused = max((limit.until - self.now for limit in live if not limit.units), default=0)
        most, ends = self.capacity, self.now
        for limit in live:
            if limit.units:
                most, ends = min(self.capacity, limit.units), limit.until
        if self.lasted is None:
            return -1
        rest, wait = max(0, ends - self.now - paused), self.lasted * units / most
        if most < self.capacity and wait > rest:
            wait = rest + (wait - rest) * most / self.capacity
        return math.ceil(paused + wait) if paused + wait < FOR_GOOD_MS / 2 else -1

    # Operations

    def find(self, ticket: str) -> Entry | None:
        """Return what the ticket has, expired or not."""
        return self.held.get(ticket) or self.queue.get(ticket)

    def holder(self, ticket: str, fence: int) -> Entry | None:
        """Return an unexpired permit under its fence."""
        held = self.held.get(ticket)
        return held if held and held.fence == fence and self.is_live(held) and not held.is_replaced else None

    def remove(self, entry: Entry | None) -> None:
        """Take a ticket out; what an expired permit had stays in use for the lock delay."""
        if entry is None:
            return
        until = entry.deadline + self.lock_delay
        if entry.fence and not self.is_live(entry) and until > self.now:
            self.delays.append(Delay(entry.ticket, entry.weight, entry.deadline, until, self.now, entry.key))
        del (self.held if entry.fence else self.queue)[entry.ticket]
        self.give_turn(entry.key, None if entry.tag is None else entry.tag - self.turns.cost(entry))
        if entry.is_replaced:
            self.turns.lead(list(self.queue.values()), entry.key, self.allowed)
