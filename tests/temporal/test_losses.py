"""What a workflow sees of a permit that it has lost, and of what it did wrong."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from ending_flows import Orphaning, slow
from lock_flows import Use
from losing_flows import (
    Adopting,
    Again,
    Blockless,
    CatchOwn,
    Child,
    Delayed,
    Dynamic,
    Losing,
    Misusing,
    OldDynamic,
    Parent,
    Signalled,
    Twice,
)
from temporal_tools import SHORT_S, Place, holder_of, names_of, stays_held, tasks_that_failed, until_free, waiting
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, ChildWorkflowError

from redlease import Semaphore
from redlease_temporal._payloads.locks import LOST_SIGNAL, LostSignal

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import WorkflowHandle

    from temporal.conftest import StartWorkerProcess

WORKFLOWS = [
    *(Adopting, Again, Blockless, CatchOwn, Child, Delayed, Dynamic, Losing, Misusing, OldDynamic, Parent, Signalled),
    Twice,
]
SOON = 3.0  # a loss is told within so many seconds
USE = Use("r", lease=1.5)
QUICKLY = timedelta(seconds=0.2)


class Watched:
    """A guarded activity that runs until it is cancelled, if it is to."""

    def __init__(self) -> None:
        self.endless = False
        self.ran = asyncio.Event()
        self.cancelled = asyncio.Event()

    @activity.defn
    async def watched(self, _: int) -> str:
        """Heartbeat for as long as that is wanted."""
        self.ran.set()
        try:
            while self.endless:
                activity.heartbeat()
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return "ran"


@pytest.fixture
def watched() -> Watched:
    """The activity, as the worker runs it."""
    return Watched()


@pytest.fixture
async def client(place: Place, watched: Watched) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker for all workflows."""
    options = {"max_heartbeat_throttle_interval": QUICKLY, "default_heartbeat_throttle_interval": QUICKLY}
    async with place.serving(WORKFLOWS, [watched.watched, slow], worker=options) as client:
        yield client


async def begun(client: Client, place: Place, workflow: type, *args: Any) -> WorkflowHandle[Any, Any]:
    """Start a workflow, and return it as soon as it holds."""
    run: Any = workflow.run  # type: ignore[attr-defined]
    handle: WorkflowHandle[Any, Any] = await client.start_workflow(
        run, args=args, id=place.task_queue, task_queue=place.task_queue
    )
    await handle.execute_update("until_held")
    return handle


async def take_away(pool: Semaphore) -> int:
    """Release the permit by its ticket, as an operator does; returns its fence."""
    holder = (await pool.inspect()).holders[0]
    assert await pool.release(holder.ticket)
    return holder.fence


async def outcome(handle: WorkflowHandle[Any, Any], within: float = SOON) -> Any:
    """Return what the run returns or is failed by, soon; none of its workflow tasks has failed."""
    try:
        return await asyncio.wait_for(handle.result(), within)
    except WorkflowFailureError as error:
        return error.cause
    finally:
        assert await tasks_that_failed(handle) == []


# How a body is told


async def test_uncaught(client: Client, place: Place, pool: Semaphore) -> None:
    """A permit that is released by its ticket is lost at once; an error that nobody catches fails the run."""
    handle = await begun(client, place, Losing, Use("r"), "uncaught", None)
    await take_away(pool)
    error = await outcome(handle)
    assert isinstance(error, ApplicationError)
    assert error.type == "LeaseLost"
    assert "r" in error.details


async def test_caught_as_the_core_has_it(client: Client, place: Place, pool: Semaphore) -> None:
    """`except redlease.LeaseLost` works in workflow code."""
    handle = await begun(client, place, Losing, USE, "catch_core", None)
    fence = await take_away(pool)
    assert await outcome(handle) == ["LeaseLost", True, fence]


async def test_caught_as_the_adapter_has_it(client: Client, place: Place, pool: Semaphore) -> None:
    """`except redlease_temporal.LeaseLost` works around `async with lock`, and names the resource."""
    handle = await begun(client, place, CatchOwn, USE)
    await take_away(pool)
    assert await outcome(handle) == "r"


async def test_swallowed_cancellation(client: Client, place: Place, pool: Semaphore) -> None:
    """A body that swallows the cancellation gets the error at its end."""
    handle = await begun(client, place, Losing, USE, "swallow", None)
    fence = await take_away(pool)
    assert await outcome(handle) == ["LeaseLost", True, fence]


async def test_check(client: Client, place: Place, pool: Semaphore) -> None:
    """`hold.lost` and `hold.check()` tell what the run knows."""
    handle = await begun(client, place, Losing, USE, "check", None)
    fence = await take_away(pool)
    assert await outcome(handle) == ["LeaseLost", True, fence]


async def test_another_error(client: Client, place: Place, pool: Semaphore) -> None:
    """Another error of the body is kept, and tells of the loss in a note."""
    handle = await begun(client, place, Losing, USE, "other_error", None)
    await take_away(pool)
    message, note = await outcome(handle)
    assert message == "mine"
    assert "no longer held" in note


async def test_workflow_cancel_wins(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that is cancelled while it cleans up after a loss ends as cancelled."""
    handle = await begun(client, place, Losing, USE, "clean", None)
    await take_away(pool)
    await eventually(lambda: has_signal(handle))
    await handle.cancel()
    assert isinstance(await outcome(handle), CancelledError)


async def has_signal(handle: WorkflowHandle[Any, Any]) -> bool:
    """Tell whether the run was told of a loss."""
    return "WORKFLOW_EXECUTION_SIGNALED" in await names_of(handle)


async def test_workflow_cancel_first(client: Client, place: Place, pool: Semaphore) -> None:
    """A run that loses its permit while it cleans up after a cancel ends as cancelled."""
    handle = await begun(client, place, Losing, USE, "clean", None)
    before = (await names_of(handle)).count("WORKFLOW_TASK_COMPLETED")
    await handle.cancel()
    await eventually(lambda: has_completed_tasks(handle, before + 1))
    await take_away(pool)
    assert isinstance(await outcome(handle), CancelledError)


async def has_completed_tasks(handle: WorkflowHandle[Any, Any], count: int) -> bool:
    """Tell whether so many workflow tasks have been completed."""
    return (await names_of(handle)).count("WORKFLOW_TASK_COMPLETED") >= count


async def test_cancel_and_loss_at_once(
    temporal_client: Client, place: Place, pool: Semaphore, worker_process: StartWorkerProcess, watched: Watched
) -> None:
    """A run that hears of a loss and a cancel in one workflow task, and cleans up, ends as cancelled."""
    worker = await worker_process("losing_flows", worker={"sticky_queue_schedule_to_start_timeout": 1.0})
    handle = await begun(temporal_client, place, Losing, Use("r"), "clean", None)
    worker.kill()
    holder = (await pool.inspect()).holders[0]
    await handle.signal(LOST_SIGNAL, LostSignal("r", holder.ticket, holder.fence, "test"))
    await handle.cancel()
    async with place.serving(WORKFLOWS, [watched.watched]):
        assert isinstance(await outcome(handle, 15), CancelledError)


async def test_only_signalled(client: Client, place: Place, pool: Semaphore) -> None:
    """With on_lost="signal" the body goes on, and is told by `wait_lost()`, `lost` and `check()`."""
    handle = await begun(client, place, Signalled, USE, "")
    await take_away(pool)
    assert await outcome(handle) == [True, True, "check"]


async def test_max_hold(client: Client, place: Place) -> None:
    """After `max_hold` a permit is not renewed, and lost when its lease ends."""
    handle = await begun(client, place, Losing, Use("r", lease=1.0), "uncaught", 1.0)
    error = await outcome(handle, 5)
    assert isinstance(error, ApplicationError)
    assert error.type == "LeaseLost"


# What is begun under it


async def test_activity_in_flight(client: Client, place: Place, pool: Semaphore, watched: Watched) -> None:
    """The guarded activity that runs is cancelled, and the body gets the loss, not the activity's error."""
    watched.endless = True
    handle = await begun(client, place, Losing, USE, "activity", None)
    await watched.ran.wait()
    fence = await take_away(pool)
    assert await outcome(handle) == ["LeaseLost", True, fence]
    await asyncio.wait_for(watched.cancelled.wait(), SOON)


async def test_activity_after_the_loss(client: Client, place: Place, pool: Semaphore, watched: Watched) -> None:
    """An activity that is begun under a lost permit does not run, and the block ends with LeaseLost."""
    handle = await begun(client, place, Signalled, USE, "then an activity")
    await take_away(pool)
    error = await outcome(handle)
    assert isinstance(error, ApplicationError)
    assert error.type == "LeaseLost"
    assert not watched.ran.is_set()


async def test_activity_of_another_worker(
    temporal_client: Client, place: Place, pool: Semaphore, worker_process: StartWorkerProcess, watched: Watched
) -> None:
    """A worker for activities alone, with the plugin, refuses them as well."""
    await worker_process("losing_flows", serve="workflows")
    async with place.serving([], [watched.watched]):
        handle = await begun(temporal_client, place, Signalled, USE, "then an activity")
        await take_away(pool)
        error = await outcome(handle)
    assert isinstance(error, ApplicationError)
    assert error.type == "LeaseLost"
    assert not watched.ran.is_set()


async def test_children(client: Client, place: Place, pool: Semaphore, watched: Watched) -> None:
    """A child's activities do not run once its parent's permit is lost; those of one that outlives its parent do."""
    children = [f"{place.task_queue}-child", f"{place.task_queue}-other"]
    handle = await begun(client, place, Parent, USE, *children)
    guarded, free = (client.get_workflow_handle(child) for child in children)
    await take_away(pool)
    await eventually(lambda: has_signal(handle))
    await guarded.signal(Child.proceed)
    error = await outcome(guarded)
    assert isinstance(error, ActivityError)
    assert isinstance(error.cause, ApplicationError)
    assert error.cause.type == "LeaseLost"
    assert not watched.ran.is_set()
    await free.signal(Child.proceed)
    assert await outcome(free) == "ran"
    await handle.signal(Parent.proceed)
    assert await outcome(handle) is True
    assert not isinstance(error, ChildWorkflowError)


# Signals


@pytest.mark.parametrize("kind", [Dynamic, OldDynamic])
async def test_dynamic_handler(client: Client, place: Place, pool: Semaphore, kind: type) -> None:
    """A handler for every signal gets the user's and never the library's."""
    handle = await begun(client, place, kind, USE)
    await handle.signal("mine", 1)
    await take_away(pool)
    assert await outcome(handle) == ["mine", "lost"]


@pytest.mark.parametrize("kind", [Dynamic, OldDynamic, Losing])
async def test_signal_before_the_first_task(place: Place, watched: Watched, kind: Any) -> None:
    """A signal of a loss that is there before the workflow's first step hurts nothing, and no handler gets it."""
    args = [Use("r"), "uncaught", None] if kind is Losing else [Use("r")]
    async with place.serving([Adopting], [watched.watched]) as client:
        handle = await client.start_workflow(
            kind.run,
            args=args,
            id=f"{place.task_queue}-early",
            task_queue=f"{place.task_queue}-early",
            start_signal=LOST_SIGNAL,
            start_signal_args=[LostSignal("r", "another", 1, "test")],
        )
        await handle.signal("proceed")
        place.task_queue += "-early"
        async with place.serving(WORKFLOWS, [watched.watched]):
            assert await outcome(handle) == (["kept", False] if kind is Losing else [])


async def test_late_signal(client: Client, place: Place, pool: Semaphore) -> None:
    """A late signal of a loss does not end a later hold by the same ticket."""
    handle = await begun(client, place, Twice, USE)
    fence = await holder_of(pool)
    await handle.signal(LOST_SIGNAL, LostSignal("r", "t", fence - 1, "test"))
    await stays_held(pool, fence, 0.5)
    await handle.signal("proceed")
    _, second, lost = await outcome(handle)
    assert (second, lost) == (fence, False)


async def test_repeated_signal(client: Client, place: Place, pool: Semaphore) -> None:
    """A loss that is told several times is one loss, and the next hold is kept."""
    handle = await begun(client, place, Again, USE)
    holder = (await pool.inspect()).holders[0]
    await take_away(pool)
    lost = LostSignal("r", holder.ticket, holder.fence, "test")
    for _ in range(3):
        await handle.signal(LOST_SIGNAL, lost)
    await eventually(lambda: is_held_above(pool, holder.fence))
    await handle.signal(LOST_SIGNAL, lost)
    fence = await holder_of(pool)
    await stays_held(pool, fence, 2)
    await handle.signal("proceed")
    assert await outcome(handle) == [1, fence]


async def is_held_above(pool: Semaphore, fence: int) -> bool:
    """Tell whether there is a holder with a greater fence."""
    return await holder_of(pool) > fence


# Without a block, and wrongly


async def test_without_a_block(client: Client, place: Place, pool: Semaphore) -> None:
    """A hold without a block is kept until it is released, which may be said twice."""
    handle = await begun(client, place, Blockless, Use("r", lease=SHORT_S))
    await stays_held(pool, await holder_of(pool), SHORT_S + 2)
    await handle.signal("proceed")
    assert await outcome(handle) == [False, True, False, "check"]
    await until_free(pool)


async def test_without_a_block_released_after_a_loss(client: Client, place: Place, pool: Semaphore) -> None:
    """A hold without a block that is lost says so, and its release says that there was nothing to give back."""
    handle = await begun(client, place, Blockless, USE)
    await take_away(pool)
    await eventually(lambda: has_signal(handle))
    await handle.signal("proceed")
    assert await outcome(handle) == [True, False, False, "check"]


async def test_adopted_from_outside(client: Client, place: Place, pool: Semaphore) -> None:
    """A permit that a service hands over has a new fence in the workflow."""
    permit = await pool.acquire()
    before, after = await client.execute_workflow(
        Adopting.run, args=[USE, permit], id=place.task_queue, task_queue=place.task_queue
    )
    assert after > before == permit.fence
    assert not await pool.is_held(permit)


async def test_adopted_too_late(client: Client, place: Place, pool: Semaphore) -> None:
    """A permit that is no longer held cannot be adopted, which fails the run."""
    permit = await pool.acquire()
    await pool.release(permit)
    handle = await client.start_workflow(
        Adopting.run, args=[USE, permit], id=place.task_queue, task_queue=place.task_queue
    )
    error = await outcome(handle)
    assert isinstance(error, ApplicationError)
    assert error.type == "LeaseLost"


@pytest.mark.parametrize("what", ["capacity", "name", "weight", "permit", "on_lost"])
async def test_misuse(client: Client, place: Place, what: str) -> None:
    """What can never be right fails the run with a ValueError, not its workflow task."""
    handle = await client.start_workflow("Misusing", what, id=place.task_queue, task_queue=place.task_queue)
    error = await outcome(handle)
    assert isinstance(error, ApplicationError)
    assert error.type == "ValueError"


# Grants that no history has


async def test_orphan_of_a_terminated_run(
    temporal_client: Client, place: Place, pool: Semaphore, worker_process: StartWorkerProcess
) -> None:
    """What was granted to a run that was terminated before its history had the grant goes to who waits."""
    first = await worker_process("ending_flows")
    handle = await temporal_client.start_workflow(
        Orphaning.run, Use("r", lease=2.0), id=place.task_queue, task_queue=place.task_queue
    )
    fence = await eventually(lambda: holder_of(pool))
    await worker_process("ending_flows")
    first.kill()
    await handle.terminate()
    assert "MARKER_RECORDED" not in await names_of(handle)
    async with waiting(pool) as waiter:
        permit = await asyncio.wait_for(asyncio.shield(waiter), 15)
        assert permit.fence > fence


@pytest.mark.slow
async def test_orphan_of_an_open_run(
    temporal_client: Client, place: Place, pool: Semaphore, worker_process: StartWorkerProcess
) -> None:
    """What was granted to a run whose replay does not ask for it again lapses, however long the run stays open."""
    first = await worker_process("ending_flows")
    handle = await temporal_client.start_workflow(
        Orphaning.run,
        Use("r", lease=2.0),
        id=place.task_queue,
        task_queue=place.task_queue,
        task_timeout=timedelta(seconds=10),  # most of which passes before the first worker would record the grant
    )
    fence = await eventually(lambda: holder_of(pool))
    await worker_process("ending_flows")
    first.kill()
    await handle.signal(Orphaning.turn)
    async with waiting(pool) as waiter:
        permit = await asyncio.wait_for(asyncio.shield(waiter), 25)
        assert permit.fence > fence
    await handle.signal(Orphaning.proceed)
    assert await asyncio.wait_for(handle.result(), 15) == "the other way"


async def test_late_marker(client: Client, place: Place, pool: Semaphore) -> None:
    """A permit is kept while its grant is not in the history because the workflow task goes on, past several leases."""
    handle = await client.start_workflow(
        Delayed.run, Use("r", lease=1.0, seconds=3.0), id=place.task_queue, task_queue=place.task_queue
    )
    fence = await eventually(lambda: holder_of(pool))
    await stays_held(pool, fence, 3.5)
    await handle.signal(Delayed.proceed)
    assert await outcome(handle, 8) == "kept"
