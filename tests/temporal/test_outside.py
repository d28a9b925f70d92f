"""Slots that services hold, which are no workflows."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from backend_bench import Bench, without_redis
from backend_flows import Actor, Asking, Holder
from temporalio.client import Client

from redlease import AcquireTimeout, LeaseLost, Unavailable
from redlease_temporal import outside
from redlease_temporal._backends.slots.activities import SLOTS

from helpers import cancel, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease_temporal.outside import SlotSemaphore

    from temporal.conftest import OwnTemporalServer
    from temporal_server import TemporalServer


@pytest.fixture
async def client(temporal_server: TemporalServer, task_queue: str, prefix: str) -> AsyncIterator[Client]:
    """A client whose plugin has no Redis, beside a worker for all workflows."""
    async with without_redis(temporal_server, task_queue, prefix) as client:
        yield client


@pytest.fixture
def bench(client: Client, task_queue: str) -> Bench:
    """A resource of its own."""
    return Bench(client, task_queue, "slots")


@pytest.fixture
def pool(bench: Bench) -> SlotSemaphore:
    """The resource as a service sees it."""
    return outside.lock(bench.client, bench.on.resource, lease=2.0)


async def test_services_and_workflows_exclude_each_other(bench: Bench, pool: SlotSemaphore) -> None:
    """A workflow waits for a service, and a service for a workflow, each under a higher fence."""
    async with pool.hold(owner="svc-a", metadata={"job": "7"}) as hold:
        holder = await bench.holder()

        async def waits() -> bool:
            return bool((await pool.inspect()).waiters)

        await eventually(waits)
        (held,) = (await pool.inspect()).holders
        assert (held.owner, held.fence, held.metadata["job"]) == ("svc-a", hold.fence, "7")
    fence = await asyncio.wait_for(holder.execute_update(Holder.until_held), 15)
    assert fence > hold.fence
    waiting = asyncio.create_task(pool.acquire())
    await holder.signal(Holder.proceed)
    permit = await asyncio.wait_for(waiting, 15)
    assert permit.fence > fence
    assert await pool.is_held(permit)
    assert await pool.release(permit)
    assert not await pool.release(permit)
    assert not await pool.is_held(permit)


async def test_a_hold_is_renewed(bench: Bench) -> None:
    """It outlives its lease, with the fence that it had."""
    pool = outside.lock(bench.client, bench.on.resource, lease=6.0)  # a busy machine stands still for seconds
    actor = await bench.actor()
    async with pool.hold() as hold:
        fence = hold.fence
        assert await bench.failing(actor, Actor.acquire, Asking(timeout=8)) == "AcquireTimeout"
        hold.check()
        assert (hold.fence, hold.lost) == (fence, False)
        assert 0 < hold.remaining() <= 6.0
    assert await bench.do(actor, Actor.acquire, Asking(timeout=10))


async def test_what_nobody_renews_lapses(pool: SlotSemaphore) -> None:
    """The permit of a service that has died is free when its lease is over, and cannot be renewed after that."""
    permit = await pool.acquire()
    other = await pool.acquire(timeout=6)
    assert other.fence > permit.fence
    with pytest.raises(LeaseLost):
        await pool.renew(permit)
    await pool.release(other)


async def test_a_renewal_by_hand(pool: SlotSemaphore) -> None:
    """It says until when the permit is held from then on."""
    permit = await pool.acquire()
    renewed = await pool.renew(permit, lease=60)
    assert (renewed.fence, renewed.lease_ms) == (permit.fence, 60_000)
    assert renewed.expires_at_ms > permit.expires_at_ms
    await pool.release(renewed)


async def test_a_lost_hold_ends_its_body(bench: Bench, pool: SlotSemaphore) -> None:
    """The task in the block is cancelled, and the block ends with LeaseLost."""
    with pytest.raises(LeaseLost):
        async with pool.hold() as hold:
            await bench.client.get_workflow_handle(f"permit:{pool.name}:0").terminate()
            await asyncio.sleep(10)
    assert hold.lost
    with pytest.raises(LeaseLost):
        hold.check()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_the_error_of_a_body_is_kept(bench: Bench, pool: SlotSemaphore) -> None:
    """What the body raises comes out of the block, and the loss is a note on it."""
    with pytest.raises(ZeroDivisionError) as raised:
        async with pool.hold():
            await bench.client.get_workflow_handle(f"permit:{pool.name}:0").terminate()
            try:
                await asyncio.sleep(10)
            finally:
                raise ZeroDivisionError
    assert any("no longer held" in note for note in raised.value.__notes__)


async def test_a_hold_tells_of_its_loss_by_the_clock(pool: SlotSemaphore) -> None:
    """While the loop stands still a thread is told of the end of the lease, and so is the block when it ends then."""

    def watched(hold: outside.SlotHold) -> None:
        hold.check()
        deadline = time.monotonic() + 20
        while hold.remaining() > 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert hold.lost
        with pytest.raises(LeaseLost):
            hold.check()

    with pytest.raises(LeaseLost), ThreadPoolExecutor(1) as threads:
        async with pool.hold() as hold:
            threads.submit(watched, hold).result()
    assert hold.lost
    async with pool.hold() as hold:
        pass
    assert not hold.lost
    assert hold.remaining() == 0


async def test_a_server_that_is_away_is_no_contention(pool: SlotSemaphore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in vain while no slot can be asked is told that, and not that others hold it."""
    permit = await pool.acquire()

    async def away(*_: object) -> str:
        raise SLOTS.unavailable(pool.name, RuntimeError("nobody is there"))

    async def silent(*_: object) -> str:
        await asyncio.sleep(30)
        return ""

    for taking in (away, silent):
        with monkeypatch.context() as patched, pytest.raises(Unavailable, match="did not answer") as caught:
            patched.setattr(pool, "_take", taking)
            await pool.acquire(timeout=0.3)
        assert not isinstance(caught.value, AcquireTimeout)
    with pytest.raises(AcquireTimeout):
        await pool.acquire(timeout=0.3)
    await pool.release(permit)


async def test_giving_up_leaves_nothing(pool: SlotSemaphore) -> None:
    """Neither a timeout nor a cancellation, wherever it strikes, leaves a slot taken."""
    permit = await pool.acquire()
    with pytest.raises(AcquireTimeout):
        await pool.acquire(timeout=0.3)
    await pool.release(permit)
    for turns in range(0, 60, 6):
        task = asyncio.create_task(pool.acquire(ticket=f"t{turns}"))
        await asyncio.sleep(turns / 2000)
        await cancel(task)
        if not task.cancelled():
            await pool.release(task.result())
        await pool.release(await pool.acquire(timeout=1.5))


async def test_a_wait_of_no_time(pool: SlotSemaphore) -> None:
    """With `timeout=0` a free slot is taken, and where none is free that is said at once."""
    permit = await pool.acquire(timeout=0)
    with pytest.raises(AcquireTimeout):
        await pool.acquire(timeout=0)
    assert await pool.release(permit)


async def test_a_slot_whose_end_nobody_awaits(bench: Bench, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for more slots than can be watched finds the one that has become free."""

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(outside, "end_of", never)
    monkeypatch.setattr(outside, "RETRY_BUSY_S", 0.2)
    many = outside.semaphore(client, bench.on.resource, outside.WATCHED_MAX + 1)
    permits = [await many.acquire() for _ in range(outside.WATCHED_MAX + 1)]
    waiting = asyncio.create_task(many.acquire())
    await many.release(permits[3])
    permits[3] = await asyncio.wait_for(waiting, 15)
    for permit in permits:
        await many.release(permit)


async def test_a_block_left_by_cancellation(pool: SlotSemaphore) -> None:
    """A task that is cancelled anywhere on its way out of the block gives its permit back all the same."""

    async def use(inside: asyncio.Event, go: asyncio.Event) -> None:
        async with pool.hold():
            inside.set()
            await go.wait()

    for turns in range(6):
        inside, go = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(use(inside, go))
        await inside.wait()
        go.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancel(task)
        await pool.release(await pool.acquire(timeout=1))


@pytest.mark.slow
async def test_waiting_while_the_server_is_away(own_temporal_server: OwnTemporalServer, prefix: str) -> None:
    """A request outlasts an outage, as its timeout allows."""
    server = await own_temporal_server(keep=True)
    async with without_redis(server, f"queue-{prefix}", prefix) as client:
        pool = outside.lock(client, f"{prefix}-r")
        before = await pool.acquire()
        await pool.release(before)
        server.kill()
        waiting = asyncio.create_task(pool.acquire(timeout=40))
        await asyncio.wait([waiting], timeout=12)
        assert not waiting.done()
        await server.start()
        assert (await waiting).fence > before.fence


async def test_a_permit_of_another_backend(bench: Bench, pool: SlotSemaphore) -> None:
    """It is refused, by services and in workflows, and the workflow goes on."""
    actor = await bench.actor()
    permit = await bench.do(actor, Actor.acquire, Asking(), backend="coordinator")
    with pytest.raises(ValueError, match="not granted by slots"):
        await pool.release(permit)
    assert await bench.failing(actor, Actor.adopt, permit) == "ValueError"
    assert await bench.failing(actor, Actor.renew, permit, None) == "ValueError"
    assert await bench.do(actor, Actor.release, permit, backend="coordinator")


async def test_what_is_refused(bench: Bench, client: Client) -> None:
    """A coordinator has no holders outside, and a client without the plugin does not know where slots run."""
    with pytest.raises(ValueError, match="coordinator"):
        outside.semaphore(client, "r", 3, backend="coordinator")
    with pytest.raises(ValueError, match="owner"):
        await outside.lock(client, bench.on.resource).acquire(owner="x" * 300)
    with pytest.raises(ValueError, match="capacity"):
        outside.semaphore(client, "r", 1001)
    plain = await Client.connect(client.service_client.config.target_host)
    with pytest.raises(ValueError, match="plugin"):
        outside.lock(plain, bench.on.resource)
