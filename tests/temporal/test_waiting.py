"""Waiting for a permit: in the order of arrival, in no slot, and through whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import redis.asyncio
from lock_flows import Plain, plain
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError, CancelledError
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import UnsandboxedWorkflowRunner, Worker
from waiting_flows import Got, Many, Wait, Waiter

from redlease import Permit, Redlease, Semaphore
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.requests import Requests
from redlease_temporal._common import run_monitor
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually, queue_up, until_waiting, watches_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease_temporal._payloads import locks

    from conftest import MakeClient, OwnServer
    from temporal.conftest import StartWorkerProcess
    from temporal_server import TemporalServer

SERVED_WITHIN = 3.0

Handle = WorkflowHandle[Waiter, Got]


class Stage:
    """A worker in this process, and a plain client beside it."""

    def __init__(self, client: Client, plugin: RedleasePlugin, service: Redlease, task_queue: str) -> None:
        self.client = client
        self.service = service
        self.task_queue = task_queue
        self._plugin = plugin

    @property
    def relay(self) -> Relay:
        """The worker's relay."""
        return self._plugin._runtime_of(self.client).relay()

    async def start(self, wait: Wait, number: int = 0) -> Handle:
        """Start a workflow that waits."""
        return await self.client.start_workflow(
            Waiter.run, wait, id=f"{self.task_queue}-{number}", task_queue=self.task_queue
        )

    async def line_up(self, wait: Wait, count: int) -> list[Handle]:
        """Start workflows one after the other, so that they stand in the queue in the order of the list."""
        handles = []
        for number in range(1, count + 1):
            handles.append(await self.start(wait, number))
            await until_waiting(self.pool(wait), number)
        return handles

    def pool(self, wait: Wait) -> Semaphore:
        """The resource, as a service sees it."""
        return self.service.semaphore(wait.resource, wait.capacity)


class MakeStage(Protocol):
    """Makes a stage; options are the plugin's, those of the worker stand in `worker`."""

    async def __call__(self, *, url: str = "", worker: dict[str, Any] | None = None, **options: Any) -> Stage: ...


@pytest.fixture
async def make_stage(
    temporal_server: TemporalServer, task_queue: str, redis_url: str, prefix: str, make_client: MakeClient
) -> AsyncIterator[MakeStage]:
    """A factory of stages."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*, url: str = redis_url, worker: dict[str, Any] | None = None, **options: Any) -> Stage:
            plugin = RedleasePlugin(url, prefix=prefix, **options)
            client = await Client.connect(temporal_server.address, plugins=[plugin])
            await stack.enter_async_context(
                Worker(
                    client,
                    task_queue=task_queue,
                    workflows=[Many, Plain, Waiter],
                    activities=[plain],
                    **worker or {},
                )
            )
            return Stage(client, plugin, await make_client(url=url), task_queue)

        yield make


async def watched(url: str, prefix: str) -> int:
    """Return how many requests relays track."""
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as raw:
        return len(await watches_of(raw, prefix))


async def nobody_is_left(stage: Stage, wait: Wait, url: str, prefix: str) -> bool:
    """Tell whether nobody holds or waits, and no relay tracks anything."""
    snapshot = await stage.pool(wait).inspect()
    return not (snapshot.holders or snapshot.waiters) and await watched(url, prefix) == 0


def in_order(results: list[Got]) -> bool:
    """Tell whether all were held, each with a higher fence than the one before."""
    fences = [got.fence for got in results]
    return {got.what for got in results} == {"held"} and fences == sorted(set(fences))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_five_hundred_wait_without_a_slot(make_stage: MakeStage, redis_url: str, prefix: str) -> None:
    """With five slots, 500 workflows wait, another activity runs at once, and all are served as they arrived."""
    count = 500
    # In the sandbox the time goes into importing what each of the runs imports.
    runner = UnsandboxedWorkflowRunner()
    stage = await make_stage(worker={"max_concurrent_activities": 5, "workflow_runner": runner})
    wait = Wait("r")
    pool = stage.service.lock("r", lease=600)  # on a machine with neighbours five hundred need more than half a minute
    permit = await pool.acquire()
    handles: list[Handle] = []
    for start in range(0, count, 50):
        handles += await asyncio.gather(*(stage.start(wait, number) for number in range(start, start + 50)))
    await eventually(lambda: _so_many(pool, count), 400)
    tickets = [waiter.ticket for waiter in (await pool.inspect(max_items=count)).waiters]

    for number in range(5):
        # Were all slots taken, it would wait until the release, which comes later.
        await stage.client.execute_workflow(
            Plain.run, id=f"{stage.task_queue}-plain-{number}", task_queue=stage.task_queue
        )

    await pool.release(permit)
    results = await asyncio.gather(*(handle.result() for handle in handles))
    by_workflow = dict(zip((handle.id for handle in handles), results, strict=True))
    assert in_order([by_workflow[ticket.split("/")[1]] for ticket in tickets])
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def _so_many(pool: Semaphore, count: int) -> bool:
    return len((await pool.inspect(max_items=count)).waiters) == count


async def test_the_order_is_that_of_arrival_in_the_queue(make_stage: MakeStage) -> None:
    """Who asked first is served first."""
    stage = await make_stage()
    permit = await stage.service.lock("r").acquire()
    handles = await stage.line_up(Wait("r"), 6)
    await stage.service.lock("r").release(permit)
    assert in_order([await handle.result() for handle in handles])


async def test_a_service_and_workflows_share_one_order(make_stage: MakeStage) -> None:
    """Whoever asks, a workflow or a plain task, is served in the one order."""
    stage = await make_stage()
    pool = stage.service.lock("r")
    permit = await pool.acquire()
    first = await stage.start(Wait("r"), 1)
    await until_waiting(pool, 1)
    (second,) = await queue_up(pool, 1)
    third = await stage.start(Wait("r"), 3)
    await until_waiting(pool, 3)
    (fourth,) = await queue_up(pool, 1)
    await pool.release(permit)
    fences = [(await first.result()).fence, (await second).fence]
    await pool.release(await second)
    fences += [(await third.result()).fence, (await fourth).fence]
    await pool.release(await fourth)
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("timeout", [0, 0.5])
async def test_a_deadline_takes_the_ticket_out(
    make_stage: MakeStage, redis_url: str, prefix: str, timeout: float
) -> None:
    """A wait of so long, or of none, ends in AcquireTimeout, and nothing of it is left."""
    stage = await make_stage()
    wait = Wait("r", timeout=timeout)
    permit = await stage.pool(wait).acquire()
    began = time.monotonic()
    assert (await (await stage.start(wait)).result()).what == "timed out"
    assert timeout <= time.monotonic() - began < timeout + SERVED_WITHIN
    await stage.pool(wait).release(permit)
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def test_cancelled_while_waiting(make_stage: MakeStage, redis_url: str, prefix: str) -> None:
    """The run ends as cancelled, and its ticket is out by then."""
    stage = await make_stage()
    wait = Wait("r")
    permit = await stage.pool(wait).acquire()
    (handle,) = await stage.line_up(wait, 1)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert isinstance(caught.value.cause, CancelledError)
    await stage.pool(wait).release(permit)
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def test_terminated_while_waiting(
    make_stage: MakeStage, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look finds it, every ten seconds by default, and takes the ticket out."""
    monkeypatch.setattr(run_monitor, "IDLE_POLL_MS", 1000.0)
    stage = await make_stage()
    wait = Wait("r")
    permit = await stage.pool(wait).acquire()
    (handle,) = await stage.line_up(wait, 1)
    await handle.terminate()
    await until_waiting(stage.pool(wait), 0)
    await stage.pool(wait).release(permit)
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def test_terminated_before_its_turn(make_stage: MakeStage, redis_url: str, prefix: str) -> None:
    """When its turn comes that is found out at once, and the next is served."""
    stage = await make_stage()
    wait = Wait("r")
    permit = await stage.pool(wait).acquire()
    first, second = await stage.line_up(wait, 2)
    await first.terminate()
    await stage.pool(wait).release(permit)
    async with asyncio.timeout(SERVED_WITHIN):
        assert (await second.result()).what == "held"
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def test_a_full_queue(make_stage: MakeStage, redis_url: str, prefix: str) -> None:
    """With `max_waiters` waiting already the workflow gets QueueFull."""
    stage = await make_stage()
    wait = Wait("r", max_waiters=1)
    pool = stage.pool(wait)
    permit = await pool.acquire()
    (waiter,) = await queue_up(pool, 1)
    assert (await (await stage.start(wait)).result()).what == "full"
    await pool.release(permit)
    await pool.release(await waiter)
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def test_withdrawn(make_stage: MakeStage, redis_url: str, prefix: str) -> None:
    """Taken out of the queue by its ticket from outside, the workflow gets Withdrawn."""
    stage = await make_stage()
    wait = Wait("r")
    pool = stage.pool(wait)
    permit = await pool.acquire()
    (handle,) = await stage.line_up(wait, 1)
    (ticket,) = await until_waiting(pool, 1)
    await pool.release(ticket)
    assert (await handle.result()).what == "withdrawn"
    await pool.release(permit)
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def test_withdrawn_before_its_activity_began(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken out between queueing and the start of the activity that waits, the workflow gets Withdrawn as well."""
    keep_place, began, may_go_on = Requests.wait, asyncio.Event(), asyncio.Event()

    async def held_back(requests: Requests, call: locks.AcquireCall, token: bytes) -> None:
        began.set()
        await may_go_on.wait()
        await keep_place(requests, call, token)

    monkeypatch.setattr(Requests, "wait", held_back)
    stage = await make_stage()
    wait = Wait("r")
    pool = stage.pool(wait)
    permit = await pool.acquire()
    (handle,) = await stage.line_up(wait, 1)
    (ticket,) = await until_waiting(pool, 1)
    await began.wait()
    await pool.release(ticket)
    may_go_on.set()
    assert (await handle.result()).what == "withdrawn"
    await pool.release(permit)


async def test_a_weight_that_can_never_fit(make_stage: MakeStage, redis_url: str, prefix: str) -> None:
    """The run fails with type ValueError."""
    stage = await make_stage()
    wait = Wait("r", capacity=2, weight=3)
    handle = await stage.start(wait)
    with pytest.raises(WorkflowFailureError) as caught:
        await handle.result()
    assert isinstance(caught.value.cause, ApplicationError)
    assert caught.value.cause.type == "ValueError"
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def attempt_of(handle: Handle) -> int:
    """Return the attempt that the waiting activity is at, 0 when there is none."""
    pending = (await handle.describe()).raw_description.pending_activities
    return pending[0].attempt if pending else 0


async def test_the_next_attempt_goes_on_with_the_place(make_stage: MakeStage) -> None:
    """The activity that waits is made anew after `wait_attempt`, in its place; the token before completes nothing."""
    stage = await make_stage(wait_attempt=1)
    wait = Wait("r")
    pool = stage.pool(wait)
    permit = await pool.acquire()
    handles = await stage.line_up(wait, 2)
    tickets = await until_waiting(pool, 2)
    trackers = stage.relay.trackers
    await eventually(lambda: len([one for one in trackers.values() if one.record.token]) == 2)
    tokens = [tracker.record.token for tracker in trackers.values()]

    async def both_are_anew() -> bool:
        return min([await attempt_of(handle) for handle in handles]) > 1

    await eventually(both_are_anew)
    await eventually(lambda: not {one.record.token for one in trackers.values()} & set(tokens))
    for token in tokens:
        old = stage.client.get_async_activity_handle(task_token=base64.b64decode(token))
        with pytest.raises(RPCError) as caught:
            await old.complete(permit)
        assert caught.value.status == RPCStatusCode.NOT_FOUND
    assert await until_waiting(pool, 2) == tickets
    await pool.release(permit)
    assert in_order([await handle.result() for handle in handles])


async def test_the_reply_to_a_completion_is_lost(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch, redis_url: str, prefix: str
) -> None:
    """A repeated completion is refused while the run holds: the permit stays its own, and nobody else gets one."""
    stage = await make_stage()
    get_handle = stage.client.get_async_activity_handle
    refused: dict[str, set[RPCStatusCode]] = {}

    def handle_of_lost_replies(**options: Any) -> Any:
        handle = get_handle(**options)
        complete = handle.complete

        async def complete_without_reply(permit: Permit) -> None:
            try:
                await complete(permit)
            except RPCError as error:
                refused.setdefault(permit.ticket, set()).add(error.status)
                raise
            raise RPCError("the reply is lost", RPCStatusCode.UNAVAILABLE, b"")

        monkeypatch.setattr(handle, "complete", complete_without_reply)
        return handle

    monkeypatch.setattr(stage.client, "get_async_activity_handle", handle_of_lost_replies)
    wait = Wait("r", seconds=2.5, lease=1)
    pool = stage.pool(wait)
    permit = await pool.acquire()
    first, second = await stage.line_up(wait, 2)
    tickets = await until_waiting(pool, 2)
    await pool.release(permit)
    results = [await first.result(), await second.result()]
    assert in_order(results)
    assert refused == {ticket: {RPCStatusCode.NOT_FOUND} for ticket in tickets}
    history = await second.fetch_history()
    began, ended = history.events[0].event_time.ToDatetime(), history.events[-1].event_time.ToDatetime()
    assert (ended - began).total_seconds() >= 5  # it was not inside with the first
    await eventually(lambda: nobody_is_left(stage, wait, redis_url, prefix))


async def test_an_attempt_dies_with_its_worker(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt of which no relay has heard, its worker having been killed as it began, does not hold up the queue."""
    stage = await make_stage()
    wait = Wait("r", lease=3)
    permit = await stage.pool(wait).acquire()
    lost = asyncio.Event()

    async def lose(*_: Any) -> None:
        lost.set()

    with monkeypatch.context() as patch:
        patch.setattr(Requests, "wait", lose)
        first = await stage.start(wait, 1)
        await eventually(lost)
    second = await stage.start(wait, 2)
    await until_waiting(stage.pool(wait), 2)
    await stage.pool(wait).release(permit)
    async with asyncio.timeout(10):
        assert (await second.result()).what == "held"
    async with asyncio.timeout(10):
        assert (await first.result()).what == "held"


async def test_a_grant_that_nobody_could_be_told_of_lapses(
    make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a request was queued stands in the history, and is no grant: without a live attempt it goes to the next."""
    stage = await make_stage(wait_attempt=1)
    wait = Wait("r", lease=2)
    permit = await stage.pool(wait).acquire()
    first, second = await stage.line_up(wait, 2)
    trackers = stage.relay.trackers
    await eventually(lambda: len([one for one in trackers.values() if one.record.token]) == 2)
    keep_place = Requests.wait
    lost = asyncio.Event()

    async def lose_first(requests: Requests, call: locks.AcquireCall, token: bytes) -> None:
        if f"/{first.id}/" in call.spec.ticket:
            lost.set()
        else:
            await keep_place(requests, call, token)

    with monkeypatch.context() as patch:
        patch.setattr(Requests, "wait", lose_first)
        await eventually(lost)  # the token that the relay has is of an attempt that is over
        await stage.pool(wait).release(permit)
        async with asyncio.timeout(15):
            assert (await second.result()).what == "held"
    async with asyncio.timeout(15):
        assert (await first.result()).what == "held"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_given_up_while_redis_is_away(
    make_stage: MakeStage, own_server: OwnServer, prefix: str, how: str
) -> None:
    """A deadline and a cancellation end the wait in an outage too, and nothing of it is left afterwards."""
    server = own_server("valkey9")
    stage = await make_stage(url=server.url)
    wait = Wait("r", timeout=2 if how == "deadline" else None, lease=3)
    assert (await (await stage.start(Wait("r"), 1)).result()).what == "held"
    server.pause()
    handle = await stage.start(wait, 2)
    try:
        if how == "cancel":
            await asyncio.sleep(1.5)
            await handle.cancel()
        async with asyncio.timeout(10):
            if how == "cancel":
                with pytest.raises(WorkflowFailureError):
                    await handle.result()
            else:
                assert (await handle.result()).what == "timed out"
    finally:
        server.resume()
    assert await failed_tasks(handle) == 0
    await eventually(lambda: nobody_is_left(stage, wait, server.url, prefix), 15)


async def test_terminated_while_redis_is_away(
    make_stage: MakeStage, own_server: OwnServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked of Redis without an answer, and carried out later, is found and taken out."""
    monkeypatch.setattr(run_monitor, "IDLE_POLL_MS", 1000.0)
    server = own_server("valkey9")
    stage = await make_stage(url=server.url)
    wait = Wait("r")
    assert (await (await stage.start(wait, 1)).result()).what == "held"
    permit = await stage.pool(wait).acquire()
    server.pause()
    try:
        handle = await stage.start(wait, 2)
        await eventually(lambda: attempt_of(handle))
        await handle.terminate()
        await asyncio.sleep(1.5)  # until the attempt has given up as well
    finally:
        server.resume()
    await stage.pool(wait).release(permit)
    await eventually(lambda: nobody_is_left(stage, wait, server.url, prefix), 15)


async def failed_tasks(handle: WorkflowHandle[Any, Any]) -> int:
    """Return how many workflow tasks of a run failed or timed out."""
    bad = {EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED, EventType.EVENT_TYPE_WORKFLOW_TASK_TIMED_OUT}
    return sum(event.event_type in bad for event in (await handle.fetch_history()).events)


async def test_redis_is_away_at_the_acquire(make_stage: MakeStage, own_server: OwnServer) -> None:
    """The pending activity says so, no workflow task fails, and it goes on when Redis is back."""
    server = own_server("valkey9")
    stage = await make_stage(url=server.url)
    assert (await (await stage.start(Wait("r"), 1)).result()).what == "held"
    server.kill()
    handle = await stage.start(Wait("r"), 2)

    async def said() -> str:
        pending = (await handle.describe()).raw_description.pending_activities
        return pending[0].last_failure.message if pending else ""

    assert "Redis" in await eventually(said, 10)
    server.start()
    async with asyncio.timeout(15):
        assert (await handle.result()).what == "held"
    assert await failed_tasks(handle) == 0


async def test_redis_is_emptied_while_workflows_wait(make_stage: MakeStage, own_server: OwnServer) -> None:
    """Each takes its place again at its activity's next attempt at the latest, and all are served."""
    server = own_server("valkey9")
    stage = await make_stage(url=server.url, wait_attempt=2)
    wait = Wait("r", seconds=0.2)
    await stage.pool(wait).acquire(ticket="away-with-redis")
    handles = await stage.line_up(wait, 4)
    server.restart()
    async with asyncio.timeout(15):
        results = [await handle.result() for handle in handles]
    assert {got.what for got in results} == {"held"}
    assert len({got.fence for got in results}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("others", [0, 1])
async def test_places_survive_the_death_of_every_worker(
    temporal_client: Client,
    worker_process: StartWorkerProcess,
    make_client: MakeClient,
    redis_url: str,
    task_queue: str,
    others: int,
) -> None:
    """With all workers killed for longer than `waiter_lease` the order stands; who asks meanwhile may get through."""
    service = await make_client(url=redis_url)
    config: dict[str, Any] = {"plugin": {"waiter_lease": 1}, "worker": {"sticky_queue_schedule_to_start_timeout": 1}}
    workers = [await worker_process("waiting_flows", **config) for _ in range(2)]
    pool = service.lock("r")
    permit = await pool.acquire()
    stage = Stage(temporal_client, RedleasePlugin(redis_url), service, task_queue)
    handles = await stage.line_up(Wait("r"), 4)
    await asyncio.sleep(0.3)  # until all wait in their activities, mostly
    for worker in workers:
        worker.kill()
    await asyncio.sleep(1.5)
    if others:
        waiter = asyncio.create_task(pool.acquire())
        await pool.release(permit)
        async with asyncio.timeout(15):
            permit = await waiter
    await worker_process("waiting_flows", **config)
    await until_waiting(pool, 4, 15)
    await pool.release(permit)
    async with asyncio.timeout(15):
        assert in_order([await handle.result() for handle in handles])


async def test_looks_at_runs_are_counted_and_few(make_stage: MakeStage) -> None:
    """While twenty wait only the holder's run is looked at, twice a second; a grant after that costs one at most."""
    stage = await make_stage()
    for number in range(100, 110):
        await (await stage.start(Wait("alone"), number)).result()
    assert stage.relay.monitor.polls == 0
    began = time.monotonic()
    holder = await stage.client.start_workflow(
        Many.run, args=["r", 1, 30.0], id=f"{stage.task_queue}-0", task_queue=stage.task_queue
    )
    await holder.execute_update(Many.held)
    handles = await stage.line_up(Wait("r-0"), 20)
    await eventually(lambda: stage.relay.monitor.polls)
    await holder.signal(Many.proceed)
    await holder.result()
    looks = stage.relay.monitor.polls
    assert 1 <= looks <= 1000 * (time.monotonic() - began) / run_monitor.BUSY_POLL_MS + 1
    for handle in handles:
        await handle.result()
    assert stage.relay.monitor.polls - looks <= len(handles)


@pytest.mark.slow
async def test_looks_are_bounded_in_all(make_stage: MakeStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many runs are to be asked after, there are no more than `polls_per_second` calls."""
    monkeypatch.setattr(run_monitor, "IDLE_POLL_MS", 200.0)
    stage = await make_stage(polls_per_second=10)
    permit = await stage.service.lock("r").acquire()
    handles = await stage.line_up(Wait("r"), 30)
    before = stage.relay.monitor.polls
    began = time.monotonic()
    await eventually(lambda: stage.relay.monitor.polls - before >= 10)
    assert stage.relay.monitor.polls - before <= 10 * (time.monotonic() - began) + 2
    await stage.service.lock("r").release(permit)
    assert in_order([await handle.result() for handle in handles])


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_thousand_holds_on_ten_slots(make_stage: MakeStage, redis_url: str, prefix: str) -> None:
    """A worker with ten slots keeps a thousand permits over several leases."""
    workflows, each, lease = 20, 50, 8.0
    stage = await make_stage(worker={"max_concurrent_activities": 10})
    handles = [
        await stage.client.start_workflow(
            Many.run,
            args=[f"r{number}", each, lease],
            id=f"{stage.task_queue}-{number}",
            task_queue=stage.task_queue,
        )
        for number in range(workflows)
    ]

    await asyncio.gather(*(handle.execute_update(Many.held) for handle in handles))
    await asyncio.sleep(2 * lease)
    await stage.client.execute_workflow(Plain.run, id=f"{stage.task_queue}-plain", task_queue=stage.task_queue)
    for handle in handles:
        await handle.signal(Many.proceed)
    assert [await handle.result() for handle in handles] == [each] * workflows
    await eventually(lambda: _nothing_watched(redis_url, prefix))


async def _nothing_watched(url: str, prefix: str) -> bool:
    return await watched(url, prefix) == 0
