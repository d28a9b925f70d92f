"""When what is due: one timer of the event loop for every hold, place and request of a client."""

from __future__ import annotations

import asyncio
import heapq
from itertools import count
from typing import Protocol

from . import clock

SENDS_A_TURN = 100  # of the loop, so that ten thousand things due at once make no burst
# A suspended machine does not advance the loop's clock, only the one that deadlines are told by: look that often.
LOOK_MS = 500.0
LATE_MS = 100.0  # a timer later than that means that the loop stood still


class Due(Protocol):
    """Something with a next moment. `due_ms` belongs to the schedule."""

    due_ms: float | None

    def turn(self, now_ms: float) -> bool:
        """Does what is due; tells whether that sent a command."""
        ...


class Stalled(Protocol):
    """Who is told, before anything else is done, that the loop stood still."""

    def stalled(self, now_ms: float) -> None: ...


class Schedule:
    """A heap of moments; an entry counts only while its item still names that moment."""

    def __init__(self, owner: Stalled) -> None:
        self._owner = owner
        self._heap: list[tuple[float, int, Due]] = []
        self._order = count()
        self._live = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0.0
        self._closed = False

    def at(self, when_ms: float, item: Due) -> None:
        """Sets the item's next moment, in place of the one it had."""
        if self._closed:
            return
        if item.due_ms is None:
            self._live += 1
        item.due_ms = when_ms
        heapq.heappush(self._heap, (when_ms, next(self._order), item))
        if len(self._heap) > 64 + 2 * self._live:
            self._heap = [entry for entry in self._heap if entry[2].due_ms == entry[0]]
            heapq.heapify(self._heap)
        if self._timer is None or when_ms < self._timer_ms:
            self._arm(clock.now_ms())

    def drop(self, item: Due) -> None:
        """Forgets the item."""
        if item.due_ms is not None:
            item.due_ms = None
            self._live -= 1

    def close(self) -> None:
        """Ends the timer; nothing is due any more."""
        self._closed = True
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, now_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._live and self._heap:
            self._timer_ms = min(self._heap[0][0], now_ms + LOOK_MS)
            delay = max(0.0, self._timer_ms - now_ms) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now_ms = clock.now_ms()
        try:
            if now_ms - self._timer_ms > LATE_MS:
                self._owner.stalled(now_ms)
            self._do_due(now_ms)
        finally:  # a mistake in one item must not end the turns of all
            if not self._closed:
                self._arm(now_ms)

    def _do_due(self, now_ms: float) -> None:
        sent = 0
        while self._heap and self._heap[0][0] <= now_ms and sent < SENDS_A_TURN:
            when_ms, _, item = heapq.heappop(self._heap)
            if item.due_ms == when_ms:
                self.drop(item)
                sent += item.turn(now_ms)
