"""What slots do beyond what every backend does."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from awkward_flows import Twice
from backend_bench import Bench, timed, without_redis
from backend_flows import WORKFLOWS, Actor, Asking, Holder, guarded
from stranding import STANDS, STRANDED, Stranding
from temporal_tools import WIDE, names_of, reset
from temporalio import activity
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from redlease_temporal._backends.slots import activities, backend
from redlease_temporal._common.descriptions import Description, describe
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from redlease import Permit

    from quiet import Quiet
    from temporal.conftest import StartWorkerProcess
    from temporal_server import TemporalServer


@pytest.fixture
async def client(temporal_server: TemporalServer, task_queue: str, prefix: str) -> AsyncIterator[Client]:
    """A client whose plugin has no Redis, beside a worker for all workflows."""
    async with without_redis(temporal_server, task_queue, prefix) as client:
        yield client


@pytest.fixture
def bench(client: Client, task_queue: str) -> Bench:
    """A resource of its own."""
    return Bench(client, task_queue, "slots")


def slot(bench: Bench, number: int = 0) -> WorkflowHandle[Any, Any]:
    """Return the workflow that is a slot."""
    return bench.client.get_workflow_handle(f"permit:{bench.on.resource}:{number}")


async def line_of(bench: Bench, count: int) -> list[str]:
    """Return the line of the only slot, as soon as so many stand in it."""

    async def so_many() -> list[str] | None:
        line = [each["requester"]["workflow_id"] for each in await slot(bench).query("line")]
        return line if len(line) == count else None

    line: list[str] = await eventually(so_many, 60)
    return line


async def test_a_smaller_capacity_is_declared(bench: Bench) -> None:
    """Who has declared a capacity of one is offered no other slot, though the holder's declaration has three."""
    bench.on.lease = 1.0
    holders = [await bench.holder(capacity=3) for _ in range(3)]
    for holder in holders:
        await holder.execute_update(Holder.until_held)
    actor = await bench.actor()
    owners = {each.metadata["redlease.slot"]: each.owner for each in (await bench.seen(actor, capacity=3)).holders}
    for holder in holders:
        if holder.id != owners["0"]:
            await holder.signal(Holder.proceed)
            await holder.result()
    waiter = await bench.holder(capacity=1)
    await line_of(bench, 1)
    runs = {(await slot(bench).describe()).run_id}

    async def has_looked_for_others() -> bool:
        runs.add((await slot(bench).describe()).run_id)
        return len(runs) == 3  # the second of them has, as it began

    await eventually(has_looked_for_others)
    assert await waiter.query(Holder.fence) == 0
    for holder in holders:
        if holder.id == owners["0"]:
            await holder.signal(Holder.proceed)
    assert await asyncio.wait_for(waiter.execute_update(Holder.until_held), 15)
    (permit,) = (await bench.seen(actor, capacity=3)).holders
    assert permit.metadata["redlease.slot"] == "0"
    await waiter.signal(Holder.proceed)


async def test_one_ticket_given_twice(bench: Bench) -> None:
    """A run that holds two slots under one ticket gives back just the one that it means."""
    actor = await bench.actor()
    bench.on.capacity = 2
    handle = await bench.start(Twice.run, bench.on)

    async def so_many(held: int) -> bool:
        return len((await bench.seen(actor)).holders) == held

    for held in (2, 1):
        await eventually(partial(so_many, held))
        await handle.signal(Twice.step)
    assert await handle.result() == [False, True, False, True]
    await eventually(partial(so_many, 0))  # the slot hears of it by a signal


async def test_the_loss_of_one_of_two_under_one_ticket(bench: Bench) -> None:
    """A run that holds two slots under one ticket is told which of them it has lost."""
    actor = await bench.actor()
    bench.on.capacity = 2
    handle = await bench.start(Twice.run, bench.on)

    async def both() -> tuple[Permit, ...] | None:
        holders = (await bench.seen(actor)).holders
        return holders if len(holders) == 2 else None

    first, _ = await eventually(both)
    number = int(first.metadata["redlease.slot"])
    await slot(bench, number).cancel()
    await slot(bench, number).result()
    await handle.signal(Twice.step)
    await handle.signal(Twice.step)
    assert await handle.result() == [True, False, False, True]


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], list[tuple[str, str]]]:
    """Let the server once not say how a slot stands, when an activity asks for a workflow; returns who was let down."""

    def once(activity_type: str, workflow_type: str) -> list[tuple[str, str]]:
        let_down = list[tuple[str, str]]()

        async def describing(client: Client, *args: Any, **options: Any) -> Description:
            info = activity.info() if activity.in_activity() else None
            asks = info is not None and (info.activity_type, info.workflow_type) == (activity_type, workflow_type)
            if info is not None and asks and not let_down:
                let_down.append((info.workflow_id or "", info.workflow_run_id or ""))
                raise RPCError("away for a moment", RPCStatusCode.UNAVAILABLE, b"")
            return await describe(client, *args, **options)

        monkeypatch.setattr(activities, "describe", describing)
        return let_down

    return once


async def test_the_server_does_not_tell_of_a_grant_at_once(
    bench: Bench, away: Callable[[str, str], list[tuple[str, str]]], quiet: Quiet
) -> None:
    """A hold outlasts that, as it does any other outage while it waits."""
    quiet.expect("away for a moment")
    let_down = away("redlease.slots.claim", "Holder")
    holder = await bench.holder()
    assert await asyncio.wait_for(holder.execute_update(Holder.until_held), 10)
    assert let_down
    await holder.signal(Holder.proceed)
    assert (await holder.result()).startswith("held")


async def test_the_server_does_not_tell_of_other_slots(
    bench: Bench, away: Callable[[str, str], list[tuple[str, str]]], quiet: Quiet
) -> None:
    """A slot that looks for others which are free for its line is held on when it is not told."""
    quiet.expect("away for a moment")
    actor = await bench.actor()
    holders = [await bench.holder(capacity=2) for _ in range(2)]
    for holder in holders:
        await holder.execute_update(Holder.until_held)
    waiters = [await bench.holder(capacity=2) for _ in range(7)]
    await eventually(lambda: _so_many_wait(bench, actor, 7))
    let_down = away("redlease.slots.idle", "redlease.Slot")
    for each in [*holders, *waiters]:
        await each.signal(Holder.proceed)
    results = await asyncio.gather(*(each.result() for each in [*holders, *waiters]))
    assert [result.split()[0] for result in results] == ["held"] * 9
    ((workflow_id, run_id),) = let_down
    assert (await bench.client.get_workflow_handle(workflow_id, run_id=run_id).result())["how"] == "released"


async def _so_many_wait(bench: Bench, actor: WorkflowHandle[Any, Any], count: int) -> bool:
    return len((await bench.seen(actor, capacity=2)).waiters) == count


async def test_a_terminated_parent_frees_its_slot_at_once(bench: Bench) -> None:
    """The slot of a terminated run ends within 100 ms, at the best of some times on a machine with other work."""
    times = [1.0]
    while min(times) > 0.1 and len(times) < 10:
        holder = await bench.holder(lease=30.0)
        await holder.execute_update(Holder.until_held)
        held = bench.client.get_workflow_handle(slot(bench).id, run_id=(await slot(bench).describe()).run_id)
        ended = asyncio.create_task(held.result())
        await asyncio.sleep(0.1)  # until the server has the call that waits for the end
        times.append(await timed(holder.terminate(), ended))
    assert min(times) <= 0.1, times


async def test_a_reset_parent_that_is_terminated_frees_its_slot_within_a_lease(bench: Bench) -> None:
    """The server closes no child of a run that was reset; the slot finds out when its lease ends."""
    holder, actor = await bench.holder(lease=2.0), await bench.actor()
    fence = await holder.execute_update(Holder.until_held)
    again = await reset(bench.client, holder, -1)
    assert await again.execute_update(Holder.until_held) == fence
    await again.terminate()
    assert await timed(bench.do(actor, Actor.acquire, Asking(timeout=10))) < 2.0 + 1.5


async def test_a_permit_that_goes_from_run_to_run_keeps_its_slot(bench: Bench) -> None:
    """Its fence is the same in the next run, and so is the run of the slot that its metadata name."""
    holder, actor = await bench.holder("hand on"), await bench.actor()
    fence = await holder.execute_update(Holder.until_held)
    (before,) = (await bench.seen(actor)).holders
    await holder.signal(Holder.proceed)
    latest = bench.client.get_workflow_handle(holder.id)

    async def goes_on() -> bool:
        return (await latest.describe()).run_id != holder.result_run_id and await latest.query(Holder.fence) == fence

    await eventually(goes_on)
    (after,) = (await bench.seen(actor)).holders
    assert (after.fence, after.metadata) == (before.fence, before.metadata)
    assert after.metadata["redlease.slot"] == "0"
    assert after.metadata["redlease.run"]


async def test_twelve_waiters_one_by_one(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """First come, first served, while nobody retries by itself; nobody bounces more than on entry."""
    monkeypatch.setattr(backend, "BACKOFF_S", (600.0, 600.0))
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking(), lease=60.0)
    tasks = []
    for number in range(1, 13):
        tasks.append(asyncio.create_task(bench.consume(0.0)))
        await line_of(bench, number)
    await bench.do(actor, Actor.release, permit)
    fences = await asyncio.gather(*tasks)
    assert all(before < after for before, after in pairwise(fences)), fences
    consumers = [bench.client.get_workflow_handle(f"{bench.queue}-{number}") for number in range(2, 14)]
    histories = [await names_of(consumer) for consumer in consumers]
    assert [names.count("START_CHILD_WORKFLOW_EXECUTION_INITIATED") for names in histories] == [2] * 12
    # A busy machine may add a workflow task or two.
    assert max(map(len, histories)) <= 41 + 6


async def test_waiters_that_died_are_passed_over(bench: Bench) -> None:
    """Two terminated waiters ahead cost the live one no back-off."""
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking(), lease=60.0)
    waiters = []
    for number in range(1, 4):
        waiters.append(await bench.holder())
        await line_of(bench, number)
    for dead in waiters[:2]:
        await dead.terminate()
    await bench.do(actor, Actor.release, permit)
    assert await asyncio.wait_for(waiters[2].execute_update(Holder.until_held), 15)
    await waiters[2].signal(Holder.proceed)


async def test_an_offer_to_a_run_that_gave_up_goes_on(bench: Bench) -> None:
    """Who has timed out is out of the line, and an offer that was on its way to it goes to the next."""
    actor, gone = await bench.actor(), await bench.actor()
    await bench.do(actor, Actor.acquire, Asking())
    assert await bench.failing(gone, Actor.acquire, Asking(timeout=0.3)) == "AcquireTimeout"
    patient = await bench.holder()
    assert await line_of(bench, 1) == [patient.id]
    (waiter,) = await slot(bench).query("line")
    await slot(bench).terminate()  # which tells nobody
    await gone.signal("redlease.offer", {"resource": bench.on.resource, "slot": 0, "request": "?", "rest": [waiter]})
    assert await asyncio.wait_for(patient.execute_update(Holder.until_held), 15)
    await patient.signal(Holder.proceed)


async def test_the_net_catches_who_was_not_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is terminated says nothing to its line, and those in it find out by themselves."""
    monkeypatch.setattr(backend, "BACKOFF_S", (0.5, 0.5))
    actor, waiting = await bench.actor(), await bench.holder()
    await waiting.execute_update(Holder.until_held)
    second = await bench.holder()
    await line_of(bench, 1)
    await slot(bench).terminate()
    assert await waiting.result() == "lost"
    await asyncio.wait_for(second.execute_update(Holder.until_held), 15)
    await second.signal(Holder.proceed)
    await second.result()
    assert await bench.do(actor, Actor.acquire, Asking(timeout=2))


async def test_a_slot_that_is_cancelled_by_hand_ends(bench: Bench) -> None:
    """An administrator takes a permit away by cancelling its slot, and the holder is told."""
    holder = await bench.holder()
    await holder.execute_update(Holder.until_held)
    await slot(bench).cancel()
    assert await holder.result() == "lost"


@pytest.mark.parametrize("capacity", [2, 12])
async def test_no_slot_stays_idle_while_somebody_waits(
    bench: Bench, capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever slot is released, a waiter in the line of another has it at once, not after a back-off."""
    monkeypatch.setattr(backend, "BACKOFF_S", (600.0, 600.0))
    actor = await bench.actor()
    permits: list[Permit] = [
        await bench.do(actor, Actor.acquire, Asking(), capacity=capacity, lease=60.0) for _ in range(capacity)
    ]
    assert len({permit.metadata["redlease.slot"] for permit in permits}) == capacity
    # The actor's own requests told slots of each other, while it looked for a free one.
    before = [await signals_to(bench, permit) for permit in permits]
    waiting = asyncio.create_task(bench.do(await bench.actor(), Actor.acquire, Asking(), capacity=capacity))
    waiter = f"{bench.queue}-2"

    async def waits() -> bool:
        # Its last event is the timer of the back-off: it stands in line.
        return (await names_of(bench.client.get_workflow_handle(waiter)))[-1] == "TIMER_STARTED"

    await eventually(waits)

    async def are_told() -> list[Permit] | None:
        # With more slots than eight besides the one where it stands, those that were not told of it are left out.
        told = [
            permit for permit, count in zip(permits, before, strict=True) if await signals_to(bench, permit) > count
        ]
        return told if len(told) >= min(capacity, 9) else None

    told = await eventually(are_told, 30)
    await bench.do(actor, Actor.release, told[-1], capacity=capacity)
    got: Permit = await asyncio.wait_for(waiting, 30)
    assert got.metadata["redlease.slot"] == told[-1].metadata["redlease.slot"]


async def signals_to(bench: Bench, permit: Permit) -> int:
    """Count the signals that a slot has had."""
    names = await names_of(slot(bench, int(permit.metadata["redlease.slot"])))
    return names.count("WORKFLOW_EXECUTION_SIGNALED")


@pytest.mark.parametrize(
    ("asking", "on"),
    [(Asking(weight=2), {"capacity": 2}), (Asking(), {"max_waiters": 1}), (Asking(), {"capacity": 1001})],
    ids=["weight", "max_waiters", "capacity"],
)
async def test_what_slots_cannot_do_is_refused(bench: Bench, asking: Asking, on: dict[str, Any]) -> None:
    """Weights, a bound for the waiters and a thousand slots end in a clear error, and take nothing."""
    actor = await bench.actor()
    assert await bench.failing(actor, Actor.acquire, asking, **on) == "ValueError"


async def test_the_makespan_of_the_demo(bench: Bench) -> None:
    """Eight consumers of 200 ms at three at a time take at most twice what they would without waste."""
    await bench.makespan_within(2.0)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_two_hundred_wait_for_ten_minutes(time_skipping: dict[str, Any], task_queue: str, prefix: str) -> None:
    """On one slot set in skipped time, no workflow's history grows over 2,000 events."""
    async with (
        Stranding() as stranding,
        await WorkflowEnvironment.start_time_skipping(**time_skipping, plugins=[RedleasePlugin(prefix=prefix)]) as env,
        # In the sandbox the time goes into importing what each of the runs imports.
        Worker(
            env.client,
            task_queue=task_queue,
            workflows=WORKFLOWS,
            activities=[guarded],
            workflow_runner=UnsandboxedWorkflowRunner(),
        ),
        asyncio.timeout(570),  # before the runner's own limit, over which no worker ends
    ):
        bench = Bench(env.client, task_queue, "slots")
        on: dict[str, Any] = {"capacity": 3, "lease": 60.0}
        holders = [await bench.holder(**on) for _ in range(3)]
        for holder in holders:
            await holder.execute_update(Holder.until_held)
        waiters = [await bench.holder(timeout=600.0, **on) for _ in range(200)]
        # One after the other: the server that skips time minds many who let it do so at one time.
        outcomes = [await stranding.outcome(waiter) for waiter in waiters]
        assert set(outcomes) <= {"timed out", STRANDED, STANDS}
        assert outcomes.count(STRANDED) <= stranding.refused  # each by a refusal that was heard; six have been seen
        assert outcomes.count("timed out") >= 180
        if STANDS in outcomes:  # it has a slot that the test server gave away while it continued as new
            assert outcomes.count(STANDS) <= 2
            assert {(await holder.describe()).status for holder in holders} == {WorkflowExecutionStatus.RUNNING}
        longest = [len(await names_of(handle)) for handle in [*holders, *waiters]]
        assert max(longest) <= 2000, max(longest)
        slots = [len(await names_of(run)) for number in range(3) for run in await runs_of(bench, number)]
        assert max(slots) <= 2000, slots
        assert len(slots) > 3


async def runs_of(bench: Bench, number: int) -> list[WorkflowHandle[Any, Any]]:
    """Return the run that a slot has now, and those before it, as far as they can be told from its input."""
    latest = slot(bench, number)
    runs = []
    run_id: str | None = (await latest.describe()).run_id
    while run_id:
        run = bench.client.get_workflow_handle(latest.id, run_id=run_id)
        runs.append(run)
        started = (await run.fetch_history()).events[0].workflow_execution_started_event_attributes
        run_id = started.continued_execution_run_id or None
    return runs


@pytest.mark.slow
async def test_the_process_that_ushers_is_killed(
    temporal_server: TemporalServer, task_queue: str, worker_process: StartWorkerProcess
) -> None:
    """Who stands in the line of a slot whose end nobody tells of asks by itself, and is served in some seconds."""
    client = await Client.connect(temporal_server.address)
    bench = Bench(client, task_queue, "slots")
    first = await worker_process("stalled_usher", worker=WIDE)
    holder = await bench.holder()
    fence = await holder.execute_update(Holder.until_held)
    waiter = await bench.holder()
    await line_of(bench, 1)
    await holder.signal(Holder.proceed)
    assert (await first.event("asked to tell"))["waiters"] == 1
    assert (await slot(bench).result())["how"] == "released"
    first.kill()
    await worker_process("backend_flows", worker=WIDE)
    await waiter.signal(Holder.proceed)
    kept, other = (await asyncio.wait_for(waiter.result(), 20)).split()
    assert kept == "held"
    assert int(other) > fence
