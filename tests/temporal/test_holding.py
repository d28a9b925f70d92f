"""Holds of workflows, on a live server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from lock_flows import Chain, Locked, Plain, Sleeper, Unlocked, Use, plain, work
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowHandle
from temporalio.worker import Worker

from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporal_server import TemporalServer

WORKFLOWS = [Chain, Locked, Plain, Sleeper, Unlocked]


@pytest.fixture
async def client(
    temporal_server: TemporalServer, task_queue: str, redis_url: str, prefix: str
) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker for all workflows."""
    client = await Client.connect(temporal_server.address, plugins=[RedleasePlugin(redis_url, prefix=prefix)])
    async with Worker(client, task_queue=task_queue, workflows=WORKFLOWS, activities=[work, plain]):
        yield client


async def events_of(client: Client, workflow_id: str) -> list[str]:
    """Return the types of the events in a workflow's history."""
    history = await client.get_workflow_handle(workflow_id).fetch_history()
    return [EventType.Name(event.event_type).removeprefix("EVENT_TYPE_") for event in history.events]


async def test_an_uncontended_hold_adds_few_events(client: Client, task_queue: str) -> None:
    """A hold around one activity adds at most four events to the same workflow without a lock."""
    use = Use("r")
    await client.execute_workflow(Unlocked.run, use, id=f"{task_queue}-without", task_queue=task_queue)
    await client.execute_workflow(Locked.run, use, id=f"{task_queue}-with", task_queue=task_queue)
    without = await events_of(client, f"{task_queue}-without")
    with_lock = await events_of(client, f"{task_queue}-with")
    assert len(with_lock) - len(without) <= 4, with_lock


async def test_no_more_than_the_capacity_work_at_once(client: Client, task_queue: str) -> None:
    """Workflows get the permits in the order of arrival, with growing fences."""
    use = Use("r", capacity=2, seconds=0.1)
    results = await asyncio.gather(
        *(
            client.execute_workflow(Locked.run, use, id=f"{task_queue}-{number}", task_queue=task_queue)
            for number in range(6)
        )
    )
    assert len({fence for fences in results for fence in fences}) == 6


async def test_a_permit_goes_from_run_to_run(client: Client, task_queue: str) -> None:
    """What is detached before continue-as-new is adopted by the next run with its fence."""
    use = Use("r", rounds=3)
    fences = await client.execute_workflow(Chain.run, args=[use, None, []], id=task_queue, task_queue=task_queue)
    assert len(fences) == 3
    assert len(set(fences)) == 1


async def test_holds_outlive_the_workers_memory(
    temporal_server: TemporalServer, task_queue: str, redis_url: str, prefix: str
) -> None:
    """Runs that are taken out of the cache while they hold or wait neither release nor lose their place."""
    client = await Client.connect(temporal_server.address, plugins=[RedleasePlugin(redis_url, prefix=prefix)])
    async with Worker(
        client, task_queue=task_queue, workflows=WORKFLOWS, activities=[work, plain], max_cached_workflows=1
    ):
        handles = [
            await client.start_workflow(
                Sleeper.run, Use("r", capacity=2, lease=2.0), id=f"{task_queue}-{number}", task_queue=task_queue
            )
            for number in range(4)
        ]
        fences: list[int] = []
        for _ in range(4):
            held = await eventually(lambda: _holding(handles), within=10)
            if not fences:
                await asyncio.sleep(2.5)  # longer than the lease
            fences.append(await held.query(Sleeper.held))
            await held.signal(Sleeper.proceed)
            assert await held.result() == f"kept {fences[-1]}"
            handles.remove(held)
    assert len(set(fences)) == 4


async def _holding(handles: list[WorkflowHandle[Any, str]]) -> WorkflowHandle[Any, str] | None:
    for handle in handles:
        if await handle.query(Sleeper.held):
            return handle
    return None
