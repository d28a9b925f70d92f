"""How much work a connection leaves unanswered at the server.

A server runs what it has read of one connection in one go, and all other clients wait for that. So the window is what
it answers within about half a millisecond, besides the time of a round trip: enough for it to work on one half while
the other half is under way. Answers that take longer shrink the window, quick ones widen it. What a round trip takes is
looked at now and then, with a window so small that the server's work hardly counts.
"""

from __future__ import annotations

import math
from time import monotonic

WORK_MS = 0.3  # for which the server may work on the calls of one connection
UNIT_MS = 0.025  # for a usual call, and for what the client does with its answer: that never shrinks the window
UNITS_FIRST, UNITS_LEAST, UNITS_OF_LOOK = 64, 8, 2
SHRINKS_TO, GROWS_TO = 0.25, 1.5  # at most, by each measurement
LOOKS_EVERY = (8, 1000)  # measurements: at first, and at most, since the first ones may be disturbed


class Window:
    """Measures how long answers take, while calls wait for room.

    Attributes:
        size: How much may be unanswered, in units of usual calls.
        half: Half of it.
        change: By how much the last measurement changed the size.
    """

    def __init__(self) -> None:
        self.size, self.half, self.change = UNITS_FIRST, UNITS_FIRST // 2, 0
        self._since = 0.0  # when the measurement began, by `monotonic`
        self._awaited = 0  # units that were unanswered then, and still are
        self._round_trip_ms, self._seen_ms = 0.0, math.inf  # the shorter of the last two; the last one
        self._until_look = 1  # measurements; 0: the window was made small; -1: no more than that is unanswered
        self._every = LOOKS_EVERY[0]
        self._usual = UNITS_FIRST  # the size before the look

    def begin(self, unanswered: int) -> None:
        """Begins a measurement, which ends when all of that is answered."""
        self._since, self._awaited = monotonic(), unanswered

    def answered(self, units: int) -> bool:
        """Returns whether that ends the measurement; then it has changed the size, and the next is to be begun."""
        self._awaited -= units
        if self._awaited > 0:
            return False
        before = self.size
        self.size = self._adapted((monotonic() - self._since) * 1000)
        self.half, self.change = self.size // 2, self.size - before
        return True

    def _adapted(self, took_ms: float) -> int:
        """Returns the size after a measurement."""
        self._until_look -= 1
        if self._until_look == 0:
            self._usual = self.size
            return UNITS_OF_LOOK
        if self._until_look == -1:
            return UNITS_OF_LOOK
        if self._until_look < 0:
            self._round_trip_ms, self._seen_ms = min(took_ms, self._seen_ms), took_ms
            self._until_look, self._every = self._every, min(2 * self._every, LOOKS_EVERY[1])
            return self._usual
        fair_ms = self._round_trip_ms + max(WORK_MS, self.size * UNIT_MS)
        if took_ms > fair_ms:
            return max(UNITS_LEAST, int(self.size * max(SHRINKS_TO, fair_ms / took_ms)))
        return min(UNITS_FIRST + int(self._round_trip_ms / UNIT_MS), int(self.size * GROWS_TO))
