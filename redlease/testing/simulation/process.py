"""A simulated process: its name, its clock, and its own random numbers."""

from __future__ import annotations

import random
from contextvars import Context, ContextVar

PROCESS: ContextVar[Process] = ContextVar("process")  # whose task or callback this is


class Process:
    """One process of a simulation, of whose callbacks the loop runs one at a time.

    Attributes:
        busy_until: The virtual time, in seconds, before which none of its callbacks runs: it is stopped, or blocks its
            event loop.
        woke_at: When it went on after the last such pause.
        is_alive: False once it was killed: none of its callbacks runs again.
        stop_after_clock_s: How long it stands still right after it next reads its clock.
        clock_offset_s: How far its wall clock is ahead.
        context: In which callbacks run that no code of its own has scheduled.
    """

    def __init__(self, name: str, seed: str) -> None:
        self.name = name
        self.random = random.Random(f"{seed} {name}")
        self.busy_until = self.woke_at = 0.0
        self.is_alive = True
        self.stop_after_clock_s = 0.0
        self.clock_offset_s = 0.0
        self.context = Context()
        self.context.run(PROCESS.set, self)

    def stop(self, now: float, seconds: float) -> None:
        """Let it stand still from `now` on, or from where it stands still already."""
        self.busy_until = self.woke_at = max(self.busy_until, now) + seconds
