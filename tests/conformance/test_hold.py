"""A hold as a block and without one: what it releases, whom it cancels, and whose exception comes out (P6, P7)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest

from redlease import ClientClosed, LeaseLost, Withdrawn

from helpers import cancel, eventually, left_over, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Hold, Redlease, Semaphore

    from conftest import MakeClient, Servers


class BodyError(Exception):
    """What a body raises."""


async def test_a_block_holds_and_releases(client: Redlease) -> None:
    """Inside the block the lock is held by this ticket and fence, with its metadata, and after it by nobody."""
    lock = client.lock("r")
    async with lock.hold(ticket="t", metadata={"job": "7"}) as hold:
        (held,) = (await lock.inspect()).holders
        assert (held.ticket, held.fence, held.metadata) == ("t", hold.fence, {"job": "7"})
        assert (hold.permit.ticket, hold.permit.fence, hold.permit.expires_at_ms) == (
            "t",
            hold.fence,
            held.expires_at_ms,
        )
        assert not hold.lost
    assert (await lock.inspect()).holders == ()
    assert not hold.lost
    assert hold.remaining() == 0
    with pytest.raises(LeaseLost, match="released"):
        hold.check()


async def test_a_primitive_is_a_block_itself(client: Redlease) -> None:
    """`async with pool` is the block of a plain hold, in any number of tasks at once."""
    lock = client.lock("r")
    inside = 0
    fences: list[int] = []

    async def work() -> None:
        nonlocal inside
        async with lock as hold:
            inside += 1
            fences.append(hold.fence)
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work() for _ in range(20)))
    assert fences == sorted(set(fences))
    assert len(fences) == 20
    assert not await lock.locked()


async def test_blocks_nest(client: Redlease) -> None:
    """One task may enter a semaphore several times, while there is room; each block ends its own permit."""
    pool = client.semaphore("r", capacity=2)
    async with pool as outer:
        async with pool as inner:
            assert inner.fence > outer.fence
            assert await pool.locked()
        (held,) = (await pool.inspect()).holders
        assert held.fence == outer.fence
    assert (await pool.inspect()).holders == ()


async def test_a_hold_without_a_block(client: Redlease) -> None:
    """An awaited hold is released by hand, once."""
    lock = client.lock("r")
    hold = await lock.hold()
    assert await lock.locked()
    assert await hold.release()
    assert not await hold.release()
    assert not hold.lost
    assert not await hold.wait_lost()
    assert not await lock.locked()


async def test_an_awaited_hold_may_be_a_block_later(client: Redlease) -> None:
    """What `await pool.hold()` returned may be entered, and is released by the block."""
    lock = client.lock("r")
    hold = await lock.hold()
    async with hold as same:
        assert same is hold
    assert not await lock.locked()


async def test_the_exception_of_the_body_comes_out(client: Redlease) -> None:
    """The permit is released, and the body's exception is what it was."""
    lock = client.lock("r")
    error = BodyError("mine")
    with pytest.raises(BodyError) as caught:
        async with lock.hold():
            raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert not await lock.locked()


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_loss_cancels_the_body(client: Redlease) -> None:
    """The task that entered the block is cancelled, and LeaseLost comes out of the block and no cancellation."""
    lock = client.lock("r")
    task = asyncio.current_task()
    assert task is not None
    with pytest.raises(LeaseLost) as caught:
        async with lock.hold(ticket="t") as hold:
            await lock.release("t")
            await asyncio.sleep(30)
    assert hold.lost
    assert (caught.value.resource, caught.value.ticket) == ("r", "t")
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # a cancellation that is still to come would come here


async def test_a_loss_only_signals_when_asked(client: Redlease) -> None:
    """With on_lost="signal" the body goes on, `lost` and `wait_lost()` tell, and the block ends without an error."""
    lock = client.lock("r")
    async with lock.hold(ticket="t", on_lost="signal") as hold:
        watcher = asyncio.create_task(hold.wait_lost())
        await lock.release("t")
        assert await asyncio.wait_for(watcher, 5)
        assert hold.lost
        with pytest.raises(LeaseLost):
            hold.check()
        await asyncio.sleep(0)  # a cancellation would come here
    assert not await lock.locked()


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_loss_is_noted_on_the_body_s_exception(client: Redlease) -> None:
    """When the body raises and the permit is lost, the body's exception comes out with the loss as a note."""
    lock = client.lock("r")
    with pytest.raises(BodyError, match="mine") as caught:
        async with lock.hold(ticket="t") as hold:
            release = asyncio.create_task(lock.release("t"))
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                raise BodyError("mine") from None
    assert await release
    assert hold.lost
    assert any("no longer held" in note for note in caught.value.__notes__)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # a cancellation that is still to come would come here


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_body_that_ends_in_the_face_of_a_loss(client: Redlease) -> None:
    """A body that swallows the cancellation and returns still gets LeaseLost from the block."""
    lock = client.lock("r")
    with pytest.raises(LeaseLost):
        async with lock.hold(ticket="t"):
            release = asyncio.create_task(lock.release("t"))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(30)
    assert await release


async def test_a_cancellation_from_outside_stays_one(client: Redlease) -> None:
    """Cancelled by its caller, a body's task ends cancelled, its permit is released, and nothing is masked."""
    lock = client.lock("r")
    entered = asyncio.Event()

    async def work() -> None:
        async with lock.hold():
            entered.set()
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel("by the caller")
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
    await eventually(lambda: _free(lock))


async def _free(lock: Semaphore) -> bool:
    return not await lock.locked()


async def test_two_cancellations_at_once_are_a_cancellation(client: Redlease) -> None:
    """Lost and cancelled by its caller in the same moment, the task ends cancelled: nobody's cancel() is swallowed."""
    lock = client.lock("r")
    entered: asyncio.Future[Hold] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        async with lock.hold(ticket="t") as hold:
            entered.set_result(hold)
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    hold = await entered
    release = asyncio.create_task(lock.release("t"))
    await hold.wait_lost()
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await release


async def test_a_timeout_around_a_block_is_a_timeout(client: Redlease) -> None:
    """asyncio.timeout around a block raises TimeoutError, and the permit is released."""
    lock = client.lock("r")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), lock.hold():
            await asyncio.sleep(30)
    await eventually(lambda: _free(lock))


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_task_group_sees_the_loss(client: Redlease) -> None:
    """Tasks that the body waits for in a group are cancelled with it, and LeaseLost comes out of the block."""
    lock = client.lock("r")
    ended = []

    async def part() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    with pytest.raises(LeaseLost):
        async with lock.hold(ticket="t"), asyncio.TaskGroup() as group:
            group.create_task(part())
            group.create_task(part())
            await asyncio.sleep(0)
            await lock.release("t")
    assert ended == [True, True]


async def test_another_task_may_leave_the_block(client: Redlease) -> None:
    """When another task leaves the block, nobody is cancelled, and LeaseLost comes at the exit."""
    lock = client.lock("r")
    request = lock.hold(ticket="t")
    hold = await asyncio.create_task(request.__aenter__())
    await lock.release("t")
    await hold.wait_lost()
    with pytest.raises(LeaseLost):
        await request.__aexit__(None, None, None)
    await asyncio.sleep(0)  # a cancellation would come here


async def test_the_hold_of_an_ended_task_goes_on(client: Redlease) -> None:
    """A hold acquired in a task that has ended since is renewed, and released by whoever has it."""
    lock = client.lock("r", lease=0.8)
    hold = await asyncio.create_task(_held(lock))
    first = hold.permit.expires_at_ms
    await eventually(lambda: hold.permit.expires_at_ms > first + 1000)
    assert await hold.release()


async def _held(lock: Semaphore) -> Hold:
    return await lock.hold()


async def test_detach_keeps_the_permit(client: Redlease) -> None:
    """A detached hold renews no more and its block releases nothing; the permit lives for its lease."""
    lock = client.lock("r", lease=1.5)
    async with lock.hold() as hold:
        permit = hold.detach()
    assert not hold.lost
    assert not await hold.wait_lost()
    assert await lock.is_held(permit)
    with pytest.raises(LeaseLost):
        hold.detach()
    assert not await hold.release()
    later = await asyncio.wait_for(lock.acquire(), 5)
    assert later.granted_at_ms >= permit.expires_at_ms


async def test_a_detached_permit_is_adopted(client: Redlease) -> None:
    """What was detached is data again: it may be adopted in the same client, with its ticket."""
    lock = client.lock("r")
    hold = await lock.hold(ticket="t")
    async with await lock.adopt(hold.detach()) as again:
        assert again.permit.ticket == "t"
        assert again.fence > hold.fence
    assert not await lock.locked()


async def test_an_adoption_is_a_block(client: Redlease) -> None:
    """`adopt` is entered as `hold` is, and gives the permit back at the end of the block."""
    lock = client.lock("r")
    before = await lock.hold()
    adopting = lock.adopt(before.detach())
    async with adopting as hold:
        assert hold.fence > before.fence
        assert await lock.is_held(hold.permit)
    assert not await lock.locked()
    with pytest.raises(LeaseLost):
        async with adopting:
            pytest.fail("nothing was left to adopt")


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_the_loss_of_an_adopted_permit_ends_its_block(client: Redlease) -> None:
    """As in the block of `hold`, the body is cancelled and the block raises LeaseLost."""
    lock = client.lock("r")
    with pytest.raises(LeaseLost):
        async with lock.adopt(await lock.acquire(ticket="t")):
            await lock.release("t")
            await asyncio.sleep(30)


async def test_a_lost_hold_cannot_be_detached(client: Redlease) -> None:
    """There is no permit to return any more."""
    lock = client.lock("r")
    hold = await lock.hold(ticket="t")
    await lock.release("t")
    await hold.wait_lost()
    with pytest.raises(LeaseLost):
        hold.detach()


async def test_a_hold_may_be_awaited_twice(client: Redlease) -> None:
    """Each await of a hold() without a ticket is a request of its own; one block is entered once."""
    pool = client.semaphore("r", capacity=3)
    request = pool.hold()
    one, two = await request, await request
    assert one.permit.ticket != two.permit.ticket
    async with request:
        with pytest.raises(RuntimeError, match="again"):
            await request.__aenter__()
    assert await one.release()
    assert await two.release()


@pytest.mark.of_tasks("a task that awaits: the blocking request speaks of entering and acquiring")
async def test_a_hold_that_nobody_awaits_asks_for_nothing(client: Redlease) -> None:
    """Calling hold() does nothing yet."""
    lock = client.lock("r")
    with pytest.warns(RuntimeWarning, match="neither awaited nor entered"):
        lock.hold()
    assert not await lock.locked()


async def test_closing_a_client_releases_its_holds(
    client: Redlease, make_client: MakeClient, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """Closing releases the holds, ends the waiting calls with an error, and leaves plain permits alone (P6)."""
    closing = await make_client()
    held, kept, waited = closing.lock("held"), closing.lock("kept"), closing.lock("waited")
    hold = await held.hold()
    permit = await kept.acquire()
    other = await client.lock("waited").acquire()
    waiting = await queue_up(waited, 2)
    await closing.close()
    assert hold.lost
    for task in waiting:
        with pytest.raises(Withdrawn, match="closed"):
            await task
    kept_permits = [f"{prefix}:{{kept}}:holders {permit.ticket}", f"{prefix}:{{waited}}:holders {other.ticket}"]
    assert sorted(await left_over(raw, prefix)) == kept_permits
    assert await client.lock("held").try_acquire() is not None
    assert await client.lock("kept").release(permit)


async def test_a_client_that_closes_takes_no_more_requests(
    make_client: MakeClient, engine: str, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """What is asked for while the client closes is refused: nobody would renew it, give it back or tell of its loss."""
    closing = await make_client()
    held, free = closing.lock("held"), closing.lock("free")
    await held.hold()

    async def work() -> None:
        with pytest.raises(Withdrawn, match="closed"):
            await held.hold()
        for request in (free.hold(), free.acquire(), free.try_acquire()):
            with pytest.raises(ClientClosed, match="closed"):
                await request

    task = asyncio.create_task(work())
    await until_waiting(held, 1)
    await closing.close()
    await task
    assert await left_over(raw, prefix) == []


async def test_an_adoption_ends_with_its_client(make_client: MakeClient, servers: Servers, real_engine: str) -> None:
    """A permit whose adoption is under way when the client closes is given back, as its holds are."""
    client, closing = [await make_client(url=servers.url(real_engine)) for _ in range(2)]
    stored = client.lock("stored")
    permit = await stored.acquire()
    await closing.lock("held").hold()
    adopting = asyncio.ensure_future(closing.lock("stored").adopt(permit))
    await asyncio.sleep(0)  # it has been sent, and `held` is released behind it
    await closing.close()
    with pytest.raises(LeaseLost, match="closed"):
        await adopting
    assert (await stored.inspect()).holders == ()


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_a_body_is_cancelled_when_its_client_closes(make_client: MakeClient, engine: str) -> None:
    """A body that runs while its client is closed loses its permit and is cancelled."""
    client = await make_client()
    lock = client.lock("r")
    entered = asyncio.Event()

    async def work() -> None:
        async with lock.hold():
            entered.set()
            await asyncio.sleep(30)

    task = asyncio.create_task(work())
    await entered.wait()
    await client.close()
    with pytest.raises(LeaseLost, match="closed"):
        await task


async def test_cancelling_a_waiting_block_leaves_the_queue(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A block that is cancelled before it was entered leaves neither permit nor place."""
    lock = client.lock("r")
    permit = await lock.acquire()

    async def work() -> None:
        async with lock.hold():
            pytest.fail("it is held by another")

    task = asyncio.create_task(work())
    await until_waiting(lock, 1)
    await cancel(task)
    await until_waiting(lock, 0)
    await lock.release(permit)
    assert await left_over(raw, prefix) == []


async def test_a_loss_says_its_reason(client: Redlease, make_client: MakeClient) -> None:
    """The error has the word that the event of the loss has: for each way to lose a permit another."""
    lock, reasons = client.lock("r", lease=1.0), []

    async def lost(hold: Hold) -> None:
        await eventually(lambda: hold.lost)
        with pytest.raises(LeaseLost) as caught:
            hold.check()
        reasons.append(caught.value.reason)

    hold = await lock.hold(on_lost="signal")
    await lock.release(hold.permit)
    await lost(hold)
    await lost(await lock.hold(on_lost="signal", max_hold=0.1))
    hold = await lock.hold(on_lost="signal", key="a")
    newer = asyncio.create_task(lock.acquire(key="a", when_full="replace-holder", grace=0.1))
    await lost(hold)
    await lock.release(await newer)
    other = await make_client()
    hold = await other.lock("r").hold(on_lost="signal")
    await other.close()
    await lost(hold)
    hold = await lock.hold()
    await hold.release()
    with pytest.raises(LeaseLost) as caught:
        hold.check()
    assert [*reasons, caught.value.reason] == ["taken", "max_hold", "superseded", "closed", None]
