"""One resource for workflows in Go, Java, TypeScript and Python, and for a service in TypeScript."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from lock_service import CALLERS
from nexus_flows import ENDPOINT, TakesTurns, enter_and_leave
from temporal_tools import until_free
from temporalio.client import Client
from typescript_peers import peer, programs_built

from helpers import until_waiting

if TYPE_CHECKING:
    from lock_service import Callers
    from temporal_tools import Place

    from redlease import Redlease

FOREIGN = ("go", "java", "typescript")
TASKS, TURNS = 2, 20  # of each language's workflows and of the service: 200 turns in all


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time on a machine, four of them are built
async def test_they_take_turns_on_one_lock(callers: Callers, place: Place, outside: Redlease) -> None:
    """200 grants, by the history that the server writes: one holder at a time, in the order of arrival."""
    lock, programs = outside.lock("r", history=10_000), await asyncio.to_thread(programs_built)
    elsewhere = await Client.connect(callers.address, namespace=CALLERS)
    of_service: dict[str, Any] = {"tasks": TASKS, "times": TURNS, "capacity": 1, "log": f"{place.prefix}-log"}
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(callers.service(place))
        here = await stack.enter_async_context(place.serving([TakesTurns], [enter_and_leave]))
        kinds: list[tuple[str, Client, str, list[Any], str]] = [
            ("python", here, "TakesTurns", [None, TURNS], place.task_queue)
        ]
        for language in FOREIGN:
            task_queue = await stack.enter_async_context(callers.foreign(language, place))
            kinds.append((language, elsewhere, "Turns", [ENDPOINT, TURNS], task_queue))
        service = await stack.enter_async_context(
            peer(programs, "turns", place.redis_url, prefix=place.prefix, direct=place.redis_url, **of_service)
        )
        async with lock.hold(owner="the first"):
            runs = [
                await client.start_workflow(
                    run, args=words, id=f"{place.prefix}-{language}-{number}", task_queue=task_queue
                )
                for language, client, run, words, task_queue in kinds
                for number in range(TASKS)
            ]
            await until_waiting(lock, TASKS * (len(kinds) + 1), 60)
        await asyncio.gather(service.event("done"), *(run.result() for run in runs))
        await until_free(lock)
    entries = [entry for entry in await lock.history(10_000) if entry.owner != "the first"]
    granted = [entry for entry in entries if entry.event == "granted"]
    assert [entry.event for entry in entries] == ["granted", "released"] * 200
    assert [entry.ticket for entry in entries[::2]] == [entry.ticket for entry in entries[1::2]]
    fences = [entry.fence for entry in granted]
    assert fences == sorted(set(fences))
    arrived = [entry.at_ms - (entry.waited_ms or 0) for entry in granted]
    assert arrived == sorted(arrived)
    names = [language for language, *_ in kinds]
    had = Counter(next((name for name in names if f"-{name}-" in entry.owner), "service") for entry in granted)
    assert had == dict.fromkeys([*names, "service"], TASKS * TURNS)
