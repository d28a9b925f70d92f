"""Starts over a limit that take the place of the oldest workflow: it is cancelled, and has ended when they go on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from limited_flows import Job, Newest, NewestBySlots, NewestTwo, ParentOfNewest, Replaced
from temporal_tools import Place, tasks_that_failed
from temporalio.client import (
    Client,
    Interceptor,
    OutboundInterceptor,
    StartWorkflowInput,
    WorkflowExecutionStatus,
    WorkflowFailureError,
    WorkflowHandle,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import CancelledError
from temporalio.plugin import SimplePlugin
from temporalio.worker import Replayer

from redlease_temporal import WorkflowConcurrencyLimitExceeded, concurrency
from redlease_temporal._admission.redis_admission import RedisAdmission
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Redlease
    from redlease_temporal._admission.replacing import TakenSlot
    from redlease_temporal._admission.rule import AdmissionRequest
    from redlease_temporal._backends.redis.registry import TicketRecord

WORKFLOWS = [Newest, NewestBySlots, NewestTwo, ParentOfNewest]
BOTH = pytest.mark.parametrize("kind", [Newest, NewestBySlots])
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    async with place.serving(WORKFLOWS, []) as client:
        yield client


class Starter:
    """Starts workflows, each with a number; a test's places on slots are its own by the customer."""

    def __init__(self, client: Client, place: Place) -> None:
        self.client = client
        self._place = place
        self._count = 0

    async def start(
        self, kind: type[Any], how: str = "complete", customer: str = "a", client: Client | None = None
    ) -> WorkflowHandle[Any, str]:
        """Start one that ends in this way when it is cancelled."""
        self._count += 1
        job = Job(f"{self._place.prefix}-{customer}", how)
        handle: WorkflowHandle[Any, str] = await (client or self.client).start_workflow(
            kind.run, job, id=f"{self._place.prefix}-{self._count}", task_queue=self._place.task_queue
        )
        return handle

    async def again(self, handle: WorkflowHandle[Any, str]) -> None:
        """Start the ID of a running workflow again, which leaves that workflow as it is."""
        job, use_existing = Job(f"{self._place.prefix}-a"), WorkflowIDConflictPolicy.USE_EXISTING
        await self.client.start_workflow(
            Newest.run, job, id=handle.id, task_queue=self._place.task_queue, id_conflict_policy=use_existing
        )


@pytest.fixture
def starter(client: Client, place: Place) -> Starter:
    """What starts workflows."""
    return Starter(client, place)


async def was_cancelled(handle: WorkflowHandle[Any, str]) -> None:
    """Wait until a workflow has ended by cancellation."""
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, CancelledError)


async def finished(*handles: WorkflowHandle[Any, str]) -> None:
    """Let workflows that run end; each has run undisturbed, and its history replays."""
    replayer = Replayer(workflows=WORKFLOWS, plugins=[RedleasePlugin("redis://nowhere.invalid")])
    for handle in handles:
        await handle.signal(Replaced.proceed)
        await handle.result()
        assert await tasks_that_failed(handle) == []
        await replayer.replay_workflow(await handle.fetch_history())


@BOTH
async def test_the_newest_takes_over(starter: Starter, kind: type[Any]) -> None:
    """Each start cancels the one before; those of other customers go on."""
    other = await starter.start(kind, customer="b")
    handles = [await starter.start(kind)]
    for _ in range(3):
        handles.append(await starter.start(kind))
        await was_cancelled(handles[-2])
    await finished(other, handles[-1])


@BOTH
async def test_the_newest_begins_when_the_oldest_has_ended(starter: Starter, kind: type[Any]) -> None:
    """While that one cleans up, the start waits: there is no second run."""
    older = await starter.start(kind, "slow")
    await older.execute_update(Replaced.begun)
    starting = asyncio.create_task(starter.start(kind))
    await older.execute_update(Replaced.cancelled)
    assert not starting.done()
    await older.signal(Replaced.proceed)
    await was_cancelled(older)
    newer = await starting
    begun = (await newer.describe()).start_time
    closed = (await older.describe()).close_time
    assert closed is not None
    assert begun >= closed
    await finished(newer)


async def test_who_does_not_end_stays(starter: Starter, outside: Redlease) -> None:
    """After the grace the start is refused; the oldest keeps its place, and so does the other."""
    oldest, other = await starter.start(NewestTwo, "never"), await starter.start(NewestTwo)
    await oldest.execute_update(Replaced.begun)
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await starter.start(NewestTwo)
    assert (await outside.semaphore("concurrency:NewestTwo", 2).inspect()).in_use == 2
    assert (await other.describe()).status == WorkflowExecutionStatus.RUNNING
    await finished(oldest, other)
    assert await oldest.result() == "never"


async def test_of_several_the_oldest_goes(starter: Starter) -> None:
    """With room for two, the other one is not disturbed."""
    first, second = await starter.start(NewestTwo), await starter.start(NewestTwo)
    third = await starter.start(NewestTwo)
    await was_cancelled(first)
    await finished(second, third)


@BOTH
async def test_a_start_without_the_plugin(starter: Starter, place: Place, kind: type[Any]) -> None:
    """The run itself takes over, when the older one has ended."""
    older = await starter.start(kind, "slow")
    await older.execute_update(Replaced.begun)
    newer = await starter.start(kind, client=await place.client(plugins=[]))
    await older.execute_update(Replaced.cancelled)
    await older.signal(Replaced.proceed)
    await was_cancelled(older)
    await finished(newer)


async def test_a_child(starter: Starter) -> None:
    """A parent's child takes over, and is replaced in turn; its parent hears of that."""
    older = await starter.start(Newest)
    parent = await starter.start(ParentOfNewest)
    await was_cancelled(older)
    await parent.execute_update(ParentOfNewest.child_started)
    newest = await starter.start(Newest)
    with pytest.raises(WorkflowFailureError):
        await parent.result()
    await finished(newest)


@BOTH
async def test_many_starts_at_once(starter: Starter, kind: type[Any]) -> None:
    """One of them runs in the end, the others were cancelled or refused; at no time do two run beside each other."""
    oldest = await starter.start(kind)
    outcomes = await asyncio.gather(*(starter.start(kind) for _ in range(10)), return_exceptions=True)
    handles = [oldest, *(each for each in outcomes if isinstance(each, WorkflowHandle))]
    refused = [each for each in outcomes if isinstance(each, WorkflowConcurrencyLimitExceeded)]
    assert len(handles) + len(refused) == 11
    described = [await handle.describe() for handle in handles]
    (running,) = (each for each in described if each.status == WorkflowExecutionStatus.RUNNING)
    ended = sorted((each for each in described if each is not running), key=lambda each: each.start_time)
    assert {each.status for each in ended} == {WorkflowExecutionStatus.CANCELED}
    for before, after in zip(ended, [*ended[1:], running], strict=True):
        assert before.close_time is not None
        assert before.close_time <= after.start_time
    await finished(next(handle for handle in handles if handle.id == running.id))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """Released by each look of a start at the places in Redis: the time at which it asked is that of its first look."""
    looks = asyncio.Semaphore(0)
    look = RedisAdmission.taken_slots

    async def looked(places: RedisAdmission, entry: AdmissionRequest) -> tuple[list[TakenSlot], float]:
        found = await look(places, entry)
        looks.release()
        return found

    monkeypatch.setattr(RedisAdmission, "taken_slots", looked)
    return looks


async def test_of_those_that_wait_the_last_runs(starter: Starter, asked: asyncio.Semaphore) -> None:
    """Three starts wait while the oldest cleans up: whichever comes in first, the one that asked last runs in the end.

    Those that asked before it are cancelled, or refused.
    """
    oldest = await starter.start(Newest, "slow")
    await oldest.execute_update(Replaced.begun)
    waiting = []
    for _ in range(3):
        waiting.append(asyncio.create_task(starter.start(Newest)))
        await asked.acquire()
    await oldest.execute_update(Replaced.cancelled)
    await oldest.signal(Replaced.proceed)
    *outcomes, newest = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(newest, WorkflowHandle)
    for outcome in outcomes:
        if isinstance(outcome, WorkflowHandle):
            await was_cancelled(outcome)
        else:
            assert isinstance(outcome, WorkflowConcurrencyLimitExceeded)
    await finished(newest)


@pytest.mark.parametrize("is_started_again", [False, True])
async def test_who_asked_before_is_older_while_it_runs_too(
    starter: Starter, asked: asyncio.Semaphore, monkeypatch: pytest.MonkeyPatch, is_started_again: bool
) -> None:
    """Two starts wait, and the one that asked first is admitted; when the other one looks again, it takes its place.

    So it does if the ID of the first was started once more meanwhile, which changes nothing: it runs.
    """
    runs = asyncio.Event()
    reserve = RedisAdmission.reserve

    async def late(places: RedisAdmission, entry: AdmissionRequest) -> TicketRecord | None:
        if entry.requested_at and entry.workflow_id.endswith("-3"):
            await runs.wait()
        return await reserve(places, entry)

    monkeypatch.setattr(RedisAdmission, "reserve", late)
    oldest = await starter.start(Newest, "slow")
    await oldest.execute_update(Replaced.begun)
    first = asyncio.create_task(starter.start(Newest))
    await asked.acquire()
    second = asyncio.create_task(starter.start(Newest))
    await asked.acquire()
    await oldest.execute_update(Replaced.cancelled)
    await oldest.signal(Replaced.proceed)
    older = await first
    await older.execute_update(Replaced.begun)
    if is_started_again:
        await starter.again(older)
    runs.set()
    newer = await second
    await was_cancelled(older)
    await finished(newer)


async def test_a_place_taken_again_counts_from_its_start(starter: Starter, outside: Redlease) -> None:
    """The place of the older of two workflows is lost and the relay takes it again: it is still the oldest."""
    pool = outside.semaphore("concurrency:NewestTwo", 2)
    first, second = await starter.start(NewestTwo), await starter.start(NewestTwo)
    for handle in (first, second):
        await handle.execute_update(Replaced.begun)
    place = min((await pool.inspect()).holders, key=lambda holder: holder.fence)
    assert await pool.release(place.ticket)

    async def taken_again() -> bool:
        return place.ticket in {holder.ticket for holder in (await pool.inspect()).holders}

    await eventually(taken_again)
    third = await starter.start(NewestTwo)
    await was_cancelled(first)
    await finished(second, third)


async def test_a_place_taken_over_counts_from_the_start_that_took_it_over(
    starter: Starter, place: Place, asked: asyncio.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workflow ID is started again before its closed run's place is free; who asked before that is refused."""
    free, reserve = RedisAdmission.free, RedisAdmission.reserve
    is_started = asyncio.Event()

    async def freed_late(places: RedisAdmission, record: TicketRecord) -> None:
        await is_started.wait()
        await free(places, record)

    async def reserved_late(places: RedisAdmission, entry: AdmissionRequest) -> TicketRecord | None:
        if entry.requested_at:
            await is_started.wait()
        return await reserve(places, entry)

    async def nothing_freed(places: RedisAdmission, entry: AdmissionRequest, taken: TakenSlot) -> bool:
        del places, entry, taken
        return False

    monkeypatch.setattr(RedisAdmission, "free", freed_late)
    monkeypatch.setattr(RedisAdmission, "reserve", reserved_late)
    monkeypatch.setattr(RedisAdmission, "free_if_closed", nothing_freed)
    oldest = await starter.start(Newest)
    await oldest.execute_update(Replaced.begun)
    waiting = asyncio.create_task(starter.start(Newest))
    await asked.acquire()
    await was_cancelled(oldest)
    newest: WorkflowHandle[Any, str] = await starter.client.start_workflow(
        Newest.run, Job(f"{place.prefix}-a"), id=oldest.id, task_queue=place.task_queue
    )
    await newest.execute_update(Replaced.begun)
    is_started.set()
    with pytest.raises(WorkflowConcurrencyLimitExceeded):
        await waiting
    await finished(newest)


class Delay(Interceptor):
    """Holds a client's starts up just before they are sent, when their places are reserved."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:  # noqa: A002
        """Put the delay before what sends them."""
        delay = self

        class Delayed(OutboundInterceptor):
            async def start_workflow(self, input: StartWorkflowInput) -> WorkflowHandle[Any, Any]:  # noqa: A002
                delay.reached.set()
                await delay.go_on.wait()
                return await super().start_workflow(input)

        return Delayed(next)


@BOTH
async def test_a_reserved_place_is_not_taken(starter: Starter, place: Place, kind: type[Any]) -> None:
    """A start that is slow has its place before its workflow exists; another waits for it, and then replaces it."""
    delay = Delay()
    slow = await place.client(plugins=[place.plugin(), SimplePlugin("delay", interceptors=[delay])])
    first = asyncio.create_task(starter.start(kind, client=slow))
    await delay.reached.wait()
    second = asyncio.create_task(starter.start(kind))
    await asyncio.wait([second], timeout=2)
    assert not second.done()
    delay.go_on.set()
    older, newer = await first, await second
    await was_cancelled(older)
    await finished(newer)


async def test_a_long_workflow_id(starter: Starter, place: Place) -> None:
    """A workflow whose id does not fit into a ticket is found, and replaced."""
    older = await starter.client.start_workflow(
        Newest.run, Job(place.prefix), id=f"{place.prefix}-{'x' * 500}", task_queue=place.task_queue
    )
    newer = await starter.client.start_workflow(
        Newest.run, Job(place.prefix), id=f"{place.prefix}-{'y' * 500}", task_queue=place.task_queue
    )
    await was_cancelled(older)
    await finished(newer)


@pytest.mark.parametrize("wrong", [{"when_full": "replace-holder"}, {"when_full": "replace", "grace": -1}], ids=str)
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    """A parameter that is none is a ValueError where the class is made."""
    with pytest.raises(ValueError, match=r"when_full|grace"):
        concurrency(max=1, **wrong)
