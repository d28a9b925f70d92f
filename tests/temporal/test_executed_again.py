"""Workflow tasks that Temporal executes again, and runs that begin again: who holds stays alone."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from backend_bench import Bench
from backend_flows import Actor, Asking
from executed_again_flows import (
    ACTIVITIES,
    WORKFLOWS,
    Again,
    AsksLater,
    Entity,
    GivesUp,
    Ledger,
    Lingering,
    Mend,
    MendedAfterReset,
    Mistaken,
    Steady,
    TwiceInOneTask,
)
from temporal_tools import events_of, has_event, names_of, reset, reset_to
from temporalio.worker import Replayer

from redlease import Unavailable
from redlease_temporal._backends.coordinator import activities
from redlease_temporal._backends.coordinator.contended import ContendedHolders
from redlease_temporal._backends.redis import tracker
from redlease_temporal._backends.redis.requests import Requests
from redlease_temporal._backends.redis.tracker import TicketTracker
from redlease_temporal._common.resource_workflows import gather_limited
from redlease_temporal._workflow_side.mailbox import ASKS_WITHIN_S
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from lock_service import Callers
    from temporal_tools import Place
    from temporalio.client import Client, WorkflowHandle

    from redlease import Permit

    from quiet import Quiet

BACKENDS = ["redis", "slots", "coordinator", "nexus"]
WAYS = ("hold", "adopt", "all_of", "rwlock")
WITHOUT = [("slots", "rwlock"), ("nexus", "rwlock")]
KINDS = [(backend, how, 1000) for backend in BACKENDS for how in WAYS if (backend, how) not in WITHOUT]
KINDS += [(backend, "hold", 0) for backend in BACKENDS[:3]]  # without a cache of workflows
# The task to which a run is reset that has asked in the first and holds in the second. A coordinator's grant is a
# signal: to a run that has asked already, it may not come again. A Nexus operation is not begun again by a reset.
BEFORE_ITS_GRANT = [
    (backend, task, signals)
    for backend in BACKENDS
    for task in (0, 1)
    for signals in ("as they came", "left out")
    if (backend, task, signals) != ("coordinator", 1, "as they came") and (backend, task) != ("nexus", 1)
]
LOST_WITHIN = 10.0


@pytest.fixture
def cache(request: pytest.FixtureRequest) -> int:
    """How many workflows the worker caches."""
    return int(getattr(request, "param", 1000))


@pytest.fixture
async def client(
    request: pytest.FixtureRequest, callers: Callers, place: Place, cache: int, quiet: Quiet
) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker; for a lock service one of another namespace."""
    Ledger.clear()
    Mend.mended = False
    Lingering.begun, Lingering.over = asyncio.Event(), asyncio.Event()
    quiet.allow("max_cached_workflows")
    workflows, params = [*WORKFLOWS, Actor], getattr(request.node, "callspec", None)
    if params is not None and params.params.get("backend") == "nexus":
        async with callers.service(place), callers.calling(place, workflows, ACTIVITIES) as client:
            yield client
        return
    async with place.serving(workflows, ACTIVITIES, worker={"max_cached_workflows": cache}) as client:
        yield client


async def taken(bench: Bench, how: str) -> Permit | None:
    """Return a permit for who adopts one."""
    return await bench.do(await bench.actor(), Actor.acquire, Asking()) if how == "adopt" else None


async def replays(handle: WorkflowHandle[Any, Any]) -> None:
    """See that the history can be replayed."""
    replayer = Replayer(workflows=WORKFLOWS, plugins=[RedleasePlugin("redis://nowhere.invalid")])
    await replayer.replay_workflow(await handle.fetch_history())


async def nudge(steady: WorkflowHandle[Any, Any]) -> int:
    """Let a holder have one more workflow task; returns its number."""

    async def tasks() -> int:
        return (await names_of(steady)).count("WORKFLOW_TASK_COMPLETED")

    before = await tasks()
    await steady.signal(Steady.nudge)

    async def is_nudged() -> bool:
        return await tasks() > before

    await eventually(is_nudged)
    return before


def nobody_wrote_late() -> None:
    """See that never two wrote at once, and nobody under a fence older than one that was seen."""
    assert Ledger.most == 1
    assert Ledger.stale == []


@pytest.mark.parametrize(("backend", "how", "cache"), KINDS, indirect=["cache"])
async def test_a_signal_in_the_last_task(client: Client, task_queue: str, backend: str, how: str, cache: int) -> None:
    """A run that has left its block, and whose task is executed again since a signal came, is never beside another."""
    bench = Bench(client, task_queue, backend)
    entity = await bench.start(Entity.run, bench.on, how, 0.3, True, await taken(bench, how))
    await asyncio.wait_for(Lingering.begun.wait(), 30)
    other = await bench.start(Entity.run, bench.on, "rwlock" if how == "rwlock" else "hold", 0.3, False, None)
    await asyncio.sleep(1)  # it has the time to be granted what is released too early
    await entity.signal(Entity.add, 1)
    Lingering.over.set()
    done = await entity.result()
    assert await other.result() == 0
    nobody_wrote_late()
    if backend == "redis" and cache:
        assert done == 1  # the task that released was not recorded, so it holds on
    await replays(entity)


@pytest.mark.parametrize("mistake", ["error", "group"])
@pytest.mark.parametrize(("backend", "how", "cache"), KINDS, indirect=["cache"])
async def test_a_mistake_in_the_body(
    client: Client, task_queue: str, backend: str, how: str, mistake: str, quiet: Quiet
) -> None:
    """A run whose task fails keeps its permit, and goes on under its fence when the mistake is mended."""
    quiet.allow("Failed activation on workflow Mistaken")
    quiet.allow("as asked")
    bench = Bench(client, task_queue, backend)
    mistaken = await bench.start(Mistaken.run, bench.on, how, mistake, await taken(bench, how))

    async def has_failed() -> bool:
        return "WORKFLOW_TASK_FAILED" in await names_of(mistaken)

    await eventually(has_failed, 30)
    other = await bench.start(Entity.run, bench.on, "rwlock" if how == "rwlock" else "hold", 0.1, False, None)
    await asyncio.sleep(2)
    Mend.mended = True
    fence = await mistaken.result()
    assert await other.result() == 0
    nobody_wrote_late()
    assert Ledger.fence > fence
    await replays(mistaken)


@pytest.mark.parametrize(("backend", "how", "cache"), KINDS, indirect=["cache"])
async def test_a_closed_run_is_reset_into_its_block(client: Client, task_queue: str, backend: str, how: str) -> None:
    """The run that begins again learns at once that it has no permit, and writes nothing beside the one that has it."""
    bench = Bench(client, task_queue, backend)
    steady = await bench.start(Steady.run, bench.on, how, await taken(bench, how))
    fence = await steady.execute_update(Steady.until_held)
    nudged = await nudge(steady)
    await steady.signal(Steady.proceed)
    assert await steady.result() == fence
    after = await bench.start(Steady.run, bench.on, "rwlock" if how == "rwlock" else "hold", None)
    held = await after.execute_update(Steady.until_held)
    again = await reset(client, steady, nudged, reapply=False)
    assert await asyncio.wait_for(again.result(), LOST_WITHIN) == "lost"
    await after.signal(Steady.proceed)
    assert await after.result() == held
    nobody_wrote_late()
    await replays(again)


@pytest.mark.parametrize(("backend", "task", "signals"), BEFORE_ITS_GRANT)
async def test_a_closed_run_is_reset_to_before_its_grant(
    client: Client, task_queue: str, backend: str, task: int, signals: str
) -> None:
    """It asks again, and waits for its turn: the grant that its former run had is not its own."""
    bench = Bench(client, task_queue, backend)
    first = await bench.start(Steady.run, bench.on, "hold", None)
    await first.execute_update(Steady.until_held)
    steady = await bench.start(Steady.run, bench.on, "hold", None)
    await bench.until_waiting(await bench.actor(), 1)
    await first.signal(Steady.proceed)
    await steady.execute_update(Steady.until_held)
    await steady.signal(Steady.proceed)
    fence = await steady.result()
    after = await bench.start(Steady.run, bench.on, "hold", None)
    held = await after.execute_update(Steady.until_held)
    again = await reset(client, steady, task, reapply=signals == "as they came")
    await bench.until_waiting(await bench.actor(), 1)
    await after.signal(Steady.proceed)
    if signals == "left out":
        await again.signal(Steady.proceed)
    assert await again.result() > held > fence
    nobody_wrote_late()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_open_run_is_reset_into_its_block(client: Client, task_queue: str, backend: str) -> None:
    """A run that is reset while it holds goes on under its fence."""
    bench = Bench(client, task_queue, backend)
    steady = await bench.start(Steady.run, bench.on, "hold", None)
    fence = await steady.execute_update(Steady.until_held)
    again = await reset(client, steady, await nudge(steady))
    await again.signal(Steady.proceed)
    assert await again.result() == fence
    nobody_wrote_late()


async def test_a_grant_is_given_back_as_its_run_asks(client: Client, task_queue: str, quiet: Quiet) -> None:
    """A run that asks in the task in which it gives back an unrecorded execution's grant does not lose its permit."""
    quiet.allow("Failed activation on workflow AsksLater")
    quiet.allow("as asked")
    bench = Bench(client, task_queue, "coordinator")
    actor = await bench.actor()
    run = await bench.start(AsksLater.run, bench.on)
    await asyncio.wait_for(Lingering.begun.wait(), 30)

    async def is_granted() -> bool:
        return bool((await bench.seen(actor)).in_use)

    await eventually(is_granted)
    before, Mend.mended = Lingering.over, True
    Lingering.begun, Lingering.over = asyncio.Event(), asyncio.Event()
    before.set()

    async def is_to_give_back() -> bool:
        return "TIMER_STARTED" in await names_of(run)

    await eventually(is_to_give_back)
    await run.signal(AsksLater.stay)
    await asyncio.wait_for(Lingering.begun.wait(), 30)
    await asyncio.sleep(1.5 * ASKS_WITHIN_S)  # the timer fires, and waits for the task to end
    await run.signal(AsksLater.proceed)
    Lingering.over.set()
    assert await run.result()
    nobody_wrote_late()
    await replays(run)


@pytest.mark.parametrize("backend", ["redis", "coordinator"])
async def test_a_closed_run_is_reset_as_its_permit_is_released(
    client: Client, task_queue: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that begins again asks, and keeps its grant: the release comes late, and is of the run that closed."""
    found, may_release, released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def late(step: Callable[..., Any]) -> Callable[..., Any]:
        async def later(self: Any, *args: Any) -> Any:
            if not getattr(self, "_closed", True):
                return await step(self, *args)
            found.set()
            await may_release.wait()
            result = await step(self, *args)
            released.set()
            return result

        return later

    monkeypatch.setattr(tracker, "FIRST_CHECK_S", 60.0)  # until then nobody asks whether the history has the grant
    monkeypatch.setattr(ContendedHolders, "_signal", late(ContendedHolders._signal))
    monkeypatch.setattr(TicketTracker, "_is_recorded", late(TicketTracker._is_recorded))
    bench = Bench(client, task_queue, backend)
    steady = await bench.start(Steady.run, bench.on, "hold", None)
    fence = await steady.execute_update(Steady.until_held)
    other = await bench.start(Steady.run, bench.on, "hold", None)
    await bench.until_waiting(await bench.actor(), 1)
    await steady.terminate()
    await asyncio.wait_for(found.wait(), 30)
    again = await reset(client, steady, 0, reapply=False)
    assert await again.execute_update(Steady.until_held) == fence
    may_release.set()
    await asyncio.wait_for(released.wait(), 30)
    await again.signal(Steady.proceed)
    assert await again.result() == fence
    await other.signal(Steady.proceed)
    assert await other.result() > fence
    nobody_wrote_late()


async def test_a_closed_run_is_reset_as_its_slot_asks_for_its_end(
    client: Client, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that begins again asks before the slot has its answer, and keeps the permit."""
    found, may_answer = asyncio.Event(), asyncio.Event()

    async def late(calls: Any) -> list[Any]:
        answers = await gather_limited(calls)
        found.set()
        await may_answer.wait()
        return answers

    monkeypatch.setattr(activities, "gather_limited", late)
    bench = Bench(client, task_queue, "slots")
    steady = await bench.start(Steady.run, bench.on, "hold", None)
    fence = await steady.execute_update(Steady.until_held)
    await steady.terminate()
    await asyncio.wait_for(found.wait(), 30)
    again = await reset(client, steady, 0, reapply=False)
    await eventually(lambda: has_event(again, "MARKER_RECORDED"), 30)
    may_answer.set()
    held = await again.execute_update(Steady.until_held)
    await asyncio.sleep(2)
    await again.signal(Steady.proceed)
    assert await again.result() == held
    assert held >= fence
    nobody_wrote_late()


async def test_a_run_is_reset_while_redis_is_away(
    client: Client, task_queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for all that it held at once, later and later, and goes on under its fence when it has the answer."""
    adopt, answers = Requests.adopt, asyncio.Event()
    asked = 0

    async def failing(self: Requests, *args: Any) -> Permit:
        nonlocal asked
        asked += 1
        if asked <= 4:
            raise Unavailable("as asked")
        answers.set()
        return await adopt(self, *args)

    monkeypatch.setattr(Requests, "adopt", failing)
    bench = Bench(client, task_queue, "redis")
    steady = await bench.start(Steady.run, bench.on, "two", None)
    fence = await steady.execute_update(Steady.until_held)
    again = await reset(client, steady, await nudge(steady))
    await eventually(answers, 30)
    await again.signal(Steady.proceed)
    assert await again.result() == fence
    timers = [each.timer_started_event_attributes for each in await events_of(again)]
    pauses = [each.start_to_fire_timeout.seconds for each in timers if each.timer_id]
    assert pauses == [2, 4]
    await replays(again)


async def test_a_wait_that_is_given_up_as_its_next_attempt_begins(place: Place, task_queue: str) -> None:
    """The request is withdrawn, though the activity that waits for it asks again before that is recorded."""
    Lingering.begun, Lingering.over = asyncio.Event(), asyncio.Event()
    attempt_s = 4.0
    async with place.serving([*WORKFLOWS, Actor], ACTIVITIES, wait_attempt=attempt_s) as client:
        bench = Bench(client, task_queue, "redis")
        actor = await bench.actor()
        holder = await bench.start(Steady.run, bench.on, "hold", None)
        await holder.execute_update(Steady.until_held)
        waiter = await bench.start(GivesUp.run, bench.on)
        await bench.until_waiting(actor, 1)
        await asyncio.sleep(attempt_s - 1)
        await waiter.signal(GivesUp.give_up)
        await asyncio.wait_for(Lingering.begun.wait(), 30)
        await asyncio.sleep(2)  # the next attempt begins meanwhile
        Lingering.over.set()
        await bench.until_waiting(actor, 0)
        await holder.signal(Steady.proceed)
        await holder.result()

        async def is_free() -> bool:
            return not (await bench.seen(actor)).in_use

        await eventually(is_free)
        await waiter.signal(GivesUp.end)
        await waiter.result()


async def test_a_block_that_ends_as_its_reset_run_begins(client: Client, task_queue: str, quiet: Quiet) -> None:
    """The permit is released, though the run asks in the same task whether it still has it."""
    quiet.allow("Failed activation on workflow MendedAfterReset")
    quiet.allow("as asked")
    bench = Bench(client, task_queue, "redis")
    actor = await bench.actor()
    run = await bench.start(MendedAfterReset.run, bench.on)

    async def has_failed() -> bool:
        return "WORKFLOW_TASK_FAILED" in await names_of(run)

    await eventually(has_failed, 30)
    failed = [event for event in await events_of(run) if event.HasField("workflow_task_failed_event_attributes")]
    Mend.mended = True
    again = await reset_to(client, run, failed[-1].event_id)

    async def is_out_and_free() -> bool:
        return await again.query(MendedAfterReset.is_out) and not (await bench.seen(actor)).in_use

    await eventually(is_out_and_free, 30)
    await again.signal(MendedAfterReset.end)
    await again.result()


async def test_two_holds_in_one_task_where_nobody_may_wait(client: Client, task_queue: str) -> None:
    """The second one waits until the first is released: its own release is nobody that it would have to wait behind."""
    bench = Bench(client, task_queue, "redis")
    run = await bench.start(TwiceInOneTask.run, dataclasses.replace(bench.on, max_waiters=0))
    first, second = await run.result()
    assert second > first


@pytest.mark.parametrize("how", ["try_acquire", "hold"])
async def test_who_does_not_wait_asks_after_a_long_workflow_task(
    client: Client, task_queue: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its release takes so long that the server begins the workflow task again; the end of that one records it."""
    release = Requests.release

    async def slowly(self: Requests, *args: Any, **options: Any) -> Any:
        released = await release(self, *args, **options)
        Lingering.begun.set()
        await Lingering.over.wait()
        return released

    monkeypatch.setattr(Requests, "release", slowly)
    on, short = Bench(client, task_queue, "redis").on, timedelta(seconds=1)
    run = await client.start_workflow(
        Again.run, args=[on, how], id=task_queue, task_queue=task_queue, task_timeout=short
    )
    await asyncio.wait_for(Lingering.begun.wait(), 30)
    before = len(await events_of(run))

    async def is_begun_again() -> bool:
        return len(await events_of(run)) > before

    await eventually(is_begun_again)
    Lingering.over.set()
    assert await run.result()
    await replays(run)
