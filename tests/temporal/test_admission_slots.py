"""Starts over the limit are refused without Redis too, by workflows whose IDs are the places."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from limited_flows import Job, ParentBySlots, Two, TwoBySlots
from temporal_tools import ENDINGS, WIDE, after_refusals, begun_for, end, ended, names_of, reset
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError
from temporalio.worker import Worker

from redlease_temporal import WorkflowConcurrencyLimitExceeded
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporal.conftest import StartWorkerProcess
    from temporal_server import TemporalServer

FREE_WITHIN = 3.0  # a second, and what a busy machine takes


class Starts:
    """What starts workflows of one test, of which two run at once."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self.client = client
        self.task_queue = task_queue

    async def start(self, name: str = "", how: str = "complete", **options: Any) -> WorkflowHandle[Any, str]:
        """Start one that ends in this way."""
        usual: dict[str, Any] = {"task_queue": self.task_queue, "task_timeout": timedelta(seconds=2)}
        handle: WorkflowHandle[Any, str] = await self.client.start_workflow(
            TwoBySlots.run,
            Job(self.task_queue, how),
            id=f"{self.task_queue}-{name or uuid.uuid4().hex}",
            **(usual | options),
        )
        return handle

    async def as_soon_as_can_be(self, count: int) -> tuple[float, list[WorkflowHandle[Any, str]]]:
        """Start so many, again and again while they are refused; return how long it took, and the workflows."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        started: list[WorkflowHandle[Any, str]] = []
        while len(started) < count:
            with contextlib.suppress(WorkflowConcurrencyLimitExceeded):
                started.append(await self.start())
        return loop.time() - began, started


@pytest.fixture
def plugin(prefix: str) -> RedleasePlugin:
    """A plugin without Redis."""
    return RedleasePlugin(prefix=prefix)


@pytest.fixture
async def client(temporal_server: TemporalServer, plugin: RedleasePlugin, task_queue: str) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    client = await Client.connect(temporal_server.address, plugins=[plugin])
    async with Worker(client, task_queue=task_queue, workflows=[TwoBySlots, ParentBySlots]):
        yield client


@pytest.fixture
def starts(client: Client, task_queue: str) -> Starts:
    """What starts workflows through it."""
    return Starts(client, task_queue)


@pytest.fixture
async def bypassing(temporal_server: TemporalServer, task_queue: str) -> Starts:
    """What starts workflows without the plugin."""
    return Starts(await Client.connect(temporal_server.address), task_queue)


async def begun(starts: Starts, ending: str) -> WorkflowHandle[Any, str]:
    """Start one that is to end in this way, and wait until it has its place."""
    handle = await starts.start(**begun_for(ending))
    await handle.execute_update(TwoBySlots.look)
    return handle


async def test_fifty_starts_at_once(starts: Starts) -> None:
    """Of fifty starts at once two run, and forty-eight are refused at once."""
    outcomes = await asyncio.gather(*(starts.start() for _ in range(50)), return_exceptions=True)
    running = [one for one in outcomes if isinstance(one, WorkflowHandle)]
    refused = [one for one in outcomes if isinstance(one, WorkflowConcurrencyLimitExceeded)]
    assert (len(running), len(refused)) == (2, 48)
    assert {(one.workflow_type, one.partition_key, one.limit) for one in refused} == {
        ("TwoBySlots", starts.task_queue, 2)
    }
    assert [(await one.describe()).status for one in running] == [WorkflowExecutionStatus.RUNNING] * 2
    await end(*running)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_ten_runs_end(starts: Starts, ending: str) -> None:
    """After each of ten runs that end in the same way its place is free within 1 s."""
    took = []
    for _ in range(5):
        handles = [await begun(starts, ending) for _ in range(2)]
        with pytest.raises(WorkflowConcurrencyLimitExceeded):
            await starts.start()
        await asyncio.gather(*(ended(handle, ending) for handle in handles))
        seconds, others = await starts.as_soon_as_can_be(2)
        took.append(seconds)
        await end(*others)
    assert max(took) < FREE_WITHIN, took


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_runs_end_after_their_worker_was_killed(
    temporal_server: TemporalServer,
    plugin: RedleasePlugin,
    task_queue: str,
    worker_process: StartWorkerProcess,
) -> None:
    """With the worker killed that began them, places are free within 1 s of their runs' ends too, however those end."""
    starts = Starts(await Client.connect(temporal_server.address, plugins=[plugin]), task_queue)
    worker = await worker_process("limited_flows", worker=WIDE)
    took = []
    for ending in ENDINGS:
        other = await worker_process("limited_flows", worker=WIDE)
        handles = [await begun(starts, ending) for _ in range(2)]
        worker.kill()
        await asyncio.gather(*(ended(handle, ending) for handle in handles))
        seconds, others = await starts.as_soon_as_can_be(2)
        took.append(seconds)
        await asyncio.gather(*(one.terminate() for one in others))
        worker = other
    assert max(took) < FREE_WITHIN, took


async def test_a_place_ends_by_itself(starts: Starts, client: Client) -> None:
    """The workflow that is a place ends some time after the one that has it, with nobody asking for a place."""
    handle = await starts.start()
    ids = [f"concurrency:TwoBySlots:{starts.task_queue}:{number}" for number in (0, 1)]
    (place,) = [place for place in map(client.get_workflow_handle, ids) if await is_known(place)]
    await eventually(lambda: has_chain(place))
    await end(handle)
    await asyncio.wait_for(place.result(), 10)
    # A busy machine may add a workflow task or two.
    assert len(await names_of(place)) <= 24


async def is_known(handle: WorkflowHandle[Any, Any]) -> bool:
    """Tell whether there is such a workflow."""
    with contextlib.suppress(RPCError):
        await handle.describe()
        return True
    return False


async def has_chain(place: WorkflowHandle[Any, Any]) -> bool:
    """Tell whether a place knows which runs have it."""
    return "chain" in await (await place.describe()).memo()


async def test_a_running_id_takes_no_place(starts: Starts) -> None:
    """A start of a running ID, with a signal or without, leaves the second place for another."""
    first = await starts.start("one")
    with pytest.raises(WorkflowAlreadyStartedError):
        await starts.start("one")
    second = await starts.start("two")
    await starts.start("one", start_signal="proceed")
    await first.result()
    await end(second, await starts.start("three"))


async def test_continued_and_reset(starts: Starts, client: Client) -> None:
    """A chain of runs keeps its one place, over a reset too, until the last is closed."""
    handle, other = await starts.start("one", "continue complete"), await starts.start("two")
    latest = client.get_workflow_handle(handle.id)
    before = await latest.execute_update(TwoBySlots.look)
    await latest.signal(TwoBySlots.proceed)
    await eventually(lambda: is_another(latest, before))
    await latest.execute_update(TwoBySlots.look)
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starts.start()
    run: WorkflowHandle[Any, Any] = client.get_workflow_handle(handle.id, run_id=(await latest.describe()).run_id)
    again = await reset(client, run, 0)
    await again.execute_update(TwoBySlots.look)
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starts.start()
    await again.terminate()
    third = await starts.start()
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starts.start()
    await end(other, third)


async def is_another(handle: WorkflowHandle[Any, Any], run_id: str) -> bool:
    """Tell whether the open run is another one."""
    return (await handle.describe()).run_id != run_id


async def test_an_id_is_used_again(starts: Starts) -> None:
    """A workflow that is started right after another of its ID was closed takes one place, not two."""
    for ending in ("terminated", "completed") * 3:
        handle = await starts.start("one")
        await handle.execute_update(TwoBySlots.look)
        await ended(handle, ending)
    handle, other = await starts.start("one"), await starts.start("two")
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starts.start()
    await end(handle, other)


async def test_a_run_is_replaced(starts: Starts, client: Client) -> None:
    """A start that terminates the running workflow of its ID has one place, which is its own."""
    other = await starts.start("other")
    handle = await starts.start("one")
    await eventually(lambda: has_place(client, starts, handle))
    again = await starts.start("one", id_conflict_policy=WorkflowIDConflictPolicy.TERMINATE_EXISTING)
    await again.execute_update(TwoBySlots.look)
    await eventually(lambda: has_place(client, starts, again))
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starts.start()
    await end(other, again)


async def has_place(client: Client, starts: Starts, handle: WorkflowHandle[Any, Any]) -> bool:
    """Tell whether there is an open place of just this chain of runs."""
    for number in (0, 1):
        place = client.get_workflow_handle(f"concurrency:TwoBySlots:{starts.task_queue}:{number}")
        with contextlib.suppress(RPCError):
            described = await place.describe()
            memo = await described.memo()
            running = described.status == WorkflowExecutionStatus.RUNNING
            if running and memo.get("chain") == handle.first_execution_run_id:
                return bool(memo["workflow_id"] == handle.id)
    return False


async def test_children(starts: Starts, client: Client, task_queue: str) -> None:
    """A parent that starts one child too many has the error at the start."""
    parent = await client.start_workflow(ParentBySlots.run, args=[task_queue, 5], id=task_queue, task_queue=task_queue)
    await parent.signal(ParentBySlots.proceed)
    assert await parent.result() == 2
    assert (await names_of(parent)).count("START_CHILD_WORKFLOW_EXECUTION_INITIATED") == 2
    seconds, others = await starts.as_soon_as_can_be(2)
    assert seconds < FREE_WITHIN
    await end(*others)


async def test_starts_that_bypass_the_plugin(starts: Starts, bypassing: Starts) -> None:
    """Of five starts by a client without the plugin two run, and three end at once as failed runs of their type."""
    handles = [await bypassing.start() for _ in range(5)]
    running, _ = await after_refusals(handles, 3)
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starts.start()
    await end(*running)


async def test_redis_is_needed_where_it_was_asked_for(client: Client, task_queue: str) -> None:
    """A client whose plugin has no Redis says so at the start of a workflow that needs it."""
    with pytest.raises(ValueError, match="needs Redis"):
        await client.start_workflow(Two.run, Job(), id=task_queue, task_queue=task_queue)


async def test_a_start_that_never_left_this_process(starts: Starts) -> None:
    """Starts whose arguments cannot be encoded take no place from those that come after them."""
    for _ in range(2):
        with pytest.raises(TypeError):
            await starts.start(memo={"not to be encoded": object()})
    await end(await starts.start(), await starts.start())


@pytest.mark.parametrize("name", ["x" * 900, "\u6f22" * 300, "a b:{c}/\n*?"])
async def test_ids_of_any_kind(starts: Starts, name: str) -> None:
    """A workflow with a long or odd ID has its place, and gives it back."""
    first = await starts.start(name)
    second = await starts.start()
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starts.start()
    await end(first)
    _, (third,) = await starts.as_soon_as_can_be(1)
    await end(second, third)
