"""Whose turn it is, in the model of the protocol: requests with different keys take turns.

Each key has its own queue, in the order of arrival. Its first waiter has a tag, the virtual time at which it became the
first plus what its turn costs: its weight divided by its share. The lowest tag is granted next, and the virtual time is
that tag then. Requests without a key are one more key of share 1, whose first waiter began at `start`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from redlease._core.limits import CAPACITY_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .entries import Entry


def is_barred(queued: Entry, most: int | None) -> bool:
    """Tell whether a request waits for more units than an operator allows to be held."""
    return most is not None and queued.weight > most


@dataclass
class Turns:
    """The keys of one resource.

    Attributes:
        capacity: Of the resource.
        virtual: The tag of the last turn.
        start: When the first of the waiters without a key became their first.
        limit: How many units one key may have; 0 for any number.
        rate: The µs between two grants to one key, and how many may come at once; empty for any number.
        is_raised: Whether keys that waited at their limit are to be looked at again.
        numbers: In which order the keys came that hold or wait.
        drawn: The last of the numbers.
    """

    capacity: int = 0
    virtual: int = 0
    start: int = 0
    limit: int = 0
    rate: tuple[int, ...] = ()
    is_raised: bool = False
    numbers: dict[str, int] = field(default_factory=dict)
    drawn: int = 0

    def cost(self, entry: Entry) -> int:
        """Return how far a turn takes the virtual time; of a great capacity a unit costs less."""
        weight = 1 if entry.weight >= CAPACITY_MAX else entry.weight  # a writer's turn costs what a reader's does
        part = max(1, self.capacity / 2**20) if self.capacity < CAPACITY_MAX else 1
        return max(1, min(2**43, math.floor(1000 * weight / entry.share / part + 0.5)))

    def restart(self, queue: Iterable[Entry]) -> None:
        """Let the virtual time begin again before tags reach their end, which is 2**51."""
        if self.virtual <= 2**50:
            return
        for queued in queue:
            queued.tag = None if queued.tag is None else max(0, queued.tag - self.virtual)
        self.start, self.virtual = self.start - self.virtual, 0

    def waiting(self, queue: Iterable[Entry], key: str) -> list[Entry]:
        """Return the waiters of a key, in their order."""
        return sorted((queued for queued in queue if queued.key == key), key=lambda queued: queued.arrived)

    def without_turn(self, queue: Iterable[Entry], key: str) -> list[Entry]:
        """Return the waiters of a key of which none has a turn."""
        waiting = self.waiting(queue, key) if key else []
        return [] if any(queued.tag is not None for queued in waiting) else waiting

    def first(self, queue: list[Entry], most: int | None) -> Entry | None:
        """Return who is granted next; None if no one waits, or all are of keys at their limits.

        `most`: how many units an operator allows; nobody with another key waits behind a request for more.
        """
        tagged = min(
            (queued for queued in queue if queued.tag is not None),
            key=lambda queued: (queued.tag, queued.arrived),
            default=None,
        )
        others = self.waiting(queue, "")
        if others and tagged is not None and is_barred(others[0], most):
            return tagged
        if others and (tagged is None or self.tag_of(others[0]) <= self.tag_of(tagged)):
            return others[0]
        return tagged

    def lead(self, queue: list[Entry], key: str, most: int | None) -> None:
        """Let the first waiter of a key go before all others: it takes over the units of a permit of its key."""
        first, own = self.first(queue, most), self.waiting(queue, key)
        head = next((queued for queued in own if queued.tag is not None or not key), None)
        if first is None or head is None or first.key == key:
            return
        if key:
            head.tag = max(0, self.tag_of(first) - 1)
        else:
            self.start = self.tag_of(first) - 1 - self.cost(head)

    def tag_of(self, first: Entry) -> int:
        """Return the tag of the first waiter of a key, or of those without one."""
        return self.start + self.cost(first) if first.tag is None else first.tag

    def goes_first(self, queue: list[Entry], entry: Entry, most: int | None) -> int | None:
        """Return the tag of a new request that goes before all who wait; None if it does not."""
        first, own = self.first(queue, most), self.waiting(queue, entry.key)
        begun = self.start if own and not entry.key else self.virtual
        head = next((queued for queued in own if queued.tag is not None), None)
        tag = (begun if head is None else self.tag_of(head) - self.cost(head)) + self.cost(entry)
        if any(self.precedes(other, entry) for other in own):
            return None
        is_own = first is not None and (first is head if entry.key else not first.key)
        is_own |= first is not None and not first.key and is_barred(first, most)
        return tag if first is None or is_own or tag < self.tag_of(first) else None

    def precedes(self, other: Entry, entry: Entry) -> bool:
        """Tell whether a waiter of the same key stands before a new request."""
        return other.arrived < entry.arrived if entry.key else other.arrival < entry.arrival

    def enter(self, queue: list[Entry], entry: Entry) -> int | None:
        """Note that a request queues, which is in the queue already; return when it became the first, if it did."""
        if not entry.key:
            if len(self.waiting(queue, "")) == 1:
                self.start = self.virtual
            return None
        if entry.key not in self.numbers:
            self.drawn += 1
            self.numbers[entry.key] = self.drawn
        entry.number = self.numbers[entry.key]
        begun = None
        for head in [queued for queued in self.waiting(queue, entry.key) if queued.tag is not None]:
            if entry.arrived < head.arrived:  # a priority, or its former place, puts it before the first
                begun, head.tag = self.tag_of(head) - self.cost(head), None
        return begun

    def taken(self, entry: Entry, tag: int) -> None:
        """Note that it was the turn of a waiter."""
        self.virtual = max(self.virtual, tag)
        if not entry.key:
            self.start = self.virtual
        entry.tag = None

    def reset(self) -> None:
        """Forget the virtual time: no ticket has a key."""
        self.virtual = self.start = self.drawn = 0
        self.is_raised = False
        self.numbers.clear()
