"""Sequences: a resource's items one at a time, each done once, whoever hands them over and whatever dies."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from sequence_flows import SOON, Handing, Item, Misusing, Naming, Receipt, note, post, trace
from temporal_tools import WIDE, Place, events_of, tasks_that_failed
from temporalio.api.enums.v1 import EventType
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle, WorkflowUpdateFailedError
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError, CancelledError, WorkflowAlreadyStartedError
from temporalio.worker import Replayer, Worker

from redlease_temporal import SequenceFailed
from redlease_temporal._sequence.workflow import SequenceWorkflow
from redlease_temporal.sequence_client import Sequence
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from temporal.conftest import OwnTemporalServer, StartWorkerProcess


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    async with place.serving([Handing, Misusing], [post]) as client:
        yield client


@pytest.fixture
def book(tmp_path: Path) -> str:
    """The file in which items leave their trace."""
    return str(tmp_path / "book")


@pytest.fixture
def ledger(client: Client, book: str, task_queue: str) -> Sequence[Item, Receipt]:
    """The sequence as a service uses it."""
    return ledger_of(client, book, task_queue)


def ledger_of(client: Client, book: str, task_queue: str) -> Sequence[Item, Receipt]:
    """Return a book's sequence."""
    return Sequence(
        client,
        f"ledger:{book}",
        post,
        task_queue=task_queue,
        start_to_close_timeout=20,
        heartbeat_timeout=2,
        retry_policy=SOON,
    )


async def handed(client: Client, place: Place, name: str, items: list[Item]) -> WorkflowHandle[Any, list[int]]:
    """Start a workflow that hands items over."""
    return await client.start_workflow(Handing.run, items, id=f"{place.task_queue}-{name}", task_queue=place.task_queue)


def run_of(client: Client, book: str) -> WorkflowHandle[Any, Any]:
    """Return the sequence's own workflow."""
    return client.get_workflow_handle(f"sequence:ledger:{book}")


def effects(book: str) -> list[int]:
    """Return the items whose effect is there, in order."""
    return [int(line.split()[1]) for line in trace(book) if line.startswith("effect")]


def one_at_a_time(book: str) -> bool:
    """Tell whether each item had ended before another began; one whose worker was killed begins again itself."""
    moves = [line.split() for line in trace(book) if not line.startswith("effect")]
    return all(
        later[1] == sooner[1] if sooner[0] == "begin" else later[0] == "begin" for sooner, later in pairwise(moves)
    )


def test_an_overlap_would_be_seen(book: str) -> None:
    """What the other tests look at tells an item that begins beside another from one that begins again."""
    for line in ("begin 0", "begin 0", "end 0", "begin 1"):
        note(book, line)
    assert one_at_a_time(book)
    note(book, "begin 2")
    assert not one_at_a_time(book)


async def begun(book: str, index: int) -> None:
    """Wait until an item has begun."""
    await eventually(lambda: f"begin {index}" in trace(book), 40)


# In a workflow


async def test_a_workflow_hands_items_over(client: Client, place: Place, book: str) -> None:
    """Its items are handled in order, and it has their results as the activity returns them."""
    handle = await handed(client, place, "a", [Item(index, book) for index in range(5)])
    assert await handle.result() == [0, 1, 2, 3, 4]
    assert effects(book) == [0, 1, 2, 3, 4]
    assert one_at_a_time(book)


async def test_an_activity_by_name_on_another_queue(place: Place, book: str) -> None:
    """The items are handled where the workflow says, and their results are decoded as what it says."""
    queue = f"{place.task_queue}-posts"
    items = [Item(index, book) for index in range(3)]
    async with place.serving([Naming], []) as client, Worker(client, task_queue=queue, activities=[post]):
        result = client.execute_workflow(Naming.run, args=[items, queue], id=queue, task_queue=place.task_queue)
        assert await asyncio.wait_for(result, 20) == [0, 1, 2]


async def test_workflows_take_turns(client: Client, place: Place, book: str) -> None:
    """Of six workflows with items of one resource each has its own done in order, and none begins beside another."""
    handles = [
        await handed(client, place, str(number), [Item(10 * number + index, book, pause=0.01) for index in range(4)])
        for number in range(6)
    ]
    results = [await handle.result() for handle in handles]
    assert results == [[10 * number + index for index in range(4)] for number in range(6)]
    assert one_at_a_time(book)
    assert sorted(effects(book)) == sorted(index for result in results for index in result)
    assert not [problem for handle in handles for problem in await tasks_that_failed(handle)]


async def test_one_after_the_other_is_over(client: Client, place: Place, book: str) -> None:
    """A sequence ends when it is done, and the next items begin another."""
    for number in range(3):
        handle = await handed(client, place, str(number), [Item(number, book)])
        assert await handle.result() == [number]
        await run_of(client, book).result()
    assert effects(book) == [0, 1, 2]


async def test_an_item_is_retried_before_the_next(client: Client, place: Place, book: str) -> None:
    """Nothing begins between the attempts of an item."""
    handle = await handed(client, place, "a", [Item(0, book), Item(1, book, fails=3), Item(2, book)])
    other = await handed(client, place, "b", [Item(3, book)])
    assert await handle.result() == [0, 1, 2]
    assert await other.result() == [3]
    assert [line for line in trace(book) if line.startswith("begin")].count("begin 1") == 4
    lines = trace(book)
    between = lines[lines.index("begin 1") : lines.index("effect 1")]
    assert set(between) == {"begin 1", "end 1"}


async def test_an_item_fails_for_good(client: Client, place: Place, book: str) -> None:
    """The items before it are done, those after it are not begun, and others' items go on."""
    handle = await handed(client, place, "a", [Item(0, book, pause=0.3), Item(1, book, fails=-1), Item(2, book)])
    await eventually(lambda: trace(book))
    other = await handed(client, place, "b", [Item(3, book)])
    assert await handle.result() == [0, -1, 1]
    assert await other.result() == [3]
    assert effects(book) == [0, 3]


async def test_a_caller_is_cancelled(client: Client, place: Place, book: str) -> None:
    """What a cancelled workflow handed over is cancelled or not begun, and nobody begins before that has ended."""
    handle = await handed(client, place, "a", [Item(0, book, fails=-2), Item(1, book)])
    await eventually(lambda: trace(book))
    other = await handed(client, place, "b", [Item(2, book)])
    await eventually(lambda: queued(client, book, 3))
    await handle.cancel()
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    assert isinstance(raised.value.cause, CancelledError)
    assert await other.result() == [2]
    assert trace(book) == ["begin 0", "end 0", "begin 2", "effect 2", "end 2"]


async def queued(client: Client, book: str, count: int) -> bool:
    """Tell whether so many items are not done yet."""
    return bool((await run_of(client, book).query("progress"))["queued"] == count)


async def test_a_caller_is_terminated(client: Client, place: Place, book: str) -> None:
    """What a terminated workflow handed over is done to its end."""
    handle = await handed(client, place, "a", [Item(index, book, pause=0.1) for index in range(3)])
    await eventually(lambda: trace(book))
    await handle.terminate()
    await run_of(client, book).result()
    assert effects(book) == [0, 1, 2]


async def test_a_sequence_is_cancelled(client: Client, place: Place, book: str) -> None:
    """Callers are told of a sequence that was cancelled from outside, and the running item has ended before that."""
    handle = await handed(client, place, "a", [Item(0, book), Item(1, book, fails=-2), Item(2, book)])
    await eventually(lambda: "begin 1" in trace(book))
    other = await handed(client, place, "b", [Item(3, book)])
    await eventually(lambda: queued(client, book, 3))
    await run_of(client, book).cancel()
    assert await handle.result() == [0, -1, 1]
    assert await other.result() == [-1, 0]
    assert trace(book)[-2:] == ["begin 1", "end 1"]


async def test_a_sequence_is_terminated(client: Client, place: Place, book: str) -> None:
    """Callers that wait for a terminated sequence find that out by themselves."""
    handle = await handed(client, place, "a", [Item(0, book, fails=-2)])
    await eventually(lambda: trace(book))
    await run_of(client, book).terminate()
    assert await asyncio.wait_for(handle.result(), 25) == [-1, 0]


async def test_what_is_too_large_is_refused(client: Client, task_queue: str) -> None:
    """Items that one run could not hand to the next are refused before any of them is begun."""
    with pytest.raises(WorkflowFailureError) as raised:
        await client.execute_workflow(Misusing.run, 11, id=task_queue, task_queue=task_queue)
    assert isinstance(raised.value.cause, ApplicationError)
    assert raised.value.cause.type == "ValueError"
    assert "1,000,000 are allowed" in raised.value.cause.message


async def test_histories_replay(client: Client, place: Place, book: str) -> None:
    """The histories of a caller and of the sequence are replayed without a difference."""
    handle = await handed(client, place, "a", [Item(index, book, pause=0.1) for index in range(3)])
    await eventually(lambda: trace(book))
    other = await handed(client, place, "b", [Item(3, book)])
    assert await handle.result() + await other.result() == [0, 1, 2, 3]
    await run_of(client, book).result()
    replayer = Replayer(workflows=[Handing, SequenceWorkflow], plugins=[RedleasePlugin("redis://unused")])
    for one in (handle, other, run_of(client, book)):
        await replayer.replay_workflow(await one.fetch_history())


# As a workflow of its own


async def test_a_service_starts_a_sequence(ledger: Sequence[Item, Receipt], book: str) -> None:
    """It has the results in order, and while it runs nobody can start another."""
    await ledger.start([Item(index, book, pause=0.05) for index in range(4)])
    with pytest.raises(WorkflowAlreadyStartedError):
        await ledger.start([])
    assert [receipt.index for receipt in await ledger.results()] == [0, 1, 2, 3]
    assert effects(book) == [0, 1, 2, 3]


async def test_a_started_item_fails_for_good(ledger: Sequence[Item, Receipt], client: Client, book: str) -> None:
    """The sequence's own workflow has failed then, and tells what is done."""
    await ledger.start([Item(0, book), Item(1, book, fails=-1), Item(2, book)])
    with pytest.raises(SequenceFailed, match="it can not be booked") as raised:
        await ledger.results()
    assert (raised.value.index, [receipt.index for receipt in raised.value.results]) == (1, [0])
    with pytest.raises(WorkflowFailureError):
        await run_of(client, book).result()


async def test_items_are_appended(ledger: Sequence[Item, Receipt], book: str) -> None:
    """Each call returns the result of its own item, which comes after what was there before."""
    await ledger.start([Item(index, book, pause=0.05) for index in range(3)])
    receipts = await asyncio.gather(*(ledger.append(Item(index, book)) for index in range(3, 15)))
    assert [receipt.index for receipt in receipts] == list(range(3, 15))
    assert all(isinstance(receipt, Receipt) for receipt in receipts)
    assert effects(book)[:3] == [0, 1, 2]
    assert sorted(effects(book)) == list(range(15))
    assert one_at_a_time(book)


async def test_an_append_starts_a_sequence(ledger: Sequence[Item, Receipt], client: Client, book: str) -> None:
    """Where none runs it starts one, which ends when it is done; a failing item fails that call alone."""
    assert (await ledger.append(Item(0, book))).index == 0
    await run_of(client, book).result()
    with pytest.raises(SequenceFailed, match="it can not be booked"):
        await ledger.append(Item(1, book, fails=-1))
    assert (await ledger.append(Item(2, book))).index == 2


async def test_an_append_is_repeated(ledger: Sequence[Item, Receipt], book: str) -> None:
    """Two calls under one id are one item."""
    await ledger.start([Item(0, book, pause=0.3)])
    one, other = await asyncio.gather(*(ledger.append(Item(1, book), id="the-one") for _ in range(2)))
    assert one == other
    assert trace(book).count("begin 1") == 1


async def test_ids_of_appended_items(ledger: Sequence[Item, Receipt], client: Client, book: str) -> None:
    """Any id names an item, but one that is too long for the server, which would stop the sequence, is refused."""
    assert (await asyncio.wait_for(ledger.append(Item(0, book), id="start"), 10)).index == 0
    with pytest.raises(ValueError, match="900"):
        await ledger.append(Item(1, book), id="x" * 901)
    with pytest.raises(ValueError, match="empty"):
        await ledger.append(Item(1, book), id="")
    running = asyncio.create_task(ledger.append(Item(2, book, pause=0.5)))
    await begun(book, 2)
    with pytest.raises(WorkflowUpdateFailedError, match="failed"):
        await run_of(client, book).execute_update("append", Item(3, book), id="x" * 901)
    assert (await running).index == 2
    assert effects(book) == [0, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"retry_policy": RetryPolicy(maximum_attempts=-1)},
        {"retry_policy": RetryPolicy(backoff_coefficient=0.5)},
        {"retry_policy": RetryPolicy(maximum_interval=timedelta(milliseconds=1))},
        {"retry_policy": RetryPolicy(maximum_attempts="3")},  # type: ignore[arg-type]
        {"task_queue": ""},
        {"task_queue": "x" * 1001},
        {"start_to_close_timeout": 0},
    ],
)
async def test_what_would_stop_a_sequence_is_refused(client: Client, wrong: dict[str, Any]) -> None:
    """Options that no activity can have would stop the sequence for everybody: they are refused before."""
    options: dict[str, Any] = {"task_queue": "q", "start_to_close_timeout": 20}
    with pytest.raises(ValueError, match=r"."):
        Sequence(client, "r", post, **(options | wrong))


async def test_progress_of_none(ledger: Sequence[Item, Receipt]) -> None:
    """Of a sequence that has never run nothing is done and nothing queued."""
    progress = await ledger.progress()
    assert (progress.handled, progress.queued, progress.current) == (0, 0, None)


async def test_progress(ledger: Sequence[Item, Receipt], client: Client, book: str) -> None:
    """A query tells what is done, what is not, and which item is handled now."""
    await ledger.start([Item(0, book), Item(1, book, fails=-2), Item(2, book)])
    await eventually(lambda: "begin 1" in trace(book))
    progress = await ledger.progress()
    assert (progress.handled, progress.queued, progress.current) == (1, 2, "start:1")
    await run_of(client, book).cancel()
    await eventually(lambda: trace(book)[-1] == "end 1")


async def began_anew(client: Client, book: str) -> bool:
    """Tell whether more than one sequence of a book has ended, as far as the server lists them."""
    ended = f"WorkflowId = '{run_of(client, book).id}' AND ExecutionStatus = 'Completed'"
    return (await client.count_workflows(ended)).count > 1


async def test_appends_meet_a_sequence_that_ends(ledger: Sequence[Item, Receipt], client: Client, book: str) -> None:
    """Each of 121 calls by three services has its result, though the sequence ends and is started anew between them."""

    async def append(service: int) -> None:
        for number in range(40):
            index = 100 * service + number
            assert (await ledger.append(Item(index, book))).index == index
            if number % 3 == service:
                await asyncio.sleep(0.03)  # long enough for the sequence to end

    await asyncio.gather(*(append(service) for service in range(3)))
    await run_of(client, book).result()  # should it not have ended between them, it begins anew for this one
    assert (await ledger.append(Item(999, book))).index == 999
    assert len(effects(book)) == 121
    assert one_at_a_time(book)
    await eventually(lambda: began_anew(client, book), 20)


async def test_callers_meet_a_sequence_that_ends(client: Client, place: Place, book: str) -> None:
    """Each of 49 workflows, four at a time, has its item done, though the sequence ends between them."""

    async def hand_over(index: int) -> None:
        handle = await handed(client, place, str(index), [Item(index, book)])
        assert await handle.result() == [index]

    for number in range(12):
        # As the last of these is done the sequence ends, and the next ones come.
        await asyncio.gather(*(hand_over(100 * caller + number) for caller in range(4)))
    await run_of(client, book).result()
    await hand_over(999)
    assert len([line for line in trace(book) if line.startswith("begin")]) == 49
    assert one_at_a_time(book)
    await eventually(lambda: began_anew(client, book), 20)


# Over long lists, and deaths


async def test_a_long_list_continues_as_new(
    own_temporal_server: OwnTemporalServer, task_queue: str, redis_url: str, prefix: str, book: str
) -> None:
    """Callers, appended items and what was started go from run to run, and each item is done once."""
    server = await own_temporal_server("--dynamic-config-value", "limit.historyCount.suggestContinueAsNew=60")
    place = Place(server, task_queue, redis_url, prefix)
    async with place.serving([Handing], [post]) as client:
        ledger = ledger_of(client, book, task_queue)
        await ledger.start([Item(index, book) for index in range(30)])
        handle = await handed(client, place, "a", [Item(index, book) for index in range(30, 60)])
        appended = await asyncio.gather(*(ledger.append(Item(index, book)) for index in range(60, 66)))
        assert await handle.result() == list(range(30, 60))
        assert [receipt.index for receipt in appended] == list(range(60, 66))
        assert [receipt.index for receipt in await ledger.results()] == list(range(30))
        last = run_of(client, book)
        events = await events_of(last)
        began = events[0].workflow_execution_started_event_attributes
        assert began.continued_execution_run_id
        assert len(events) < 120
    assert sorted(effects(book)) == list(range(66))
    assert one_at_a_time(book)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_workers_are_killed(
    temporal_client: Client, place: Place, worker_process: StartWorkerProcess, book: str
) -> None:
    """Fifty items with the worker killed five times: every item's effect is there once, in order, with no overlap."""
    worker = await worker_process("sequence_flows", worker=WIDE)
    handle = await handed(temporal_client, place, "a", [Item(index, book, pause=0.02) for index in range(50)])
    for kills in range(5):
        await begun(book, 10 * kills + 3)
        worker.kill()
        worker = await worker_process("sequence_flows", worker=WIDE)
    assert await asyncio.wait_for(handle.result(), 60) == list(range(50))
    assert effects(book) == list(range(50))
    assert one_at_a_time(book)
    completed = [
        event
        for event in await events_of(run_of(temporal_client, book))
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED
    ]
    assert len(completed) == 50
