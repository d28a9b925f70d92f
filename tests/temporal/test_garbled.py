"""What nobody can read: results that an operator gives by hand, and signals that say something else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from backend_bench import Bench
from backend_flows import WORKFLOWS, Actor, Asking, Holder, guarded
from limited_flows import Job, Two
from lock_flows import Use
from losing_flows import Dynamic
from sequence_flows import Handing, Item, post, trace
from temporal_tools import Place, tasks_that_failed
from temporalio.client import Client, WorkflowHandle
from together_flows import Part, Sharing
from waiting_flows import Wait, Waiter

from redlease import Permit, Redlease, Semaphore
from redlease_temporal._admission import rule
from redlease_temporal._admission.activities import AdmissionActivities
from redlease_temporal._admission.rule import AdmissionRequest
from redlease_temporal._admission.slot_workflow import ADMISSION_SLOT, SLOT_OWNER
from redlease_temporal._backends.coordinator.workflow import Coordinator
from redlease_temporal._backends.redis.requests import Requests
from redlease_temporal._backends.slots.workflow import Slot
from redlease_temporal._payloads import locks
from redlease_temporal._payloads.coordinator import Adoption, CoordinatorRequest, Renewal, Requester
from redlease_temporal._sequence.api import Batch, Handling
from redlease_temporal._sequence.workflow import SequenceWorkflow

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from quiet import Quiet

SOON = 10.0
OTHERS = Permit("another", "ticket", 1, 1, 1, 1000, 0, 0, "somebody", {})
RESULTS = {"text": "granted", "nothing": None, "another shape": {"ticket": 5}, "a permit of something else": OTHERS}
GARBLED: list[list[Any]] = [[], ["text"], [None], [{"a": 1}], [{"a": 1}, 2], [[1, 2]]]


RUN_SIGNALS = [
    *(locks.LOST_SIGNAL, locks.GRANTED_SIGNAL, locks.REFUSED_SIGNAL, locks.CONFIRM_SIGNAL, locks.OFFER_SIGNAL),
]


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker for all workflows."""
    async with place.serving([*WORKFLOWS, Waiter, Dynamic, Handing, Sharing, Two], [guarded, post]) as client:
        yield client


@pytest.fixture(autouse=True)
def dropped(quiet: Quiet) -> None:
    """The SDK says which signals it could not read."""
    quiet.allow("dropping the signal")


async def waiting_activity(handle: WorkflowHandle[Any, Any], kind: str) -> str:
    """Return the id of the pending activity of a type, once a worker has begun it."""

    async def begun() -> str:
        pending = (await handle.describe()).raw_description.pending_activities
        return next((each.activity_id for each in pending if each.activity_type.name == kind), "")

    return str(await eventually(begun, SOON))


async def complete(client: Client, handle: WorkflowHandle[Any, Any], kind: str, result: Any) -> None:
    """Complete an activity of a run by hand, as an operator does."""
    activity_id = await waiting_activity(handle, kind)
    described = await handle.describe()
    by_hand = client.get_async_activity_handle(workflow_id=handle.id, run_id=described.run_id, activity_id=activity_id)
    await by_hand.complete(result)


# Results


@pytest.mark.parametrize("result", RESULTS)
async def test_a_wait_that_is_completed_with_something_else(
    client: Client, place: Place, pool: Semaphore, result: str
) -> None:
    """The run hears that its request was withdrawn, and the next in line is served."""
    permit = await pool.acquire()
    handles = []
    for number in range(2):
        handles.append(
            await client.start_workflow(
                Waiter.run, Wait("r"), id=f"{place.task_queue}-{number}", task_queue=place.task_queue
            )
        )
        await until_waiting(pool, number + 1)
    first, second = handles
    await complete(client, first, locks.WAIT, RESULTS[result])
    async with asyncio.timeout(SOON):
        assert (await first.result()).what == "withdrawn"
    await until_waiting(pool, 1)
    await pool.release(permit)
    async with asyncio.timeout(SOON):
        assert (await second.result()).what == "held"
    assert await tasks_that_failed(first) == []


async def test_a_release_that_is_completed_with_something_else(
    client: Client, place: Place, pool: Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, and does not take it for done: with its end the permit is free."""

    async def never(_: Requests, __: locks.ReleaseCall, **___: Any) -> locks.ReleaseResult:
        return locks.ReleaseResult(released=False, pending=True)

    bench = Bench(client, place.task_queue, "redis")
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking())
    monkeypatch.setattr(Requests, "release", never)
    releasing = asyncio.create_task(bench.do(actor, Actor.release, permit))
    await complete(client, actor, locks.RELEASE_LATER, "done")
    assert not await releasing
    assert await bench.do(actor, Actor.check, permit)
    monkeypatch.undo()
    assert await bench.do(actor, Actor.release, permit)
    assert await tasks_that_failed(actor) == []
    assert not (await pool.inspect()).holders


async def test_a_downgrade_that_is_completed_with_something_else(
    client: Client, place: Place, outside: Redlease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on as a reader, and what it holds excludes as much as before, until it ends."""

    async def never(_: Requests, __: locks.DowngradeCall) -> bool:
        raise TimeoutError

    monkeypatch.setattr(Requests, "downgrade", never)
    writer = await client.start_workflow(
        Sharing.run, args=[Part("redis", "r", "write"), None, None], id=place.task_queue, task_queue=place.task_queue
    )
    await writer.execute_update(Sharing.until_held)
    downgrading = asyncio.create_task(writer.execute_update(Sharing.downgrade))
    await complete(client, writer, locks.DOWNGRADE, "done")
    assert (await downgrading).weight == 1
    assert await outside.rwlock("r").read.try_acquire() is None
    await writer.signal(Sharing.proceed)
    await writer.result()
    assert await tasks_that_failed(writer) == []
    assert await outside.rwlock("r").read.acquire(timeout=5)


async def test_a_place_that_is_given_by_hand_with_something_else(
    client: Client, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run asks again, and begins in its place."""
    may_answer, admit = asyncio.Event(), AdmissionActivities._admit

    async def late(activities: AdmissionActivities, entry: AdmissionRequest, *, limit_s: float) -> bool:
        if not may_answer.is_set():
            raise TimeoutError
        return await admit(activities, entry, limit_s=limit_s)

    monkeypatch.setattr(AdmissionActivities, "_admit", late)
    handle = await client.start_workflow(Two.run, Job(), id=place.task_queue, task_queue=place.task_queue)
    await complete(client, handle, rule.LATER[rule.ADMIT], "of course")
    may_answer.set()
    await handle.execute_update(Two.look)
    await handle.signal("proceed")
    async with asyncio.timeout(SOON):
        assert await handle.result() == "complete"
    assert await tasks_that_failed(handle) == []


async def test_the_question_of_a_place_that_is_answered_with_something_else(client: Client, place: Place) -> None:
    """The place asks again for its workflow, and ends with that."""
    owner = await client.start_workflow(Two.run, Job(), id=place.task_queue, task_queue=place.task_queue)
    await owner.execute_update(Two.look)
    chain = (await owner.describe()).run_id
    handle = await client.start_workflow(
        ADMISSION_SLOT,
        AdmissionRequest("Two", owner.id, 2, chain=chain),
        id=f"{owner.id}-place",
        task_queue=internal_queue(client),
    )
    await complete(client, handle, SLOT_OWNER, {"a": 1})
    await owner.terminate()
    async with asyncio.timeout(SOON):
        await handle.result()
    assert await tasks_that_failed(handle) == []


def internal_queue(client: Client) -> str:
    """Return the queue of the plugin's own worker."""
    return str(client.config()["plugins"][0].internal_queue(client))  # type: ignore[attr-defined]


# Signals


@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_a_run_that_is_signalled_what_it_cannot_read(client: Client, place: Place, backend: str) -> None:
    """The library's signals that say nothing of use are dropped, and the run holds and ends as if there were none."""
    bench = Bench(client, place.task_queue, backend)
    handle = await bench.holder()
    await handle.execute_update(Holder.until_held)
    for name in RUN_SIGNALS:
        for args in GARBLED:
            await handle.signal(name, args=args)
    await handle.signal(Holder.proceed)
    async with asyncio.timeout(SOON):
        assert (await handle.result()).startswith("held")
    assert await tasks_that_failed(handle) == []


async def garble(handle: WorkflowHandle[Any, Any], workflow: type) -> None:
    """Send a workflow each signal that its class takes, with arguments that say nothing."""
    for name in workflow.__temporal_workflow_definition.signals:  # type: ignore[attr-defined]
        for args in GARBLED:
            await handle.signal(name, args=args)


async def test_a_dynamic_handler_beside_signals_that_nobody_can_read(
    client: Client, place: Place, pool: Semaphore
) -> None:
    """What comes before the library's handlers are set, and cannot be read, is dropped as well."""
    handle = await client.start_workflow(
        Dynamic.run,
        Use("r"),
        id=place.task_queue,
        task_queue=place.task_queue,
        start_signal=locks.LOST_SIGNAL,
        start_signal_args=["text", 2],
    )
    await handle.execute_update("until_held")
    await pool.release((await pool.inspect()).holders[0].ticket)
    async with asyncio.timeout(SOON):
        assert await handle.result() == ["lost"]
    assert await tasks_that_failed(handle) == []


@pytest.mark.parametrize(("backend", "keeper"), [("slots", Slot), ("coordinator", Coordinator)])
async def test_a_keeper_that_is_signalled_what_it_cannot_read(
    client: Client, place: Place, backend: str, keeper: type
) -> None:
    """It keeps what it keeps, and hands it on to the next in line."""
    bench = Bench(client, place.task_queue, backend)
    actor, other = await bench.actor(), await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking())
    waiting = asyncio.create_task(bench.do(other, Actor.acquire, Asking()))
    await bench.until_waiting(actor, 1)
    resource = bench.on.resource
    handle = client.get_workflow_handle(f"lock:{resource}" if keeper is Coordinator else f"permit:{resource}:0")
    await garble(handle, keeper)
    async with asyncio.timeout(2 * SOON):
        assert await bench.do(actor, Actor.check, permit)
        assert await bench.do(actor, Actor.release, permit)
        assert (await waiting).fence > permit.fence
    assert await tasks_that_failed(handle) == []


async def test_a_keeper_that_is_asked_for_what_cannot_be(client: Client, place: Place) -> None:
    """A coordinator refuses or drops what it can read and not do, and serves everybody as before."""
    bench = Bench(client, place.task_queue, "coordinator")
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking())
    keeper = client.get_workflow_handle(f"lock:{bench.on.resource}")
    requester = Requester(actor.id, "", "", "by hand")
    terms, spec = locks.ResourceTerms(bench.on.resource, 1, 5000), locks.AcquireSpec("t")
    ever = 10**30
    for lease_ms in (-5, 0, ever):
        await keeper.signal("renew", Renewal(permit.ticket, permit.fence, lease_ms))
        await keeper.signal("adopt", Adoption(permit.ticket, permit.fence, requester, lease_ms))
        await keeper.signal("request", CoordinatorRequest(replace(terms, lease_ms=lease_ms), spec, requester))
    for weight in (-5, 0, ever):
        await keeper.signal("request", CoordinatorRequest(terms, replace(spec, weight=weight), requester))
    for capacity in (-5, 0, ever):
        await keeper.signal("request", CoordinatorRequest(replace(terms, capacity=capacity), spec, requester))
        await keeper.signal("resize", capacity)
    await keeper.signal(
        "request", CoordinatorRequest(terms, replace(spec, max_hold_ms=ever), requester, timeout_ms=ever)
    )
    async with asyncio.timeout(SOON):
        assert await bench.do(actor, Actor.check, permit)
        assert await bench.do(actor, Actor.release, permit)
        await bench.do(await bench.actor(), Actor.acquire, Asking())
    assert (await bench.seen(actor)).capacity == 1
    assert await tasks_that_failed(keeper) == []


async def test_a_slot_that_is_asked_for_what_cannot_be(client: Client, place: Place) -> None:
    """A slot drops what it can read and not do, and is kept and released as before."""
    bench = Bench(client, place.task_queue, "slots")
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking())
    slot = client.get_workflow_handle(f"permit:{bench.on.resource}:0")
    requester = Requester(actor.id, "", "", "by hand")
    for lease_ms in (-5, 0, 10**30):
        await slot.signal("renew", Renewal(permit.ticket, permit.fence, lease_ms))
        await slot.signal("adopt", Adoption(permit.ticket, permit.fence, requester, lease_ms))
    adoption = Adoption(permit.ticket, permit.fence, requester, 5000, max_hold_ms=10**30)
    await slot.signal("adopt", adoption)
    async with asyncio.timeout(SOON):
        assert await bench.do(actor, Actor.check, permit)
        assert await bench.do(actor, Actor.release, permit)
    assert await tasks_that_failed(slot) == []


@pytest.mark.parametrize(
    ("item", "handling"),
    [
        ({"a": 1}, {}),
        ({"payload": "no hex"}, {}),
        ({"json": 1}, {"start_to_close_ms": -5}),
        ({"json": 1}, {"activity": ""}),
        ({"json": 1}, {"backoff": 0.5}),
        ({"json": 1}, {"initial_interval_ms": 10**30}),
    ],
)
async def test_a_sequence_that_is_signalled_what_it_cannot_read(
    client: Client, place: Place, tmp_path: Path, item: dict[str, Any], handling: dict[str, Any]
) -> None:
    """It drops that, and handles the items that come before and after."""
    book = str(tmp_path / "book")
    first = await handed(client, place, Item(0, book, pause=1.0))
    await eventually(lambda: trace(book), SOON)
    handle = client.get_workflow_handle(f"sequence:ledger:{book}")
    await garble(handle, SequenceWorkflow)
    batch = Batch("by hand", [item], replace(Handling("post", place.task_queue, 1000), **handling))
    await handle.signal("extend", batch)
    second = await handed(client, place, Item(1, book))
    async with asyncio.timeout(SOON):
        assert [await first.result(), await second.result()] == [[0], [1]]
    assert await tasks_that_failed(handle) == []


async def handed(client: Client, place: Place, item: Item) -> WorkflowHandle[Any, list[int]]:
    """Start a workflow that hands one item over."""
    return await client.start_workflow(
        Handing.run, [item], id=f"{place.task_queue}-{item.index}", task_queue=place.task_queue
    )
