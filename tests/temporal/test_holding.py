"""Holds of workflows, on a live server."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from backend_flows import Consumer, Inside, On, guarded
from lock_flows import Chain, Locked, Plain, Sleeper, Unlocked, Use, plain, work
from temporal_tools import Place, names_of
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.client import Client, WorkflowHandle
from temporalio.converter import DataConverter
from temporalio.runtime import MetricBuffer, Runtime, TelemetryConfig
from temporalio.worker import Worker

from redlease import Permit, Redlease, Semaphore

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quiet import Quiet


WORKFLOWS = [Chain, Consumer, Locked, Plain, Sleeper, Unlocked]
ACTIVITIES = [work, plain, guarded]


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker for all workflows."""
    async with place.serving(WORKFLOWS, ACTIVITIES) as client:
        yield client


async def test_an_uncontended_hold_adds_few_events(client: Client, task_queue: str) -> None:
    """A hold around one activity adds at most four events to the same workflow without a lock."""
    use = Use("r")
    await client.execute_workflow(Unlocked.run, use, id=f"{task_queue}-without", task_queue=task_queue)
    await client.execute_workflow(Locked.run, use, id=f"{task_queue}-with", task_queue=task_queue)
    without = await names_of(client.get_workflow_handle(f"{task_queue}-without"))
    with_lock = await names_of(client.get_workflow_handle(f"{task_queue}-with"))
    assert len(with_lock) - len(without) <= 4, with_lock


async def test_no_more_than_the_capacity_work_at_once(client: Client, task_queue: str, outside: Redlease) -> None:
    """Workflows get the permits in the order of arrival, and as many as the capacity work at one time."""
    pool = outside.semaphore("r", capacity=2)
    Inside.most = 0
    async with pool.hold(weight=2):
        handles = []
        for number in range(6):
            handles.append(
                await client.start_workflow(
                    Consumer.run,
                    args=[On("redis", "r", capacity=2), 0.3],
                    id=f"{task_queue}-{number}",
                    task_queue=task_queue,
                )
            )
            await until_waiting(pool, number + 1)
    fences = [await handle.result() for handle in handles]
    assert fences == sorted(set(fences))
    assert Inside.most == 2


async def test_a_permit_goes_from_run_to_run(client: Client, task_queue: str) -> None:
    """What is detached before continue-as-new is adopted by the next run with its fence."""
    use = Use("r", rounds=3)
    fences = await client.execute_workflow(Chain.run, args=[use, None, []], id=task_queue, task_queue=task_queue)
    assert len(fences) == 3
    assert len(set(fences)) == 1


async def test_holds_outlive_the_workers_memory(place: Place, task_queue: str, quiet: Quiet) -> None:
    """Runs that are taken out of the cache while they hold or wait neither release nor lose their place."""
    # Of a run that it takes out, the SDK's core may want a local activity cancelled that has just ended.
    quiet.allow("Cannot find activity to cancel")
    async with place.serving(WORKFLOWS, ACTIVITIES, worker={"max_cached_workflows": 1}) as client:
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


async def test_metrics_of_workflows(place: Place, task_queue: str, outside: Redlease) -> None:
    """Each grant, wait, hold and loss is recorded once, however often the run is replayed, with a label of it."""
    buffer = MetricBuffer(10_000)
    runtime = Runtime(telemetry=TelemetryConfig(metrics=buffer))
    plugin = place.plugin(resource_label=lambda name: name.partition(":")[0])
    client = await place.client(runtime=runtime, plugins=[plugin])
    # Without a cache each task of a run replays what was before it.
    async with Worker(
        client, task_queue=task_queue, workflows=[Locked, Sleeper], activities=[work], max_cached_workflows=0
    ):
        use = Use("r:1", rounds=3)
        await client.execute_workflow(Locked.run, use, id=task_queue, task_queue=task_queue)
        losing = await client.start_workflow(Sleeper.run, use, id=f"{task_queue}-lost", task_queue=task_queue)
        lock = outside.lock("r:1")

        async def its_permit() -> Permit | None:
            return next((each for each in (await lock.inspect()).holders if each.owner == losing.id), None)

        await eventually(its_permit)
        permit = await its_permit()
        assert permit is not None
        await lock.release(permit.ticket)
        assert await losing.result() == "lost"
    updates = [update for update in buffer.retrieve_updates() if update.metric.name.startswith("redlease_")]
    found = Counter(update.metric.name for update in updates)
    grants, losses = "redlease_grants_total", "redlease_losses_total"
    waits, holds = "redlease_wait_duration_seconds", "redlease_hold_duration_seconds"
    assert found == {grants: 4, waits: 4, holds: 4, losses: 1}
    assert {update.attributes["redlease_resource"] for update in updates} == {"r"}
    assert all(0 <= update.value < 30 for update in updates)


async def test_a_waiting_workflow_shows_its_place(client: Client, task_queue: str, pool: Semaphore) -> None:
    """The pending activity of the second in the queue says so in its summary."""
    async with pool:
        handles = []
        for number in range(2):
            handle = await client.start_workflow(
                Locked.run, Use("r"), id=f"{task_queue}-{number}", task_queue=task_queue
            )
            await until_waiting(pool, number + 1)
            handles.append(handle)
        shown = [await _summary(handle) for handle in handles]
    assert shown == ["waiting for r, place 1", "waiting for r, place 2"]
    await asyncio.gather(*(handle.result() for handle in handles))


async def _summary(handle: WorkflowHandle[Any, Any]) -> str:
    """Return the summary of a workflow's first activity, once there is one."""

    async def scheduled() -> HistoryEvent | None:
        events = (await handle.fetch_history()).events
        kind = EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED
        return next((event for event in events if event.event_type == kind), None)

    event: HistoryEvent = await eventually(scheduled)
    return DataConverter.default.payload_converter.from_payload(event.user_metadata.summary, str)
