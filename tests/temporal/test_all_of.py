"""Several resources at once in workflows: all of them or none, on any backend."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
from backend_bench import Bench
from backend_flows import Actor, Asking, Inside, guarded
from temporal_tools import SHORT_S, Place, reset
from temporalio.client import WorkflowFailureError
from temporalio.worker import Replayer
from together_flows import WORKFLOWS, Crossing, HandingOn, Part, Together

from redlease._core.limits import CAPACITY_MAX
from redlease_temporal import all_of, lock, rwlock, semaphore
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from temporalio.client import WorkflowHandle

    from redlease import Redlease


BACKENDS = ["redis", "slots", "coordinator"]


@pytest.fixture
async def bench(place: Place) -> AsyncIterator[Bench]:
    """The workflows that use the resources; which they are, each test says."""
    async with place.serving([Actor, *WORKFLOWS], [guarded]) as client:
        yield Bench(client, place.task_queue, "redis")


@pytest.fixture(params=[*BACKENDS, "all"])
def parts(request: pytest.FixtureRequest, bench: Bench) -> list[Part]:
    """Three locks on each backend, and one on each of the three; the order of their names is not that of the list."""
    resource_workflow = BACKENDS if request.param == "all" else [request.param] * 3
    return [Part(each, f"{bench.queue}-{name}") for each, name in zip(resource_workflow, "bca", strict=True)]


async def start(bench: Bench, parts: list[Part], timeout: float | None = None) -> WorkflowHandle[Any, Any]:
    """Start a run that holds them all."""
    return await bench.start(Together.run, parts, timeout)


async def held(bench: Bench, parts: list[Part]) -> WorkflowHandle[Any, Any]:
    """Start a run that holds them all; returns when it does."""
    handle = await start(bench, parts)
    await handle.execute_update(Together.until_held)
    return handle


def of(part: Part) -> dict[str, Any]:
    """Return the resource of a part, as actors take it."""
    capacity = CAPACITY_MAX if part.side else part.capacity
    return {"backend": part.backend, "resource": part.resource, "capacity": capacity}


async def are_free(bench: Bench, actor: WorkflowHandle[Any, Any], *parts: Part) -> bool:
    """Return True if nobody holds any of these or waits for it."""
    snapshots = [await bench.seen(actor, **of(part)) for part in parts]
    return not any(snapshot.holders or snapshot.waiters for snapshot in snapshots)


async def until_free(bench: Bench, actor: WorkflowHandle[Any, Any], *parts: Part, within: float = 5.0) -> None:
    """Return when nobody holds any of these or waits for it."""

    async def free() -> bool:
        return await are_free(bench, actor, *parts)

    await eventually(free, within)


async def test_all_are_held_and_released(bench: Bench) -> None:
    """Inside the block each is held with its weight, in the order that was given, whatever keeps it."""
    parts = [
        Part("coordinator", f"{bench.queue}-d", capacity=3, weight=2),
        Part("redis", f"{bench.queue}-c", "write"),
        Part("slots", f"{bench.queue}-b"),
        Part("redis", f"{bench.queue}-a", capacity=3, weight=3),
        Part("coordinator", f"{bench.queue}-a", "read"),
    ]
    actor, handle = await bench.actor(), await held(bench, parts)
    assert await handle.query(Together.held) == [2, CAPACITY_MAX, 1, 3, 1]
    fences = [(await bench.seen(actor, **of(part))).holders[0].fence for part in parts]
    assert await handle.execute_update(Together.until_held) == fences
    await handle.signal(Together.proceed)
    assert await handle.result() == "held"
    await until_free(bench, actor, *parts)


async def test_a_resource_given_twice_is_held_once(bench: Bench) -> None:
    """The largest weight counts: of a lock the one permit, of the sides of a read-write lock the writer's."""
    names = [f"{bench.queue}-{name}" for name in "abc"]
    parts = [
        *(Part("slots", names[0]), Part("slots", names[0])),
        *(Part("redis", names[1], "read"), Part("redis", names[1], "write")),
        *(Part("coordinator", names[2], capacity=3, weight=3), Part("coordinator", names[2], capacity=3)),
    ]
    handle = await held(bench, parts)
    assert await handle.query(Together.held) == [1, 1, CAPACITY_MAX, CAPACITY_MAX, 3, 3]
    fences = await handle.execute_update(Together.until_held)
    assert fences[::2] == fences[1::2]
    await handle.signal(Together.proceed)
    assert await handle.result() == "held"


@pytest.mark.parametrize("timeout", [0.0, 1.5])
async def test_what_times_out_leaves_nothing(bench: Bench, parts: list[Part], timeout: float) -> None:
    """If one is not free in time, none is held, nobody waits, and the error names it."""
    actor, (first, taken, third) = await bench.actor(), parts
    permit = await bench.do(actor, Actor.acquire, Asking(), **of(taken))
    handle = await start(bench, parts, timeout)
    assert await handle.result() == f"timed out at {taken.resource}"
    await until_free(bench, actor, first, third)
    assert await bench.do(actor, Actor.release, permit, **of(taken))
    await until_free(bench, actor, taken)


async def test_who_is_cancelled_while_it_waits_leaves_nothing(bench: Bench, parts: list[Part]) -> None:
    """What was acquired before the resource that it waits for is released, and it waits for nothing any more."""
    actor, (first, taken, third) = await bench.actor(), parts
    permit = await bench.do(actor, Actor.acquire, Asking(), **of(taken))
    handle = await start(bench, parts)
    await bench.until_waiting(actor, 1, **of(taken))
    assert not await are_free(bench, actor, first)
    await handle.cancel()
    with pytest.raises(WorkflowFailureError):
        await handle.result()
    await until_free(bench, actor, first, third)
    await bench.until_waiting(actor, 0, **of(taken))
    assert await bench.do(actor, Actor.release, permit, **of(taken))


async def test_the_loss_of_one_ends_the_block(bench: Bench, parts: list[Part]) -> None:
    """The body gets LeaseLost, which names the resource, and the others are released."""
    actor, handle = await bench.actor(), await held(bench, parts)
    (permit,) = (await bench.seen(actor, **of(parts[0]))).holders
    assert await bench.do(actor, Actor.release_ticket, permit.ticket, **of(parts[0]))
    assert await handle.result() == f"lost {parts[0].resource}"
    await until_free(bench, actor, *parts)


async def test_the_loss_of_one_while_another_is_waited_for(bench: Bench, parts: list[Part]) -> None:
    """The block does not begin: what is held is released, and the request in the queue is withdrawn."""
    actor, (first, taken, third) = await bench.actor(), parts
    permit = await bench.do(actor, Actor.acquire, Asking(), **of(taken))
    handle = await start(bench, parts)
    await bench.until_waiting(actor, 1, **of(taken))
    (acquired,) = (await bench.seen(actor, **of(first))).holders
    assert await bench.do(actor, Actor.release_ticket, acquired.ticket, **of(first))
    assert await handle.result() == f"lost {first.resource}"
    await until_free(bench, actor, first, third)
    await bench.until_waiting(actor, 0, **of(taken))
    assert await bench.do(actor, Actor.release, permit, **of(taken))


async def test_what_a_terminated_run_held_is_free_soon(bench: Bench, parts: list[Part]) -> None:
    """Another run that wants all of them has them within a lease of each."""
    actor, handle = await bench.actor(), await held(bench, parts)
    next_one = await start(bench, parts)
    await handle.terminate()
    await asyncio.wait_for(next_one.execute_update(Together.until_held), 15)
    await next_one.signal(Together.proceed)
    assert await next_one.result() == "held"
    await until_free(bench, actor, *parts)


async def test_a_reset_run_keeps_them_all(bench: Bench, parts: list[Part]) -> None:
    """A run that is reset to when it held goes on holding them past their leases, and releases them at its end."""
    for part in parts:
        part.lease = SHORT_S
    actor, handle = await bench.actor(), await held(bench, parts)
    fences = await handle.execute_update(Together.until_held)
    again = await reset(bench.client, handle, -1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(again.result(), SHORT_S + 2)
    assert await again.execute_update(Together.until_held) == fences
    await again.signal(Together.proceed)
    assert await again.result() == "held"
    await until_free(bench, actor, *parts)


async def test_they_go_from_run_to_run(bench: Bench, parts: list[Part]) -> None:
    """What is detached in the block is adopted by the next run, with the same fences, and kept past its leases."""
    for part in parts:
        part.lease = SHORT_S
    actor, first = await bench.actor(), await bench.start(HandingOn.run, parts, [])
    fences = await first.execute_update(HandingOn.until_held)
    await first.signal(HandingOn.proceed)
    latest = bench.client.get_workflow_handle(first.id)

    async def is_next() -> bool:
        return bool((await latest.describe()).run_id != first.first_execution_run_id and await latest.query("held"))

    await eventually(is_next, 2 * SHORT_S)
    assert await latest.execute_update(HandingOn.until_held) == fences
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(latest.result(), SHORT_S + 2)
    assert not any([await are_free(bench, actor, part) for part in parts])
    await latest.signal(HandingOn.proceed)
    assert await latest.result() == "adopted"
    await until_free(bench, actor, *parts)


@pytest.mark.slow
async def test_no_order_leads_to_a_deadlock(bench: Bench, parts: list[Part]) -> None:
    """Two dozen runs that name three locks in each order all come to hold them, one at a time, and replay."""
    for part in parts:
        part.lease = 30.0
    orders = [list(order) for order in itertools.permutations(parts)] * 4
    random.shuffle(orders)
    Inside.most = 0
    handles = [await bench.start(Crossing.run, order, 0.01) for order in orders]
    fences = await asyncio.wait_for(asyncio.gather(*(handle.result() for handle in handles)), 50)
    assert len(set(fences)) == len(orders)
    assert Inside.most == 1
    replayer = Replayer(workflows=[Crossing], plugins=[RedleasePlugin("redis://nowhere.invalid")])
    for handle in handles:
        await replayer.replay_workflow(await handle.fetch_history())


async def test_workflows_and_services_agree_on_the_order(bench: Bench, outside: Redlease) -> None:
    """A service and workflows that name two locks on Redis in opposite orders do not wait for each other for ever."""
    parts = [Part("redis", f"{bench.queue}-{name}") for name in "ab"]
    names = [part.resource for part in reversed(parts)]
    handles = [await bench.start(Crossing.run, parts, 0.01) for _ in range(4)]
    for _ in range(8):
        async with outside.all(*(outside.lock(name, lease=5) for name in names), timeout=30):
            pass
    await asyncio.gather(*(handle.result() for handle in handles))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing": (all_of, "at least one"),
    "two capacities": (lambda: all_of(semaphore("r", 2), semaphore("r", 3)), "two capacities"),
    "a weight on slots": (lambda: all_of(semaphore("r", 3, backend="slots").weighted(2)), "one unit at a time"),
    "a weight of 0": (lambda: semaphore("r", 3).weighted(0), "weight"),
    "two writers": (lambda: all_of(rwlock("r").write.weighted(2)), "weight"),
    "a timeout": (lambda: all_of(lock("r"), timeout=-1), "timeout"),
    "an owner": (lambda: all_of(lock("r"), owner=""), "owner"),
    "on_lost": (lambda: all_of(lock("r"), on_lost="shout"), "on_lost"),  # type: ignore[arg-type]
    "max_hold": (lambda: all_of(lock("r"), max_hold=-1), "max_hold"),
    "a writer on slots": (lambda: rwlock("r", backend="slots"), "backend='coordinator' or 'redis'"),
    "another backend": (lambda: rwlock("r", backend="zookeeper"), "backend must be one of"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused_before_anything_is_held(what: str) -> None:
    """The call raises a ValueError that says why; no block begins."""
    call, why = WRONG[what]
    with pytest.raises(ValueError, match=why):
        call()
