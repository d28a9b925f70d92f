"""The model of a resource, with the messages that the scripts publish."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from redlease._core.protocol.replies import Status
from redlease.testing.entries import Entry, split
from redlease.testing.model import Model, Reply


@dataclass
class PublishingModel(Model):
    """A model that also tells what the server publishes: `docs/protocol.md` has the messages.

    Attributes:
        state_key: The name of the resource's first key.
        messages: What the calls since the last `published` have published: channel and payload of each.
        is_advancing: Whether the queue is being granted.
        notified_ticket: The ticket that was notified last when to call, being granted next.
        asking: The ticket of the last acquire.
        replied_to: The waiter to whom the reply of this call tells that.
        is_new_wait: Whether a wait for a token has begun in this call.
        before_call: The capacity and the places before the call.
        newer: The ticket that takes the place of others.
        was_until: When the lease of the permit ended that the acquire asks for.
    """

    state_key: str = ""
    is_advancing: bool = False
    notified_ticket: str = ""
    asking: str = ""
    replied_to: str = ""
    is_new_wait: bool = False
    before_call: tuple[int, dict[str, int]] = (0, {})
    newer: str = ""
    was_until: int = 0
    messages: list[tuple[str, str]] = field(default_factory=list)

    def published(self) -> list[tuple[str, str]]:
        """Return the messages, and begin a new list."""
        messages, self.messages = self.messages, []
        return messages

    def forgotten(self) -> PublishingModel:
        """Return what is left when the server has deleted the keys."""
        return PublishingModel(self.clock, fence_before=max(self.fence, self.fence_before), state_key=self.state_key)

    def publish(self, place: str, payload: str) -> None:
        """Publish to the client of a place."""
        channel = split(place)[0]
        self.messages.append((self.state_key + channel if channel.startswith(":") else channel, payload))

    def publish_to_sharers(self, entry: Entry, kind: str, rest: str = "", but: str = "") -> None:
        """Publish to all who use a ticket, but one."""
        for place, request_id in entry.claims:
            if request_id != but:
                self.publish(place, f"{kind} {request_id}{rest}")

    def publish_to_head(self) -> None:
        """Tell the first waiter to call at once."""
        self.publish_expiry(self.first() or next(iter(self.waiters()), None), 0)

    def publish_expiry(self, waiter: Entry | None, wait: int) -> None:
        """Tell a waiter that something ends so soon, earlier than it knows."""
        if waiter and wait >= 0:
            self.publish_to_sharers(waiter, "l", f" {wait}")

    def tell_first(self) -> None:
        """Where there is a rate, tell who is granted next when to call, if it is another, or has to wait once more."""
        is_new, self.is_new_wait = self.is_new_wait, False
        if not self.rate and not (self.turns.rate and self.has_keys):
            return
        first, was_first = self.first(), self.notified_ticket
        self.notified_ticket = first.ticket if first else ""
        if first and first.ticket != self.replied_to and (is_new or first.ticket != was_first):
            self.publish_expiry(first, self.published_expiry(first, self.soonest()))

    def tell_next(self, key: str, wait: int | None = None) -> None:
        """Tell the next waiter of a key when to call, if the key has no turn; with `wait`, after that time anyway."""
        waiting = self.turns.waiting(self.queue.values(), key)
        heads = [queued for queued in waiting if queued.tag is not None]
        if wait is None and waiting:
            wait = -1 if heads else self.notified_by_key(waiting[0], waiting)
        self.publish_expiry(next(iter(heads or waiting), None), wait or 0)

    def publish_capacity(self) -> None:
        """Tell the clients that had places of a smaller capacity."""
        before, places = self.before_call
        if self.capacity < before:
            for place, ends in places.items():
                if ends > self.now:
                    self.publish(place, f"c {self.capacity} {self.state_key}")

    # The calls that publish

    def keep(self, idle: int) -> None:
        """End a call."""
        self.tell_first()
        self.replied_to = ""
        super().keep(idle)

    def grant(self, entry: Entry, deadline: int) -> None:
        """Make a holder of a ticket, and tell who waits for it."""
        super().grant(entry, deadline)
        if entry.ticket == self.asking:
            self.was_until = deadline  # a repeated request may make it end earlier
        if entry.ticket in self.queue:
            self.publish_to_sharers(entry, "g", f" {entry.fence} {self.now} {deadline} {self.capacity}")

    def await_token(self) -> None:
        """Grant nothing more until the next token is due."""
        super().await_token()
        self.is_new_wait |= self.token_due("") > 0

    def take(self, queued: Entry) -> None:
        """Grant a waiter, and tell the next one of its key what it waits for."""
        super().take(queued)
        if queued.key and self.turns.rate:
            self.tell_next(queued.key)

    def park(self, queued: Entry) -> None:
        """Take the turn of a waiter away, and tell it what it waits for."""
        super().park(queued)
        self.tell_next(queued.key)

    def advance(self) -> None:
        """Grant the queue, and tell those whose weight no longer fits."""
        self.is_advancing = True
        super().advance()
        self.is_advancing = False

    def remove(self, entry: Entry | None) -> None:
        """Take a ticket out, and tell the next one of its key what it waits for.

        Its turn has come, and it is too heavy, if that happens while the queue is granted.
        """
        if entry is None or entry.fence:
            super().remove(entry)
            return
        is_next = self.turns.without_turn(self.queue.values(), entry.key)[:1] == [entry]
        super().remove(entry)
        if is_next:
            self.tell_next(entry.key)
        if self.is_advancing and self.is_live(entry):
            most = self.capacity if entry.weight > self.capacity else self.turns.limit
            self.publish_to_sharers(entry, "m", f" {most}")

    def give_turn(self, key: str, begun: int | None = None) -> None:
        """Let the next waiter of a key be its first, and tell those before it that are too heavy for the key."""
        waiting = self.turns.waiting(self.queue.values(), key) if key else []
        super().give_turn(key, begun)
        for queued in waiting:
            if queued.ticket not in self.queue and self.is_live(queued):
                self.publish_to_sharers(queued, "m", f" {self.turns.limit}")

    def look_at_all(self) -> None:
        """Give turns to the keys that may have one now, and tell those that still have to wait."""
        self.turns.is_raised = False
        for key in list(self.turns.numbers):
            self.give_turn(key)
            self.tell_next(key)

    def proceed(self, key: str, idle: int) -> None:
        """Grant what a limit allows now; who waits learns first that it may end early."""
        if key:
            self.tell_next(key, 0)
        else:
            self.publish_to_head()
        super().proceed(key, idle)

    def limit_grants(self, rate: tuple[int, ...] | None) -> bool:
        """Set the rate of grants; who is told first is notified again."""
        is_another = super().limit_grants(rate)
        if is_another:
            self.notified_ticket = ""
            if not self.rate:
                self.publish_to_head()
        return is_another

    def make_way(self, weight: int, key: str) -> None:
        """Grant the queue, and tell of a smaller capacity."""
        super().make_way(weight, key)
        self.tell_first()
        self.replied_to = self.asking
        self.publish_capacity()

    def enter(self, entry: Entry, *args: Any) -> Reply:
        """Grant or queue a request; if it passes others of its key, tell the next of them what it waits for."""
        reply = super().enter(entry, *args)
        if reply[0] == Status.GRANTED and entry.key and self.turns.rate:
            self.tell_next(entry.key)
        return reply

    def acquire(self, *args: object) -> Reply:
        """Request, which may declare a smaller capacity or make a lease end earlier."""
        self.asking = str(args[0])
        known = self.find(self.asking)
        self.before_call = self.capacity, dict(self.places)
        self.was_until = known.deadline if known else 0
        reply = super().acquire(*args)  # type: ignore[arg-type]
        held = self.held.get(self.asking)
        if held and held is known and held.deadline < self.was_until:
            self.publish_to_head()
        return reply

    def beat(self, place: str, waiter_lease: int, ticket: str, idle: int) -> Reply:
        """Keep a client's place; the reply tells the waiter that it asks about when to call."""
        self.replied_to = ticket
        return super().beat(place, waiter_lease, ticket, idle)

    def release(  # noqa: PLR0917 - the arguments of the call, in its order
        self, ticket: str, request_id: str, fence: str, tombstone: int, notify: int, idle: int
    ) -> Reply:
        """Take a ticket out, and tell the others who use it."""
        known = self.find(ticket)
        claims = list(known.claims) if known else []
        reply = super().release(ticket, request_id, fence, tombstone, notify, idle)
        if known and self.find(ticket) is not known:
            heard = notify or claims[0][1].startswith("h") or len(claims) > 1
            if heard:
                known.claims = claims
                self.publish_to_sharers(known, "x", but=request_id)
        return reply

    def renew(self, ticket: str, fence: int, lease: int, shorten: str, idle: int) -> Reply:
        """Renew, and tell of a lease that ends earlier."""
        held = self.held.get(ticket)
        was_until = held.deadline if held else 0
        reply = super().renew(ticket, fence, lease, "0" if shorten == "write" else shorten, idle)
        if held and 0 < reply[0] < was_until:
            self.publish_to_head()
            if shorten == "told":
                place, request_id = held.claims[0]
                self.publish(place, f"r {request_id}")
        return reply

    def adopt(self, ticket: str, *args: object) -> Reply:
        """Take a permit over, and tell those who had it."""
        held = self.held.get(ticket)
        before = Entry(**{**vars(held), "claims": list(held.claims)}) if held else None
        reply = super().adopt(ticket, *args)  # type: ignore[arg-type]
        if before and reply[0] and reply[2] < before.deadline:
            self.publish_to_head()
        if before and reply[0] and reply[0] != before.fence:
            self.publish_to_sharers(before, "x")
        return reply

    def supersede(self, ticket: str, *args: object) -> Reply:
        """Let a request take the place of others, and tell those."""
        self.newer = ticket
        return super().supersede(ticket, *args)  # type: ignore[arg-type]

    def replace_waiter(self, other: Entry, tombstone: int) -> None:
        """Take a waiter out of the queue."""
        super().replace_waiter(other, tombstone)
        self.publish_to_sharers(other, "s", f" {self.newer}")

    def replace_holder(self, other: Entry, grace: int) -> None:
        """End a permit."""
        super().replace_holder(other, grace)
        self.publish_to_sharers(other, "s", f" {self.newer}")

    def replace_holders(self, queued: Entry, grace: int) -> int:
        """End permits, and tell the first waiters if one ends earlier than before."""
        before = {held.ticket: held.deadline for held in self.held.values()}
        count = super().replace_holders(queued, grace)
        if any(held.deadline < before[held.ticket] for held in self.held.values()):
            self.publish_to_head()
            if queued.key:
                self.tell_next(queued.key)
        return count

    def resize(self, capacity: int, idle: int) -> Reply:
        """Set the capacity, and tell of a smaller one."""
        self.before_call = self.capacity, self.places
        reply = super().resize(capacity, idle)
        self.publish_capacity()
        return reply
