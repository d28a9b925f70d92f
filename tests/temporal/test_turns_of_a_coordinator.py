"""Keys, shares, limits of keys and `when_full` in workflows without Redis: a coordinator has them too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from backend_bench import without_redis
from newest_flows import Ask, NewestHolder
from temporal_tools import names_of, tasks_that_failed
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import Priority
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import Replayer
from turn_flows import Try, Turn, Use

from redlease import Snapshot
from redlease_temporal._backends.coordinator import workflow
from redlease_temporal._backends.coordinator.workflow import Coordinator
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporal_server import TemporalServer

SOON = 20
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def client(temporal_server: TemporalServer, task_queue: str, prefix: str) -> AsyncIterator[Client]:
    """A client whose plugin has no Redis, beside a worker."""
    async with without_redis(temporal_server, task_queue, prefix, Turn, Try, NewestHolder) as client:
        yield client


class Kept:
    """A resource that a coordinator keeps, and the workflows that use it."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self.name = f"{task_queue}-r"
        self.client = client
        self.started: list[WorkflowHandle[Any, Any]] = []
        self._task_queue = task_queue

    @property
    def keeper(self) -> WorkflowHandle[Any, Any]:
        """The coordinator."""
        return self.client.get_workflow_handle(f"lock:{self.name}")

    async def use(self, key: str | None = None, *, stays: bool = False, **options: Any) -> WorkflowHandle[Any, Any]:
        """Start a workflow that takes a turn."""
        priority = options.pop("priority", Priority())
        asked = Use(self.name, key=key, backend="coordinator", **options)
        return await self._start(Turn.run, asked, stays, None, priority=priority)

    async def ask(self, full: str = "wait", key: str | None = None, **options: Any) -> WorkflowHandle[Any, Any]:
        """Start a workflow that holds until it is told to go on."""
        return await self._start(NewestHolder.run, Ask(full, key, resource=self.name, backend="coordinator", **options))

    async def _start(self, run: Any, *args: Any, **options: Any) -> WorkflowHandle[Any, Any]:
        handle: WorkflowHandle[Any, Any] = await self.client.start_workflow(
            run, args=args, id=f"{self.name}-{len(self.started)}", task_queue=self._task_queue, **options
        )
        self.started.append(handle)
        return handle

    async def snapshot(self) -> Snapshot | None:
        """Look at the resource; None before there is a coordinator."""
        try:
            snapshot: Snapshot = await self.keeper.query("snapshot", result_type=Snapshot)
        except RPCError:
            return None
        return snapshot

    async def until_waiting(self, *owners: str) -> None:
        """Return when these workflows wait, in this order."""

        async def they_do() -> bool:
            snapshot = await self.snapshot()
            return snapshot is not None and [waiter.owner for waiter in snapshot.waiters] == list(owners)

        await eventually(they_do, SOON)

    async def queued(self, *args: Any, **options: Any) -> None:
        """Start one that takes a turn, and return when it waits."""
        handle = await self.use(*args, **options)

        async def waits() -> bool:
            snapshot = await self.snapshot()
            return snapshot is not None and handle.id in [waiter.owner for waiter in snapshot.waiters]

        await eventually(waits, SOON)

    async def replay(self) -> None:
        """Replay the history of the coordinator and of all that used it, of which no task has failed."""
        replayer = Replayer(workflows=[Coordinator, Turn, Try, NewestHolder], plugins=[RedleasePlugin()])
        for handle in (self.keeper, *self.started):
            assert await tasks_that_failed(handle) == []
            await replayer.replay_workflow(await handle.fetch_history())


@pytest.fixture
def kept(client: Client, task_queue: str) -> Kept:
    """A resource of its own."""
    return Kept(client, task_queue)


async def holding(kept: Kept, key: str | None = None, **options: Any) -> WorkflowHandle[Any, Any]:
    """Start a workflow that holds until it is told to go on, and return when it does."""
    handle = await kept.use(key, stays=True, **options)
    await handle.execute_update(Turn.until_held)
    return handle


async def order_of(handles: list[WorkflowHandle[Any, Any]]) -> list[str | None]:
    """Return the keys of workflows in the order of their grants."""
    permits = await asyncio.gather(*(handle.result() for handle in handles))
    return [permit.key for permit in sorted(permits, key=lambda permit: permit.fence)]


async def test_keys_take_turns(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that comes last has its first turn before another has its second, over many runs of the coordinator."""
    monkeypatch.setattr(workflow, "EVENTS_MAX", 30)
    holder = await holding(kept)
    first = (await kept.keeper.describe()).run_id
    for key in "aaab":
        await kept.queued(key)
    snapshot = await kept.snapshot()
    assert snapshot is not None
    assert [waiter.key for waiter in snapshot.waiters] == ["a", "b", "a", "a"]
    await holder.signal(Turn.proceed)
    assert await order_of(kept.started[1:]) == ["a", "b", "a", "a"]
    assert (await kept.keeper.describe()).run_id != first
    await kept.replay()


async def test_the_key_and_the_share_of_a_priority(kept: Kept) -> None:
    """Who gives no key takes the turns of its priority's fairness key, and so many as its weight says."""
    holder = await holding(kept)
    for key, weight in (("a", 1.0), ("b", 2.0)):
        for _ in range(4):
            await kept.queued(priority=Priority(fairness_key=key, fairness_weight=weight))
    await holder.signal(Turn.proceed)
    order = await order_of(kept.started[1:])
    assert order[:6].count("b") == 4, order


async def test_a_key_at_its_limit_holds_up_nobody(kept: Kept) -> None:
    """The second of a key waits though there is room, and one of another key enters past it."""
    terms: dict[str, Any] = {"capacity": 3, "per_key": 1}
    first = await holding(kept, "a", **terms)
    await kept.queued("a", **terms)
    other = await kept.use("b", **terms)
    assert (await other.result()).key == "b"
    await first.signal(Turn.proceed)
    assert await order_of([first, kept.started[1]]) == ["a", "a"]
    await kept.replay()


async def test_a_key_of_which_so_many_wait(kept: Kept) -> None:
    """A further request of it is refused, and one of another key waits."""
    holder = await holding(kept)
    await kept.queued("a", waiters=1)
    third = await kept.use("a", waiters=1)
    with pytest.raises(WorkflowFailureError) as raised:
        await third.result()
    assert isinstance(raised.value.cause, ApplicationError)
    assert raised.value.cause.type == "QueueFull"
    assert "1 of key 'a' wait already" in raised.value.cause.message
    await kept.queued("b", waiters=1)
    await holder.signal(Turn.proceed)
    assert await order_of([kept.started[1], kept.started[3]]) == ["a", "b"]


async def test_an_adopted_permit_counts_for_its_key(kept: Kept, task_queue: str) -> None:
    """A run that takes another's permit over holds it under its key, whose limit it has reached."""
    terms: dict[str, Any] = {"capacity": 3, "per_key": 1}
    use = Use(kept.name, backend="coordinator", **terms)
    first = await holding(kept, "a", **terms)
    permit = await first.execute_update(Turn.until_held)
    adopter = await kept.client.start_workflow(
        Turn.run, args=[use, True, permit], id=f"{kept.name}-adopter", task_queue=task_queue
    )
    assert (await adopter.execute_update(Turn.until_held)).key == "a"
    use.key = "a"
    tried = await kept.client.execute_workflow(Try.run, use, id=f"{kept.name}-try", task_queue=task_queue)
    assert not tried
    await adopter.signal(Turn.proceed)
    await adopter.result()


async def test_the_newest_waits(kept: Kept) -> None:
    """Of a key one waits, who holds is not disturbed, and those of other keys wait too."""
    holder = await kept.ask(key="a")
    await holder.execute_update(NewestHolder.until_held)
    older = await kept.ask(key="a")
    await kept.until_waiting(older.id)
    other = await kept.ask(key="b")
    await kept.until_waiting(older.id, other.id)
    newer = await kept.ask("replace-waiter", "a")
    told = await older.result()
    assert told.startswith(f"Superseded: resource {kept.name!r}: a newer request")
    await holder.signal(NewestHolder.proceed)
    assert await holder.result() == "done"
    for handle in (other, newer):
        await handle.signal(NewestHolder.proceed)
        assert await handle.result() == "done"
    await kept.replay()


async def test_the_newest_takes_over(kept: Kept) -> None:
    """The older body is cancelled, and told by whom; the newer begins when it is left, long before the grace ends."""
    older = await kept.ask(slow=True)
    lost = await older.execute_update(NewestHolder.until_held)
    newer = await kept.ask("replace-holder")
    await older.execute_update(NewestHolder.until_leaving)
    await kept.until_waiting(newer.id)
    await older.signal(NewestHolder.proceed)
    permit = await newer.execute_update(NewestHolder.until_held)
    assert permit.fence > lost.fence
    told = await older.result()
    assert told.startswith("LeaseLost")
    assert f"the newer request {permit.ticket!r} replaced it" in told
    await newer.signal(NewestHolder.proceed)
    assert await newer.result() == "done"
    await kept.replay()


async def test_a_body_that_goes_on_delays_the_newest_for_its_grace(kept: Kept) -> None:
    """It begins then, with a greater fence, though the older one's lease would last for a minute."""
    older = await kept.ask(on_lost="signal")
    before = await older.execute_update(NewestHolder.until_held)
    newer = await kept.ask("replace-holder", grace=1.5)
    after = await asyncio.wait_for(newer.execute_update(NewestHolder.until_held), 30)
    assert after.fence > before.fence
    assert "TIMER_FIRED" in await names_of(kept.keeper)
    for handle in (older, newer):
        await handle.signal(NewestHolder.proceed)
        assert await handle.result() == "done"
    await kept.replay()


async def test_a_run_that_is_terminated_makes_room(kept: Kept) -> None:
    """A replaced run that is terminated before its body has ended leaves what it had for the grace, and no longer."""
    older = await kept.ask(slow=True)
    await older.execute_update(NewestHolder.until_held)
    newer = await kept.ask("replace-holder", grace=3)
    await older.execute_update(NewestHolder.until_leaving)
    await older.terminate()
    await asyncio.wait_for(newer.execute_update(NewestHolder.until_held), 30)
    await newer.signal(NewestHolder.proceed)
    assert await newer.result() == "done"
