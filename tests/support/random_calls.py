"""Random calls of the scripts, as clients of one resource might make them, sensible and late ones."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any, Self

from redlease._core.limits import CAPACITY_MAX
from redlease._core.protocol.replies import Status
from redlease.testing import Model

from against_model import LABEL

Args = tuple[str | int, ...]

TICKETS = "abcdefgh"
# For how long the server keeps an idle resource. Fast paths need it to be kept long enough already, which the last 64th
# of it allows for: on a set clock, where more time passes between calls, some resources are kept longer.
IDLE_MS, LONG_IDLE_MS = 150, 3000


@dataclass
class RandomCalls:
    """Draws calls, many of which concern what the model holds and queues, and some what is long gone."""

    random: Random
    model: Model
    capacity: int
    weights: list[int]
    leases: list[int]
    idle: int = IDLE_MS
    keys: tuple[str, ...] = ()
    is_limited: bool = False
    has_rates: bool = False
    epochs: Counter[str] = field(default_factory=Counter)
    requests: dict[tuple[str, str], str] = field(default_factory=dict)
    granted: deque[tuple[str, int]] = field(default_factory=lambda: deque([("a", 1)], maxlen=12))
    left: dict[str, int] = field(default_factory=dict)
    numbers: int = 0

    @classmethod
    def in_set_time(cls, seed: object, number: int) -> Self:
        """Return calls for a set clock."""
        return cls.of_kind(Random(f"{seed} {number}"), number, LONG_IDLE_MS if number // 4 % 2 else IDLE_MS)

    @classmethod
    def of_kind(cls, random: Random, number: int, idle: int = IDLE_MS) -> Self:
        """Return calls of a lock, of a semaphore, of one with weights, or of a read-write lock."""
        terms = ((1, [1]), (3, [1]), (4, [1, 1, 2, 3, 5]), (CAPACITY_MAX, [1, 1, CAPACITY_MAX]))
        capacity, weights = terms[number % len(terms)]
        longest = random.choice([3, 20, 60])
        keys = random.choice([(), ("", "k", "l", "m")])
        is_limited = random.random() < 0.5
        has_rates = random.random() < 0.2
        leases = [1 + longest // 4, longest]
        return cls(random, Model(), capacity, weights, leases, idle, keys, is_limited, has_rates)

    def learn(self, name: str, args: tuple[Any, ...], reply: list[Any], fence: int) -> None:
        """Remember what a later call may be about; `fence`: the last one before this call."""
        if self.model.fence > fence:
            granted = [held for held in self.model.held.values() if held.fence > fence]
            self.granted.extend((held.ticket, held.fence) for held in granted)
        if name == "acquire" and reply[0] == Status.QUEUED:
            self.left[str(args[0])] = reply[1]
        if name in {"acquire", "beat"} and reply[0] == Status.LAPSED:
            channel, _, epoch = str(args[2] if name == "acquire" else args[0]).partition("|")
            self.epochs[channel] = max(self.epochs[channel], int(epoch) + 1)

    def call(self) -> tuple[str, Args]:
        """Return the next call: the name of the operation, and its arguments."""
        shares = SHARES if self.is_limited else SHARES | {"limit": 0}
        (name,) = self.random.choices(list(shares), list(shares.values()))
        return name, getattr(self, name)()

    def request(self, channel: str, ticket: str) -> str:
        """Return the request of a client for a ticket: the last one again, or a new one, for a hold or for a permit."""
        self.numbers += 1
        if self.random.random() < 0.3 or (channel, ticket) not in self.requests:
            self.requests[channel, ticket] = f"{self.random.choice('hp')}{self.numbers}"
        return self.requests[channel, ticket]

    def place(self, channel: str) -> str:
        """Return the place of a client, now and then the one that it had before."""
        return f"{channel}|{max(0, self.epochs[channel] - (self.random.random() < 0.05))}"

    def channel(self) -> str:
        """Return a client; the messages to one of them go beside the keys."""
        return self.random.choice(("c1", "c2", ":c3"))

    def permit(self) -> tuple[str, int]:
        """Return ticket and fence of a permit that was held lately."""
        held = [(ticket, held.fence) for ticket, held in self.model.held.items()]
        return self.random.choice(held if held and self.random.random() < 0.7 else list(self.granted))

    def acquire(self) -> Args:
        """Request."""
        draw, channel, ticket = self.random, self.channel(), self.random.choice(TICKETS)
        arrival = draw.choice(["0", "0", "0", "+0", f"+{max(0, self.left.get(ticket, 0))}"])
        capacity = self.capacity
        if capacity < CAPACITY_MAX and draw.random() < 0.03:
            capacity = self.capacity = draw.randint(1, 5)
        known = self.model.find(ticket)
        key = draw.choice(self.keys) if self.keys else ""
        key = known.key if known and draw.random() < 0.9 else key
        most: int | str = draw.choice([-1, -1, -1, 2, 4])
        if key and draw.random() < 0.3:
            most = f"{most} {draw.choice([0, 1, 2, 3])}"
        return (
            *(ticket, self.request(channel, ticket), self.place(channel), arrival, self.asked()),
            *(draw.choice(self.leases), capacity, draw.choice([0, *self.leases, *self.leases])),
            *(most, self.idle, LABEL),
            *([key] if key else []),
        )

    def asked(self) -> str | int:
        """Return a weight, now and then with a priority or a lock delay, which lasts for the next losses, and so on."""
        weight = self.random.choice(self.weights)
        if self.has_rates and self.random.random() < 0.1:
            rates = ["", "0", "500:1", "1500:1", "3000:2", "4000:4"]
            of_keys = [*rates, "30000:1", "30000:3", "400000:1", "400000:2"] if self.keys else [""]
            return f"{weight} 0     {self.random.choice(rates)} {self.random.choice(of_keys)}"
        if self.keys and self.random.random() < 0.4:
            per_key, share = self.random.choice(["", "", "", 0, 1, 2]), self.random.choice(["1", "2", "0.5", "3"])
            return f"{weight} {self.random.choice([0, 0, 1])}   {per_key} {share}"
        if self.random.random() < 0.8:
            return weight
        return f"{weight} {self.random.randint(0, 3)} {self.random.choice(['', '', 0, 2, 2 * self.leases[0]])}"

    def release(self) -> Args:
        """Release under a fence, as a client that gives up, by ticket alone, or nothing but what is left to do."""
        ticket, fence = self.permit()
        request = ""
        how = self.random.random()
        if how > 0.6:
            ticket, fence = self.random.choice(TICKETS), 0
            channel = self.channel()
            request = self.request(channel, ticket) if how < 0.9 else ""
        if how > 0.97:
            ticket = ""
        return ticket, request, fence or "", self.random.choice([0, 0, 0, 5]), int(how * 100) % 2, self.idle

    def renew(self) -> Args:
        """Renew, for longer or shorter than before."""
        return *self.permit(), self.random.choice(self.leases), self.random.choice(["0", "1", "told"]), self.idle

    def adopt(self) -> Args:
        """Take over, under the old fence too."""
        (ticket, fence), channel = self.permit(), self.channel()
        request, place = self.request(channel, ticket), self.place(channel)
        return (
            ticket,
            fence,
            request,
            place,
            self.random.choice(self.leases),
            self.random.randint(0, 1),
            self.idle,
            LABEL,
        )

    def beat(self) -> Args:
        """Keep a place."""
        place = self.place(self.channel())
        return place, self.random.choice(self.leases), self.random.choice(TICKETS), self.idle

    def supersede(self) -> Args:
        """Replace what is older, holders too."""
        channel, ticket = self.channel(), self.random.choice(list(self.model.queue) or TICKETS)
        known = self.model.queue.get(ticket)
        request = known.claims[0][1] if known and self.random.random() < 0.9 else self.request(channel, ticket)
        return ticket, request, self.random.randint(0, 1), 5, self.random.choice([0, 2, 30]), self.idle, ""

    def reduce(self) -> Args:
        """Give back a part."""
        return *self.permit(), self.random.choice([1, 1, 2, 3]), self.idle

    def resize(self) -> Args:
        """Set the capacity, which is refused of a lock and a read-write lock."""
        return 3 if self.capacity == CAPACITY_MAX else self.random.randint(1, 6), self.idle

    def limit(self) -> Args:
        """Set or lift a limit, of the resource or of keys."""
        draw = self.random
        kind, key = draw.choice([("limit", ""), ("pause", ""), ("back", "")])
        if self.keys and draw.random() < 0.7:
            kind, key = draw.choice([("each", ""), ("limit", "k"), ("limit", "l"), ("back", "k"), ("back", "m")])
        until = str(draw.choice(self.leases))
        if draw.random() < 0.2:
            until = f"@{max(0, self.model.now + draw.choice([-1, *self.leases]))}"
        units = draw.randint(0, 4) if kind in {"limit", "each"} else 0
        return kind, key, "" if draw.random() < 0.6 else units, until, self.idle, LABEL

    def check(self) -> Args:
        """Ask whether a permit is held."""
        return self.permit()

    def position(self) -> Args:
        """Ask where a ticket is."""
        return (self.random.choice(TICKETS),)

    def watch(self) -> Args:
        """Watch for a moment."""
        return (3,)


# How often each operation is drawn.
SHARES = {
    "acquire": 45,
    "release": 20,
    "renew": 8,
    "beat": 8,
    "adopt": 6,
    "reduce": 5,
    "supersede": 3,
    "check": 4,
    "position": 4,
    "resize": 3,
    "limit": 4,
    "watch": 1,
}
