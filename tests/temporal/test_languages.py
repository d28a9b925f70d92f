"""One resource for workflows in Go, a service in TypeScript and workflows in Python."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from lock_service import CALLERS
from nexus_flows import ENDPOINT, TakesTurns, enter_and_leave
from temporalio.client import Client
from typescript_peers import peer, programs_built

from helpers import until_waiting

if TYPE_CHECKING:
    from lock_service import Callers
    from temporal_tools import Place

    from redlease import Redlease

# How many of a language take turns at one time, and how many turns each: 200 in all.
TURNS = {"go": (2, 34), "python": (2, 33), "ts": (2, 33)}


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time on a machine, two of them are built
async def test_they_take_turns_on_one_lock(callers: Callers, place: Place, outside: Redlease) -> None:
    """200 grants, by the history that the server writes: one holder at a time, in the order of arrival."""
    lock, programs = outside.lock("r", history=10_000), await asyncio.to_thread(programs_built)
    elsewhere = await Client.connect(callers.address, namespace=CALLERS)
    of_ts: dict[str, Any] = {
        "tasks": TURNS["ts"][0],
        "times": TURNS["ts"][1],
        "capacity": 1,
        "log": f"{place.prefix}-log",
    }
    async with (
        callers.service(place),
        callers.go(place),
        place.serving([TakesTurns], [enter_and_leave]) as here,
        peer(programs, "turns", place.redis_url, prefix=place.prefix, direct=place.redis_url, **of_ts) as service,
    ):
        async with lock.hold(owner="the first"):
            runs = [
                await client.start_workflow(
                    run,
                    args=[endpoint, TURNS[name][1]],
                    id=f"{place.prefix}-{name}-{number}",
                    task_queue=place.task_queue,
                )
                for name, client, run, endpoint in (
                    ("go", elsewhere, "Turns", ENDPOINT),
                    ("python", here, "TakesTurns", None),
                )
                for number in range(TURNS[name][0])
            ]
            await until_waiting(lock, sum(tasks for tasks, _ in TURNS.values()), 60)
        await asyncio.gather(service.event("done"), *(run.result() for run in runs))
    entries = [entry for entry in await lock.history(10_000) if entry.owner != "the first"]
    granted = [entry for entry in entries if entry.event == "granted"]
    assert [entry.event for entry in entries] == ["granted", "released"] * 200
    assert [entry.ticket for entry in entries[::2]] == [entry.ticket for entry in entries[1::2]]
    fences = [entry.fence for entry in granted]
    assert fences == sorted(set(fences))
    arrived = [entry.at_ms - (entry.waited_ms or 0) for entry in granted]
    assert arrived == sorted(arrived)
    had = Counter(next((name for name in ("go", "python") if f"-{name}-" in entry.owner), "ts") for entry in granted)
    assert had == {name: tasks * turns for name, (tasks, turns) in TURNS.items()}
