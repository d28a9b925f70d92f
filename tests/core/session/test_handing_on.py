"""What a client does first when one of its tasks hands a permit on to another."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from helpers import until_waiting

if TYPE_CHECKING:
    from conftest import MakeClient, Servers

TASKS = 20


async def test_who_gets_it_begins_first(make_client: MakeClient, servers: Servers, real_engine: str) -> None:
    """A task that gets a lock begins before the one that gave it back goes on, whichever of them is told first."""
    client = await make_client(url=servers.url(real_engine))
    lock = client.lock("r")
    told: list[str] = []

    async def work(number: int) -> None:
        async with lock.hold():
            told.append(f"{number} begins")
            await asyncio.sleep(0)
        told.append(f"{number} goes on")

    async with asyncio.TaskGroup() as group, lock.hold():
        for number in range(TASKS):
            group.create_task(work(number))
            await until_waiting(lock, number + 1)
    assert len(told) == 2 * TASKS
    for number in range(1, TASKS):
        assert told.index(f"{number} begins") < told.index(f"{number - 1} goes on"), told
