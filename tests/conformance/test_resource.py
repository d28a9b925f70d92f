"""A resource as a whole: what can be seen of it, how large it is, and how it is emptied."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import TYPE_CHECKING

import pytest

from redlease import LeaseLost, NeverFits, RedleaseError, Withdrawn

from helpers import cancel, eventually, keys_of, left_over, queue_up, until_waiting

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis.asyncio

    from redlease import Redlease, Semaphore, Snapshot

    from conftest import MakeClient


async def test_inspect_shows_holders_and_waiters(client: Redlease) -> None:
    """Holders stand in the order of their grants, waiters in that of their arrival, with all that they said."""
    pool = client.semaphore("r", capacity=3)
    permits = [await pool.acquire(ticket=ticket, weight=weight) for ticket, weight in (("z", 2), ("a", 1))]
    tasks = [(await queue_up(pool, 1, ticket=ticket, weight=2, owner=f"o-{ticket}"))[0] for ticket in ("y", "b", "x")]
    snapshot = await pool.inspect()
    assert (snapshot.resource, snapshot.capacity) == ("r", 3)
    assert list(snapshot.holders) == permits
    assert [(waiter.ticket, waiter.weight, waiter.owner) for waiter in snapshot.waiters] == [
        ("y", 2, "o-y"),
        ("b", 2, "o-b"),
        ("x", 2, "o-x"),
    ]
    queued = [waiter.queued_at_ms for waiter in snapshot.waiters]
    assert queued == sorted(queued)
    assert permits[0].granted_at_ms <= queued[0] <= snapshot.server_time_ms
    assert snapshot.fence == permits[1].fence
    await cancel(*tasks)


async def test_inspect_of_nothing(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """A resource that nobody has used shows the declared capacity, and looking leaves no key."""
    pool = client.semaphore("r", capacity=7)
    snapshot = await pool.inspect()
    assert (snapshot.capacity, snapshot.holders, snapshot.waiters, snapshot.fence) == (7, (), (), 0)
    assert not await pool.locked()
    assert await keys_of(raw, f"{prefix}:{{r}}*") == []


async def test_inspect_has_a_limit(client: Redlease) -> None:
    """A long list is cut to its first entries; the totals count all of them."""
    pool = client.semaphore("r", capacity=9)
    for number, weight in enumerate((1, 2, 3, 1, 2)):
        await pool.acquire(ticket=f"h{number}", weight=weight)
    tasks = [(await queue_up(pool, 1, ticket=f"w{number}"))[0] for number in range(4)]
    snapshot = await pool.inspect(max_items=2)
    assert [permit.ticket for permit in snapshot.holders] == ["h0", "h1"]
    assert [waiter.ticket for waiter in snapshot.waiters] == ["w0", "w1"]
    assert (snapshot.in_use, snapshot.waiting) == (9, 4)
    await cancel(*tasks)


async def test_totals_count_the_living(make_client: MakeClient, engine: str) -> None:
    """What lapsed is in no total: neither a permit nor the waiters of a client that is gone, wherever they stand."""
    client, gone = await make_client(), await make_client(waiter_lease=0.3)
    pool, other = client.semaphore("r", capacity=3), gone.semaphore("r", capacity=3)
    await pool.acquire(weight=2)
    await client.semaphore("r", capacity=3, lease=0.3).acquire()
    tasks = [
        (await queue_up(each, 1, ticket=ticket, weight=2))[0]
        for each, ticket in ((pool, "a"), (other, "b"), (pool, "c"), (other, "d"))
    ]
    assert (await pool.inspect()).waiting == 4
    await gone.abandon()

    async def only_the_living() -> bool:
        snapshot = await pool.inspect(max_items=1)
        return (snapshot.in_use, snapshot.waiting) == (2, 2)

    await eventually(only_the_living)
    assert [waiter.ticket for waiter in (await pool.inspect()).waiters] == ["a", "c"]
    await cancel(*tasks)


async def test_locked_says_whether_one_would_wait(client: Redlease) -> None:
    """It is locked when the capacity is used, or somebody waits; a lapsed permit does not count."""
    pool = client.semaphore("r", capacity=2, lease=0.3)
    assert not await pool.locked()
    await pool.acquire()
    assert not await pool.locked()
    heavy = await queue_up(pool, 1, weight=2)
    assert await pool.locked()
    await cancel(*heavy)
    await eventually(lambda: _unlocked(client))
    permit = await pool.acquire(weight=2)
    assert await pool.locked()
    await eventually(lambda: _unlocked(client))
    assert not await pool.release(permit)


async def _unlocked(client: Redlease) -> bool:
    return not await client.semaphore("r", capacity=2).locked()


async def test_a_larger_capacity_admits_at_once(client: Redlease, make_client: MakeClient) -> None:
    """After a resize all waiters that fit now are granted, without anybody releasing."""
    pool = client.semaphore("r", capacity=2)
    await pool.acquire(weight=2)
    tasks = await queue_up(pool, 4)
    await (await make_client()).semaphore("r", capacity=2).resize(4)
    permits = [await asyncio.wait_for(task, 5) for task in tasks[:2]]
    assert all(permit.capacity == 4 for permit in permits)
    assert not tasks[2].done()
    await pool.resize(6)
    await asyncio.wait_for(asyncio.gather(*tasks[2:]), 5)
    assert (await pool.inspect()).capacity == 6


async def test_a_smaller_capacity_takes_nothing_away(client: Redlease) -> None:
    """After a shrink those who hold keep their permits, and nobody is admitted before they fit."""
    pool = client.semaphore("r", capacity=3)
    permits = [await pool.acquire() for _ in range(3)]
    await pool.resize(1)
    assert all([await pool.is_held(permit) for permit in permits])
    (task,) = await queue_up(pool, 1)
    assert await pool.release(permits[0])
    assert await pool.release(permits[1])
    assert await pool.locked()
    assert not task.done()
    assert await pool.release(permits[2])
    assert (await asyncio.wait_for(task, 5)).capacity == 1


async def test_a_waiter_that_cannot_fit_any_more_is_told(client: Redlease, make_client: MakeClient) -> None:
    """A resize below the weight of waiters fails them, wherever they stand, and those behind them move up."""
    pool = client.semaphore("r", capacity=4)
    permit = await pool.acquire(weight=4)
    light = await queue_up(pool, 1)
    heavy = await queue_up(pool, 1, weight=3)
    behind = await queue_up(pool, 1)
    await (await make_client()).semaphore("r", capacity=4).resize(2)
    with pytest.raises(ValueError, match="weight 3"):
        await asyncio.wait_for(heavy[0], 2)
    assert await pool.release(permit)
    await asyncio.wait_for(asyncio.gather(*light, *behind), 5)


async def test_a_resize_outlives_a_restart(client: Redlease, make_client: MakeClient) -> None:
    """A process that declares the value it always declared does not undo a resize; a new value takes effect."""
    pool = client.semaphore("r", capacity=2)
    await pool.release(await pool.acquire())
    await pool.resize(5)
    again = (await make_client()).semaphore("r", capacity=2)
    permit = await again.acquire()
    assert permit.capacity == 5
    assert (await again.inspect()).capacity == 5
    changed = (await make_client()).semaphore("r", capacity=3)
    assert (await changed.acquire()).capacity == 3
    assert (await again.inspect()).capacity == 3


async def test_a_refused_declaration_counts(client: Redlease) -> None:
    """A new value is stored though its request is refused, so that it does not undo a resize after that."""
    pool = client.semaphore("r", capacity=2)
    await pool.acquire(weight=2)
    await pool.resize(3)
    await pool.acquire()
    again = client.semaphore("r", capacity=3)
    assert await again.try_acquire() is None
    await pool.resize(4)
    assert await again.try_acquire(weight=2) is None
    assert (await pool.inspect()).capacity == 4


async def test_a_resource_may_be_sized_before_its_first_use(client: Redlease) -> None:
    """A resize of what nobody has used yet is not undone by the first declaration."""
    pool = client.semaphore("r", capacity=2)
    await pool.resize(3)
    assert (await pool.acquire()).capacity == 3


@pytest.mark.parametrize("kind", ["lock", "semaphore", "rwlock"])
async def test_what_excludes_others_is_not_resized(client: Redlease, make_client: MakeClient, kind: str) -> None:
    """A lock, a pool of one and a read-write lock refuse, and what was set before their first use does not count."""
    other = (await make_client()).semaphore("r", capacity=9)
    await other.resize(3)
    makers: dict[str, Callable[[], Semaphore]] = {
        "lock": lambda: client.lock("r"),
        "semaphore": lambda: client.semaphore("r", capacity=1),
        "rwlock": lambda: client.rwlock("r").write,
    }
    primitive = makers[kind]()
    permit = await primitive.acquire()
    with pytest.raises(ValueError, match=r"'r' cannot be resized to 3: it is a (read-write )?lock"):
        await other.resize(3)
    assert await primitive.try_acquire() is None
    assert await primitive.release(permit)
    await primitive.acquire()


async def test_a_call_in_the_last_moment_of_a_resource_keeps_it(
    client: Redlease, make_client: MakeClient, raw: redis.asyncio.Redis
) -> None:
    """A call in the millisecond in which the keys expire extends their life, and does not delete the state at once."""
    catalog = client.rwlock("r")
    state = catalog.read._resource.keys[0]
    hold = await catalog.write.hold()
    (waiting,) = await queue_up(catalog.write, 1, ticket="T")
    other = (await make_client()).rwlock("r")
    for call in (lambda: other.read.release("nobody"), lambda: other.write.try_acquire(ticket="T"), hold.downgrade):
        await raw.hset(state, "k", "1")
        await call()
        snapshot = await catalog.inspect()
        assert [held.fence for held in snapshot.holders] == [hold.fence] == [snapshot.fence]
    await hold.release()
    assert await catalog.write.release(await waiting)


async def test_another_declaration_is_logged_once(
    make_client: MakeClient, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A declared value that differs from the stored one takes its place, with one warning that names both."""
    first, second = await make_client(), await make_client()
    await first.semaphore("r", capacity=2).acquire()
    with caplog.at_level(logging.WARNING, logger="redlease"):
        caplog.clear()
        for _ in range(3):
            await second.semaphore("r", capacity=5).acquire()
        (record,) = caplog.records
    assert "'r'" in record.getMessage()
    assert "2" in record.getMessage()
    assert "5" in record.getMessage()


async def test_a_larger_declaration_admits_who_waits(client: Redlease, make_client: MakeClient) -> None:
    """A deployment with a larger value grants the queue, before the newcomer that brought it."""
    pool = client.semaphore("r", capacity=1)
    await pool.acquire()
    tasks = await queue_up(pool, 1)
    larger = (await make_client()).semaphore("r", capacity=3)
    newcomer = await larger.acquire()
    earlier = await asyncio.wait_for(tasks[0], 5)
    assert earlier.fence < newcomer.fence


async def test_release_all_frees_the_holders(client: Redlease, make_client: MakeClient) -> None:
    """Holders are freed and told at once; who waited is granted."""
    pool = client.semaphore("r", capacity=3)
    holds = [await pool.hold() for _ in range(2)]
    await pool.acquire()
    tasks = await queue_up(pool, 2)
    assert await (await make_client()).semaphore("r", capacity=3).release_all() == 3
    for hold in holds:
        assert await asyncio.wait_for(hold.wait_lost(), 5)
    permits = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert len((await pool.inspect()).holders) == len(permits) == 2


async def test_release_all_empties_the_queue_too(
    client: Redlease, make_client: MakeClient, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """With queue=True waiters are taken out first, so that nobody is granted on the way."""
    pool = client.semaphore("r", capacity=2)
    await pool.acquire()
    hold = await pool.hold()
    tasks = await queue_up(pool, 5)
    assert await (await make_client()).semaphore("r", capacity=2).release_all(queue=True) == 7
    for task in tasks:
        with pytest.raises(Withdrawn):
            await task
    assert await hold.wait_lost()
    assert await left_over(raw, prefix) == []
    assert await pool.release_all(queue=True) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
@pytest.mark.of_tasks("so many waiters would be as many threads")
async def test_release_all_lets_nobody_in_from_a_long_queue(make_client: MakeClient) -> None:
    """With `queue` every waiter goes first, those behind the first thousand too: none is granted in between."""
    # fakeredis takes its time for so many, and nothing may lapse meanwhile.
    lock = (await make_client(call_timeout=60)).lock("r", lease=120, waiter_lease=120)
    held = await lock.acquire()
    tasks = [asyncio.create_task(lock.acquire()) for _ in range(1100)]

    async def all_wait() -> bool:
        return len((await lock.inspect(max_items=2000)).waiters) == len(tasks)

    await eventually(all_wait, 20)
    freed = await lock.release_all(queue=True)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Withdrawn}
    assert freed == 1101
    assert (await lock.inspect()).fence == held.fence


@pytest.mark.of_tasks("a loss cancels the task of a body, and nothing cancels a thread")
async def test_release_all_cancels_bodies(client: Redlease) -> None:
    """A body whose lock was freed by force is cancelled."""
    lock = client.lock("r")
    with pytest.raises(LeaseLost):
        async with lock.hold():
            freeing = asyncio.create_task(lock.release_all())
            await asyncio.sleep(30)
    assert await freeing == 1


async def test_watch_yields_changes(client: Redlease, make_client: MakeClient) -> None:
    """A watcher sees the resource as it is, and then each change without asking for it."""
    pool = client.semaphore("r", capacity=2)
    watching = (await make_client()).semaphore("r", capacity=2).watch()
    seen: list[Snapshot] = [await anext(watching)]

    async def until(holders: int, waiters: int) -> None:
        while (len(seen[-1].holders), len(seen[-1].waiters)) != (holders, waiters):
            seen.append(await asyncio.wait_for(anext(watching), 2))

    await until(0, 0)
    permit = await pool.acquire(weight=2)
    await until(1, 0)
    (task,) = await queue_up(pool, 1)
    await until(1, 1)
    await pool.release(permit)
    await until(1, 0)
    assert seen[-1].fence > permit.fence
    await pool.resize(4)
    while seen[-1].capacity != 4:
        seen.append(await asyncio.wait_for(anext(watching), 2))
    await pool.release(await task)
    await until(0, 0)
    await watching.aclose()


async def test_watch_sees_what_lapses(client: Redlease) -> None:
    """A lease that ends is seen though nobody calls."""
    lock = client.lock("r", lease=0.3)
    await lock.acquire()
    watching = lock.watch()
    assert len((await anext(watching)).holders) == 1
    assert (await asyncio.wait_for(anext(watching), 2)).holders == ()
    await watching.aclose()


async def test_a_watch_is_cancelled_whatever_comes_with_it(client: Redlease) -> None:
    """A cancellation at the moment of a change, some turns of the loop more or less, ends the watch."""
    for turns in range(24):
        pool = client.lock(f"r{turns}")
        seen = asyncio.Event()

        async def look(pool: Semaphore = pool, seen: asyncio.Event = seen) -> None:
            async for _ in pool.watch():
                seen.set()

        watching = asyncio.create_task(look())
        await seen.wait()
        await pool.release(await pool.acquire())
        for _ in range(turns % 8):
            await asyncio.sleep(0)
        watching.cancel()
        done, _ = await asyncio.wait({watching}, timeout=5)
        assert done, f"it went on after {turns} turns"
        assert watching.cancelled()


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
async def test_a_watch_that_is_cancelled_as_it_begins_leaves_nothing(client: Redlease, turns: int) -> None:
    """Neither the channel nor the watcher is kept of a watch that ends before it has begun to listen."""
    lock = client.lock("r")
    assert not await lock.locked()
    listening = len(client._session.watchers)

    async def watch() -> None:
        async for _ in lock.watch():
            pass

    watching = asyncio.create_task(watch())
    for _ in range(turns):
        await asyncio.sleep(0)
    await cancel(watching)
    assert len(client._session.watchers) == listening


async def test_an_adoption_that_is_misuse_is_not_remembered(client: Redlease) -> None:
    """A ticket that is in use in this client is refused before a request is set aside for its repetition."""
    lock = client.lock("r")
    async with lock.hold(ticket="t") as hold:
        with pytest.raises(ValueError, match="in use in this client"):
            await lock.adopt(hold.permit)
        assert not client._session.memory.adopting


async def test_many_may_watch(client: Redlease) -> None:
    """Several watchers of one client see the same, and leave each other alone when they end."""
    lock = client.lock("r")
    watchers = [lock.watch() for _ in range(3)]
    for watching in watchers:
        assert (await anext(watching)).holders == ()
    permit = await lock.acquire()
    for watching in watchers:
        assert len((await asyncio.wait_for(anext(watching), 2)).holders) == 1
    await watchers.pop().aclose()
    await lock.release(permit)
    for watching in watchers:
        assert (await asyncio.wait_for(anext(watching), 2)).holders == ()
        await watching.aclose()


@pytest.mark.slow
async def test_many_waiters_and_holders_at_once(client: Redlease) -> None:
    """Work over more than one batch is finished: hundreds granted by one resize."""
    pool = client.semaphore("r", capacity=2)
    permit = await pool.acquire(weight=2)
    tasks = [asyncio.create_task(pool.acquire()) for _ in range(350)]
    await until_waiting(pool, 350)
    await pool.resize(401)
    assert len(await asyncio.wait_for(asyncio.gather(*tasks), 5)) == 350
    assert await pool.release_all() == 351
    assert not await pool.release(permit)


async def test_a_waiter_does_not_bring_an_old_declaration_back(client: Redlease, make_client: MakeClient) -> None:
    """Who queued under an old declaration claims its grant without undoing a newer one."""
    old = client.semaphore("r", capacity=1)
    permit = await old.acquire()
    tasks = await queue_up(old, 1)
    new = (await make_client()).semaphore("r", capacity=2)
    await new.try_acquire()
    await asyncio.wait_for(tasks[0], 5)
    assert (await new.inspect()).capacity == 2
    assert await old.release(permit)


async def test_a_waiter_in_the_middle_is_told_of_a_repeated_ask_that_shrinks(
    client: Redlease, make_client: MakeClient
) -> None:
    """Waiters that a smaller declaration leaves without hope are told, whoever declared it."""
    pool = client.semaphore("r", capacity=4)
    permit = await pool.acquire(weight=4)
    light, heavy = (await queue_up(pool, 1))[0], (await queue_up(pool, 1, weight=3))[0]
    smaller = (await make_client()).semaphore("r", capacity=2)
    assert await smaller.try_acquire() is None
    with pytest.raises(ValueError, match="weight 3"):
        await asyncio.wait_for(heavy, 2)
    assert await pool.release(permit)
    assert await asyncio.wait_for(light, 5)


async def test_who_is_told_that_it_does_not_fit_leaves_the_newer_declaration(
    client: Redlease, make_client: MakeClient
) -> None:
    """The first in the queue, which asks once more before it believes that, does not declare its capacity anew."""
    old = client.semaphore("r", capacity=3)
    permit = await old.acquire()
    heavy = (await queue_up(old, 1, weight=3))[0]
    smaller = (await make_client()).semaphore("r", capacity=2)
    assert (await smaller.acquire()).capacity == 2
    with pytest.raises(ValueError, match="weight 3"):
        await asyncio.wait_for(heavy, 2)
    assert (await smaller.inspect()).capacity == 2
    assert await old.release(permit)


async def test_a_name_with_spaces_hears_of_a_smaller_capacity(client: Redlease) -> None:
    """The message that tells waiters of a smaller capacity is understood whatever the name looks like."""
    pool = client.semaphore("two words {and} more", capacity=3)
    permit = await pool.acquire()
    heavy = asyncio.create_task(pool.acquire(weight=3))
    await until_waiting(pool, 1)
    await pool.resize(2)
    with pytest.raises(NeverFits, match="can never fit") as raised:
        await asyncio.wait_for(heavy, 1)
    assert isinstance(raised.value, RedleaseError)
    assert isinstance(raised.value, ValueError)
    assert raised.value.resource == "two words {and} more"
    assert raised.value.ticket
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), NeverFits)
    assert await pool.release(permit)
