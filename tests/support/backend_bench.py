"""A resource on some backend, and the workflows that tests let use it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from awkward_flows import Twice
from backend_flows import WORKFLOWS, Actor, Consumer, Holder, Inside, On, guarded
from temporalio.client import Client, WorkflowUpdateFailedError
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from temporalio.client import WorkflowHandle

    from redlease import Permit, Snapshot

    from temporal_server import TemporalServer


class Bench:
    """One resource, and the workflows that use it."""

    def __init__(self, client: Client, task_queue: str, backend: str) -> None:
        self.client = client
        self.queue = task_queue
        self.on = On(backend, f"{task_queue}-r", lease=5.0)
        self._started = 0

    async def actor(self) -> WorkflowHandle[Any, Any]:
        """Start a workflow that does what it is told to."""
        return await self.start(Actor.run, self.on)

    async def holder(self, how: str = "complete", permit: Permit | None = None, **on: Any) -> WorkflowHandle[Any, Any]:
        """Start a workflow that holds, what it acquires or a permit that it adopts."""
        return await self.start(Holder.run, On(**(vars(self.on) | on)), how, permit)

    async def consume(self, seconds: float, **on: Any) -> int:
        """Run one guarded activity in a hold; returns the fence."""
        handle = await self.start(Consumer.run, On(**(vars(self.on) | on)), seconds)
        fence: int = await handle.result()
        return fence

    async def start(self, run: Any, *args: Any) -> WorkflowHandle[Any, Any]:
        """Start a workflow."""
        self._started += 1
        return await self.client.start_workflow(
            run, args=list(args), id=f"{self.queue}-{self._started}", task_queue=self.queue
        )

    async def do(self, actor: WorkflowHandle[Any, Any], update: Any, *args: Any, **on: Any) -> Any:
        """Let an actor do one thing."""
        return await actor.execute_update(update, args=[On(**(vars(self.on) | on)), *args])

    async def failing(self, actor: WorkflowHandle[Any, Any], update: Any, *args: Any, **on: Any) -> str:
        """Let it do something that is refused; returns the name of the error."""
        with pytest.raises(WorkflowUpdateFailedError) as raised:
            await self.do(actor, update, *args, **on)
        assert isinstance(raised.value.cause, ApplicationError)
        return raised.value.cause.type or ""

    async def seen(self, actor: WorkflowHandle[Any, Any], **on: Any) -> Snapshot:
        """Look at the resource."""
        snapshot: Snapshot = await self.do(actor, Actor.inspect, **on)
        return snapshot

    async def until_waiting(self, actor: WorkflowHandle[Any, Any], count: int, **on: Any) -> None:
        """Return when so many wait."""

        async def so_many() -> bool:
            return len((await self.seen(actor, **on)).waiters) == count

        await eventually(so_many, 60)

    async def makespan_within(self, most: float) -> None:
        """See eight consumers of 200 ms at three at a time take no longer than so much of the ideal 0.6 s.

        That is the best of six times. What a busy machine takes for the same without a lock, it may take here too.
        """
        await self.consume(0.0, capacity=3)
        await asyncio.gather(*(self.consume(0.0, backend="") for _ in range(8)))
        seen = []
        for _ in range(6):
            alone = await timed(*(self.consume(0.2, backend="") for _ in range(8)))
            Inside.most = 0
            spent = await timed(*(self.consume(0.2, capacity=3) for _ in range(8)))
            assert Inside.most <= 3
            slowed = max(1.0, alone / 0.3)
            seen.append(f"{spent:.2f} s, and {alone:.2f} s without a lock")
            if Inside.most == 3 and spent <= most * 0.6 * slowed:
                return
        pytest.fail("; ".join(seen))


@contextlib.asynccontextmanager
async def without_redis(server: TemporalServer, task_queue: str, prefix: str, *more: type) -> AsyncIterator[Client]:
    """Run a worker for all workflows here and `more`, whose plugin has no Redis; yields its client."""
    client = await Client.connect(server.address, plugins=[RedleasePlugin(prefix=prefix)])
    async with Worker(client, task_queue=task_queue, workflows=[*WORKFLOWS, Twice, *more], activities=[guarded]):
        yield client


async def timed(*work: Awaitable[object]) -> float:
    """Return how long all of it took together, in seconds."""
    began = asyncio.get_running_loop().time()
    await asyncio.gather(*work)
    return asyncio.get_running_loop().time() - began
