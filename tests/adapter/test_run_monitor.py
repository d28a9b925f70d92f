"""How often runs are looked at, and for how long one counts as unknown; without Temporal."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from fake_temporal import FakeTemporal

from redlease_temporal._common import run_monitor
from redlease_temporal._common.run_monitor import RunMonitor, RunState, RunStatus

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

RUNS = 100
A_SECOND = 100  # looks
MEASURED_S = 2.0


@contextlib.asynccontextmanager
async def looking(monitor: RunMonitor) -> AsyncIterator[None]:
    """Let it look."""
    task = asyncio.create_task(monitor.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_many_runs_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take half of the looks, so that one that somebody waits for is looked at as often as it is to be."""
    monkeypatch.setattr(run_monitor, "IDLE_POLL_MS", 100.0)
    monkeypatch.setattr(run_monitor, "BUSY_POLL_MS", 50.0)
    temporal: Any = FakeTemporal()
    monitor, seen = RunMonitor(temporal, A_SECOND), Counter[str]()
    for number in range(RUNS):
        temporal.start(f"w{number}")

    def watch(name: str) -> None:
        def on_look(_: RunState) -> None:
            seen[name] += 1

        monitor.watch((name, f"run of {name}"), on_look)
        if name == "w0":
            monitor.poll_often((name, f"run of {name}"), on_look, often=True)

    for number in range(RUNS):
        watch(f"w{number}")
    async with looking(monitor):
        await eventually(lambda: len(seen) == RUNS)
        seen.clear()
        await asyncio.sleep(MEASURED_S)
    quiet = sum(looks for name, looks in seen.items() if name != "w0")
    assert quiet <= 0.6 * A_SECOND * MEASURED_S
    # Each look takes its turn, so on a busy machine there are fewer of both.
    assert seen["w0"] >= quiet / RUNS * 5


async def test_one_lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is unknown from the first look without an answer, not from the last that had one."""
    monkeypatch.setattr(run_monitor, "IDLE_POLL_MS", 2000.0)
    temporal: Any = FakeTemporal()
    monitor, seen = RunMonitor(temporal, A_SECOND), list[RunStatus]()

    async def lost(*_: Any) -> RunState:
        return RunState(RunStatus.UNKNOWN)

    monkeypatch.setattr(RunMonitor, "_poll_server", lost)
    run = ("w", "run of w")
    monitor.watch(run, lambda look: seen.append(look.status))
    async with looking(monitor):
        await eventually(lambda: seen)
        assert monitor.unknown_ms(run) < 1000
        await eventually(lambda: len(seen) > 1)
        assert monitor.unknown_ms(run) >= 1500
