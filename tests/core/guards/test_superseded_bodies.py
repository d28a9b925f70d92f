"""A thousand holders are replaced by newer requests: each body is cancelled, and what it writes late is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease import LeaseLost, StaleFence

if TYPE_CHECKING:
    from redlease import Hold

    from conftest import MakeClient
    from servers import Server

TIMES = 1000


class Bodies:
    """Bodies under one lock, each of which writes late, after the next one has begun."""

    def __init__(self, lock: Any, guard: Any) -> None:
        self._lock = lock
        self._guard = guard
        self._began = asyncio.Event()
        self.inside = self.inside_most = self.cancelled = self.lost = self.refused = 0
        self.fences: list[int] = []

    async def start(self) -> asyncio.Task[None]:
        """Start one in place of the one that holds; return when it is inside and has written."""
        self._began = asyncio.Event()
        task = asyncio.create_task(self._run())
        await self._began.wait()
        return task

    async def _run(self) -> None:
        try:
            async with self._lock.hold(when_full="replace-holder", grace=60) as hold:
                await self._body(hold)
        except LeaseLost as lost:
            self.lost += "the newer request" in str(lost)

    async def _body(self, hold: Hold) -> None:
        self.inside += 1
        self.inside_most = max(self.inside, self.inside_most)
        self.fences.append(hold.fence)
        await self._guard.check(hold.fence)
        self._began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1

    async def write_late(self, fence: int) -> None:
        """Write as a body that was replaced."""
        try:
            await self._guard.check(fence)
        except StaleFence:
            self.refused += 1


@pytest.mark.slow
async def test_a_thousand_superseded_bodies(make_client: MakeClient, server: Server) -> None:
    """A thousand of a thousand are cancelled and told by whom, never two are inside, and no late write is taken."""
    client, other = await make_client(url=server.url), await make_client(url=server.url)
    guard = client.guard("ledger")
    # In turns of two clients: the message about the older one comes over another connection than the newer's grant.
    bodies = [Bodies(each.lock("r"), guard) for each in (client, other)]
    tasks = [await bodies[0].start()]
    for number in range(1, TIMES + 1):
        before = bodies[(number - 1) % 2].fences[-1]
        tasks.append(await bodies[number % 2].start())
        await bodies[(number - 1) % 2].write_late(before)
        assert sum(each.inside for each in bodies) == 1
    await asyncio.gather(*tasks[:-1])
    tasks[-1].cancel()
    await asyncio.gather(tasks[-1], return_exceptions=True)
    assert sum(each.cancelled for each in bodies) == TIMES + 1  # the last one by this test
    assert sum(each.lost for each in bodies) == TIMES
    assert sum(each.refused for each in bodies) == TIMES
    assert max(each.inside_most for each in bodies) == 1
