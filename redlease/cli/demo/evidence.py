"""What is seen of a run, by those who do not depend on each other: the consumers, the server, the one who kills.

Moments are seconds of the machine's monotonic clock, which all its processes share, counted from the start of the run.
Only what ends in `_ms` is by the server's clock; the two are never compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

KillKind = Literal["holder", "waiter"]


@dataclass(slots=True)
class Turn:
    """One time that a consumer asked, as it told itself."""

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
    """The resource as the server showed it: tickets, the waiters in the order of the queue."""

    at: float
    holders: list[str]
    waiters: list[str]
    queued_at_ms: list[int]


@dataclass(slots=True)
class Kill:
    """A consumer killed -9 while the server had its ticket as `kind`.

    Attributes:
        kind: What it was.
        consumer: Who.
        ticket: Of what it held or waited for.
        at: When.
        lease: Of its permit or place, in seconds.
        holds_from: Since when it took a unit, dead; a dead waiter is granted in its turn while its place lasts.
        holds_until: When that lease ends: the earliest moment that it can be, by what the server told.
        gone_at: The first moment at which the server showed its ticket no more.
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
        """From when to when it took a unit, dead, if it did."""
        if self.holds_from is None or self.holds_until is None:
            return None
        return self.holds_from, self.holds_until


@dataclass(slots=True)
class Evidence:
    """All of it."""

    resource: str
    capacity: int
    rounds: int
    turns: dict[str, Turn] = field(default_factory=dict)
    sightings: list[Sighting] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ended_at: float = 0.0

    def record(self, consumer: str, told: dict[str, Any], at: float) -> Turn:
        """Writes down one event that a consumer told: what it did, with which ticket, and when."""
        ticket = told["ticket"]
        if told["did"] == "ask":
            self.turns[ticket] = Turn(consumer, ticket, at)
        turn = self.turns[ticket]
        if told["did"] == "enter":
            turn.entered_at, turn.fence, turn.granted_at_ms = at, told["fence"], told["granted_at_ms"]
        elif told["did"] == "leave":
            turn.left_at, turn.lost = at, told["lost"]
        return turn

    def killed(self, consumer: str) -> Kill | None:
        """How this consumer was killed, if it was."""
        return next((kill for kill in self.kills if kill.consumer == consumer), None)

    def inside(self) -> list[tuple[float, float]]:
        """Every stay inside, from when to when; that of a killed holder goes on until its lease has ended."""
        return self._stays(lambda kill: kill.holds_until)

    def living(self) -> list[tuple[float, float]]:
        """Every stay inside of a living consumer; that of a killed holder ends with it."""
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
    """How many stays overlap, from which moment on; who leaves at a moment makes room at that moment."""
    changes = sorted([(start, 1) for start, _ in stays] + [(end, -1) for _, end in stays])
    count, line = 0, []
    for at, change in changes:
        count += change
        line.append((at, count))
    return line
