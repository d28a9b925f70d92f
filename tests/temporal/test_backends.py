"""What every backend does with a resource, and what one refuses that it cannot do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from backend_bench import Bench
from backend_flows import WORKFLOWS, Actor, Asking, Holder, Inside, guarded
from temporal_tools import SHORT_S, Place, reset
from temporalio.client import Client, WorkflowFailureError

from redlease import Position

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Permit, Snapshot

    from temporal_server import TemporalServer


BACKENDS = ["redis", "slots", "coordinator"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn."""
    return str(request.param)


@pytest.fixture
async def client(place: Place) -> AsyncIterator[Client]:
    """A client with the plugin, beside a worker for all workflows."""
    async with place.serving(WORKFLOWS, [guarded]) as client:
        yield client


@pytest.fixture
def bench(client: Client, task_queue: str, backend: str) -> Bench:
    """A resource of its own."""
    return Bench(client, task_queue, backend)


@pytest.mark.smoke
async def test_one_at_a_time_with_growing_fences(bench: Bench) -> None:
    """The second has the permit when the first has given it back, under a higher fence."""
    first, second = await bench.actor(), await bench.actor()
    permit: Permit = await bench.do(first, Actor.acquire, Asking())
    waiting = asyncio.create_task(bench.do(second, Actor.acquire, Asking()))
    await bench.until_waiting(first, 1)
    assert await bench.do(first, Actor.check, permit)
    assert await bench.do(first, Actor.release, permit)
    other: Permit = await waiting
    assert other.fence > permit.fence
    assert not await bench.do(first, Actor.check, permit)
    assert await bench.do(second, Actor.release, other)


async def test_what_a_prefix_separates(bench: Bench, place: Place, temporal_server: TemporalServer) -> None:
    """Two prefixes are two resources on Redis; what keeps one without Redis has the resource's name alone."""
    beside = Place(temporal_server, f"{place.task_queue}-beside", place.redis_url, f"{place.prefix}-beside")
    async with beside.serving(WORKFLOWS, [guarded]) as client:
        other = Bench(client, beside.task_queue, bench.on.backend)
        other.on = bench.on
        first, second = await bench.actor(), await other.actor()
        permit: Permit = await bench.do(first, Actor.acquire, Asking())
        found = await other.do(second, Actor.try_acquire, Asking())
        assert (found is not None) == (bench.on.backend == "redis")
        await bench.do(first, Actor.release, permit)


@pytest.mark.smoke
async def test_the_capacity_is_how_many_hold(bench: Bench) -> None:
    """Two of three have a permit of a capacity of two, and the third has none without waiting."""
    actor = await bench.actor()
    permits = [await bench.do(actor, Actor.try_acquire, Asking(), capacity=2) for _ in range(3)]
    assert [permit is not None for permit in permits] == [True, True, False]
    assert len({permit.ticket for permit in permits if permit}) == 2
    snapshot = await bench.seen(actor, capacity=2)
    assert {permit.ticket for permit in snapshot.holders} == {permit.ticket for permit in permits if permit}


async def test_totals_count_what_is_not_listed(bench: Bench) -> None:
    """A snapshot of one holder and one waiter says how many there are in all."""
    actor = await bench.actor()
    permits = [await bench.do(actor, Actor.acquire, Asking(), capacity=2, lease=60.0) for _ in range(2)]
    waiting = [asyncio.create_task(bench.do(actor, Actor.acquire, Asking(), capacity=2)) for _ in range(2)]
    await bench.until_waiting(actor, 2, capacity=2)
    snapshot: Snapshot = await bench.do(actor, Actor.inspect_first, 1, capacity=2)
    assert (len(snapshot.holders), len(snapshot.waiters)) == (1, 1)
    assert (snapshot.in_use, snapshot.waiting) == (2, 2)
    for permit in permits:
        assert await bench.do(actor, Actor.release, permit, capacity=2)
    await asyncio.gather(*waiting)


async def test_where_a_request_stands(bench: Bench) -> None:
    """By its ticket: 0 with a permit, 1 as the first of the queue; slots, which have several queues, refuse."""
    actor = await bench.actor()
    if bench.on.backend == "slots":
        assert await bench.failing(actor, Actor.position, "a") == "ValueError"
        return
    assert await bench.do(actor, Actor.position, "a") is None
    held: Permit = await bench.do(actor, Actor.acquire, Asking(ticket="a"), lease=60.0)
    waiting = []
    for count, ticket in enumerate("bc", 1):
        waiting.append(asyncio.create_task(bench.do(actor, Actor.acquire, Asking(ticket=ticket))))
        await bench.until_waiting(actor, count)
    assert [await bench.do(actor, Actor.position, ticket) for ticket in "abc"] == [
        Position(0, 0.0),
        Position(1, None),
        Position(2, None),
    ]
    assert await bench.do(actor, Actor.release, held)
    next_one: Permit = await waiting[0]
    position: Position = await bench.do(actor, Actor.position, "c")
    assert position.rank == 1
    assert position.estimated_wait == pytest.approx((next_one.granted_at_ms - held.granted_at_ms) / 1000, abs=0.5)
    assert await bench.do(actor, Actor.release, next_one)
    await waiting[1]


@pytest.mark.smoke
async def test_a_permit_says_what_was_asked_for(bench: Bench) -> None:
    """The permit carries the resource, the ticket, the owner, the metadata and the lease."""
    actor = await bench.actor()
    asking = Asking(ticket="order-42", owner="svc-a", metadata={"why": "tested"})
    permit: Permit = await bench.do(actor, Actor.acquire, asking)
    assert (permit.resource, permit.ticket, permit.owner) == (bench.on.resource, "order-42", "svc-a")
    assert permit.metadata.items() >= {"why": "tested"}.items()
    assert (permit.weight, permit.capacity, permit.lease_ms) == (1, 1, 5000)
    assert permit.expires_at_ms - permit.granted_at_ms == 5000


@pytest.mark.smoke
async def test_a_release_may_be_repeated(bench: Bench) -> None:
    """The first says that it was held, the second that it was not, and neither touches the next holder."""
    first, second = await bench.actor(), await bench.actor()
    permit = await bench.do(first, Actor.acquire, Asking())
    assert await bench.do(first, Actor.release, permit)
    other = await bench.do(second, Actor.acquire, Asking())
    assert not await bench.do(first, Actor.release, permit)
    assert await bench.do(second, Actor.check, other)


async def test_a_release_by_ticket(bench: Bench) -> None:
    """Whoever has the ticket's name may give it back."""
    first, second = await bench.actor(), await bench.actor()
    permit = await bench.do(first, Actor.acquire, Asking(ticket="mine"))
    assert await bench.do(second, Actor.release_ticket, "mine")
    assert not await bench.do(first, Actor.check, permit)
    assert not await bench.do(second, Actor.release_ticket, "mine")


@pytest.mark.smoke
async def test_a_timeout_leaves_nothing(bench: Bench) -> None:
    """Who gave up is out of the queue, and the permit goes to who comes later."""
    first, second = await bench.actor(), await bench.actor()
    permit = await bench.do(first, Actor.acquire, Asking())
    assert await bench.failing(second, Actor.acquire, Asking(timeout=0.3)) == "AcquireTimeout"
    assert await bench.failing(second, Actor.acquire, Asking(timeout=0)) == "AcquireTimeout"
    await bench.do(first, Actor.release, permit)
    again = await bench.do(second, Actor.acquire, Asking(timeout=5))
    assert [each.ticket for each in (await bench.seen(first)).holders] == [again.ticket]


@pytest.mark.smoke
async def test_a_wait_that_is_cancelled_leaves_nothing(bench: Bench) -> None:
    """A run cancelled while it waits is granted nothing later."""
    first, third = await bench.actor(), await bench.actor()
    permit = await bench.do(first, Actor.acquire, Asking())
    waiting = await bench.holder()
    await bench.until_waiting(first, 1)
    await waiting.cancel()
    with pytest.raises(WorkflowFailureError):
        await waiting.result()
    await bench.until_waiting(first, 0)
    await bench.do(first, Actor.release, permit)
    assert await bench.do(third, Actor.try_acquire, Asking())


async def test_a_permit_that_nobody_keeps_lapses(bench: Bench) -> None:
    """What `acquire` returned is gone when its lease has run out."""
    first, second = await bench.actor(), await bench.actor()
    permit = await bench.do(first, Actor.acquire, Asking(), lease=0.5)
    other = await bench.do(second, Actor.acquire, Asking(timeout=10))
    assert other.fence > permit.fence
    assert not await bench.do(first, Actor.check, permit)
    assert not await bench.do(first, Actor.release, permit)


async def test_a_renewal(bench: Bench) -> None:
    """A renewed permit outlives its first lease, and one that is gone cannot be renewed."""
    first, second = await bench.actor(), await bench.actor()
    permit = await bench.do(first, Actor.acquire, Asking(), lease=SHORT_S)
    renewed: Permit = await bench.do(first, Actor.renew, permit, 30.0)
    assert (renewed.fence, renewed.lease_ms) == (permit.fence, 30_000)
    assert renewed.expires_at_ms > permit.expires_at_ms
    assert await bench.failing(second, Actor.acquire, Asking(timeout=SHORT_S + 2)) == "AcquireTimeout"
    assert await bench.do(first, Actor.check, renewed)
    await bench.do(first, Actor.release, renewed)
    assert await bench.failing(first, Actor.renew, renewed, None) == "LeaseLost"


async def test_a_hold_outlives_its_lease(bench: Bench) -> None:
    """What a hold holds is kept while its run is open."""
    holder, actor = await bench.holder(lease=SHORT_S), await bench.actor()
    fence = await holder.execute_update(Holder.until_held)
    assert await bench.failing(actor, Actor.acquire, Asking(timeout=SHORT_S + 2)) == "AcquireTimeout"
    await holder.signal(Holder.proceed)
    assert await holder.result() == f"held {fence}"
    assert await bench.do(actor, Actor.acquire, Asking(timeout=3))


@pytest.mark.smoke
@pytest.mark.parametrize("how", ["complete", "fail", "cancel"])
async def test_a_hold_is_released_at_the_end_of_its_run(bench: Bench, how: str) -> None:
    """However the body ends, the permit is free when the run is over."""
    holder, actor = await bench.holder(how), await bench.actor()
    await holder.execute_update(Holder.until_held)
    await (holder.cancel() if how == "cancel" else holder.signal(Holder.proceed))
    if how == "complete":
        await holder.result()
    else:
        with pytest.raises(WorkflowFailureError):
            await holder.result()
    assert await bench.do(actor, Actor.acquire, Asking(timeout=3))


async def test_a_terminated_run_holds_for_a_lease_at_most(bench: Bench) -> None:
    """No code of a terminated run gives its permit back; it passes on by itself."""
    holder, actor = await bench.holder(lease=2.0), await bench.actor()
    fence = await holder.execute_update(Holder.until_held)
    await holder.terminate()
    other = await bench.do(actor, Actor.acquire, Asking(timeout=6))
    assert other.fence > fence


async def test_a_permit_goes_from_run_to_run(bench: Bench) -> None:
    """What is detached before continue-as-new is adopted by the next run, with its fence, and kept."""
    holder, actor = await bench.holder("hand on", lease=SHORT_S), await bench.actor()
    fence = await holder.execute_update(Holder.until_held)
    await holder.signal(Holder.proceed)
    latest = bench.client.get_workflow_handle(holder.id)

    async def adopted() -> bool:
        return bool(await latest.query(Holder.fence) == fence and (await latest.describe()).run_id != holder.run_id)

    await eventually(adopted, 2 * SHORT_S)
    assert await bench.failing(actor, Actor.acquire, Asking(timeout=SHORT_S + 2)) == "AcquireTimeout"
    await latest.signal(Holder.proceed)
    assert await latest.result() == f"adopted {fence}"
    assert await bench.do(actor, Actor.acquire, Asking(timeout=3))


async def test_an_adopted_permit_outlasts_the_run_that_acquired_it(bench: Bench) -> None:
    """The run that had it before closes, and whoever adopted it holds on."""
    first, second = await bench.actor(), await bench.actor()
    permit: Permit = await bench.do(first, Actor.acquire, Asking())
    adopted: Permit = await bench.do(second, Actor.adopt, permit)
    await first.signal(Actor.over)
    await first.result()
    await asyncio.sleep(2)  # the backend learns of its end
    assert await bench.do(second, Actor.check, adopted)


@pytest.mark.smoke
async def test_a_permit_of_another_is_adopted_with_a_new_fence(bench: Bench) -> None:
    """Who had it before is refused from then on, and so is who adopts the old permit after that."""
    first, second, third = [await bench.actor() for _ in range(3)]
    permit = await bench.do(first, Actor.acquire, Asking())
    adopted: Permit = await bench.do(second, Actor.adopt, permit)
    assert adopted.fence > permit.fence
    assert not await bench.do(first, Actor.check, permit)
    assert not await bench.do(first, Actor.release, permit)
    assert await bench.failing(third, Actor.adopt, permit) == "LeaseLost"
    assert await bench.do(second, Actor.check, adopted)


@pytest.mark.smoke
async def test_a_lost_permit_ends_the_body(bench: Bench) -> None:
    """A hold that somebody released by its ticket ends with LeaseLost."""
    holder, actor = await bench.holder(), await bench.actor()
    await holder.execute_update(Holder.until_held)
    (permit,) = (await bench.seen(actor)).holders
    assert await bench.do(actor, Actor.release_ticket, permit.ticket)
    assert await holder.result() == "lost"


async def test_nobody_is_granted_what_its_waiter_gave_up(bench: Bench) -> None:
    """A waiter whose run timed out and ended keeps nothing: it is granted to the next at once, not for ever to it."""
    first, second = await bench.actor(), await bench.actor()
    permit = await bench.do(first, Actor.acquire, Asking())
    gave_up = await bench.holder(timeout=0.3)
    assert await gave_up.result() == "timed out"
    await bench.do(first, Actor.release, permit)
    assert await bench.do(second, Actor.acquire, Asking(timeout=3))


async def test_no_activity_begins_under_a_permit_that_is_gone(bench: Bench) -> None:
    """A body that heeds no loss begins an activity, which does not run, and it ends with LeaseLost."""
    actor, holder = await bench.actor(), await bench.holder("guarded", lease=0.7)
    await holder.execute_update(Holder.until_held)
    await asyncio.sleep(1.0)  # past the lease that the holder knows of
    (permit,) = (await bench.seen(actor)).holders
    Inside.most = 0
    await bench.do(actor, Actor.release_ticket, permit.ticket)
    await holder.signal(Holder.proceed)
    assert await holder.result() == "lost"
    assert Inside.most == 0


@pytest.mark.parametrize("how", ["hold", "adopt"])
async def test_max_hold_ends_the_keeping(bench: Bench, how: str) -> None:
    """A body that hangs loses its permit a lease after `max_hold`, be it one that it adopted."""
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking()) if how == "adopt" else None
    holder = await bench.holder(permit=permit, max_hold=0.5, lease=1.0)
    fence = await holder.execute_update(Holder.until_held)
    assert (await bench.do(actor, Actor.acquire, Asking(timeout=8))).fence > fence
    assert await holder.result() == "lost"


async def test_a_reset_run_keeps_its_permit(bench: Bench) -> None:
    """A run that is reset to a moment when it held goes on holding, past its lease."""
    holder, actor = await bench.holder(lease=SHORT_S), await bench.actor()
    fence = await holder.execute_update(Holder.until_held)
    again = await reset(bench.client, holder, -1)
    assert await bench.failing(actor, Actor.acquire, Asking(timeout=SHORT_S + 2)) == "AcquireTimeout"
    await again.signal(Holder.proceed)
    assert await again.result() == f"held {fence}"


@pytest.mark.parametrize("when", ["while it holds", "after it held"])
async def test_a_run_that_is_reset_to_its_start_asks_anew(bench: Bench, when: str) -> None:
    """Whether it held or had released when it was reset, it comes to hold again."""
    holder, actor = await bench.holder(), await bench.actor()
    await holder.execute_update(Holder.until_held)
    if when == "after it held":
        await holder.signal(Holder.proceed)
        await holder.result()
    again = await reset(bench.client, holder, 0)
    if when == "while it holds":
        await again.execute_update(Holder.until_held)
        assert len((await bench.seen(actor)).holders) == 1
        await again.signal(Holder.proceed)
    assert (await again.result()).startswith("held")
    assert await bench.do(actor, Actor.acquire, Asking(timeout=6))
