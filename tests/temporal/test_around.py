"""What workflow code may do around a hold, and with names and tickets of its own."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from around_flows import Grouped, Repeated, Ticketed, TimedOut
from lock_flows import Sleeper, Use, work
from temporal_tools import Place, names_of, nobody_waits
from temporalio.client import Client, WorkflowHandle

from redlease import Redlease

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quiet import Quiet


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    async with place.serving([Grouped, Repeated, Sleeper, Ticketed, TimedOut], [work]) as client:
        yield client


@pytest.mark.parametrize("name", ['a "name"', "back\\slash", "two\nlines", "tab\t\x01", "Straße {1} 🔒"])
async def test_any_name_is_kept(client: Client, task_queue: str, outside: Redlease, name: str) -> None:
    """A hold granted at once is found in the history, however the resource's name is written there, and renewed."""
    handle = await client.start_workflow(Sleeper.run, Use(name, lease=1.0), id=task_queue, task_queue=task_queue)
    pool = outside.lock(name)
    await eventually(pool.locked)
    first = (await pool.inspect()).fence
    await asyncio.sleep(2.5)
    assert [permit.fence for permit in (await pool.inspect()).holders] == [first]
    await handle.signal(Sleeper.proceed)
    assert await handle.result() == f"kept {first}"


async def test_a_timeout_of_asyncio_ends_the_wait(client: Client, task_queue: str, outside: Redlease) -> None:
    """`asyncio.timeout` around a hold that waits raises TimeoutError, and the request leaves the queue."""
    async with outside.lock("r"):
        result = await client.execute_workflow(TimedOut.run, id=task_queue, task_queue=task_queue)
        assert result == "timed out"
        await eventually(lambda: nobody_waits(outside.lock("r")))


async def test_a_task_group_ends_the_wait(client: Client, task_queue: str, outside: Redlease) -> None:
    """A sibling's error cancels the task that waits, and no other error comes of that."""
    async with outside.lock("r"):
        result = await client.execute_workflow(Grouped.run, id=task_queue, task_queue=task_queue)
        assert result == "as asked"
        await eventually(lambda: nobody_waits(outside.lock("r")))


async def test_a_workflow_task_that_is_done_again_acquires_again(client: Client, task_queue: str, quiet: Quiet) -> None:
    """What it released before it failed does not stand in its way, however often that happens."""
    quiet.expect("as asked")
    quiet.allow("Failed activation|Failing workflow task|workflow task")
    result = await client.execute_workflow(Repeated.run, 2, id=task_queue, task_queue=task_queue)
    assert result == 3


async def test_two_workflows_wait_with_one_ticket(client: Client, task_queue: str, outside: Redlease) -> None:
    """They have one place in the queue, and neither is forgotten when the other has had its turn."""
    async with outside.lock("r"):
        handles = [await _ticketed(client, task_queue, number, 0.1) for number in range(2)]
        for handle in handles:
            await eventually(partial(_waits, handle))
        await until_waiting(outside.lock("r"), 1)
    results = await asyncio.wait_for(asyncio.gather(*(handle.result() for handle in handles)), 20)
    assert "kept" in results
    await eventually(lambda: _is_free(outside))


async def test_the_other_holder_of_a_ticket_is_told_when_it_is_released(
    client: Client, task_queue: str, outside: Redlease
) -> None:
    """One ticket is one permit: who still holds it when it is given back has lost it."""
    shorter = await _ticketed(client, task_queue, 0, 3.0)
    longer = await _ticketed(client, task_queue, 1, 30.0)
    assert await shorter.result() == "kept"
    assert await asyncio.wait_for(longer.result(), 10) == "lost"
    await eventually(lambda: _is_free(outside))


async def _ticketed(client: Client, queue: str, number: int, seconds: float) -> WorkflowHandle[Any, str]:
    return await client.start_workflow(Ticketed.run, seconds, id=f"{queue}-{number}", task_queue=queue)


async def _waits(handle: WorkflowHandle[Any, Any]) -> bool:
    return "ACTIVITY_TASK_SCHEDULED" in await names_of(handle)


async def _is_free(outside: Redlease) -> bool:
    snapshot = await outside.lock("r").inspect()
    return not snapshot.holders and not snapshot.waiters
