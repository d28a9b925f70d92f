"""Activities in threads, in which the SDK raises an exception when they are cancelled."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from temporalio.client import WorkflowFailureError
from temporalio.worker import Worker
from threaded_flows import Holding, Threaded

from redlease.sync import Redlease

from helpers import eventually

if TYPE_CHECKING:
    from temporalio.client import Client, WorkflowHandle


async def test_cancelled_activities_leave_neither_permits_nor_places(
    temporal_client: Client, redis_url: str, task_queue: str, prefix: str
) -> None:
    """Of twelve in threads one holds and the others wait; each ends within two seconds, and the pool is free."""
    with Redlease.from_url(redis_url, prefix=prefix) as client, ThreadPoolExecutor(12) as threads:
        pool = client.semaphore("pool", 1)
        holding = Holding(pool)
        worker = Worker(
            temporal_client,
            task_queue=task_queue,
            workflows=[Threaded],
            activities=[holding.hold],
            activity_executor=threads,
            max_heartbeat_throttle_interval=timedelta(seconds=0.2),  # so soon it hears that it is cancelled
        )

        async def found(holders: int, waiters: int) -> bool:
            snapshot = await asyncio.to_thread(pool.inspect)
            return (len(snapshot.holders), len(snapshot.waiters)) == (holders, waiters)

        async with worker:
            handles: list[WorkflowHandle[Any, None]] = []
            for number in range(12):
                started = await temporal_client.start_workflow(Threaded.run, id=uuid4().hex, task_queue=task_queue)
                handles.append(started)
                await eventually(partial(found, 1, number))
            for handle in reversed(handles):  # the holder last
                await handle.cancel()
                with pytest.raises(WorkflowFailureError):
                    await asyncio.wait_for(handle.result(), 10)
        assert len(holding.ended_after) == 12
        assert max(holding.ended_after) < 2
        assert await found(0, 0)
