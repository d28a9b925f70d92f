"""One ticket asked with from several processes: what one of them does takes nothing away from the others untold."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, LeaseLost, Permit, QueueFull, Redlease
from redlease._core.hold import lease_of
from redlease._core.protocol import arguments, scripts
from redlease._core.protocol.replies import Status

from helpers import eventually

if TYPE_CHECKING:
    from conftest import MakeClient

SHARERS = 100  # as share.lua has it


async def waits(client: Redlease, ticket: str) -> bool:
    """Whether the ticket stands in the queue."""
    return ticket in [waiter.ticket for waiter in (await client.lock("r").inspect()).waiters]


async def queued(client: Redlease, ticket: str) -> None:
    """Return when it does."""
    await eventually(lambda: waits(client, ticket))


async def is_over(client: Redlease, permit: Permit) -> bool:
    """Whether a permit is no longer held."""
    return not await client.lock("r").is_held(permit)


async def cancelled(task: asyncio.Task[object]) -> None:
    """Cancel the task and see it end."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture
async def others(make_client: MakeClient, engine: str) -> list[Redlease]:
    """Three clients of one server, as three processes have them."""
    return [await make_client() for _ in range(3)]


async def test_giving_up_leaves_the_holder_its_permit(others: list[Redlease]) -> None:
    """B asks with the ticket that A holds and gives up before its answer is read: A holds it, and nobody gets in."""
    a, b, c = others
    async with a.lock("r", lease=20).hold(ticket="T") as hold:
        for _ in range(5):
            asking = asyncio.ensure_future(b.lock("r").acquire(ticket="T"))
            await asyncio.sleep(0)  # it has asked, and has no answer yet
            await cancelled(asking)
            assert await c.lock("r").try_acquire() is None
        assert await a.lock("r").is_held(hold.permit)
        hold.check()
    assert await c.lock("r").try_acquire() is not None


async def test_who_shares_a_permit_is_told_when_it_goes(others: list[Redlease]) -> None:
    """B finds A's permit by its ticket and leaves its block: A's hold knows at once, before it could renew."""
    a, b, c = others
    hold = await a.lock("r", lease=60).hold(ticket="T")
    async with b.lock("r", lease=60).hold(ticket="T") as other:
        assert other.fence == hold.fence
    async with asyncio.timeout(10):  # a third of its lease is 20 s
        assert await hold.wait_lost()
    with pytest.raises(LeaseLost):
        hold.check()
    assert await c.lock("r").try_acquire() is not None


async def test_all_who_share_it_are_told(others: list[Redlease]) -> None:
    """Three hold one permit by its ticket: released by one, or by its ticket alone, the others know at once."""
    holds = [await client.lock("r", lease=60).hold(ticket="T") for client in others]
    assert await holds[1].release()
    async with asyncio.timeout(10):
        assert await holds[0].wait_lost()
        assert await holds[2].wait_lost()
    holds = [await client.lock("r", lease=60).hold(ticket="T") for client in others]
    assert await others[0].lock("r").release("T")
    async with asyncio.timeout(10):
        assert all(await asyncio.gather(*(hold.wait_lost() for hold in holds)))


async def test_giving_up_leaves_the_waiter_its_place(others: list[Redlease]) -> None:
    """A waits first and C second; B asks with A's ticket and gives up: A is served before C."""
    a, b, c = others
    permit = await b.lock("r").acquire(ticket="before")
    first = asyncio.ensure_future(a.lock("r").acquire(ticket="T"))
    await queued(a, "T")
    second = asyncio.ensure_future(c.lock("r").acquire(ticket="U"))
    await queued(a, "U")
    with pytest.raises(AcquireTimeout):
        await b.lock("r").acquire(ticket="T", timeout=0.2)
    asking = asyncio.ensure_future(b.lock("r").acquire(ticket="T"))
    await asyncio.sleep(0.05)
    await cancelled(asking)
    assert [waiter.ticket for waiter in (await a.lock("r").inspect()).waiters] == ["T", "U"]
    await b.lock("r").release(permit)
    granted = await first
    assert not second.done()
    await a.lock("r").release(granted)
    assert (await second).fence > granted.fence


async def test_both_who_wait_with_a_ticket_are_granted(others: list[Redlease]) -> None:
    """A and B wait with one ticket: one grant, which both are told of by a message."""
    a, b, c = others
    permit = await c.lock("r").acquire()
    # A place that outlives the test by far: without the message the grant would be noticed at the next beat only.
    waiting = [asyncio.ensure_future(each.lock("r", waiter_lease=60).hold(ticket="T")) for each in (a, b)]
    await queued(c, "T")
    await eventually(lambda: all(each._session.waiter_leases for each in (a, b)))
    await c.lock("r").release(permit)
    async with asyncio.timeout(10):
        first, second = await asyncio.gather(*waiting)
    assert first.fence == second.fence
    snapshot = await c.lock("r").inspect()
    assert [held.ticket for held in snapshot.holders] == ["T"]
    assert not snapshot.waiters


@pytest.mark.slow
async def test_the_place_lasts_as_long_as_one_of_them_lives(others: list[Redlease]) -> None:
    """B asks with A's ticket and dies without a word: A waits on, is granted, and its lease is its own."""
    a, b, c = others
    permit = await c.lock("r").acquire()
    first = asyncio.ensure_future(a.lock("r", waiter_lease=2).hold(ticket="T"))
    await queued(c, "T")
    second = asyncio.ensure_future(b.lock("r", waiter_lease=0.2).hold(ticket="T"))
    await eventually(lambda: b._session.waiter_leases)
    await b.abandon()  # as when its process dies: nothing is taken back
    await asyncio.sleep(0.5)
    assert await waits(c, "T")
    await c.lock("r").release(permit)
    async with asyncio.timeout(10):
        async with await first as hold:
            hold.check()
    second.cancel()


async def test_no_lease_is_shortened_for_another(others: list[Redlease]) -> None:
    """A holds for long, B asks with its ticket for a short time and renews: A's lease ends when it would have."""
    a, b, _ = others
    first = await a.lock("r", lease=60).hold(ticket="T")
    before = (await a.lock("r").inspect()).holders[0].expires_at_ms
    shorter = await b.lock("r", lease=1).acquire(ticket="T")
    assert shorter.expires_at_ms >= before
    renewed = await b.lock("r").renew(shorter, lease=1)
    assert renewed.expires_at_ms >= before
    assert await a.lock("r").is_held(first.permit)


async def test_a_first_renewal_shortens_no_other_lease(others: list[Redlease]) -> None:
    """Both wait with one ticket, B for a shorter lease than what is left of the place: A's lease is not cut."""
    a, b, c = others
    permit = await c.lock("r").acquire()
    first = asyncio.ensure_future(a.lock("r", lease=60, waiter_lease=30).hold(ticket="T"))
    await queued(c, "T")
    second = asyncio.ensure_future(b.lock("r", lease=1, waiter_lease=30).hold(ticket="T"))
    await eventually(lambda: b._session.waiter_leases)
    await c.lock("r").release(permit)
    first_hold, second_hold = await asyncio.gather(first, second)
    await eventually(lambda: second_hold.permit.expires_at_ms != second_hold.permit.granted_at_ms)
    renewed = await b.lock("r").renew(second_hold.permit, lease=1)
    assert renewed.expires_at_ms - renewed.granted_at_ms > 10_000
    assert await a.lock("r").is_held(first_hold.permit)


@pytest.mark.slow
async def test_who_comes_after_a_dead_process_has_the_ticket_alone(others: list[Redlease]) -> None:
    """A restarted process asks with the ticket of its former life, and gives up: nothing of it stays in the queue."""
    a, b, c = others
    permit = await c.lock("r").acquire()
    first = asyncio.ensure_future(a.lock("r", waiter_lease=0.3).acquire(ticket="T"))
    await queued(c, "T")
    await a.abandon()
    again = asyncio.ensure_future(b.lock("r", waiter_lease=10).acquire(ticket="T"))
    await eventually(lambda: b._session.waiter_leases)
    await asyncio.sleep(0.5)  # the place of the former life is over
    await cancelled(again)
    await eventually(lambda: c.lock("r").inspect())
    assert not await waits(c, "T")
    await c.lock("r").release(permit)
    assert await c.lock("r").try_acquire() is not None
    first.cancel()


async def test_retries_of_one_push_no_other_out(others: list[Redlease]) -> None:
    """B asks again and again with the ticket that A holds, and A, B and C hold: all are told when the permit goes."""
    a, b, c = others
    first = await b.lock("r", lease=60).acquire(ticket="T")
    holds = [await client.lock("r", lease=60).hold(ticket="T") for client in (a, c)]
    for _ in range(2 * SHARERS):
        assert (await b.lock("r", lease=60).acquire(ticket="T")).fence == first.fence
    for _ in range(SHARERS):
        asking = asyncio.ensure_future(b.lock("r", lease=60).acquire(ticket="T"))
        await asyncio.sleep(0)
        await cancelled(asking)
    assert await a.lock("r").is_held(first)
    assert await b.lock("r").release(first)
    async with asyncio.timeout(10):
        assert all([await hold.wait_lost() for hold in holds])


async def test_who_finds_no_room_in_a_record_has_lost_the_permit(make_client: MakeClient, client: Redlease) -> None:
    """More processes than a record can tell of hold with one ticket: some have lost it at once, the others are told."""
    first = await client.lock("r", lease=60).hold(ticket="T")
    many = [await make_client() for _ in range(SHARERS + 3)]
    holds = [await each.lock("r", lease=60).hold(ticket="T") for each in many]
    await eventually(lambda: sum(hold.lost for hold in holds) >= 3)
    assert not first.lost
    assert not holds[-1].lost
    assert sum(hold.lost for hold in holds) < 6
    assert await holds[-1].release()
    async with asyncio.timeout(10):
        assert await first.wait_lost()
        assert all([await hold.wait_lost() for hold in holds[:-1]])


async def test_many_who_wait_with_one_ticket(make_client: MakeClient, client: Redlease) -> None:
    """Twenty clients wait with one ticket, and all but two give up: these two keep its place before a later one."""
    permit = await client.lock("r").acquire()
    many = [await make_client() for _ in range(20)]
    waiting = [asyncio.ensure_future(each.lock("r", waiter_lease=60).acquire(ticket="T")) for each in many]
    await eventually(lambda: all(each._session.waiter_leases for each in many))
    later = asyncio.ensure_future(client.lock("r", waiter_lease=60).acquire(ticket="U"))
    await queued(client, "U")
    for task in waiting[2:]:
        await cancelled(task)
    await client.lock("r").locked()
    await client.lock("r").release(permit)
    first, second = await asyncio.gather(*waiting[:2])
    assert first.fence == second.fence
    assert not later.done()
    await client.lock("r").release("T")
    await later


async def test_a_permit_that_is_given_back_by_its_data(others: list[Redlease]) -> None:
    """B, or A itself, releases the permit that A's hold keeps: A's hold knows at once."""
    a, b, _ = others
    for releasing in (b, a):
        hold = await a.lock("r", lease=60).hold()
        assert await releasing.lock("r").release(hold.permit)
        async with asyncio.timeout(10):
            assert await hold.wait_lost()


@pytest.mark.parametrize("refence", [True, False])
async def test_an_adopter_takes_no_lease_from_who_joined(others: list[Redlease], refence: bool) -> None:
    """C adopts for a short time and B asks with the ticket; C's repeated request does not end B's lease earlier."""
    a, b, c = others
    permit = await a.lock("r", lease=60).acquire(ticket="T")
    adopted = await c.lock("r", lease=1).adopt(permit, refence=refence)
    hold = await b.lock("r", lease=60).hold(ticket="T")
    assert hold.fence == adopted.fence
    lease = lease_of(adopted)
    await c._session.connection.call(
        *(lease.request.resource, scripts.ADOPT, "T", permit.fence, lease.request.request_id, c._session.new_name()),
        *(1000, int(refence), 86_400_000, arguments.label("c", {})),
    )
    (held,) = (await a.lock("r").inspect()).holders
    assert held.expires_at_ms - (await a.lock("r").inspect()).server_time_ms > 30_000
    assert await adopted.release()
    async with asyncio.timeout(10):
        assert await hold.wait_lost()


async def test_who_adopts_without_a_new_fence_shares(others: list[Redlease]) -> None:
    """A and B hold one permit, and C adopts it under its fence: whoever gives it back, the others are told at once."""
    for last in range(3):
        holds = [await client.lock("r", lease=60).hold(ticket=f"T{last}") for client in others[:2]]
        holds.append(await others[2].lock("r", lease=60).adopt(holds[0].permit, refence=False))
        assert await holds[last].release()
        async with asyncio.timeout(10):
            assert all([await hold.wait_lost() for number, hold in enumerate(holds) if number != last])


async def test_a_waiter_is_not_released_by_a_fence(others: list[Redlease]) -> None:
    """A permit with the fence 0, which nobody was granted, releases nothing, and least of all a waiter."""
    a, b, c = others
    permit = await a.lock("r").acquire()
    waiting = asyncio.ensure_future(b.lock("r").acquire(ticket="T"))
    await queued(c, "T")
    assert not await c.lock("r").release(replace(permit, ticket="T", fence=0))
    assert await waits(c, "T")
    await a.lock("r").release(permit)
    await waiting


async def test_who_loses_it_by_its_own_clock_takes_it_from_nobody(others: list[Redlease]) -> None:
    """A shares the permit for a short lease and lets it run out, by `max_hold`: B, who renews it, holds it on."""
    a, b, c = others
    hold = await b.lock("r", lease=30).hold(ticket="T")
    shorter = await a.lock("r", lease=0.3).hold(ticket="T", max_hold=0.2, on_lost="signal")
    async with asyncio.timeout(10):
        assert await shorter.wait_lost()
    await a.lock("r").locked()  # its reply comes behind that to what A has sent as it lost it
    assert await c.lock("r").try_acquire() is None
    hold.check()
    assert await b.lock("r").is_held(hold.permit)


async def test_who_left_a_waiting_ticket_has_no_part_in_its_grant(others: list[Redlease]) -> None:
    """B leaves the ticket that A waits with too, and that very call grants it: A alone holds it, and gives it back."""
    a, b, c = others
    lock = c.lock("r", lease=0.02)
    permit = await lock.acquire()

    async def call(script: scripts.Script, *args: str | int) -> list[Any]:
        return (await c._session.connection.call(lock._resource, script, *args)).values

    terms = ("0", 1, 60_000, 1, 60_000, -1, 86_400_000, arguments.label("o", {}))
    for request, client in (("pa", a), ("pb", b)):
        await call(scripts.ACQUIRE, "T", request, client._session.new_name(), *terms)
    await eventually(lambda: is_over(c, permit))
    assert await call(scripts.RELEASE, "T", "pb", "", 0, 0, 86_400_000) == [0, 0]
    assert [held.ticket for held in (await lock.inspect()).holders] == ["T"]
    assert await call(scripts.RELEASE, "T", "pa", "", 0, 0, 86_400_000) == [1, 0]
    assert (await lock.inspect()).holders == ()


async def test_who_left_a_waiting_ticket_may_leave_a_dead_one(others: list[Redlease]) -> None:
    """A queue was full of the living; then B leaves a ticket, with which only A waits, who is gone: one more fits."""
    a, b, c = others
    lock = c.lock("r", max_waiters=1)
    await lock.acquire()

    async def call(script: scripts.Script, *args: str | int) -> list[Any]:
        return (await c._session.connection.call(lock._resource, script, *args)).values

    places = [client._session.new_name() for client in (a, b)]
    for request, place, waiter_lease_ms in zip(("pa", "pb"), places, (300, 60_000), strict=True):
        terms = ("0", 1, 60_000, 1, waiter_lease_ms, -1, 86_400_000, arguments.label("o", {}))
        await call(scripts.ACQUIRE, "T", request, place, *terms)

    async def has_expired() -> bool:
        return (await call(scripts.BEAT, places[0], 1, "T", 86_400_000)) == [Status.LAPSED]

    await eventually(has_expired)
    with pytest.raises(QueueFull):
        await lock.acquire()
    assert await call(scripts.RELEASE, "T", "pb", "", 0, 0, 86_400_000) == [0, 0]
    waiting = asyncio.create_task(lock.acquire(ticket="U"))
    await queued(c, "U")
    await cancelled(waiting)
