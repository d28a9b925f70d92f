"""Several resources at once: all of them or none, without a deadlock whatever the order they are given in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, LeaseLost, QueueFull, RedleaseError

from helpers import cancel, until_waiting

if TYPE_CHECKING:
    from redlease import AllRequest, Redlease, Semaphore

    from conftest import MakeClient


async def free(*pools: Semaphore) -> bool:
    """Tell whether nobody holds any of these or waits for it."""
    snapshots = [await pool.inspect() for pool in pools]
    return not any(snapshot.holders or snapshot.waiters for snapshot in snapshots)


async def test_all_are_held_and_released(client: Redlease) -> None:
    """Inside the block each of them is held, with the weight that was asked for, in the order that was given."""
    lock, pool, catalog = client.lock("z"), client.semaphore("a", capacity=3), client.rwlock("m")
    async with client.all(lock, pool.weighted(2), catalog.write, metadata={"job": "7"}) as holds:
        assert [hold.resource for hold in holds] == ["z", "a", "m"]
        assert holds[1].permit.weight == 2
        assert not holds.lost
        assert 0 < holds.remaining() <= 30
        holds.check()
        assert [len((await each.inspect()).holders) for each in (lock, pool, catalog.read)] == [1, 1, 1]
        assert await catalog.read.try_acquire() is None
        (held,) = (await pool.inspect()).holders
        assert held.metadata == {"job": "7"}
    assert await free(lock, pool, catalog.read)
    with pytest.raises(LeaseLost):
        holds.check()


async def test_a_resource_given_twice_is_held_once(client: Redlease) -> None:
    """The largest weight counts: of a lock the one permit, of the sides of a read-write lock the writer's."""
    lock, pool, catalog = client.lock("l"), client.semaphore("p", capacity=3), client.rwlock("c")
    parts = (lock, client.lock("l"), pool, pool.weighted(3), catalog.read, catalog.write)
    async with client.all(*parts, timeout=5) as holds:
        assert len(holds) == 6
        assert holds[0] is holds[1]
        assert holds[2].permit.weight == 3
        (held,) = (await catalog.inspect()).holders
        assert catalog.is_writer(held)
    assert await free(lock, pool, catalog.read)


async def test_what_times_out_leaves_nothing(client: Redlease) -> None:
    """If one is not free in time, none is held, and nothing waits."""
    locks = [client.lock(name) for name in "abc"]
    taken = await locks[1].acquire()
    for timeout in (0, 0.05):
        with pytest.raises(AcquireTimeout, match="'b'"):
            async with client.all(*locks, timeout=timeout):
                pytest.fail("it was not free")
        assert await free(locks[0], locks[2])
    assert await locks[1].release(taken)
    async with client.all(*locks, timeout=0):
        pass
    assert await free(*locks)


async def test_who_is_cancelled_while_it_waits_leaves_nothing(client: Redlease) -> None:
    """A cancelled wait gives back what it has, and leaves the queue that it stands in."""
    first, second = client.lock("a"), client.lock("b")
    taken = await second.acquire()

    async def take() -> None:
        async with client.all(first, second):
            pytest.fail("it was not free")

    task = asyncio.create_task(take())
    await until_waiting(second, 1)
    assert await first.locked()
    await cancel(task)
    assert await second.release(taken)
    async with client.all(second, first, timeout=5):
        pass


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_the_loss_of_one_ends_the_block(client: Redlease) -> None:
    """The body is cancelled, the error is that of the lost one, and the others are free again."""
    locks = [client.lock(name) for name in "abc"]
    entered = asyncio.Event()

    async def work() -> None:
        async with client.all(*locks, ticket="t"):
            entered.set()
            await asyncio.Event().wait()

    for lost in locks:
        entered.clear()
        task = asyncio.create_task(work())
        await entered.wait()
        assert await lost.release("t")
        with pytest.raises(LeaseLost, match=f"'{lost.name}'"):
            await task
        async with client.all(*locks, timeout=5):
            pass


async def test_the_loss_of_one_while_another_is_waited_for(client: Redlease) -> None:
    """Nobody goes on waiting without what it already had."""
    first, second = client.lock("a"), client.lock("b")
    taken = await second.acquire()

    async def take() -> None:
        async with client.all(first, second, ticket="t"):
            pytest.fail("the first was lost")

    task = asyncio.create_task(take())
    await until_waiting(second, 1)
    assert await first.release("t")
    with pytest.raises(LeaseLost, match="'a'"):
        await task
    assert await second.release(taken)
    async with client.all(first, second, timeout=5):
        pass


async def test_a_loss_that_is_only_signalled(client: Redlease) -> None:
    """With `on_lost="signal"` the body goes on, and the holds say together that one is lost."""
    locks = [client.lock(name) for name in "ab"]
    async with client.all(*locks, on_lost="signal") as holds:
        assert await locks[1].release(holds[1].ticket)
        assert await holds[1].wait_lost()
        assert holds.lost
        assert not holds[0].lost
        with pytest.raises(LeaseLost, match="'b'"):
            holds.check()
    assert await free(*locks)


async def test_no_order_leads_to_a_deadlock(make_client: MakeClient, engine: str) -> None:
    """Tasks of two clients that name the same resources in opposite orders all end, one at a time."""
    clients = [await make_client(), await make_client()]
    names = ["a", "b", "c", "d"]
    inside: set[str] = set()

    async def work(client: Redlease, order: list[str]) -> None:
        for _ in range(10):
            async with client.all(*(client.lock(name) for name in order)):
                assert not inside & set(order)
                inside.update(order)
                await asyncio.sleep(0)
                inside.difference_update(order)

    orders = [names, names[::-1], names[1:3], [names[3], names[0]]]
    async with asyncio.timeout(30):
        await asyncio.gather(*(work(client, order) for client in clients for order in orders))


async def test_what_is_refused_holds_nothing(client: Redlease) -> None:
    """A wrong parameter is refused before anything is sent, and a weight that cannot fit gives back the others."""
    lock, pool = client.lock("a"), client.semaphore("b", capacity=2)
    with pytest.raises(ValueError, match="at least one"):
        client.all()
    with pytest.raises(ValueError, match="timeout"):
        client.all(lock, timeout=-1)
    with pytest.raises(ValueError, match="on_lost"):
        client.all(lock, on_lost="shout")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two capacities"):
        client.all(pool, client.semaphore("b", capacity=3))
    with pytest.raises(ValueError, match="weight"):
        pool.weighted(0)
    with pytest.raises(ValueError, match="capacity"):
        async with client.all(lock, pool.weighted(3)):
            pytest.fail("it does not fit")
    assert await free(lock, pool)
    block = client.all(lock)
    with pytest.raises(RuntimeError, match="not entered"):
        await block.__aexit__(None, None, None)
    async with block:
        with pytest.raises(RuntimeError, match="entered already"):
            await block.__aenter__()
    async with block:
        pass
    await client.close()
    with pytest.raises(RedleaseError):
        async with block:
            pytest.fail("the client is closed")


async def test_all_take_the_turn_of_a_key(client: Redlease) -> None:
    """`per_key` and `when_full` count for a block as they do for a single hold."""
    pool, lock = client.semaphore("pool", capacity=5, per_key=1), client.lock("lock")
    async with client.all(lock, pool, key="acme", share=2) as holds:
        assert [hold.permit.key for hold in holds] == ["acme", "acme"]
        assert await pool.try_acquire(key="acme") is None
        assert await pool.try_acquire(key="other") is not None
        with pytest.raises(QueueFull, match="when_full is 'refuse'"):
            async with client.all(pool, key="acme", when_full="refuse"):
                pass
    assert await pool.release(await pool.acquire(key="acme"))
    older = await pool.acquire(key="acme")
    newer = asyncio.create_task(entered(client.all(lock, pool, key="acme", when_full="replace-holder", grace=0)))
    await newer
    assert not await pool.is_held(older)
    refused: list[dict[str, Any]] = [
        {"share": 2},
        {"key": ""},
        {"when_full": "replace-waiter", "timeout": 0},
        {"when_full": "never"},
    ]
    for wrong in refused:
        with pytest.raises(ValueError, match=r"\w"):
            client.all(pool, **wrong)


async def entered(request: AllRequest) -> None:
    """Enter a block, and leave it."""
    async with request:
        pass


async def test_one_block_is_entered_once_at_a_time(client: Redlease) -> None:
    """Of two tasks that enter one object, the second is refused, also while the first still waits."""
    first, second = client.lock("a"), client.lock("b")
    taken = await second.acquire()
    block = client.all(first, second)

    async def enter() -> None:
        async with block as holds:
            holds.check()

    waiting = asyncio.create_task(enter())
    await until_waiting(second, 1)
    with pytest.raises(RuntimeError, match="entered already"):
        await asyncio.create_task(enter())
    assert await second.release(taken)
    await waiting
    await enter()
    assert await free(first, second)


async def test_what_is_not_of_this_client_is_refused(make_client: MakeClient, engine: str) -> None:
    """Locks of another client, which may be on another server, and what is no lock at all."""
    client, other = await make_client(), await make_client()
    with pytest.raises(ValueError, match="another client"):
        client.all(client.lock("a"), other.lock("a"))
    with pytest.raises(ValueError, match="takes locks"):
        client.all("a")  # type: ignore[arg-type]
