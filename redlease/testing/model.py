"""The promises of the protocol, P1 to P5 and P8, as a program of one resource in plain Python: its specification.

Read it to learn what the server does with a call, or test a client of your own against it, in whatever language that
is: `docs/protocol.md` names the calls and their arguments.

- P1 and P8, exclusion and strict expiry: only unexpired permits count against the capacity, and no call revives an
  expired one. See `fits`, `reap` and `holder`.
- P2, order: the queue is served in the order of arrival, less ten for each step of a priority, and nobody passes its
  head. See `advance` and `enter`. Requests with keys take turns, see `Turns`.
- P3, fencing: each fence is greater than every one before it, also after the server has lost the resource. See
  `next_fence` and `forgotten`.
- P4, liveness: whatever frees capacity grants it to the live head of the queue in the same call; dead waiters are
  passed over. See `advance`.
- P5, idempotence: a repeated request gets its permit, or keeps its place; a late copy gets nothing. See
  `refusal_of_repeat`, `repeat_held` and `repeat_queued`.

P6 and P7 are promises of a client and not of the server. The messages that the server publishes are not in the model,
nor are the limits to what one call looks at, grants or removes. Where requests have keys, what the server tells of
places in the queue is a guess, and what the model tells another one.

One thing is as it is for the sake of the server's speed: expired entries are removed late. An expired permit occupies
its units until a call that lacks capacity removes it, and a dead waiter its rank until it is the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from redlease._core.protocol.replies import Status

from .entries import Entry, Limit, claimed, claimed_by_waiter, is_late, read_asked
from .resource import EXCLUSIVE, ResourceState

Reply = list[Any]  # what a call replies after its tag


@dataclass
class Model(ResourceState):
    """One resource, as the server keeps it.

    Set `clock` to the time of a call, and make the call by its name with the arguments of `docs/protocol.md`, without
    tag and label: it returns what the server replies, without the tag. All times are in ms of the server's clock, save
    `clock`. What it keeps is in `ResourceState`.

    Example:
        >>> model = Model(clock=1_700_000_000_000_000)
        >>> model.acquire("a", "request-1", "client|0", "0", 1, 30_000, 1, 10_000, -1, 86_400_000)
        [<Status.GRANTED: 1>, 1700000000000000, 1700000000000, 1700000030000, 1, 0]
        >>> model.acquire("b", "request-2", "client|0", "0", 1, 30_000, 1, 10_000, -1, 86_400_000)
        [<Status.QUEUED: 2>, 1, 0, 30000, 1, 0, 0, 1700000000000]
    """

    def acquire(  # noqa: PLR0917 - the arguments of the call, in its order
        self,
        ticket: str,
        request_id: str,
        place: str,
        arrival: str,
        asked: int | str,
        lease: int,
        capacity: int,
        waiter_lease: int,
        most: int | str,
        idle: int,
        key: str = "",
    ) -> Reply:
        """Request a permit, or repeat a request; `asked`: a weight, or with it a priority and settings."""
        declares = self.declares(arrival, ticket, request_id)
        weight, priority, delay, per_key, share, rate, key_rate = read_asked(asked, declares=declares)
        known = self.find(ticket)
        live = known if known and self.is_live(known) else None
        if refused := self.refusal_of_repeat(live, request_id, place, weight, key):
            return refused
        if live and live.fence:
            if self.set_limits(per_key, key_rate, rate) or self.turns.is_raised:
                self.advance()
            self.lock_delay = self.lock_delay if delay is None else delay  # for leases that end from now on
            return self.repeat_held(live, request_id, place, lease, idle)
        wanted, declared = self.terms(capacity, declares=declares)
        is_same = wanted == self.capacity or not self.kept_until
        is_same = is_same and rate in {None, self.rate}
        at_once = not known and not self.queue and self.used() + weight <= wanted and not key and is_same
        claims, share = [(place, request_id)], share if key else 1
        entry = Entry(ticket, weight, lease, claims, self.now, abs(int(arrival)), key=key, share=share)
        limit = self.turns.limit if per_key is None else per_key
        if not at_once and (refused := self.refusal(entry, wanted, limit, place if waiter_lease else "")):
            return refused
        self.set_limits(per_key, key_rate, rate)
        was_declared = self.declared if declared != self.declared else 0
        self.capacity, self.declared, self.turns.capacity = wanted, declared, wanted
        if live:
            reply = self.repeat_queued(live, request_id, place, lease, waiter_lease)
        else:
            self.remove(known)
            if not at_once:
                self.make_way(entry.weight, entry.key)
            reply = self.enter(entry, place, waiter_lease, most, priority)
        self.lock_delay = self.lock_delay if delay is None else delay
        self.keep(idle if reply[0] in {Status.GRANTED, Status.QUEUED} else 0)  # a refusal is no use of the resource
        if reply[0] == Status.QUEUED:
            return [*reply[:-1], self.capacity, was_declared, reply[-1], self.now]
        return [*reply, was_declared] if reply[0] == Status.GRANTED else reply

    def set_limits(self, limit: int | None, key_rate: tuple[int, ...] | None, rate: tuple[int, ...] | None) -> bool:
        """Set what a request declares beside the capacity; return whether the rate of grants is another one."""
        self.limit_keys(limit, key_rate)
        return self.limit_grants(rate)

    def limit_keys(self, limit: int | None, rate: tuple[int, ...] | None) -> None:
        """Set how many units one key may have, and how many grants in a time."""
        turns, before = self.turns, (self.turns.limit, self.turns.rate)
        turns.limit = turns.limit if limit is None else limit
        turns.rate = turns.rate if rate is None else rate
        is_higher = before[0] > 0 and (turns.limit == 0 or turns.limit > before[0])
        was, new = before[1], turns.rate
        is_faster = bool(was) and (not new or new[0] < was[0] or new[1] > was[1])
        turns.is_raised |= self.has_keys and bool(self.queue) and (is_higher or is_faster)

    def limit_grants(self, rate: tuple[int, ...] | None) -> bool:
        """Set the rate of grants; return whether it is another one.

        The next token comes when it would have, or one interval from now if that is earlier; the burst gathers again.
        """
        if rate is None or rate == self.rate:
            return False
        self.limits.pop(Limit.named("rate", ""), None)
        was, self.rate = self.rate, rate
        if rate and was:
            due = max(self.clock, self.tat - (was[1] - 1) * was[0])
            self.tat = min(due, self.clock + rate[0]) + (rate[1] - 1) * rate[0]
            self.await_token()
        else:
            self.tat = 0
        return True

    def declares(self, arrival: str, ticket: str, request_id: str) -> bool:
        """Tell whether a request declares anything: who was queued before does not, nor does a copy of a request."""
        known = self.find(ticket)
        is_copy = known is not None and known.names(request_id)
        return not self.declared or not (is_copy or arrival.startswith("+"))

    def terms(self, capacity: int, *, declares: bool) -> tuple[int, int]:
        """Return the capacity, and the last declared one, after a request that declares one.

        One that is the last once more undoes no resize, nor does the first one, but for a lock or a read-write lock.
        """
        if capacity == self.declared or not declares:
            return self.capacity, self.declared
        return capacity if self.declared or not self.capacity or capacity in EXCLUSIVE else self.capacity, capacity

    def refusal_of_repeat(self, live: Entry | None, request_id: str, place: str, weight: int, key: str) -> Reply:
        """Return the reply to a late copy, or to a request that differs from an earlier one; empty if it is neither."""
        if self.tombstones.get(request_id, 0) > self.now:
            return [Status.WITHDRAWN, 1] if request_id in self.replaced else [Status.WITHDRAWN]
        if live and live.is_replaced:
            return [Status.WITHDRAWN, 1]
        if live and live.weight != weight:
            return [Status.OTHER_WEIGHT, live.weight]
        if live and live.key != key:
            return [Status.OTHER_WEIGHT, live.weight, 1]
        return [Status.WITHDRAWN] if live and is_late(live, request_id, place) else []

    def refusal(self, entry: Entry, capacity: int, limit: int, place: str) -> Reply:
        """Return the reply to a request that can never fit, or whose place is gone; empty if it is neither."""
        if entry.weight > capacity:
            return [Status.MISFIT, capacity]
        if self.never_fits(entry, limit):
            return [Status.MISFIT, limit, 1]
        return [Status.LAPSED] if self.places.get(place, self.now + 1) <= self.now else []

    def repeat_held(self, held: Entry, request_id: str, place: str, lease: int, idle: int) -> Reply:
        """Give a permit to a repeated request: it declares no capacity, and its lease is full again."""
        held.claims = claimed(held.claims, request_id, place)
        held.lease, held.deadline = lease, held.deadline_from(self.now, lease)
        self.keep(idle)
        return [*self.granted(held), 0]

    def repeat_queued(self, queued: Entry, request_id: str, place: str, lease: int, waiter_lease: int) -> Reply:
        """Let a repeated request keep its place, unless it is its turn."""
        live = [(other, its) for other, its in queued.claims if self.places.get(other, 0) > self.now]
        claims = claimed_by_waiter(live, request_id, place)
        if waiter_lease:
            queued.claims, queued.lease = claims, lease
            self.places[place] = max(self.places.get(place, 0), self.now + waiter_lease)
        self.make_way(queued.weight, "")
        if queued.ticket in self.held:
            queued.claims, queued.lease = claims, lease
            queued.deadline = queued.deadline_from(self.now, lease)
            return self.granted(queued)
        if queued.ticket not in self.queue:  # its key may not have so much from now on
            return [Status.MISFIT, self.turns.limit, 1]
        if not waiter_lease:
            return [Status.BUSY, 0]
        before = self.waiters().index(queued)
        return [Status.QUEUED, queued.arrival, before, self.published_expiry(queued, self.soonest()), 0]

    def enter(self, entry: Entry, place: str, waiter_lease: int, most: int | str, priority: int) -> Reply:
        """Grant a new request if nobody is ahead of it and it fits, or queue it."""
        returns = entry.arrival > 0
        sequence = entry.arrival or self.sequence + 1
        entry.arrival = entry.arrival or sequence - 10 * priority
        tag = None if self.over_limit(entry) else self.turns.goes_first(list(self.queue.values()), entry, self.allowed)
        if tag is not None and self.fits(entry.weight):
            self.sequence += bool(self.queue)
            self.grant(entry, self.now + entry.lease)
            self.turns.virtual = max(self.turns.virtual, tag)
            return self.granted(entry)
        waiting = len(self.queue)
        if waiter_lease and not returns and (full := self.refusal_of_full(entry.key, most)):
            return full
        if not waiter_lease:
            return [Status.BUSY, 0]
        more = int(len(self.queue) < waiting)
        before, soonest = self.ahead_of(entry), self.soonest()
        self.queue[entry.ticket] = entry
        self.sequence = max(self.sequence, sequence)
        self.places[place] = max(self.places.get(place, 0), self.now + waiter_lease)
        begun = self.turns.enter(list(self.queue.values()), entry)
        self.give_turn(entry.key, begun)
        return [Status.QUEUED, entry.arrival, before, self.published_expiry(entry, soonest), more]

    def ahead_of(self, entry: Entry) -> int:
        """Return how many stand before a new waiter."""
        return sum(queued.arrival < entry.arrival for queued in self.queue.values())

    def refusal_of_full(self, key: str, most: int | str) -> Reply:
        """Return the reply to a request that finds as many waiters as there may be, of its key or in all."""
        in_all, *of_key = map(int, str(most).split())
        if of_key and (waiting := self.make_room(of_key[0], key)) >= of_key[0]:
            return [Status.FULL, waiting, 0, 1]
        if in_all >= 0 and (waiting := self.make_room(in_all)) >= in_all:
            return [Status.FULL, waiting, 0]
        return []

    def make_room(self, most: int, key: str | None = None) -> int:
        """Remove dead waiters, those of a key or any, until one more may wait; return how many wait then."""
        waiting = [queued for queued in self.waiters() if key in {None, queued.key}]
        for queued in waiting if most else ():  # where none may wait, nobody is looked at
            if sum(other.ticket in self.queue for other in waiting) < most:
                break
            if not self.is_live(queued) and queued.ticket in self.queue:
                self.remove(queued)
        return sum(queued.ticket in self.queue for queued in waiting)

    def granted(self, held: Entry) -> Reply:
        """Return the reply to who has a permit."""
        return [Status.GRANTED, held.fence, held.since, held.deadline, self.capacity]

    def release(self, ticket: str, request_id: str, fence: str, tombstone: int, _notify: int, idle: int) -> Reply:
        """Take a ticket out: under its fence, as one request, or whatever has it."""
        known = self.find(ticket)
        released, changed, waiting = 0, not ticket and self.kept_until > 0, len(self.queue)
        buried = [request_id] if tombstone and request_id else []
        if known:
            others = [claim for claim in known.claims if claim[1] != request_id]
            hit = known.fence == int(fence) > 0 if fence else not request_id or (known.names(request_id) and not others)
            if hit:
                released = int(self.is_live(known))
                if released and known.fence and waiting:
                    lasted = self.now - known.since
                    self.lasted = (7 * (lasted if self.lasted is None else self.lasted) + lasted) / 8
                self.remove(known)
                buried += [its for _, its in known.claims if tombstone and not request_id]
            elif not fence and known.names(request_id):
                known.claims, changed = others, True
            changed = changed or hit
        self.tombstones |= dict.fromkeys(buried, self.now + tombstone)
        self.replaced -= set(buried)
        if changed or buried:
            if waiting:
                self.advance()
            self.keep(idle)
        return [released, 0]

    def renew(self, ticket: str, fence: int, lease: int, shorten: str, idle: int) -> Reply:
        """Give a permit a full lease again."""
        held = self.holder(ticket, fence)
        if held is None:
            return [0, self.capacity, 0]
        until = held.deadline_from(self.now, lease)
        held.deadline = max(held.deadline, until) if shorten in {"0", "write"} else until
        held.lease = lease
        self.keep(idle)
        return [held.deadline, self.capacity, len(self.queue)]

    def adopt(  # noqa: PLR0917 - see above
        self, ticket: str, fence: int, request_id: str, place: str, lease: int, refence: int, idle: int
    ) -> Reply:
        """Take a permit over; with a new fence from all who had it, once however often the request is repeated."""
        held = self.held.get(ticket)
        repeated = held is not None and held.names(request_id)
        if held is None or not self.is_live(held) or held.is_replaced or (held.fence != fence and not repeated):
            return [0]
        if refence and not repeated:
            held.fence, held.claims = self.next_fence(), []
        elif refence and held.claims == [(held.claims[0][0], request_id)]:
            held.claims = []
        held.deadline = max(held.deadline, self.now + lease) if held.claims else self.now + lease
        held.claims, held.lease = claimed(held.claims, request_id, place), lease
        self.keep(idle)
        return [held.fence, held.since, held.deadline, held.weight, self.capacity]

    def reduce(self, ticket: str, fence: int, weight: int, idle: int) -> Reply:
        """Give back a part of a permit, as a writer does that becomes a reader."""
        held = self.holder(ticket, fence)
        if held is not None and weight < held.weight:
            held.weight = weight
            self.give_turn(held.key)
            self.advance()
            self.keep(idle)
        return [int(held is not None), 0]

    def supersede(  # noqa: PLR0917 - see above
        self, ticket: str, request_id: str, holders: int, tombstone: int, grace: int, idle: int, _after: str = ""
    ) -> Reply:
        """Let a waiting request take the place of the others of its key that came before it, or of holders too."""
        queued = self.queue.get(ticket)
        if queued is None or not queued.names(request_id) or not self.is_live(queued):
            return [0, 0, b""]
        superseded = 0
        for other in [other for other in self.waiters() if other.key == queued.key]:
            is_before = self.turns.precedes(other, queued) and other.since <= queued.since
            if other is queued or not is_before or other.ticket not in self.queue:
                continue
            superseded += self.is_live(other)
            self.replace_waiter(other, tombstone)
        if holders:
            self.reap()
            superseded += self.replace_holders(queued, grace)
        self.advance()
        self.keep(idle)
        return [superseded, 0, b""]

    def replace_waiter(self, other: Entry, tombstone: int) -> None:
        """Take a waiter out of the queue, and refuse its requests for so long."""
        request_ids = [its for _, its in other.claims]
        self.tombstones |= dict.fromkeys(request_ids, self.now + tombstone)
        self.replaced |= set(request_ids)
        self.remove(other)

    def replace_holder(self, other: Entry, grace: int) -> None:
        """Let a permit last for so long at most, and not be renewed."""
        other.is_replaced, other.deadline = True, min(other.deadline, self.now + max(1, grace))

    def replace_holders(self, queued: Entry, grace: int) -> int:
        """End the oldest permits of the key of a waiter until it fits; return how many.

        What ends by itself is not counted: a pause, and a time without tokens or without grants.
        """
        held = sorted((held for held in self.held.values() if held.key == queued.key), key=lambda held: held.fence)
        lasting = sum(limit.kept(self.capacity) for limit in self.limits.values() if limit.kind == "limit")
        lacking = lasting + sum(user.weight for user in self.users()) + queued.weight - self.capacity
        if queued.key:
            names = (Limit.named("limit", queued.key), Limit.named("each", ""))
            limit = next((self.limits[name] for name in names if name in self.limits), None)
            most = limit.units if limit else self.turns.limit or None
            used = sum(user.weight for user in self.users() if user.key == queued.key)
            lacking = max(lacking, 0 if most is None else used + queued.weight - most)
        lacking -= sum(other.weight for other in held if other.is_replaced)
        count = 0
        for other in [other for other in held if not other.is_replaced]:
            if lacking <= 0:
                break
            lacking -= other.weight
            self.replace_holder(other, grace)
            count += 1
        return count

    def beat(self, place: str, waiter_lease: int, ticket: str, idle: int) -> Reply:
        """Keep a client's place; grant if an expiry made that possible."""
        if not self.capacity or self.places.get(place, 0) <= self.now:
            return [Status.LAPSED]
        self.places[place] = max(self.places[place], self.now + waiter_lease)
        asked = self.find(ticket)
        if asked and asked.key:  # the first of a key that is at its limit may have died
            self.give_turn(asked.key)
        self.advance()
        self.keep(idle)
        if ticket not in self.queue:
            return [Status.GRANTED]
        before = self.waiters().index(self.queue[ticket])
        return [Status.QUEUED, before, self.published_expiry(self.queue[ticket], self.soonest()), self.capacity, 0]

    def resize(self, capacity: int, idle: int) -> Reply:
        """Set the capacity, which is not a declaration; refused of a lock and of a read-write lock."""
        if self.declared in EXCLUSIVE and capacity != self.declared:
            return [0, self.declared]
        self.capacity = self.turns.capacity = capacity
        self.advance()
        self.keep(idle)
        return [0]

    def limit(self, kind: str, key: str, units: int | str, until: str, idle: int) -> Reply:
        """Set or lift a limit, which outranks what processes declare."""
        before, ends = self.limits.get(Limit.named(kind, key)), self.ending(until)
        if before and kind == "back" and units != "" and self.now < ends <= before.until:
            return [before.until, 0]  # of several times after a vendor's refusal the last one counts
        ends = self.set_limit(kind, key, units, ends)
        if ends:
            self.proceed(key, idle)
        return [ends, 0]

    def set_limit(self, kind: str, key: str, units: int | str, ends: int) -> int:
        """Set or lift a limit; return when it ends, 0 if there is none, or it would be over already."""
        name = Limit.named(kind, key)
        before = self.limits.get(name)
        if units == "":
            ends = before.until if before else 0
        if ends <= self.now:
            return 0
        if before:
            del self.limits[name]
        limit = Limit(name, int(units or 0), ends, self.now, kind, key)
        if units != "":
            self.limits[name] = limit
        if limit.of_keys or kind == "limit":
            self.look_again(key)
        return ends

    def proceed(self, _key: str, idle: int) -> None:
        """Grant what a limit of a key allows now; the keys need not outlive one that ends earlier now."""
        self.advance()
        self.kept_until = 0
        self.keep(idle)

    def watch(self, watch_ms: int) -> Reply:
        """Have changes published, for which the server keeps the keys as long."""
        self.kept_until = max(self.kept_until, self.now + watch_ms)
        return [self.soonest()]

    def check(self, ticket: str, fence: int) -> Reply:
        """Tell whether a permit is held under its fence."""
        return [int(self.holder(ticket, fence) is not None)]

    def position(self, ticket: str) -> Reply:
        """Tell the place of a ticket in the queue, and about how long it waits."""
        known = self.find(ticket)
        if known is None or not self.is_live(known):
            return [-1, -1]
        if known.fence:
            return [0, 0]
        ahead = [queued for queued in self.waiters() if self.is_live(queued) and queued.position <= known.position]
        wait = self.estimated(sum(queued.weight for queued in ahead))
        if self.rate:  # so many tokens are needed, and the rate gives no more before
            needed = max(self.tat - self.clock, 0) + (len(ahead) - self.rate[1]) * self.rate[0]
            wait = max(wait, 0, math.ceil(needed / 1000))
        return [len(ahead), wait]
