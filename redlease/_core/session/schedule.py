"""Schedules every hold, place and request of a client with one timer of the event loop."""

from __future__ import annotations

import asyncio
import heapq
from typing import Protocol

from redlease._core import clock
from redlease._core.log import report

SENDS_A_TURN = 100  # per iteration of the loop, so that ten thousand items due at once make no burst
# While the machine is suspended the loop's clock stands still, but the clock of deadlines runs: check this often.
CHECK_MS = 500.0
MOMENTS_MIN = 64  # kept before moments without items are removed
AGAIN_MS = 100.0  # the pause before a failed item is retried
LATE_MS = 100.0  # a timer later than this means that the loop was blocked


class Due(Protocol):
    """An item that can be scheduled. Only the schedule sets `due_ms`."""

    due_ms: float | None

    def on_due(self, now_ms: float) -> bool:
        """Runs the due action; returns True if it sent a command."""
        ...


class Stalled(Protocol):
    """Called after the loop was blocked, before anything else runs."""

    def stalled(self, now_ms: float) -> None: ...


class Schedule:
    """The items due at each moment, and a heap of the moments: many renewals share a moment.

    Each item has at most one moment; the items of a moment run in the order in which they were added.
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
        """Schedules the item; replaces its earlier moment."""
        if self._closed:
            return
        if item.due_ms is not None:
            del self._due[item.due_ms][item]
            item.due_ms = None
        due = self._due.get(when_ms)
        if due is None:
            # Pushed first: no item of a moment that is known, but not in the heap, would ever run.
            heapq.heappush(self._moments, when_ms)
            self._due[when_ms] = {item: None}
        else:
            due[item] = None
        item.due_ms = when_ms
        # For a moment that is known too: setting the timer may have failed for the item that came first.
        if self._timer is None or when_ms < self._timer_ms:
            self._arm(asyncio.get_running_loop().time(), clock.now_ms())

    def drop(self, item: Due) -> None:
        """Removes the item."""
        if item.due_ms is not None:
            del self._due[item.due_ms][item]
            item.due_ms = None

    def failed(self, item: Due, error: Exception) -> None:
        """Reports an exception of the item, and schedules the item again."""
        report(error)
        again_ms = clock.now_ms() + AGAIN_MS
        if item.due_ms is None or item.due_ms > again_ms:
            self.at(again_ms, item)

    def close(self) -> None:
        """Stops the timer and ignores all items from now on."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self, read_at_s: float, now_ms: float) -> None:
        """Sets the timer; `read_at_s`: the loop's clock, read before `now_ms`.

        In that order, so that a process which stands still anywhere in between has its timer early, and never late.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._moments:
            self._timer_ms = min(self._moments[0], now_ms + CHECK_MS)
            due_s = read_at_s + (self._timer_ms - now_ms) / 1000
            self._timer = asyncio.get_running_loop().call_at(due_s, self._turn)

    def _turn(self) -> None:
        self._timer, now_ms = None, self._timer_ms
        read_at_s = asyncio.get_running_loop().time()
        try:
            now_ms = clock.now_ms()
            if now_ms - self._timer_ms > LATE_MS:
                self._owner.stalled(now_ms)
            if len(self._moments) > self._sweep_at:
                self._sweep()
            sends = SENDS_A_TURN
            while self._moments and self._moments[0] <= now_ms and sends > 0:
                sends -= self._do_due(now_ms, sends)
        except Exception as error:  # noqa: BLE001  a bug must not stop the timer
            report(error)
        finally:
            if not self._closed:
                self._arm(read_at_s, now_ms)

    def _sweep(self) -> None:
        """Removes the moments without items, before they outnumber the others."""
        self._due = {moment_ms: due for moment_ms, due in self._due.items() if due}
        self._moments = sorted(self._due)
        self._sweep_at = MOMENTS_MIN + 2 * len(self._moments)

    def _do_due(self, now_ms: float, most: int) -> int:
        """Runs the items of the first moment, up to `most` sends; returns the number of sends."""
        moment_ms = heapq.heappop(self._moments)
        due, sent = self._due[moment_ms], 0
        try:
            for item in tuple(due):
                if item.due_ms == moment_ms:  # an earlier item may have rescheduled it
                    del due[item]
                    item.due_ms = None
                    try:
                        sent += item.on_due(now_ms)
                    except Exception as error:  # noqa: BLE001  the other items must run as well
                        self.failed(item, error)
                    if sent == most:
                        break
        finally:
            if due:
                heapq.heappush(self._moments, moment_ms)
            else:
                del self._due[moment_ms]
        return sent
