"""Histories of resources on a server that evicts keys, since other keys fill its memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from loss_histories import History

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import redis.asyncio

    from redlease import Redlease

TURNS = 80  # how often the memory of a server is filled up by a megabyte
ACTIVE_TURNS, IDLE_TURNS = 8, 22  # in which a resource is used, and then not


class Pressure:
    """Other keys that fill the memory of a server, a megabyte a turn, so that it evicts others."""

    def __init__(self) -> None:
        """Begin without any."""
        self._turn = 0
        self._next = asyncio.Event()

    def fill(self) -> None:
        """Begin the next turn."""
        self._turn += 1
        now, self._next = self._next, asyncio.Event()
        now.set()

    async def ends(self) -> None:
        """Wait until there is no pressure any more."""
        while self._turn < TURNS:
            await self._next.wait()

    async def let_idle(self, number: int) -> None:
        """Wait for the turns in which the resource of that number is used: what is idle is evicted first."""
        while self._turn < TURNS and (self._turn + 7 * number) % (ACTIVE_TURNS + IDLE_TURNS) >= ACTIVE_TURNS:
            await self._next.wait()


async def play_under_eviction(
    seeds: Iterable[int], clients: Sequence[Redlease], raw: redis.asyncio.Redis
) -> tuple[list[str], int]:
    """Play the histories while other keys fill the server's memory; return the problems, and how many keys it lost."""
    await raw.config_set("notify-keyspace-events", "Ee")
    pressure, lost = Pressure(), 0
    async with raw.pubsub() as evicted, asyncio.TaskGroup() as group:
        await evicted.subscribe("__keyevent@0__:evicted")
        playing = [group.create_task(History(seed, clients, raw, pressure).run()) for seed in seeds]
        for turn in range(TURNS):
            async with raw.pipeline(transaction=False) as batch:
                for number in range(1000):
                    batch.set(f"filling:{turn}:{number}", b"x" * 1000, px=600_000)
                await batch.execute(raise_on_error=False)
            while message := await evicted.get_message(ignore_subscribe_messages=True, timeout=0):
                lost += message["data"].startswith(b"redlease:")
            await asyncio.sleep(0.02)
            if turn == TURNS - 1:
                await raw.config_set("maxmemory", 0)
            pressure.fill()
        problems = [problem for task in playing for problem in await task]
    return problems, lost
