"""Operations and permits: repeated requests, renewing, giving back and taking over (P5)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from redlease import LeaseLost, Withdrawn

from helpers import cancel, eventually, left_over, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease, Semaphore

    from conftest import MakeClient


async def test_a_repeated_ticket_has_the_same_permit(client: Redlease, make_client: MakeClient) -> None:
    """Acquiring again with a ticket that holds gives the same permit and fence, its lease full again, in any client."""
    lock, elsewhere = client.lock("r", lease=5), (await make_client()).lock("r", lease=5)
    first = await lock.acquire(ticket="t")
    await asyncio.sleep(0.02)
    again = await lock.acquire(ticket="t")
    tried = await elsewhere.try_acquire(ticket="t")
    assert tried is not None
    for copy in (again, tried):
        assert (copy.fence, copy.granted_at_ms) == (first.fence, first.granted_at_ms)
        assert copy.expires_at_ms > first.expires_at_ms
    assert len((await lock.inspect()).holders) == 1
    assert await lock.release(first)
    assert not await elsewhere.release(tried)


async def test_a_repeated_ticket_has_the_same_place(make_client: MakeClient, engine: str) -> None:
    """Asking again elsewhere with a ticket that waits takes over its place: nobody behind it gets ahead."""
    locks = [(await make_client()).lock("r") for _ in range(3)]
    permit = await locks[0].acquire()
    first = await queue_up(locks[0], 1, ticket="t")
    second = await queue_up(locks[1], 1)
    repeated = asyncio.create_task(locks[2].acquire(ticket="t"))
    assert len(await until_waiting(locks[0], 2)) == 2
    await eventually(lambda: locks[2]._session.pending and next(iter(locks[2]._session.pending.values())).sequence)
    await cancel(*first)
    assert await until_waiting(locks[0], 2) == ["t", (await locks[0].inspect()).waiters[1].ticket]
    await locks[0].release(permit)
    third = await repeated
    assert third.ticket == "t"
    assert not second[0].done()
    await locks[2].release(third)
    await second[0]


async def test_one_ticket_twice_at_once_is_refused(client: Redlease) -> None:
    """In one client a ticket in use is refused, while waiting and while held, and may be used again after that."""
    lock = client.lock("r")
    hold = await lock.hold(ticket="t")
    with pytest.raises(ValueError, match="'t'"):
        await lock.acquire(ticket="t")
    with pytest.raises(ValueError, match="'t'"):
        await lock.adopt(hold.permit)
    waiting = await queue_up(lock, 1, ticket="u")
    with pytest.raises(ValueError, match="'u'"):
        await lock.acquire(ticket="u")
    assert await hold.release()
    assert await lock.release(await waiting[0])
    assert await lock.release(await lock.acquire(ticket="t"))


async def test_one_ticket_may_be_used_on_two_resources(client: Redlease) -> None:
    """Operations belong to their resource."""
    one, two = client.lock("one"), client.lock("two")
    async with one.hold(ticket="t"), two.hold(ticket="t"):
        assert await one.locked()
        assert await two.locked()


async def test_a_known_ticket_keeps_its_weight(client: Redlease, make_client: MakeClient) -> None:
    """A ticket that holds or waits with one weight is refused with another, and nothing changes."""
    pool = client.semaphore("r", capacity=4)
    elsewhere = (await make_client()).semaphore("r", capacity=4)
    permit = await pool.acquire(ticket="t", weight=2)
    waiting = await queue_up(pool, 1, ticket="w", weight=3)
    before = await pool.inspect()
    with pytest.raises(ValueError, match="weight 2"):
        await elsewhere.acquire(ticket="t", weight=1)
    with pytest.raises(ValueError, match="weight 3"):
        await elsewhere.acquire(ticket="w", weight=1)
    after = await pool.inspect()
    assert (after.waiters, [held.fence for held in after.holders]) == (before.waiters, [permit.fence])
    assert await pool.release(permit)
    assert (await waiting[0]).weight == 3


async def test_a_released_ticket_may_be_used_anew(client: Redlease) -> None:
    """A ticket that was released is a new request: at the tail, with a new fence, of any weight."""
    lock = client.lock("r")
    first = await lock.acquire(ticket="t")
    assert await lock.release(first)
    other = await lock.acquire()
    waiting = await queue_up(lock, 1)
    again = await queue_up(lock, 1, ticket="t")
    assert await lock.release(other)
    between = await waiting[0]
    assert not again[0].done()
    assert await lock.release(between)
    last = await again[0]
    assert last.fence > between.fence > first.fence
    assert not await lock.release(first)
    assert await lock.is_held(last)


async def test_a_lapsed_ticket_may_be_used_anew(client: Redlease) -> None:
    """A ticket whose lease has ended is a new request with a new fence, and the old permit stays lost."""
    lock = client.lock("r", lease=0.1)
    first = await lock.acquire(ticket="t")
    await eventually(lambda: _lapsed(lock, first.expires_at_ms))
    again = await lock.acquire(ticket="t")
    assert again.fence > first.fence
    assert not await lock.is_held(first)
    with pytest.raises(LeaseLost):
        await lock.renew(first)


async def _lapsed(lock: Semaphore, deadline_ms: int) -> bool:
    return (await lock.inspect()).server_time_ms > deadline_ms


async def test_release_may_be_repeated(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """The first release says that the permit was held, every further one that it was not."""
    lock = client.lock("r")
    permit = await lock.acquire()
    assert await asyncio.gather(*(lock.release(permit) for _ in range(5))) == [True, False, False, False, False]
    assert await left_over(raw, prefix) == []


async def test_a_stale_permit_releases_nothing(client: Redlease) -> None:
    """A permit with an old fence neither releases nor renews what its ticket holds now."""
    lock = client.lock("r")
    first = await lock.acquire(ticket="t")
    await lock.release(first)
    second = await lock.acquire(ticket="t")
    assert not await lock.release(first)
    with pytest.raises(LeaseLost):
        await lock.renew(first)
    assert await lock.is_held(second)


async def test_release_by_ticket_frees_a_holder(client: Redlease, make_client: MakeClient) -> None:
    """Anybody may free a ticket without knowing its fence; its hold is told at once, and the next one is granted."""
    lock, admin = client.lock("r"), (await make_client()).lock("r")
    hold = await lock.hold(ticket="t")
    waiting = await queue_up(lock, 1)
    assert await admin.release("t")
    assert await asyncio.wait_for(hold.wait_lost(), 5)
    assert (await waiting[0]).fence > hold.fence
    assert not await admin.release("t")
    assert not await admin.release("never heard of")


async def test_release_by_ticket_takes_a_waiter_out(client: Redlease, make_client: MakeClient) -> None:
    """A waiter that somebody takes out of the queue gets an error at once, and those behind it move up."""
    lock, admin = client.lock("r"), (await make_client()).lock("r")
    permit = await lock.acquire()
    tasks = [*await queue_up(lock, 1, ticket="t"), *await queue_up(lock, 1)]
    assert await admin.release("t")
    with pytest.raises(Withdrawn, match="'t'") as caught:
        await tasks[0]
    assert (caught.value.resource, caught.value.ticket) == ("r", "t")
    assert len(await until_waiting(lock, 1)) == 1
    await lock.release(permit)
    await tasks[1]


async def test_a_permit_of_another_resource_is_refused(client: Redlease) -> None:
    """What is no permit of this resource is a mistake of the caller."""
    lock, other = client.lock("r"), client.lock("other")
    permit = await other.acquire()
    for call in (lock.release, lock.renew, lock.is_held, lock.adopt):
        with pytest.raises(ValueError, match="'r'"):
            await call(permit)
        with pytest.raises(ValueError, match="no permit"):
            await call(42)  # type: ignore[arg-type]
    assert await other.release(permit)


async def test_check_asks_for_ticket_and_fence(client: Redlease) -> None:
    """A permit is held only under its own fence, side by side with others."""
    pool = client.semaphore("r", capacity=2)
    one, two = await pool.acquire(), await pool.acquire()
    assert await pool.is_held(one)
    assert await pool.is_held(two)
    assert not await pool.is_held(replace(one, fence=two.fence))
    assert not await pool.is_held(replace(one, ticket="nobody"))
    await pool.release(one)
    assert not await pool.is_held(one)
    assert await pool.is_held(two)


async def test_adopt_takes_a_permit_over(client: Redlease, make_client: MakeClient) -> None:
    """The adopter has a new fence and renews from then on; whoever had the permit before is refused."""
    lock, elsewhere = client.lock("r", lease=0.8), (await make_client()).lock("r", lease=0.8)
    old = await lock.acquire(ticket="t", metadata={"k": "v"})
    hold = await elsewhere.adopt(old)
    assert hold.fence > old.fence
    assert (hold.permit.ticket, hold.permit.metadata) == ("t", {"k": "v"})
    assert not await lock.is_held(old)
    assert not await lock.release(old)
    with pytest.raises(LeaseLost):
        await lock.renew(old)
    first = hold.permit.expires_at_ms
    await eventually(lambda: hold.permit.expires_at_ms > first + 1000)
    (held,) = (await lock.inspect()).holders
    assert (held.fence, held.metadata) == (hold.fence, {"k": "v"})
    assert await hold.release()


async def test_of_two_adopters_one_wins(make_client: MakeClient, engine: str) -> None:
    """Of several that adopt one permit at once one has it, and the others get LeaseLost."""
    locks = [(await make_client()).lock("r") for _ in range(4)]
    permit = await locks[0].acquire()
    outcomes = await asyncio.gather(*(lock.adopt(permit) for lock in locks), return_exceptions=True)
    winners = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert len(winners) == 1
    assert sum(isinstance(outcome, LeaseLost) for outcome in outcomes) == 3
    assert await winners[0].release()


async def test_a_former_hold_finds_out(make_client: MakeClient, engine: str) -> None:
    """A process that still holds what another has adopted loses it by its next renewal, and releases nothing."""
    former = await (await make_client()).lock("r", lease=0.6).hold()
    hold = await (await make_client()).lock("r", lease=0.6).adopt(former.permit)
    assert await asyncio.wait_for(former.wait_lost(), 5)
    assert not await former.release()
    hold.check()
    assert await hold.release()


async def test_adopt_may_keep_the_fence(client: Redlease) -> None:
    """With refence=False the permit keeps its fence, as where no former holder can be left."""
    lock = client.lock("r")
    permit = await lock.acquire()
    async with await lock.adopt(permit, refence=False) as hold:
        assert hold.fence == permit.fence
        assert await lock.is_held(permit)
    assert not await lock.is_held(permit)


async def test_adopted_weights_count_once(client: Redlease) -> None:
    """Adopting changes nothing in what is in use."""
    pool = client.semaphore("r", capacity=3)
    permit = await pool.acquire(weight=2)
    hold = await pool.adopt(permit)
    assert await pool.try_acquire(weight=2) is None
    other = await pool.try_acquire()
    assert other is not None
    assert await hold.release()
    assert await pool.try_acquire(weight=2) is not None


async def test_a_repeated_ticket_outlives_a_shrink(client: Redlease, make_client: MakeClient) -> None:
    """A held ticket that asks again finds its permit though its weight would not fit any more."""
    pool = client.semaphore("r", capacity=4)
    permit = await pool.acquire(ticket="t", weight=3)
    await pool.resize(2)
    again = await (await make_client()).semaphore("r", capacity=4).acquire(ticket="t", weight=3)
    assert again.fence == permit.fence
    assert await pool.release(permit)
