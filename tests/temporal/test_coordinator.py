"""What the coordinator does beyond what every backend does."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from backend_bench import Bench, without_redis
from backend_flows import Actor, Asking, Consumer, Holder
from temporal_tools import events_of, has_event, names_of
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowHandle, WorkflowUpdateFailedError

from redlease import Unavailable
from redlease_temporal._backends.coordinator import queue_state, workflow
from redlease_temporal._backends.coordinator.activities import CoordinatorActivities
from redlease_temporal._backends.coordinator.queue_state import QueueState
from redlease_temporal._plugin import activity_interceptor

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporal_server import TemporalServer


@pytest.fixture
async def client(temporal_server: TemporalServer, task_queue: str, prefix: str) -> AsyncIterator[Client]:
    """A client whose plugin has no Redis, beside a worker for all workflows."""
    async with without_redis(temporal_server, task_queue, prefix) as client:
        yield client


@pytest.fixture
def bench(client: Client, task_queue: str) -> Bench:
    """A resource of its own."""
    return Bench(client, task_queue, "coordinator")


def keeper(bench: Bench) -> WorkflowHandle[Any, Any]:
    """Return the workflow that keeps the resource."""
    return bench.client.get_workflow_handle(f"lock:{bench.on.resource}")


async def test_a_release_that_overtakes_the_delivery_of_its_grant(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a busy worker a release comes in one task with the news that its grant was delivered; nothing leaks."""
    ask = QueueState.request

    def slowly(*args: Any) -> Any:
        time.sleep(0.02)
        return ask(*args)

    monkeypatch.setattr(QueueState, "request", slowly)
    await asyncio.gather(*(bench.consume(0.0, capacity=2) for _ in range(20)))
    assert overtaken([event.event_type for event in (await keeper(bench).fetch_history()).events]) > 0
    snapshot = await bench.seen(await bench.actor())
    assert (snapshot.holders, snapshot.waiters) == ((), ())


def overtaken(kinds: list[Any]) -> int:
    """Count the workflow tasks that begin with the delivery of a signal and with a signal received."""
    count, batch = 0, set[Any]()
    for kind in kinds:
        if kind == EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED:
            both = {
                EventType.EVENT_TYPE_EXTERNAL_WORKFLOW_EXECUTION_SIGNALED,
                EventType.EVENT_TYPE_WORKFLOW_EXECUTION_SIGNALED,
            }
            count += both <= batch
            batch.clear()
        batch.add(kind)
    return count


async def test_waiters_that_died_are_passed_over(bench: Bench) -> None:
    """Three terminated waiters ahead cost the live one no lease and no deadline."""
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking(), lease=60.0)
    dead = []
    for number in range(1, 4):
        dead.append(await bench.holder())
        await bench.until_waiting(actor, number)
    live = await bench.holder()
    await bench.until_waiting(actor, 4)
    for one in dead:
        await one.terminate()
    await bench.do(actor, Actor.release, permit)
    assert await asyncio.wait_for(live.execute_update(Holder.until_held), 15)
    await live.signal(Holder.proceed)


async def test_a_grant_to_a_run_that_does_not_wait_for_it_comes_back(bench: Bench) -> None:
    """A new run under the id of a dead waiter gets its grant, and returns it."""
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking())
    dead = await bench.holder()
    await bench.until_waiting(actor, 1)
    await dead.terminate()
    other = await bench.client.start_workflow(Actor.run, bench.on, id=dead.id, task_queue=bench.queue)
    await bench.do(actor, Actor.release, permit)
    assert await bench.do(actor, Actor.acquire, Asking(timeout=3))
    await eventually(partial(has_event, other, "SIGNAL_EXTERNAL_WORKFLOW_EXECUTION_INITIATED"))


async def test_an_activity_whose_coordinator_is_slow_spends_no_attempt(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first attempt asks again for its permit, and runs: the user's attempts are for the activity's own errors."""
    ask, left = CoordinatorActivities.are_held, 2

    async def slowly(self: CoordinatorActivities, *args: Any) -> list[bool]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Unavailable("as asked")
        return await ask(self, *args)

    monkeypatch.setattr(CoordinatorActivities, "are_held", slowly)
    monkeypatch.setattr(activity_interceptor, "PAUSE_S", 0.05)
    run = await bench.start(Consumer.run, bench.on, 0.0)
    assert await run.result()
    started = [each.activity_task_started_event_attributes for each in await events_of(run)]
    assert [each.attempt for each in started if each.attempt] == [1]
    assert left < 0


async def test_first_come_first_served_over_many_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve waiters are served in their order while the coordinator continues as new with them again and again."""
    monkeypatch.setattr(workflow, "EVENTS_MAX", 40)
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking(), lease=60.0)
    first = (await keeper(bench).describe()).run_id
    tasks = []
    for number in range(1, 13):
        tasks.append(asyncio.create_task(bench.consume(0.0)))
        await bench.until_waiting(actor, number)
    await bench.do(actor, Actor.release, permit)
    fences = await asyncio.gather(*tasks)
    assert all(before < after for before, after in pairwise(fences))
    described = await keeper(bench).describe()
    assert described.run_id != first
    longest = max([len(await names_of(run)) for run in await runs_of(bench)])
    assert longest < 100


async def runs_of(bench: Bench) -> list[WorkflowHandle[Any, Any]]:
    """Return the runs of the coordinator."""
    query = f"WorkflowId = '{keeper(bench).id}'"
    return [
        bench.client.get_workflow_handle(each.id, run_id=each.run_id)
        async for each in bench.client.list_workflows(query)
    ]


async def test_it_ends_when_idle_and_loses_no_request(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in every gap, is started anew by whoever asks next, and its fences go on growing."""
    monkeypatch.setattr(queue_state, "IDLE_MS", 1)
    fences: list[int] = []
    runs = set()

    async def ended() -> str | None:
        described = await keeper(bench).describe()
        return described.run_id if described.status == WorkflowExecutionStatus.COMPLETED else None

    for _ in range(4):
        fences += sorted(await asyncio.gather(*(bench.consume(0.0) for _ in range(3))))
        fences += [await bench.consume(0.0) for _ in range(3)]
        runs.add(await eventually(ended))
    assert all(before < after for before, after in pairwise(fences))
    assert len(runs) == 4


async def test_a_heavy_request_is_not_starved(bench: Bench) -> None:
    """A request for all units at the head waits for them, and light ones behind it wait too."""
    actor = await bench.actor()
    light = await bench.do(actor, Actor.acquire, Asking(), capacity=3, lease=60.0)
    heavy = asyncio.create_task(bench.do(actor, Actor.acquire, Asking(weight=3), capacity=3))
    await bench.until_waiting(actor, 1)
    behind = asyncio.create_task(bench.do(actor, Actor.acquire, Asking(), capacity=3))
    await bench.until_waiting(actor, 2)
    await bench.do(actor, Actor.release, light, capacity=3)
    first = await heavy
    assert not behind.done()
    await bench.do(actor, Actor.release, first, capacity=3)
    assert (await behind).fence > first.fence


async def test_resized_and_released_by_hand(bench: Bench) -> None:
    """An administrator's signals need no library: the command line can send them."""
    actor, holder = await bench.actor(), await bench.holder()
    await holder.execute_update(Holder.until_held)
    waiting = asyncio.create_task(bench.do(actor, Actor.acquire, Asking()))
    await bench.until_waiting(actor, 1)
    await keeper(bench).signal("resize", 2)
    await waiting
    (held, _) = (await bench.seen(actor)).holders
    await keeper(bench).signal("release", {"ticket": held.ticket})
    assert await holder.result() == "lost"


async def test_a_dead_holder_is_noticed_while_others_wait(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With somebody waiting its run is looked at before its lease of half a minute is over."""
    monkeypatch.setattr(queue_state, "POLL_MS", 300)
    holder, actor = await bench.holder(lease=30.0), await bench.actor()
    await holder.execute_update(Holder.until_held)
    await holder.terminate()
    assert await bench.do(actor, Actor.acquire, Asking(timeout=5))


async def test_redis_is_refused_where_there_is_none(bench: Bench) -> None:
    """A plugin without Redis says so to whoever asks for it."""
    actor = await bench.actor()
    assert await bench.failing(actor, Actor.acquire, Asking(), backend="redis") == "ValueError"
    assert await bench.failing(actor, Actor.acquire, Asking(), backend="etcd") == "ValueError"


async def test_the_makespan_of_the_demo(bench: Bench) -> None:
    """Eight consumers of 200 ms at three at a time take at most 1.8 of what they would without waste."""
    await bench.makespan_within(1.8)


async def test_one_of_two_that_share_a_ticket_is_terminated(bench: Bench) -> None:
    """The other one has the permit alone, nobody else is let in beside it, and its release frees it."""
    first, sharer, other, third = [await bench.actor() for _ in range(4)]
    held = await bench.do(first, Actor.acquire, Asking())
    gone = asyncio.create_task(bench.do(sharer, Actor.acquire, Asking(ticket="t")))
    await bench.until_waiting(first, 1)
    shared = asyncio.create_task(bench.do(other, Actor.acquire, Asking(ticket="t")))

    async def both() -> bool:
        return EventType.EVENT_TYPE_MARKER_RECORDED in [event.event_type for event in await events_of(other)]

    await eventually(both)
    behind = asyncio.create_task(bench.do(third, Actor.acquire, Asking()))
    await bench.until_waiting(first, 2)
    await sharer.terminate()
    await bench.do(first, Actor.release, held)
    permit = await asyncio.wait_for(shared, 15)
    snapshot = await bench.seen(first)
    assert ([each.ticket for each in snapshot.holders], len(snapshot.waiters)) == (["t"], 1)
    assert await bench.do(other, Actor.release, permit)
    assert (await asyncio.wait_for(behind, 15)).fence > permit.fence
    with pytest.raises(WorkflowUpdateFailedError):
        await gone
