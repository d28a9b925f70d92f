"""Starts over the limit of a workflow are refused, and places are held until the last run is closed."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from limited_flows import AGAIN, Hasty, Job, OneEach, Parent, Two
from temporal_tools import (
    ENDINGS,
    WIDE,
    Place,
    after_refusals,
    begun_for,
    end,
    ended,
    has_event,
    names_of,
    reset,
    tasks_that_failed,
)
from temporalio.client import (
    Client,
    Schedule,
    ScheduleActionStartWorkflow,
    ScheduleSpec,
    WithStartWorkflowOperation,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Replayer

from redlease_temporal import WorkflowConcurrencyLimitExceeded, concurrency
from redlease_temporal._admission import redis_admission
from redlease_temporal._admission.redis_admission import RedisAdmission
from redlease_temporal._admission.redis_tracker import AdmissionTracker
from redlease_temporal._admission.rule import AdmissionRequest, Rule, rule_of
from redlease_temporal._admission.start_interceptor import StartGate
from redlease_temporal._backends.redis.registry import Registry, TicketRecord
from redlease_temporal._common.run_monitor import RunState, RunStatus
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Redlease, Semaphore

    from conftest import OwnServer
    from temporal.conftest import StartWorkerProcess
    from temporal_server import TemporalServer

WORKFLOWS = [Two, OneEach, Parent, Hasty]
FREE_WITHIN = 3.0


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    async with place.serving(WORKFLOWS, []) as client:
        yield client


@pytest.fixture
async def plain(place: Place) -> Client:
    """A client without the plugin, as other SDKs, the CLI and schedules are."""
    return await place.client(plugins=[])


@pytest.fixture
def places(outside: Redlease) -> Semaphore:
    """The places of `Two`."""
    return outside.semaphore("concurrency:Two", 2)


async def taken(places: Semaphore) -> int:
    """Return how many places are taken."""
    return len((await places.inspect()).holders)


async def is_taken(places: Semaphore, count: int) -> bool:
    """Tell whether so many places are taken."""
    return await taken(places) == count


async def started(
    client: Client, place: Place, name: str = "", how: str = "complete", **options: Any
) -> WorkflowHandle[Any, str]:
    """Start one of which two run at once, that ends in this way."""
    usual: dict[str, Any] = {"task_queue": place.task_queue, "task_timeout": timedelta(seconds=2)}
    handle: WorkflowHandle[Any, str] = await client.start_workflow(
        Two.run, Job(how=how), id=f"{place.task_queue}-{name or uuid.uuid4().hex}", **(usual | options)
    )
    return handle


# The start


async def test_fifty_starts_at_once(client: Client, place: Place) -> None:
    """Of fifty starts at once two run, and forty-eight are refused at once."""
    outcomes = await asyncio.gather(*(started(client, place) for _ in range(50)), return_exceptions=True)
    running = [one for one in outcomes if isinstance(one, WorkflowHandle)]
    refused = [one for one in outcomes if isinstance(one, WorkflowConcurrencyLimitExceeded)]
    assert (len(running), len(refused)) == (2, 48)
    assert {(one.workflow_type, one.partition_key, one.limit) for one in refused} == {("Two", None, 2)}
    assert [(await one.describe()).status for one in running] == [WorkflowExecutionStatus.RUNNING] * 2
    await end(*running)


async def test_from_two_clients(client: Client, place: Place) -> None:
    """The limit is for all clients together, those without a worker among them."""
    other = await place.client()
    first, second = await started(client, place), await started(other, place)
    for one in (client, other):
        with pytest.raises(WorkflowConcurrencyLimitExceeded, match="2 of them run, and more may not"):
            await started(one, place)
    await end(first, second)


async def test_a_limit_for_each_key(client: Client, place: Place) -> None:
    """With a key the limit is for each of its values."""
    handles = {}
    for customer in ("a", "b"):
        handles[customer] = await client.start_workflow(
            OneEach.run, Job(customer), id=f"{place.task_queue}-{customer}", task_queue=place.task_queue
        )
    with pytest.raises(WorkflowConcurrencyLimitExceeded) as raised:
        await client.start_workflow(OneEach.run, Job("a"), id=f"{place.task_queue}-c", task_queue=place.task_queue)
    assert (raised.value.workflow_type, raised.value.partition_key, raised.value.limit) == ("OneEach", "a", 1)
    await end(*handles.values())


async def test_a_start_that_did_not_happen(client: Client, place: Place, places: Semaphore) -> None:
    """A start that the server refuses leaves no place taken, and one of a running ID takes none."""
    with pytest.raises(Exception, match="task queue"):
        await client.start_workflow(Two.run, Job(), id=place.task_queue, task_queue="")
    assert await taken(places) == 0
    handle = await started(client, place, "one")
    with pytest.raises(WorkflowAlreadyStartedError):
        await started(client, place, "one")
    assert await taken(places) == 1
    await end(handle)


async def test_two_starts_of_one_id(
    client: Client, place: Place, places: Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one looked before the other one had started the ID, and took its place over: the place is kept."""
    handle = await started(client, place, "one")
    await handle.execute_update(Two.look)
    status, looks = RedisAdmission._status_of, []

    async def earlier(admission: RedisAdmission, entry: AdmissionRequest) -> RunStatus:
        looks.append(await status(admission, entry))
        return RunStatus.CLOSED if len(looks) == 1 else looks[-1]

    monkeypatch.setattr(RedisAdmission, "_status_of", earlier)
    with pytest.raises(WorkflowAlreadyStartedError):
        await started(client, place, "one")
    assert len(looks) == 2

    async def is_renewed_after() -> bool:
        (holder,) = (snapshot := await places.inspect()).holders
        return holder.expires_at_ms > snapshot.server_time_ms + redis_admission.PROVISIONAL_MS

    await eventually(is_renewed_after)
    await end(handle)
    await eventually(lambda: is_taken(places, 0), FREE_WITHIN)


async def test_signal_and_update_with_start(client: Client, place: Place, places: Semaphore) -> None:
    """On a running ID they take no place and are never refused; otherwise they are starts as any other."""
    first, second = await started(client, place, "one"), await started(client, place, "two")
    options: dict[str, Any] = {"task_queue": place.task_queue, "start_signal": "proceed"}
    again = await client.start_workflow(Two.run, Job(), id=first.id, **options)
    assert again.result_run_id == first.result_run_id
    await first.result()
    operation = WithStartWorkflowOperation(
        Two.run,
        Job(),
        id=second.id,
        task_queue=place.task_queue,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    run_id = await client.execute_update_with_start_workflow(Two.look, start_workflow_operation=operation)
    assert run_id == second.result_run_id
    await eventually(lambda: is_taken(places, 1), FREE_WITHIN)
    third = await started(client, place, "three")
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await client.start_workflow(Two.run, Job(), id=f"{place.task_queue}-four", **options)
    operation = WithStartWorkflowOperation(
        Two.run,
        Job(),
        id=f"{place.task_queue}-four",
        task_queue=place.task_queue,
        id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
    )
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await client.execute_update_with_start_workflow(Two.look, start_workflow_operation=operation)
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await operation.workflow_handle()
    await end(second, third)


async def test_children(client: Client, place: Place) -> None:
    """A parent that starts one child too many has the error at the start, and the child does not exist."""
    parent = await client.start_workflow(Parent.run, 3, id=place.task_queue, task_queue=place.task_queue)
    await eventually(lambda: is_running(client, f"{place.task_queue}-0"))
    await parent.signal("proceed")
    assert await parent.result() == ["started", "OneEach child 1", "OneEach child 1", "child"]
    assert (await names_of(parent)).count("START_CHILD_WORKFLOW_EXECUTION_INITIATED") == 1
    assert not await tasks_that_failed(parent)


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_the_start_of_a_child_is_given_up(client: Client, place: Place, turns: int) -> None:
    """A start that is cancelled while its place is taken ends as cancelled: no child runs, and the place is free."""
    hasty = await client.start_workflow(Hasty.run, turns, id=place.task_queue, task_queue=place.task_queue)
    assert await hasty.result() == "given up"
    assert "START_CHILD_WORKFLOW_EXECUTION_INITIATED" not in await names_of(hasty)
    assert not await tasks_that_failed(hasty)
    other = await client.start_workflow(
        OneEach.run, Job(customer="hasty"), id=f"{place.task_queue}-other", task_queue=place.task_queue
    )
    await end(other)


async def is_running(client: Client, workflow_id: str) -> bool:
    """Tell whether a workflow runs."""
    found = [
        one async for one in client.list_workflows(f"WorkflowId = '{workflow_id}' AND ExecutionStatus = 'Running'")
    ]
    return bool(found)


async def test_starts_that_bypass_the_plugin(client: Client, plain: Client, place: Place) -> None:
    """Of five starts by a client without the plugin two run, and three end at once as failed runs of their type."""
    handles = [await started(plain, place) for _ in range(5)]
    running, refusals = await after_refusals(handles, 3)
    assert [list(refusal.details) for refusal in refusals] == [["Two", None, 2]] * 3
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await started(client, place)
    await end(*running)


async def test_a_schedule_bypasses_the_plugin(client: Client, plain: Client, place: Place) -> None:
    """A run that a schedule starts over the limit fails at once."""
    running = [await started(client, place) for _ in range(2)]
    schedule = await plain.create_schedule(
        f"{place.task_queue}-schedule",
        Schedule(
            action=ScheduleActionStartWorkflow(
                Two.run, Job(), id=f"{place.task_queue}-scheduled", task_queue=place.task_queue
            ),
            spec=ScheduleSpec(),
        ),
        trigger_immediately=True,
    )

    async def action() -> Any:
        return (await schedule.describe()).info.recent_actions

    (acted,) = await eventually(action)
    handle = plain.get_workflow_handle(acted.action.workflow_id, run_id=acted.action.first_execution_run_id)
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, ApplicationError)
    assert raised.value.cause.type == "WorkflowConcurrencyLimitExceeded"
    await schedule.delete()
    await end(*running)


async def test_ended_before_it_began(place: Place, places: Semaphore) -> None:
    """The place of a run that no worker has begun is free too when that is terminated, as soon as there is a relay."""
    client = await place.client()
    handles = [await started(client, place, task_queue="nobody's") for _ in range(2)]
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await started(client, place)
    async with place.serving(WORKFLOWS, []):
        await handles[0].terminate()
        await eventually(lambda: is_taken(places, 1), FREE_WITHIN)
        await handles[1].terminate()
        await eventually(lambda: is_taken(places, 0), FREE_WITHIN)


def door_of(client: Client, place: Place) -> tuple[StartGate, Rule, Any]:
    """Return what takes places for a client, the rule of `Two`, and a start of it."""
    settings = RedleasePlugin(place.redis_url, prefix=place.prefix)._settings
    rule = rule_of("Two")
    assert rule is not None
    return StartGate(client.config(), settings), rule, SimpleNamespace(id=f"{place.task_queue}-unknown", args=[Job()])


async def test_a_start_that_came_through_after_all(
    client: Client, plain: Client, place: Place, places: Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of a run whose start seemed to have failed stays taken until that is closed."""
    monkeypatch.setattr(redis_admission, "PROVISIONAL_MS", 1000)
    door, rule, start = door_of(client, place)
    with pytest.raises(RPCError):
        async with door.reserved_slot(rule, start):
            handle = await started(plain, place, "unknown", task_queue="nobody's")
            raise RPCError("away", RPCStatusCode.UNAVAILABLE, b"")
    await stays_taken(places, 1, 2.5)
    await handle.terminate()
    await eventually(lambda: is_taken(places, 0), FREE_WITHIN)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), RPCError("away", RPCStatusCode.UNAVAILABLE, b"")])
async def test_a_start_of_which_nothing_is_known(
    client: Client, place: Place, places: Semaphore, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Its place is kept for a while, and free then, should there be no run."""
    monkeypatch.setattr(redis_admission, "PROVISIONAL_MS", 1000)
    door, rule, start = door_of(client, place)
    with pytest.raises(type(error)):
        async with door.reserved_slot(rule, start):
            raise error
    await stays_taken(places, 1, 0.5)
    await eventually(lambda: is_taken(places, 0), 3)


async def test_whoever_took_a_place_died(client: Client, place: Place, places: Semaphore) -> None:
    """A place that was taken for a run, and not written down any more, is free when that is closed."""
    door, _, _ = door_of(client, place)
    async with door._open() as taking:
        record = taking.record_of(AdmissionRequest("Two", f"{place.task_queue}-gone", 2, chain="gone"))
        await taking._registry.claim(record)
        await taking._take(record, redis_admission.SLOT_LEASE_MS)
    assert await taken(places) == 1
    await eventually(lambda: is_taken(places, 0), 10)


# The end


async def begun(client: Client, place: Place, ending: str) -> WorkflowHandle[Any, str]:
    """Start one that is to end in this way."""
    handle = await started(client, place, **begun_for(ending))
    await handle.execute_update(Two.look)
    return handle


async def seconds_until_free(places: Semaphore) -> float:
    """Return how long it took until no place was taken."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    await eventually(lambda: is_taken(places, 0), 10)
    return loop.time() - began


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("ending", ENDINGS)
async def test_ten_runs_end(client: Client, place: Place, places: Semaphore, ending: str) -> None:
    """After each of ten runs that end in the same way its place is free within 3 s."""
    took = []
    for number in range(5):
        handles = [await begun(client, place, ending) for _ in range(2)]
        await asyncio.sleep(0.15 * number)  # the relay looks once a second: they end at other moments between two looks
        await asyncio.gather(*(ended(handle, ending) for handle in handles))
        took.append(await seconds_until_free(places))
    assert max(took) < FREE_WITHIN, took


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_runs_end_after_their_worker_was_killed(
    worker_process: StartWorkerProcess, place: Place, places: Semaphore
) -> None:
    """With the worker killed that began them, places are free within 3 s of their runs' ends too, however those end."""
    client = await place.client()
    worker = await worker_process("limited_flows", worker=WIDE)
    took = []
    for ending in ENDINGS:
        other = await worker_process("limited_flows", worker=WIDE)
        handles = [await begun(client, place, ending) for _ in range(2)]
        worker.kill()
        await asyncio.gather(*(ended(handle, ending) for handle in handles))
        took.append(await seconds_until_free(places))
        worker = other
    assert max(took) < FREE_WITHIN, took


# Runs that go on as others


async def stays_taken(places: Semaphore, count: int, seconds: float) -> None:
    """Look again and again for so long: so many places are taken at every look."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        assert await taken(places) == count
        await asyncio.sleep(0.02)


async def test_continued_as_new(client: Client, place: Place, places: Semaphore) -> None:
    """A chain of runs keeps its one place until the last is closed."""
    handle = await started(client, place, "one", "continue continue complete")
    latest = client.get_workflow_handle(handle.id)
    staying = asyncio.create_task(stays_taken(places, 1, 3))
    for _ in range(2):
        await goes_on(latest)
    await staying
    await latest.signal(Two.proceed)
    assert await handle.result() == "complete"
    assert await seconds_until_free(places) < FREE_WITHIN


async def goes_on(handle: WorkflowHandle[Any, Any]) -> None:
    """Let a run go on, and wait until it has been continued as another."""
    before = await handle.execute_update(Two.look)
    await handle.signal(Two.proceed)
    await eventually(lambda: is_another(handle, before))


async def is_another(handle: WorkflowHandle[Any, Any], run_id: str) -> bool:
    """Tell whether the open run is another one."""
    return (await handle.describe()).run_id != run_id


async def test_retried(client: Client, place: Place, places: Semaphore) -> None:
    """The retries of a workflow keep its one place, while others are refused."""
    handle = await started(client, place, "one", "retry", retry_policy=AGAIN)
    other = await started(client, place)
    latest = client.get_workflow_handle(handle.id)
    for _ in range(2):
        await goes_on(latest)
        with pytest.raises(WorkflowConcurrencyLimitExceeded):
            await started(client, place)
    await end(latest, other)
    assert await seconds_until_free(places) < FREE_WITHIN


@pytest.mark.parametrize("task", [0, -1])
async def test_reset(client: Client, place: Place, places: Semaphore, task: int) -> None:
    """A run that was reset, to before or after it took its place, keeps it until that run is closed."""
    handle = await started(client, place, "one")
    await handle.execute_update(Two.look)
    other = await started(client, place)
    staying = asyncio.create_task(stays_taken(places, 2, 3))
    latest = await reset(client, handle, task)
    await latest.execute_update(Two.look)
    await staying
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await started(client, place)
    await latest.terminate()
    await eventually(lambda: is_taken(places, 1), FREE_WITHIN)
    await end(other)


async def test_an_id_is_used_again(client: Client, place: Place, places: Semaphore) -> None:
    """A workflow that is started right after another of its ID was closed has its own place, which stays."""
    for ending in ("terminated", "completed") * 3:
        handle = await started(client, place, "one")
        await handle.execute_update(Two.look)
        await ended(handle, ending)
    handle = await started(client, place, "one")
    await stays_taken(places, 1, 3)
    await end(handle)
    assert await seconds_until_free(places) < FREE_WITHIN


async def test_the_place_of_the_next_run_is_not_taken_for_a_lost_one(
    client: Client, place: Place, places: Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that renews the place of a closed run while the next run of its ID takes that over does not free it."""
    trackers: list[AdmissionTracker] = []
    renewed: list[TicketRecord] = []
    start, on_look, adopt = AdmissionTracker.start, AdmissionTracker._on_state, RedisAdmission._adopt

    def noted(tracker: AdmissionTracker) -> None:
        trackers.append(tracker)
        start(tracker)

    def learns_late(tracker: AdmissionTracker, look: RunState) -> None:
        if renewed or look.status is RunStatus.OPEN:
            on_look(tracker, look)

    async def while_the_relay_renews(
        admission: RedisAdmission, entry: AdmissionRequest, record: TicketRecord, *permit: int
    ) -> int:
        adopted = await adopt(admission, entry, record, *permit)
        if not renewed:
            tracker = trackers[-1]
            renewed.append(tracker.record)
            await tracker._renew()
            tracker._closed = True  # as it learns within a second, if not yet
            await tracker._step()
        return adopted

    monkeypatch.setattr(AdmissionTracker, "start", noted)
    monkeypatch.setattr(RedisAdmission, "_adopt", while_the_relay_renews)
    monkeypatch.setattr(AdmissionTracker, "_on_state", learns_late)
    before = await started(client, place, "one")
    await before.execute_update(Two.look)
    await ended(before, "terminated")
    handle = await started(client, place, "one")
    assert [record.chain for record in renewed] == [before.first_execution_run_id]
    assert await taken(places) == 1
    await end(handle)


async def test_the_watch_of_an_earlier_run_ends_late(
    client: Client, place: Place, places: Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended after the next run has claimed it, and before that is written down, it is that run's all the same."""
    put = Registry.save
    late: list[TicketRecord | None] = []

    async def after_its_end(registry: Registry, record: TicketRecord) -> bool:
        if record.admission and not late:
            late.append(await registry.drop(record.id))
        return await put(registry, record)

    monkeypatch.setattr(Registry, "save", after_its_end)
    handle = await started(await place.client(plugins=[]), place)
    await handle.execute_update(Two.look)
    assert late
    await end(handle)
    assert await seconds_until_free(places) < FREE_WITHIN


async def test_a_run_is_replaced(client: Client, place: Place, places: Semaphore) -> None:
    """A start that terminates the running workflow of its ID has its place, for as long as it runs."""
    handle = await started(client, place, "one")
    await handle.execute_update(Two.look)
    handle = await started(client, place, "one", id_conflict_policy=WorkflowIDConflictPolicy.TERMINATE_EXISTING)
    await handle.execute_update(Two.look)
    await stays_taken(places, 1, 2.5)
    await end(handle)
    assert await seconds_until_free(places) < FREE_WITHIN


# Losses


async def test_places_are_taken_again(client: Client, place: Place, places: Semaphore) -> None:
    """Runs whose places are lost in Redis take them again."""
    handles = [await started(client, place) for _ in range(2)]
    for handle in handles:
        await handle.execute_update(Two.look)
    await places.release_all()
    await eventually(lambda: is_taken(places, 2), 10)
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await started(client, place)
    await end(*handles)
    assert await seconds_until_free(places) < FREE_WITHIN


async def test_redis_away_at_the_start(place: Place, temporal_server: TemporalServer, own_server: OwnServer) -> None:
    """A run that finds Redis away waits for it, begins when it is back, and is refused if there is no place then."""
    server = own_server("valkey9")
    away = Place(temporal_server, place.task_queue, server.url, place.prefix)
    plain = await place.client(plugins=[])
    async with away.serving(WORKFLOWS, []):
        server.pause()
        handles = [await started(plain, away) for _ in range(3)]
        await eventually(lambda: all_have(handles, "ACTIVITY_TASK_SCHEDULED"), 15)
        server.resume()

        async def is_one_refused() -> bool:
            statuses = [(await handle.describe()).status for handle in handles]
            return statuses.count(WorkflowExecutionStatus.FAILED) == 1

        await eventually(is_one_refused, 15)
        for handle in handles:
            if (await handle.describe()).status == WorkflowExecutionStatus.RUNNING:
                await end(handle)


async def all_have(handles: list[WorkflowHandle[Any, Any]], event: str) -> bool:
    """Tell whether all histories have an event of that type."""
    return all([await has_event(handle, event) for handle in handles])


async def test_histories_replay(client: Client, place: Place) -> None:
    """The history of a limited workflow has one event more, and is replayed without a difference."""
    handle = await started(client, place, "one")
    parent = await client.start_workflow(Parent.run, 2, id=place.task_queue, task_queue=place.task_queue)
    await eventually(lambda: is_running(client, f"{place.task_queue}-0"))
    await end(handle, parent)
    assert (await names_of(handle)).count("MARKER_RECORDED") == 1
    replayer = Replayer(workflows=WORKFLOWS, plugins=[RedleasePlugin("redis://unused")])
    for one in (handle, parent):
        await replayer.replay_workflow(await one.fetch_history())


def test_misuse() -> None:
    """A limit of 0, and a class that is no workflow yet, are refused."""
    with pytest.raises(ValueError, match="max must be a whole number from 1"):
        concurrency(max=0)
    with pytest.raises(ValueError, match=r"above @workflow\.defn"):
        concurrency(max=1)(Place)


async def test_a_key_that_cannot_be_told(client: Client, plain: Client, place: Place) -> None:
    """It is an error of the start that says why; past the plugin it fails the run, not its workflow task."""
    with pytest.raises(ValueError, match="could not be computed"):
        await client.start_workflow("OneEach", 7, id=place.task_queue, task_queue=place.task_queue)
    with pytest.raises(WorkflowFailureError) as raised:
        await plain.execute_workflow("OneEach", id=place.task_queue, task_queue=place.task_queue)
    assert isinstance(raised.value.cause, ApplicationError)
    assert raised.value.cause.type == "ValueError"
