"""The records of a run from independent observers: the consumers, the server, and the process that kills.

Times are seconds of the machine's monotonic clock, which all its processes share, from the start of the run. Only
fields that end in `_ms` are times of the server's clock; the two are never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

KillKind = Literal["holder", "waiter"]


@dataclass(slots=True)
class Turn:
    """One acquire of a consumer, as the consumer reported it."""

    consumer: str
    ticket: str
    asked_at: float
    entered_at: float | None = None
    left_at: float | None = None
    fence: int | None = None
    granted_at_ms: int = 0
    lost: bool = False


@dataclass(slots=True)
class Sighting:
    """A snapshot of the resource from the server: tickets, with the waiters in the order of the queue."""

    at: float
    holders: list[str]
    waiters: list[str]
    queued_at_ms: list[int]


@dataclass(slots=True)
class Kill:
    """A consumer killed -9 while the server had its ticket as `kind`.

    Attributes:
        kind: Whether it held or waited.
        consumer: Its name.
        ticket: The ticket that it held or waited with.
        at: When it was killed.
        lease: The lease of its permit or place, in seconds.
        holds_from: Since when the dead consumer used a unit; a dead waiter can be granted while its place lasts.
        holds_until: When that lease ends at the earliest, by the server's snapshots.
        gone_at: When a snapshot first no longer contained its ticket.
    """

    kind: KillKind
    consumer: str
    ticket: str
    at: float
    lease: float
    holds_from: float | None = None
    holds_until: float | None = None
    gone_at: float | None = None

    @property
    def holds(self) -> tuple[float, float] | None:
        """The span in which the dead consumer used a unit, if it did."""
        if self.holds_from is None or self.holds_until is None:
            return None
        return self.holds_from, self.holds_until


@dataclass(slots=True)
class Evidence:
    """All records of a run."""

    resource: str
    capacity: int
    rounds: int
    turns: dict[str, Turn] = field(default_factory=dict)
    sightings: list[Sighting] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ended_at: float = 0.0

    def record(self, consumer: str, text: dict[str, Any], at: float) -> Turn:
        """Records one event that a consumer reported: what it did, with which ticket, and when."""
        ticket = text["ticket"]
        if text["did"] == "ask":
            self.turns[ticket] = Turn(consumer, ticket, at)
        turn = self.turns[ticket]
        if text["did"] == "enter":
            turn.entered_at, turn.fence, turn.granted_at_ms = at, text["fence"], text["granted_at_ms"]
        elif text["did"] == "leave":
            turn.left_at, turn.lost = at, text["lost"]
        return turn

    def killed(self, consumer: str) -> Kill | None:
        """Returns the kill of this consumer, if it was killed."""
        return next((kill for kill in self.kills if kill.consumer == consumer), None)

    def inside(self) -> list[tuple[float, float]]:
        """Returns the span of every hold; that of a killed holder lasts until its lease has ended."""
        return self._stays(lambda kill: kill.holds_until)

    def living(self) -> list[tuple[float, float]]:
        """Returns the span of every hold by a living consumer; that of a killed holder ends with the kill."""
        return self._stays(lambda kill: kill.at)

    def _stays(self, end_of_killed: Callable[[Kill], float | None]) -> list[tuple[float, float]]:
        stays = []
        for turn in self.turns.values():
            if turn.entered_at is not None:
                kill = self.killed(turn.consumer)
                end = end_of_killed(kill) if kill is not None and turn.left_at is None else turn.left_at
                stays.append((turn.entered_at, self.ended_at if end is None else end))
        return stays


def steps(stays: list[tuple[float, float]]) -> list[tuple[float, int]]:
    """Returns how many spans overlap from each moment on; a span that ends at a moment does not count there."""
    changes = sorted([(start, 1) for start, _ in stays] + [(end, -1) for _, end in stays])
    count, line = 0, []
    for at, change in changes:
        count += change
        line.append((at, count))
    return line
