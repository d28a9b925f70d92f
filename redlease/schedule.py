"""When what is due: one timer of the event loop for every hold, place and request of a client."""

from __future__ import annotations

import asyncio
import heapq
from typing import Protocol

from . import clock

SENDS_A_TURN = 100  # of the loop, so that ten thousand things due at once make no burst
# A suspended machine does not advance the loop's clock, only the one that deadlines are told by: look that often.
LOOK_MS = 500.0
MOMENTS_MIN = 64  # that are kept before it is looked which of them nothing is due at any more
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
    """What is due at each moment, and a heap of the moments: renewals come many to a moment.

    An item is due once; in its moment, items come in the order in which they were put there.
    """

    def __init__(self, owner: Stalled) -> None:
        self._owner = owner
        self._due: dict[float, dict[Due, None]] = {}
        self._moments: list[float] = []
        self._sweep_at = MOMENTS_MIN
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0.0
        self._closed = False

    def at(self, when_ms: float, item: Due) -> None:
        """Sets the item's next moment, in place of the one it had."""
        if self._closed:
            return
        if item.due_ms is not None:
            del self._due[item.due_ms][item]
        item.due_ms = when_ms
        due = self._due.get(when_ms)
        if due is None:
            self._due[when_ms] = {item: None}
            self._add(when_ms)
        else:
            due[item] = None

    def drop(self, item: Due) -> None:
        """Forgets the item."""
        if item.due_ms is not None:
            del self._due[item.due_ms][item]
            item.due_ms = None

    def close(self) -> None:
        """Ends the timer; nothing is due any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _add(self, moment_ms: float) -> None:
        heapq.heappush(self._moments, moment_ms)
        if self._timer is None or moment_ms < self._timer_ms:
            self._arm(clock.now_ms())

    def _arm(self, now_ms: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._moments:
            self._timer_ms = min(self._moments[0], now_ms + LOOK_MS)
            delay = max(0.0, self._timer_ms - now_ms) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._turn)

    def _turn(self) -> None:
        self._timer = None
        now_ms = clock.now_ms()
        try:
            if now_ms - self._timer_ms > LATE_MS:
                self._owner.stalled(now_ms)
            if len(self._moments) > self._sweep_at:
                self._sweep()
            sends = SENDS_A_TURN
            while self._moments and self._moments[0] <= now_ms and sends > 0:
                sends -= self._do_due(heapq.heappop(self._moments), now_ms, sends)
        finally:  # a mistake in one item must not end the turns of all
            if not self._closed:
                self._arm(now_ms)

    def _sweep(self) -> None:
        """Forgets the moments of which everything was dropped, before there are more of them than of others."""
        self._due = {moment_ms: due for moment_ms, due in self._due.items() if due}
        self._moments = sorted(self._due)
        self._sweep_at = MOMENTS_MIN + 2 * len(self._moments)

    def _do_due(self, moment_ms: float, now_ms: float, most: int) -> int:
        """Does what is due at that moment, up to so many sends; how many there were."""
        due, sent = self._due[moment_ms], 0
        try:
            for item in tuple(due):
                if item.due_ms == moment_ms:  # what was done before it may have changed that
                    del due[item]
                    item.due_ms = None
                    sent += item.turn(now_ms)
                    if sent == most:
                        break
        finally:
            if due:
                heapq.heappush(self._moments, moment_ms)
            else:
                del self._due[moment_ms]
        return sent
