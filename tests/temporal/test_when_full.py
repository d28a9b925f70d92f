"""`when_full` in workflows: a request is refused, or takes the place of older ones, of workflows and services alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from newest_flows import Ask, NewestHolder
from temporal_tools import Place, tasks_that_failed, until_free
from temporalio.client import Client, WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.worker import Replayer

from redlease import LeaseLost, Superseded
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import WorkflowHandle

    from redlease import Redlease, Semaphore

    from temporal.conftest import StartWorkerProcess

SOON = 20
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker."""
    async with place.serving([NewestHolder], []) as client:
        yield client


@pytest.fixture
def pool(outside: Redlease) -> Semaphore:
    """The resource as a service sees it."""
    return outside.semaphore("r", 1, lease=60)


class Starter:
    """Starts workflows, each with a number."""

    def __init__(self, client: Client, place: Place) -> None:
        self._client = client
        self._place = place
        self._count = 0

    async def start(self, ask: Ask) -> WorkflowHandle[NewestHolder, str]:
        """Start one."""
        self._count += 1
        identity = f"{self._place.prefix}-{self._count}"
        return await self._client.start_workflow(NewestHolder.run, ask, id=identity, task_queue=self._place.task_queue)

    async def holding(self, ask: Ask) -> WorkflowHandle[NewestHolder, str]:
        """Start one, and return when it holds."""
        handle = await self.start(ask)
        await handle.execute_update(NewestHolder.until_held)
        return handle


@pytest.fixture
def starter(client: Client, place: Place) -> Starter:
    """What starts workflows."""
    return Starter(client, place)


async def waits_alone(pool: Semaphore, handle: WorkflowHandle[NewestHolder, str]) -> None:
    """Wait until this workflow is the only one that waits."""

    async def alone() -> bool:
        return [waiter.owner for waiter in (await pool.inspect()).waiters] == [handle.id]

    await eventually(alone, SOON)


async def replays(*handles: WorkflowHandle[NewestHolder, str]) -> None:
    """Replay each history, of which no task has failed."""
    replayer = Replayer(workflows=[NewestHolder], plugins=[RedleasePlugin()])
    for handle in handles:
        assert await tasks_that_failed(handle) == []
        await replayer.replay_workflow(await handle.fetch_history())


@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_a_request_that_does_not_wait(
    client: Client, starter: Starter, place: Place, outside: Redlease, backend: str
) -> None:
    """It gets QueueFull at once while another holds, and the permit as soon as none does."""
    name = f"{place.prefix}-{backend}"  # slots and coordinators have no prefix: other tests on this server use "r"
    ask = Ask("refuse", backend=backend, resource=name)
    holder = await starter.holding(ask)
    refused = await (await starter.start(ask)).result()
    assert refused.startswith(f"QueueFull: resource {name!r}: no permit without waiting")
    await holder.signal(NewestHolder.proceed)
    assert await holder.result() == "done"
    if backend == "slots":  # a block that ends there leaves a slot that closes a moment later
        await client.get_workflow_handle(f"permit:{name}:0").result()
    elif backend == "redis":
        await until_free(outside.lock(name))
    again = await starter.holding(ask)
    await again.signal(NewestHolder.proceed)
    assert await again.result() == "done"
    await replays(holder, again)


async def test_the_newest_waits(starter: Starter, pool: Semaphore) -> None:
    """Of a key one waits, be the others workflows or services, and who holds is not disturbed; other keys wait too."""
    permit = await pool.acquire(key="a")
    service = asyncio.create_task(pool.acquire(key="a"))
    other = asyncio.create_task(pool.acquire(key="b"))
    await until_waiting(pool, 2)
    first = await starter.start(Ask("replace-waiter", "a"))
    with pytest.raises(Superseded):
        await service
    second = await starter.start(Ask("replace-waiter", "a"))
    assert (await first.result()).startswith("Superseded: resource 'r': a newer request replaced ticket")
    assert await pool.is_held(permit)
    await pool.release(permit)
    await pool.release(await other)
    await second.execute_update(NewestHolder.until_held)
    await second.signal(NewestHolder.proceed)
    assert await second.result() == "done"
    await replays(first, second)


async def test_a_service_takes_the_place_of_a_waiting_workflow(starter: Starter, pool: Semaphore) -> None:
    """The workflow hears of it while it waits, and goes on."""
    permit = await pool.acquire()
    waiter = await starter.start(Ask())
    await until_waiting(pool, 1, SOON)
    newest = asyncio.create_task(pool.acquire(when_full="replace-waiter"))
    assert (await waiter.result()).startswith("Superseded")
    await pool.release(permit)
    await pool.release(await newest)
    await replays(waiter)


async def test_the_newest_takes_over(starter: Starter, pool: Semaphore) -> None:
    """The older body is cancelled, and told by whom; the newer begins when it is left, long before the grace ends."""
    older = await starter.holding(Ask("replace-holder", slow=True))
    newer = await starter.start(Ask("replace-holder"))
    await older.execute_update(NewestHolder.until_leaving)
    lost = await older.execute_update(NewestHolder.until_held)
    assert not await pool.is_held(lost)
    await waits_alone(pool, newer)
    await older.signal(NewestHolder.proceed)
    permit = await newer.execute_update(NewestHolder.until_held)
    assert permit.fence > lost.fence
    told = await older.result()
    assert told.startswith("LeaseLost")
    assert f"the newer request {permit.ticket!r} replaced it" in told
    await newer.signal(NewestHolder.proceed)
    assert await newer.result() == "done"
    await replays(older, newer)


async def test_a_body_that_goes_on_delays_the_newest_for_its_grace(starter: Starter, pool: Semaphore) -> None:
    """It begins then, with a greater fence, though the older one's lease would last for a minute."""
    older = await starter.holding(Ask(on_lost="signal"))
    before = await older.execute_update(NewestHolder.until_held)
    newer = await starter.start(Ask("replace-holder", grace=1.5))
    after = await asyncio.wait_for(newer.execute_update(NewestHolder.until_held), 30)
    assert after.fence > before.fence
    assert await pool.is_held(after)
    for handle in (older, newer):
        await handle.signal(NewestHolder.proceed)
        assert await handle.result() == "done"
    await replays(older, newer)


async def test_a_run_that_is_terminated_makes_room(starter: Starter, pool: Semaphore) -> None:
    """A replaced run that is terminated before its body has ended leaves what it had for the grace, and no longer."""
    older = await starter.holding(Ask(slow=True))
    newer = await starter.start(Ask("replace-holder", grace=3))
    await older.execute_update(NewestHolder.until_leaving)
    await older.terminate()
    assert await pool.is_held(await asyncio.wait_for(newer.execute_update(NewestHolder.until_held), 30))
    await newer.signal(NewestHolder.proceed)
    assert await newer.result() == "done"


async def test_services_and_workflows_take_over_from_each_other(starter: Starter, pool: Semaphore) -> None:
    """A workflow from a service, and a service from that workflow."""
    inside = asyncio.Event()

    async def serve() -> None:
        async with pool.hold():
            inside.set()
            await asyncio.Event().wait()

    service = asyncio.create_task(serve())
    await inside.wait()
    flow = await starter.start(Ask("replace-holder"))
    with pytest.raises(LeaseLost, match="the newer request"):
        await service
    await flow.execute_update(NewestHolder.until_held)
    async with pool.hold(when_full="replace-holder", grace=120, timeout=30) as hold:
        assert (await flow.result()).startswith("LeaseLost")
        hold.check()
    await replays(flow)


async def test_a_request_outlives_the_worker_that_queued_it(
    place: Place, temporal_client: Client, pool: Semaphore, worker_process: StartWorkerProcess
) -> None:
    """The relay that takes it over has it take the place of what came before it, too."""
    starter = Starter(temporal_client, place)
    wide = {"sticky_queue_schedule_to_start_timeout": 1.0}
    permit = await pool.acquire(key="b")
    first = await worker_process("newest_flows", worker=wide)
    newest = await starter.start(Ask("replace-waiter", "a"))
    await waits_alone(pool, newest)
    first.kill()
    await first.ended()
    await worker_process("newest_flows", worker=wide)
    await pool.release(permit)
    assert (await newest.execute_update(NewestHolder.until_held)).key == "a"
    await newest.signal(NewestHolder.proceed)
    assert await newest.result() == "done"


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (Ask("replace-holder", backend="slots"), "it needs 'redis' or 'coordinator'"),
        (Ask("replace-holder", writes=True), "a read-write lock has no when_full"),
        (Ask("replace-waiter", timeout=0), "goes without a timeout of 0"),
        (Ask("replace"), "when_full must be one of 'wait'"),
        (Ask("replace-holder", grace=-1), "grace"),
    ],
    ids=str,
)
async def test_what_cannot_be_is_refused(starter: Starter, ask: Ask, says: str) -> None:
    """The run fails with a ValueError that says why, and nothing is queued."""
    handle = await starter.start(ask)
    with pytest.raises(WorkflowFailureError) as raised:
        await handle.result()
    cause = raised.value.cause
    assert isinstance(cause, ApplicationError)
    assert cause.type == "ValueError"
    assert says in cause.message
