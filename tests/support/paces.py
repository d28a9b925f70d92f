"""Whether grants keep to their rates, judged by nothing but when they came."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redlease.testing.model import Model

NEWEST = 40  # grants that each new one is compared with


class Paces:
    """The grants of one resource, of all and of each key.

    Attributes:
        judged: How many grants a rate was asked about.
    """

    def __init__(self) -> None:
        self.judged = 0
        self._rates: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._last = 0
        self._grants: dict[str | None, deque[int]] = {}

    def judge(self, model: Model, name: str, fence_before: int) -> None:
        """Take note of what a call has granted; between any two grants there are no more than the rate allows."""
        if (model.rate, model.turns.rate) != self._rates or model.fence < self._last:
            self._rates = model.rate, model.turns.rate
            self._grants = {}
        self._last = model.fence
        if name == "adopt":  # a new fence, and no grant
            return
        for held in sorted(model.held.values(), key=lambda held: held.fence):
            if held.fence > fence_before:
                self._granted(None, model.clock, model.rate)
                if held.key:
                    self._granted(held.key, model.clock, model.turns.rate)

    def _granted(self, key: str | None, clock: int, rate: tuple[int, ...]) -> None:
        if not rate:
            return
        interval, burst = rate
        grants = self._grants.setdefault(key, deque(maxlen=NEWEST))
        grants.append(clock)
        self.judged += 1
        for number, earlier in enumerate(reversed(grants), 1):
            assert number <= burst + (clock - earlier) / interval, f"{number} grants in {clock - earlier} µs"
