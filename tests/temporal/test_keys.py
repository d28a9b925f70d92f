"""Two services with one codec class and different keys, on one namespace, Redis and prefix, and a real server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from keyed import keyed
from lock_flows import Plain, plain
from temporal_tools import WIDE, Place, tasks_that_failed
from temporalio.client import Client
from temporalio.worker import Worker
from waiting_flows import Wait, Waiter

from helpers import until_waiting

if TYPE_CHECKING:
    from redlease import Semaphore

    from temporal.conftest import StartWorkerProcess

OTHERS_TAKE_OVER_IN = 5.0  # a relay lives for three seconds without a beat


@pytest.mark.timeout(120)
async def test_a_dead_process_leaves_its_waiter_to_its_own_service(
    place: Place, pool: Semaphore, worker_process: StartWorkerProcess
) -> None:
    """The other service's relay completes nothing; a new process of the first goes on with what the dead one had."""
    starter = await Client.connect(place.address, data_converter=keyed("one"))
    other = await place.client(data_converter=keyed("two"))
    async with Worker(other, task_queue=f"{place.task_queue}-two", workflows=[Plain], activities=[plain]):
        permit = await pool.acquire()
        first = await worker_process("waiting_flows", key="one", worker=WIDE)
        handle = await starter.start_workflow(Waiter.run, Wait("r"), id=place.task_queue, task_queue=place.task_queue)
        await until_waiting(pool, 1, 15)
        first.kill()
        await first.ended()
        await pool.release(permit)
        await asyncio.sleep(OTHERS_TAKE_OVER_IN)
        await worker_process("waiting_flows", key="one", worker=WIDE)
        async with asyncio.timeout(40):
            assert (await handle.result()).what == "held"
    assert await tasks_that_failed(handle) == []
