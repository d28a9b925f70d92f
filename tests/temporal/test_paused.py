"""Runs that are paused, which are open, in a state that the SDK cannot name: they keep what they hold, as others do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from backend_bench import Bench
from backend_flows import WORKFLOWS, Actor, Asking, Holder, guarded
from google.protobuf.timestamp_pb2 import Timestamp
from limited_flows import Job, Two, TwoBySlots
from temporal_tools import Place, pause, unpause
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflow.v1 import WorkflowExecutionInfo
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionResponse,
    PauseActivityRequest,
)
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle, WorkflowQueryRejectedError

from redlease_temporal import Unavailable, WorkflowConcurrencyLimitExceeded
from redlease_temporal._backends.coordinator.activities import StatusActivities
from redlease_temporal._common.descriptions import CLOSED, PAUSED, Description, describe, refused_in
from redlease_temporal._common.run_monitor import RunMonitor, RunState, RunStatus
from redlease_temporal._payloads.coordinator import RunToPoll
from redlease_temporal._payloads.slots import MARGIN
from redlease_temporal.sequence_client import Sequence

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Permit

    from quiet import Quiet

LEASE = 2.0
SERVED_WITHIN = 3.0  # of the end of a run for whose permit somebody waits: a second, and what a busy machine takes

BACKENDS = ["redis", "slots", "coordinator"]
KEEPERS = {"slots": "permit:{}:0", "coordinator": "lock:{}"}
LIMITED = {"redis": Two, "slots": TwoBySlots}


@pytest.fixture
async def client(pausing_place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker for all workflows."""
    async with pausing_place.serving([*WORKFLOWS, Two, TwoBySlots], [guarded]) as client:
        yield client


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, client: Client, task_queue: str) -> Bench:
    """A resource of its own on each backend."""
    return Bench(client, task_queue, str(request.param))


async def holding(bench: Bench, **on: Any) -> tuple[WorkflowHandle[Any, Any], int]:
    """Start a workflow that holds; returns it and its fence."""
    handle = await bench.holder(**{"lease": LEASE} | on)
    return handle, await handle.execute_update(Holder.until_held)


async def go_on(handle: WorkflowHandle[Any, Any]) -> Any:
    """Let a holder end; returns what it says."""
    await handle.signal(Holder.proceed)
    return await handle.result()


async def test_a_paused_holder_keeps_its_permit(bench: Bench) -> None:
    """Nobody else gets it, for several leases; its fence stays; and when it goes on it still holds.

    The pause outlasts the looks at the run, and the time at which the server would end a slot that nobody extends.
    """
    actor = await bench.actor()
    paused, fence = await holding(bench)
    await pause(bench.client, paused)
    pause_s = LEASE * 3 + (MARGIN.total_seconds() if bench.on.backend == "slots" else 0.0)
    for _ in range(int(pause_s * 2)):
        await asyncio.sleep(0.5)
        assert [held.fence for held in (await bench.seen(actor, lease=LEASE)).holders] == [fence]
        assert await bench.do(actor, Actor.try_acquire, Asking(), lease=LEASE) is None
    await unpause(bench.client, paused)
    assert await go_on(paused) == f"held {fence}"


async def test_who_waits_is_served_beside_a_paused_holder(bench: Bench) -> None:
    """One holder is paused and another one terminated, whose permit goes to who waits; so does the next one's."""
    actor = await bench.actor()
    paused, fence = await holding(bench, capacity=2)
    other, _ = await holding(bench, capacity=2)
    await pause(bench.client, paused)
    await asyncio.sleep(LEASE)  # in which the paused run is looked at
    for _ in range(2):
        waiter = await bench.holder(lease=LEASE, capacity=2)
        await bench.until_waiting(actor, 1, capacity=2)
        await other.terminate()
        await asyncio.wait_for(waiter.execute_update(Holder.until_held), SERVED_WITHIN)
        other = waiter
    held = (await bench.seen(actor, lease=LEASE, capacity=2)).holders
    assert fence in {permit.fence for permit in held}
    assert len(held) == 2
    await go_on(other)
    await unpause(bench.client, paused)
    assert await go_on(paused) == f"held {fence}"


async def test_the_permit_of_a_run_that_is_terminated_in_its_pause_is_free(bench: Bench) -> None:
    """A pause is no state that a run cannot be ended in."""
    actor = await bench.actor()
    paused, _ = await holding(bench)
    await pause(bench.client, paused)
    waiter = await bench.holder(lease=LEASE)
    await bench.until_waiting(actor, 1)
    await asyncio.sleep(LEASE)
    await paused.terminate()
    await asyncio.wait_for(waiter.execute_update(Holder.until_held), SERVED_WITHIN)
    assert (await go_on(waiter)).startswith("held")


async def test_the_permit_of_a_paused_run_is_released_by_its_ticket(bench: Bench) -> None:
    """An administrator lets the others go on; the run learns of it as soon as it goes on itself, and ends."""
    actor = await bench.actor()
    paused, fence = await holding(bench)
    await pause(bench.client, paused)
    (held,) = (await bench.seen(actor, lease=LEASE)).holders
    assert held.owner == paused.id
    assert await bench.do(actor, Actor.release_ticket, held.ticket, lease=LEASE)
    other, later = await holding(bench)
    assert later > fence
    await unpause(bench.client, paused)
    assert await paused.result() == "lost"
    assert await go_on(other) == f"held {later}"


async def test_max_hold_bounds_a_pause(bench: Bench) -> None:
    """The permit of a paused run is renewed no longer than that of any other."""
    paused, fence = await holding(bench, max_hold=2 * LEASE)
    await pause(bench.client, paused)
    other = await bench.holder(lease=LEASE)
    assert await asyncio.wait_for(other.execute_update(Holder.until_held), 3 * LEASE + SERVED_WITHIN) > fence
    await unpause(bench.client, paused)
    assert await paused.result() == "lost"
    assert (await go_on(other)).startswith("held")


async def test_a_paused_waiter_goes_on_where_it_was(bench: Bench) -> None:
    """A paused run keeps its place in the queue, has the permit when it goes on, and nobody gets it twice."""
    actor = await bench.actor()
    first: Permit = await bench.do(actor, Actor.acquire, Asking(), lease=60.0)
    waiter = await bench.holder(lease=LEASE)
    await bench.until_waiting(actor, 1)
    await pause(bench.client, waiter)
    await bench.do(actor, Actor.release, first)
    await asyncio.sleep(LEASE * 2)
    await unpause(bench.client, waiter)
    fence = await asyncio.wait_for(waiter.execute_update(Holder.until_held), SERVED_WITHIN + 5.0)
    assert fence > first.fence
    assert await go_on(waiter) == f"held {fence}"


@pytest.mark.parametrize("backend", LIMITED)
async def test_a_paused_run_keeps_its_place(client: Client, task_queue: str, prefix: str, backend: str) -> None:
    """Starts over the limit are refused as ever, one of its own ID finds it, and places of others come free."""
    limited: Any = LIMITED[backend]

    async def start(name: str) -> WorkflowHandle[Any, Any]:
        return await client.start_workflow(limited.run, Job(prefix), id=f"{task_queue}-{name}", task_queue=task_queue)

    async def is_refused() -> bool:
        try:
            await start("third")
        except WorkflowConcurrencyLimitExceeded:
            return True
        return False

    paused, other = await start("paused"), await start("other")
    await pause(client, paused)
    assert await is_refused()
    await asyncio.sleep(3.0)  # in which both are looked at
    assert await is_refused()
    await other.terminate()
    await eventually(lambda: starts(start), within=10)
    assert await is_refused()
    await unpause(client, paused)
    await paused.signal("proceed")
    assert await paused.result() == "complete"


async def starts(start: Any) -> bool:
    """Tell whether another one can be started now."""
    try:
        await start("fourth")
    except WorkflowConcurrencyLimitExceeded:
        return False
    return True


@pytest.mark.parametrize("backend", KEEPERS)
async def test_a_paused_keeper_says_so(client: Client, task_queue: str, backend: str) -> None:
    """What keeps a resource is a workflow too: paused it gives nothing away and answers nothing, which is told."""
    bench = Bench(client, task_queue, backend)
    actor = await bench.actor()
    held, fence = await holding(bench, lease=30.0)
    keeper = client.get_workflow_handle(KEEPERS[backend].format(bench.on.resource))
    await pause(client, keeper)
    assert await bench.failing(actor, Actor.inspect) == "Unavailable"
    if backend == "slots":
        assert await bench.do(actor, Actor.try_acquire, Asking()) is None
    await unpause(client, keeper)
    assert [permit.fence for permit in (await bench.seen(actor)).holders] == [fence]
    assert await go_on(held) == f"held {fence}"


async def test_a_slot_that_is_paused_for_long_is_ended(client: Client, task_queue: str) -> None:
    """The server ends it, as one whose workers are away; its holder is told."""
    bench = Bench(client, task_queue, "slots")
    held, fence = await holding(bench)
    await pause(client, client.get_workflow_handle(KEEPERS["slots"].format(bench.on.resource)))
    other = await bench.holder(lease=LEASE)
    within = LEASE + MARGIN.total_seconds() + 20.0  # it asks again by itself
    assert await asyncio.wait_for(other.execute_update(Holder.until_held), within) > fence
    assert await held.result() == "lost"
    assert (await go_on(other)).startswith("held")


async def test_a_paused_sequence_says_so(client: Client, task_queue: str) -> None:
    """Its progress is not to be had, and the error says why."""
    sequence = Sequence(client, task_queue, "nowhere", task_queue="nowhere", start_to_close_timeout=5)
    handle = await sequence.start([1])
    await pause(client, handle)
    with pytest.raises(Unavailable, match="paused"):
        await sequence.progress()
    await unpause(client, handle)
    assert (await sequence.progress()).resource == task_queue
    await handle.terminate()


# What the server says of runs


def described(**info: Any) -> Description:
    """Return what a server may say of a run."""
    reply = DescribeWorkflowExecutionResponse(workflow_execution_info=WorkflowExecutionInfo(**info))
    return Description(cast("Client", None), reply)


def test_what_is_not_known_to_be_closed_is_open() -> None:
    """So are states that no SDK has a name for yet, unless the server says when the run was closed."""
    closed = {status for status in range(1000) if not described(status=status).is_open}
    assert closed == {status for status in range(1, 8) if status != WorkflowExecutionStatus.RUNNING}
    assert not described(status=999, close_time=Timestamp(seconds=1)).is_open


def test_why_a_query_was_refused() -> None:
    """By the status, be it one that the SDK has no name for; any other error is what it was."""
    assert refused_in(WorkflowQueryRejectedError(WorkflowExecutionStatus.TERMINATED)) in CLOSED
    with pytest.raises(ValueError, match="8 is not a valid") as raised:
        WorkflowExecutionStatus(8)
    assert refused_in(raised.value) == PAUSED
    with pytest.raises(ValueError, match="something else"):
        refused_in(ValueError("something else"))


async def test_each_look_stands_alone(
    client: Client, task_queue: str, monkeypatch: pytest.MonkeyPatch, quiet: Quiet
) -> None:
    """Of the runs in a batch one cannot be read: the others are, and nothing is known of that one, which is told."""
    quiet.expect("as no server has said yet")
    bench = Bench(client, task_queue, "redis")
    good, bad = await bench.actor(), await bench.actor()

    async def awkward(client: Client, workflow_id: str, *args: Any, **options: Any) -> Description:
        if workflow_id == bad.id:
            raise ValueError("as no server has said yet")
        return await describe(client, workflow_id, *args, **options)

    monkeypatch.setattr("redlease_temporal._common.run_monitor.describe", awkward)
    owners = RunMonitor(client, 50)
    asked = [RunToPoll(one.id, one.result_run_id or "") for one in (good, bad, good)]
    assert [seen.status for seen in await StatusActivities(owners).poll(asked)] == ["open", "unknown", "open"]
    watched: list[RunState] = []
    owners.watch((bad.id, bad.result_run_id or ""), watched.append)
    await owners.poll((bad.id, bad.result_run_id or ""))
    assert [look.status for look in watched] == [RunStatus.UNKNOWN]
    assert owners.unknown_ms((bad.id, bad.result_run_id or "")) > 0


async def test_a_paused_head_of_the_line_keeps_no_others_waiting_on_slots(client: Client, task_queue: str) -> None:
    """It does not take the slot that it is offered, so the next takes it when its back-off is over."""
    bench = Bench(client, task_queue, "slots")
    actor = await bench.actor()
    first: Permit = await bench.do(actor, Actor.acquire, Asking(), lease=60.0)
    paused = await bench.holder(lease=LEASE)
    await bench.until_waiting(actor, 1)
    await pause(client, paused)
    behind = await bench.holder(lease=LEASE)
    await bench.until_waiting(actor, 2)
    await bench.do(actor, Actor.release, first)
    assert await asyncio.wait_for(behind.execute_update(Holder.until_held), 20) > first.fence
    await unpause(client, paused)
    assert (await go_on(behind)).startswith("held")
    assert (await go_on(paused)).startswith("held")


# The activity that waits is paused, and its run is not


async def pause_wait(client: Client, handle: WorkflowHandle[Any, Any]) -> None:
    """Pause the activity by which a run waits."""

    async def pending() -> Any:
        return (await handle.describe()).raw_description.pending_activities

    (waiting,) = await eventually(pending)
    await client.workflow_service.pause_activity(
        PauseActivityRequest(
            namespace=client.namespace, execution=WorkflowExecution(workflow_id=handle.id), id=waiting.activity_id
        )
    )


async def test_a_paused_wait_is_served(client: Client, task_queue: str) -> None:
    """Its attempt goes on, and is completed as ever."""
    bench = Bench(client, task_queue, "redis")
    actor = await bench.actor()
    first: Permit = await bench.do(actor, Actor.acquire, Asking(), lease=60.0)
    waiter = await bench.holder(lease=LEASE)
    await bench.until_waiting(actor, 1)
    await pause_wait(client, waiter)
    await bench.do(actor, Actor.release, first)
    assert await asyncio.wait_for(waiter.execute_update(Holder.until_held), 10) > first.fence
    assert (await go_on(waiter)).startswith("held")
