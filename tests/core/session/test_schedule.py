"""The timer of a client's deadlines, in a process that stands still at awkward moments."""

from __future__ import annotations

import asyncio
import time

import pytest

from redlease._core import clock
from redlease._core.session.schedule import Schedule

from helpers import eventually

STOP_S = 0.3


class Client:
    """A client with one item, which counts how often it ran."""

    def __init__(self) -> None:
        self.due_ms: float | None = None
        self.runs = 0
        self.stalls = 0

    def on_due(self, now_ms: float) -> bool:  # noqa: ARG002
        self.runs += 1
        return False

    def stalled(self, now_ms: float) -> None:  # noqa: ARG002
        self.stalls += 1


async def test_a_timer_that_is_not_late_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client looks at all its leases after a stall alone, and not in every turn."""
    monkeypatch.setattr("redlease._core.session.schedule.LATE_MS", 1e6)  # however busy the machine is
    client = Client()
    schedule = Schedule(client)
    for _ in range(3):
        client.runs = 0
        schedule.at(clock.now_ms() + 5, client)
        await eventually(lambda: client.runs == 1)
    assert client.stalls == 0
    schedule.close()


def stop_after_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the process once, right after it has read its clock."""
    read = clock.now_ms

    def read_and_stop() -> float:
        now_ms = read()
        monkeypatch.setattr(clock, "now_ms", read)
        time.sleep(STOP_S)
        return now_ms

    monkeypatch.setattr(clock, "now_ms", read_and_stop)


async def one_turn() -> None:
    """Let the loop look at its timers once."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_stop_while_the_timer_is_set_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fell due meanwhile runs as soon as the process goes on."""
    client = Client()
    schedule = Schedule(client)
    due_ms = clock.now_ms() + 1000 * STOP_S / 2
    stop_after_a_look(monkeypatch)
    schedule.at(due_ms, client)
    await one_turn()
    assert client.runs == 1
    schedule.close()


async def test_a_stop_while_a_timer_runs_delays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a stop in a turn of the timer, which sets the next one."""
    first, second = Client(), Client()
    schedule = Schedule(first)
    schedule.at(clock.now_ms(), first)
    schedule.at(clock.now_ms() + 1000 * STOP_S / 2, second)
    stop_after_a_look(monkeypatch)
    await one_turn()
    assert first.runs == 1
    await one_turn()
    assert second.runs == 1
    schedule.close()


@pytest.mark.parametrize("fails", ["redlease._core.clock.now_ms", "heapq.heappush", "asyncio.get_running_loop"])
async def test_a_mistake_while_an_item_is_scheduled(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Another item of that moment runs then, and the first as soon as it is scheduled again."""
    first, second = Client(), Client()
    schedule = Schedule(first)
    due_ms = clock.now_ms() + 20

    def fail(*_: object) -> None:
        raise RuntimeError(fails)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match=fails):
        patched.setattr(fails, fail)
        schedule.at(due_ms, first)
    schedule.at(due_ms, second)
    await eventually(lambda: second.runs == 1)
    schedule.at(clock.now_ms(), first)
    await eventually(lambda: first.runs >= 1)
    schedule.close()
