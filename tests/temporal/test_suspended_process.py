"""A process that stands still for longer than everything lasts, and goes on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.client import Client
from waiting_flows import Wait, Waiter

from helpers import until_waiting

if TYPE_CHECKING:
    from conftest import MakeClient
    from temporal.conftest import StartWorkerProcess


@pytest.mark.timeout(120)
async def test_what_others_have_seen_to_is_not_asked_for_again(
    temporal_client: Client,
    worker_process: StartWorkerProcess,
    make_client: MakeClient,
    redis_url: str,
    task_queue: str,
) -> None:
    """A workflow that another relay has served to its end does not wait once more when its first one goes on."""
    service = await make_client(url=redis_url)
    few = {"max_concurrent_workflow_task_polls": 2, "max_concurrent_activity_task_polls": 1}
    config: dict[str, Any] = {
        "plugin": {"waiter_lease": 1},
        "worker": {"sticky_queue_schedule_to_start_timeout": 1} | few,
    }
    stopped = await worker_process("waiting_flows", **config)
    pool = service.lock("r")
    permit = await pool.acquire()
    handle = await temporal_client.start_workflow(
        Waiter.run, Wait("r", lease=3), id=f"{task_queue}-waits", task_queue=task_queue
    )
    await until_waiting(pool, 1)
    await worker_process("waiting_flows", **config)
    stopped.pause()
    await pool.release(permit)
    async with asyncio.timeout(50):  # a task that the server gives to the stopped one comes again after ten seconds
        assert (await handle.result()).what == "held"
    await asyncio.sleep(3.5)  # past a lease, for which it is remembered that the request is over
    stopped.resume()
    for _ in range(20):
        permit = await pool.acquire(timeout=2)
        assert await pool.release(permit)
        await asyncio.sleep(0.1)
