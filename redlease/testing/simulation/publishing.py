"""The model of a resource, with the messages that the scripts publish."""

from __future__ import annotations

from dataclasses import dataclass, field

from redlease.testing.entries import Entry, split
from redlease.testing.model import Model, Reply


@dataclass
class PublishingModel(Model):
    """A model that also tells what the server publishes: `docs/protocol.md` has the messages.

    Attributes:
        state_key: The name of the resource's first key.
        messages: What the calls since the last `published` have published: channel and payload of each.
        is_advancing: Whether the queue is being granted.
    """

    state_key: str = ""
    is_advancing: bool = False
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
        for place, request in entry.claims:
            if request != but:
                self.publish(place, f"{kind} {request}{rest}")

    def publish_to_head(self) -> None:
        """Tell the first waiter that a lease ends earlier."""
        first = self.turns.first(list(self.queue.values())) or next(iter(self.waiters()), None)
        for place, _ in first.claims if first else ():
            self.publish(place, f"l 0 {self.state_key}")

    def publish_capacity(self, before: int, places: dict[str, int]) -> None:
        """Tell the clients that had these places of a smaller capacity."""
        if self.capacity < before:
            for place, ends in places.items():
                if ends > self.now:
                    self.publish(place, f"c {self.capacity} {self.state_key}")

    # The calls that publish

    def grant(self, entry: Entry, deadline: int) -> None:
        """Make a holder of a ticket, and tell who waits for it."""
        super().grant(entry, deadline)
        if entry.ticket in self.queue:
            self.publish_to_sharers(entry, "g", f" {entry.fence} {self.now} {deadline} {self.capacity}")

    def advance(self) -> None:
        """Grant the queue, and tell those whose weight no longer fits."""
        self.is_advancing = True
        super().advance()
        self.is_advancing = False

    def remove(self, entry: Entry | None) -> None:
        """Take a ticket out; its turn has come, and it is too heavy, if that happens while the queue is granted."""
        if self.is_advancing and entry and not entry.fence and self.is_live(entry):
            most = self.capacity if entry.weight > self.capacity else self.turns.limit
            self.publish_to_sharers(entry, "m", f" {most}")
        super().remove(entry)

    def give_turn(self, key: str, begun: int | None = None) -> None:
        """Let the next waiter of a key be its first, and tell those before it that are too heavy for the key."""
        waiting = self.turns.waiting(self.queue.values(), key) if key else []
        super().give_turn(key, begun)
        for queued in waiting:
            if queued.ticket not in self.queue and self.is_live(queued):
                self.publish_to_sharers(queued, "m", f" {self.turns.limit}")

    def proceed(self, idle: int) -> None:
        """Grant what a limit allows now; who waits learns first that it may end early."""
        self.publish_to_head()
        super().proceed(idle)

    def acquire(self, *args: object) -> Reply:
        """Request, which may declare a smaller capacity or make a lease end earlier."""
        before, places, held = self.capacity, dict(self.places), self.held.get(str(args[0]))
        was_until = held.deadline if held else 0
        reply = super().acquire(*args)  # type: ignore[arg-type]
        self.publish_capacity(before, places)
        if held and held is self.held.get(held.ticket) and held.deadline < was_until:
            self.publish_to_head()
        return reply

    def release(  # noqa: PLR0917 - the arguments of the call, in its order
        self, ticket: str, request: str, fence: str, tombstone: int, notify: int, idle: int
    ) -> Reply:
        """Take a ticket out, and tell the others who use it."""
        known = self.find(ticket)
        claims = list(known.claims) if known else []
        reply = super().release(ticket, request, fence, tombstone, notify, idle)
        if known and self.find(ticket) is not known:
            heard = notify or claims[0][1].startswith("h") or len(claims) > 1
            grants, self.messages = self.messages, []
            if heard:
                known.claims = claims
                self.publish_to_sharers(known, "x", but=request)
            self.messages += grants
        return reply

    def renew(self, ticket: str, fence: int, lease: int, shorten: str, idle: int) -> Reply:
        """Renew, and tell of a lease that ends earlier."""
        held = self.held.get(ticket)
        was_until = held.deadline if held else 0
        reply = super().renew(ticket, fence, lease, "0" if shorten == "write" else shorten, idle)
        if held and 0 < reply[0] < was_until:
            self.publish_to_head()
            if shorten == "told":
                place, request = held.claims[0]
                self.publish(place, f"r {request}")
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

    def resize(self, capacity: int, idle: int) -> Reply:
        """Set the capacity, and tell of a smaller one."""
        before = self.capacity
        reply = super().resize(capacity, idle)
        self.publish_capacity(before, self.places)
        return reply
