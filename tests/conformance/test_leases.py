"""Leases: what lapses when, who finds out, and what keeps a permit (P4, P7, P8)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from redlease import LeaseLost

from helpers import eventually, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Hold, Redlease, Semaphore

    from conftest import MakeClient


async def test_a_permit_that_nobody_renews_lapses(client: Redlease) -> None:
    """What acquire returned is not renewed, and its unit is free again when the lease ends."""
    lock = client.lock("r", lease=0.3)
    first = await lock.acquire()
    second = await asyncio.wait_for(lock.acquire(), 5)
    assert second.granted_at_ms >= first.expires_at_ms
    assert second.fence > first.fence
    assert not await lock.release(first)
    assert await lock.is_held(second)


async def test_a_lapsed_permit_passes_on_at_its_deadline(client: Redlease) -> None:
    """The next waiter has it soon after the lease ended, within one beat, with nobody to release it."""
    lock = client.lock("r", lease=0.8, waiter_lease=3)
    first = await lock.acquire()
    tasks = [asyncio.create_task(lock.acquire()) for _ in range(3)]
    second = await tasks[0]
    assert 0 <= second.granted_at_ms - first.expires_at_ms < 1000
    third = await tasks[1]
    assert 0 <= third.granted_at_ms - second.expires_at_ms < 1000
    await lock.release(third)
    await lock.release(await tasks[2])


async def test_what_has_lapsed_is_lost_though_nobody_took_it(client: Redlease) -> None:
    """Past its deadline a permit can be neither renewed, nor released, nor adopted, nor checked (P8)."""
    lock = client.lock("r", lease=0.1)
    permit = await lock.acquire()
    await eventually(lambda: _is_free(lock))
    with pytest.raises(LeaseLost, match="r") as caught:
        await lock.renew(permit)
    assert (caught.value.resource, caught.value.ticket) == ("r", permit.ticket)
    with pytest.raises(LeaseLost):
        await lock.adopt(permit)
    assert not await lock.is_held(permit)
    assert not await lock.release(permit)
    assert (await lock.inspect()).holders == ()


async def _is_free(lock: Semaphore) -> bool:
    return not await lock.locked()


async def test_renew_fills_the_lease(client: Redlease) -> None:
    """A renewed permit has a later deadline, of another length if one is given, and the same fence."""
    lock = client.lock("r", lease=1)
    permit = await lock.acquire()
    longer = await lock.renew(permit, lease=10)
    assert longer.expires_at_ms - permit.expires_at_ms >= 9000
    assert (longer.fence, longer.ticket, longer.lease_ms) == (permit.fence, permit.ticket, 10_000)
    again = await lock.renew(longer)
    assert again.expires_at_ms >= longer.expires_at_ms
    shorter = await lock.renew(again, lease=timedelta(seconds=0.3))
    assert shorter.expires_at_ms < again.expires_at_ms
    await eventually(lambda: _is_free(lock))
    with pytest.raises(LeaseLost):
        await lock.renew(shorter)


async def test_a_hold_is_renewed(client: Redlease) -> None:
    """A hold lasts for several leases, and its own knowledge of its deadline goes on with it."""
    lock = client.lock("r", lease=0.8)
    async with lock.hold() as hold:
        first = hold.permit
        await eventually(lambda: hold.permit.expires_at_ms > first.expires_at_ms + 1600)
        assert hold.fence == first.fence
        assert 0 < hold.remaining() <= 0.8
        hold.check()
        assert await lock.is_held(hold.permit)
        assert await lock.try_acquire() is None
    assert await lock.try_acquire() is not None


async def test_a_hold_after_a_wait_has_a_full_lease(make_client: MakeClient, engine: str) -> None:
    """A grant out of the queue starts with what is left of the place, and is renewed to the full lease."""
    client = await make_client(waiter_lease=0.4)
    lock = client.lock("r", lease=5)
    permit = await lock.acquire()
    waiting = asyncio.create_task(_hold(lock))
    await until_waiting(lock, 1)
    await lock.release(permit)
    hold = await waiting
    await eventually(lambda: hold.remaining() > 4, 2)
    assert await hold.release()


async def _hold(lock: Semaphore) -> Hold:
    return await lock.hold()


async def test_an_acquire_after_a_wait_has_a_full_lease(make_client: MakeClient, engine: str) -> None:
    """An acquire that had to wait returns a permit whose lease is full, though nobody renews it."""
    client = await make_client(waiter_lease=0.4)
    lock = client.lock("r", lease=5)
    permit = await lock.acquire()
    tasks = await queue_up(lock, 1)
    await lock.release(permit)
    later = await tasks[0]
    now_ms = (await lock.inspect()).server_time_ms
    assert later.expires_at_ms - now_ms > 4000
    (held,) = (await lock.inspect()).holders
    assert held.expires_at_ms == later.expires_at_ms


@pytest.mark.parametrize("how", ["hold", "adopt"])
@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_max_hold_ends_renewal(client: Redlease, how: str) -> None:
    """A body that runs longer than max_hold loses its permit when the lease has run out, and not before."""
    lock = client.lock("r", lease=0.6)
    loop = asyncio.get_running_loop()
    entered = lock.hold(max_hold=1.2) if how == "hold" else await lock.adopt(await lock.acquire(), max_hold=1.2)
    with pytest.raises(LeaseLost):
        async with entered as hold:
            began = loop.time()
            await asyncio.sleep(30)
    assert loop.time() - began >= 1.2
    assert hold.lost
    assert await asyncio.wait_for(lock.acquire(), 5)


@pytest.mark.of_tasks("blocks the event loop of the test, which is not that of a blocking client")
async def test_a_stalled_event_loop_is_noticed(client: Redlease) -> None:
    """When a body blocks the loop past its lease, the first turn of the loop after that cancels it (P7)."""
    lock = client.lock("r", lease=0.3)
    turns = 0
    with pytest.raises(LeaseLost):
        async with lock.hold() as hold:
            await asyncio.sleep(0)
            time.sleep(0.5)
            while True:
                await asyncio.sleep(0)
                turns += 1
                assert turns < 10
    assert hold.lost
    assert not await hold.release()


@pytest.mark.of_tasks("blocks the event loop of the test, which is not that of a blocking client")
async def test_check_tells_before_the_loop_has_turned(client: Redlease) -> None:
    """After a stall check() and remaining() tell of the loss at once, without awaiting (P7)."""
    lock = client.lock("r", lease=0.3)
    with pytest.raises(LeaseLost, match="no longer held"):
        async with lock.hold() as hold:
            time.sleep(0.5)
            assert hold.remaining() == 0
            hold.check()
    assert hold.lost


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_body_that_ignores_check_is_cancelled(client: Redlease) -> None:
    """A body that swallows the error of check() does not go on past its next await."""
    lock = client.lock("r", lease=0.3)
    with pytest.raises(LeaseLost):
        async with lock.hold() as hold:
            time.sleep(0.5)
            with contextlib.suppress(LeaseLost):
                hold.check()
            await asyncio.sleep(1)
            pytest.fail("the body went on without its permit")


async def test_a_stall_shorter_than_the_lease_costs_nothing(client: Redlease) -> None:
    """A loop that stands still for part of a lease keeps its permits."""
    lock = client.lock("r", lease=1.5)
    async with lock.hold() as hold:
        for _ in range(3):
            time.sleep(0.5)
            await eventually(lambda: hold.remaining() > 1.1)
        hold.check()
        assert await lock.is_held(hold.permit)


@pytest.mark.of_tasks("blocks the event loop of the test, which is not that of a blocking client")
async def test_a_lost_permit_is_never_retaken(client: Redlease) -> None:
    """After a loss the library does not take the permit again behind the holder's back (P8)."""
    lock = client.lock("r", lease=0.3)
    hold = await lock.hold()
    time.sleep(0.5)
    await eventually(lambda: hold.lost)
    assert (await lock.inspect()).holders == ()
    assert await lock.try_acquire() is not None


@pytest.mark.slow
async def test_many_holds_are_renewed_together(client: Redlease) -> None:
    """A hundred holds of one client outlive their leases."""
    pools = [client.semaphore(f"r{number}", capacity=25, lease=6) for number in range(4)]
    holds = await asyncio.gather(*(pool.hold() for pool in pools for _ in range(25)))
    first = max(hold.permit.expires_at_ms for hold in holds)
    await eventually(lambda: all(hold.permit.expires_at_ms > first + 6000 for hold in holds), 40)
    assert not any(hold.lost for hold in holds)
    assert all(await asyncio.gather(*(hold.release() for hold in holds)))


async def test_the_keys_of_an_idle_resource_go(make_client: MakeClient, engine: str, raw: redis.asyncio.Redis) -> None:
    """An idle resource leaves no key behind once idle_ttl has passed, and fences go on from time alone."""
    client = await make_client(idle_ttl=0.2)
    lock = client.lock("brief", lease=0.2, waiter_lease=0.2)
    permit = await lock.acquire()
    tasks = await queue_up(lock, 1)
    await lock.release(permit)
    last = await tasks[0]
    await lock.release(last)

    async def gone() -> bool:
        return not [key async for key in raw.scan_iter(match="*{brief}*") if client._prefix in key]

    await eventually(gone)
    assert (await lock.acquire()).fence > last.fence
