"""Workflows that use locks run without Redis, and over skipped time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from skipping_flows import Hours, Impatient, Reading, Writing, note
from temporalio.client import Client, WorkflowHandle
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from redlease_temporal._backends.redis import notifications, tracker
from redlease_temporal.testing import InMemoryPlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Permit
    from redlease_temporal._backends.redis.registry import TicketRecord

    from temporal_server import TemporalServer

WORKFLOWS = [Hours, Impatient, Reading, Writing]


@pytest.fixture
async def skipping(time_skipping: dict[str, Any], task_queue: str) -> AsyncIterator[Client]:
    """A client of a server that skips time, beside a worker."""
    async with (
        await WorkflowEnvironment.start_time_skipping(
            **time_skipping, plugins=[InMemoryPlugin(time_skipping=True)]
        ) as env,
        Worker(env.client, task_queue=task_queue, workflows=WORKFLOWS, activities=[note]),
    ):
        yield env.client


async def test_hours_pass_while_some_hold_and_others_wait(skipping: Client, task_queue: str) -> None:
    """Three holds of an hour each, one after the other, in no time: each waiter has the lock an hour later."""
    handles = [
        await skipping.start_workflow(Hours.run, id=f"{task_queue}-{number}", task_queue=task_queue)
        for number in range(3)
    ]
    # Time is skipped as soon as a result is waited for, over the first steps of the others too.
    for handle in handles:
        await _until_asked(handle)
    ends = sorted([(await handle.result())[1] for handle in handles])
    assert [later - sooner >= 3600 for sooner, later in pairwise(ends)] == [True, True]


async def tell_late(temporal: Client, record: TicketRecord, token: str, permit: Permit) -> None:
    """Tell of a grant after a while."""
    await asyncio.sleep(0.3)
    await notifications.notify_of_grant(temporal, record, token, permit)


async def test_no_time_is_skipped_between_a_release_and_the_next_grant(
    skipping: Client, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant that is told late is told before the workflow that released goes on, so nobody times out meanwhile."""
    monkeypatch.setattr(tracker, "notify_of_grant", tell_late)
    await test_hours_pass_while_some_hold_and_others_wait(skipping, task_queue)


async def _until_asked(handle: WorkflowHandle[Any, Any]) -> None:
    async def asked() -> bool:
        return len((await handle.fetch_history()).events) > len(("started", "scheduled", "started", "completed"))

    await eventually(asked)


async def test_no_time_is_skipped_between_a_downgrade_and_the_next_grant(
    skipping: Client, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that waits for a writer enters at its downgrade, though it is told late, not when the writer ends."""
    monkeypatch.setattr(tracker, "notify_of_grant", tell_late)
    writing = await skipping.start_workflow(Writing.run, id=f"{task_queue}-writing", task_queue=task_queue)
    await _until_asked(writing)
    reading = await skipping.start_workflow(Reading.run, id=f"{task_queue}-reading", task_queue=task_queue)
    await _until_asked(reading)
    assert await reading.result() == "held"
    await writing.result()


async def test_a_deadline_passes_in_skipped_time(skipping: Client, task_queue: str) -> None:
    """Who waits a minute for a hold of an hour times out, and is out of the queue."""
    holding = await skipping.start_workflow(Hours.run, id=f"{task_queue}-holding", task_queue=task_queue)
    impatient = await skipping.start_workflow(Impatient.run, id=f"{task_queue}-impatient", task_queue=task_queue)
    assert await impatient.result() == "timed out"
    await holding.result()
    again = await skipping.execute_workflow(Impatient.run, id=f"{task_queue}-again", task_queue=task_queue)
    assert again == "held"


async def test_the_engine_in_memory_serves_an_ordinary_server(temporal_server: TemporalServer, task_queue: str) -> None:
    """Waiting is by an activity there, and no Redis is needed either."""
    client = await Client.connect(temporal_server.address, plugins=[InMemoryPlugin()])
    async with Worker(client, task_queue=task_queue, workflows=[Impatient], activities=[note]):
        results = await asyncio.gather(
            *(
                client.execute_workflow(Impatient.run, id=f"{task_queue}-{number}", task_queue=task_queue)
                for number in range(5)
            )
        )
    assert results == ["held"] * 5
