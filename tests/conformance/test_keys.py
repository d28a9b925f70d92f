"""Keys: requests with different keys take turns, by their shares, and no key has more units than its limit."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from redlease import AcquireTimeout, QueueFull, Superseded

from helpers import cancel, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Permit, Redlease, Semaphore

    from conftest import MakeClient

Waiting = list[tuple[str, asyncio.Task["Permit"]]]


async def queue_keys(pool: Semaphore, keys: str, shares: dict[str, float] | None = None) -> Waiting:
    """Queue a request for each letter, with that key, in this order; a dash has none."""
    found: Waiting = []
    for letter in keys:
        options = {} if letter == "-" else {"key": letter, "share": (shares or {}).get(letter, 1)}
        found += [(letter, task) for task in await queue_up(pool, 1, **options)]
    return found


async def served(pool: Semaphore, waiting: Waiting) -> str:
    """Release each permit as it comes, and return the keys in the order of the fences."""
    done: list[tuple[int, str]] = []

    async def take(key: str, task: asyncio.Task[Permit]) -> None:
        permit = await task
        done.append((permit.fence, key))
        await pool.release(permit)

    await asyncio.gather(*(take(key, task) for key, task in waiting))
    return "".join(key for _, key in sorted(done))


async def test_keys_take_turns(client: Redlease) -> None:
    """Who came with a key of few requests does not wait for all of a key with many; each key is served in order."""
    lock = client.lock("r")
    taken = await lock.acquire()
    waiting = await queue_keys(lock, "aaaaaaabbc")
    assert Counter(waiter.key for waiter in (await lock.inspect()).waiters) == {"a": 7, "b": 2, "c": 1}
    assert await lock.release(taken)
    order = await served(lock, waiting)
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order[3:5]) == ["a", "b"]
    assert order[5:] == "aaaaa"
    assert [task.result().key for _, task in waiting] == list("aaaaaaabbc")
    for key in "ab":
        fences = [task.result().fence for its, task in waiting if its == key]
        assert fences == sorted(fences)


async def test_requests_without_a_key_are_one_more(client: Redlease) -> None:
    """They keep their order, whatever came before them, and take turns with the keys."""
    lock = client.lock("r")
    taken = await lock.acquire()
    waiting = await queue_keys(lock, "---aaa--b")
    assert await lock.release(taken)
    order = await served(lock, waiting)
    assert sorted(order[:3]) == ["-", "a", "b"]
    assert sorted(order[3:5]) == sorted(order[5:7]) == ["-", "a"]
    fences = [task.result().fence for its, task in waiting if its == "-"]
    assert fences == sorted(fences)


async def test_shares_of_the_turns(client: Redlease) -> None:
    """Of keys with the shares 1, 2 and 4 that always wait, each gets turns in that proportion."""
    lock = client.lock("r")
    taken = await lock.acquire()
    waiting = await queue_keys(lock, "abc" * 8, {"a": 1, "b": 2, "c": 4})
    assert await lock.release(taken)
    assert Counter((await served(lock, waiting))[:14]) == {"a": 2, "b": 4, "c": 8}


async def test_weights_count(client: Redlease) -> None:
    """A key whose requests weigh twice as much gets half as many turns."""
    pool = client.semaphore("r", capacity=2)
    taken = await pool.acquire(weight=2)
    waiting: Waiting = []
    for _ in range(6):
        waiting += [("h", task) for task in await queue_up(pool, 1, key="h", weight=2)]
        waiting += [("l", task) for task in await queue_up(pool, 1, key="l")]
    assert await pool.release(taken)
    assert Counter((await served(pool, waiting))[:6]) == {"h": 2, "l": 4}


async def test_a_limit_for_each_key(client: Redlease) -> None:
    """A key at its limit waits and holds up nobody; a unit of it that is freed goes to its next request."""
    pool = client.semaphore("r", capacity=5, per_key=2)
    first = [await pool.acquire(key="a") for _ in range(2)]
    waiting = await queue_up(pool, 2, key="a")
    assert await pool.try_acquire(key="a") is None
    with pytest.raises(AcquireTimeout):
        await pool.acquire(key="a", timeout=0)
    others = [await pool.acquire(key="b", timeout=0), await pool.acquire(timeout=0), await pool.acquire(timeout=0)]
    assert await pool.try_acquire() is None
    assert await pool.release(others[2])
    assert not any(task.done() for task in waiting)
    assert await pool.release(first[0])
    assert (await waiting[0]).key == "a"
    assert not waiting[1].done()
    await cancel(*waiting)


async def test_a_key_that_fills_the_queue_with_its_own(client: Redlease) -> None:
    """With max_waiters_per_key of a key its next request is refused; others queue, and who leaves makes place."""
    lock = client.lock("r")
    pool = client.semaphore("r", 1, max_waiters=6, max_waiters_per_key=2)
    taken = await lock.acquire()
    waiting = await queue_keys(pool, "aab---")
    with pytest.raises(QueueFull, match="2 requests of key 'a' wait already and max_waiters_per_key is 2") as caught:
        await pool.acquire(key="a", ticket="third")
    assert (caught.value.resource, caught.value.ticket) == ("r", "third")
    with pytest.raises(QueueFull, match="6 requests wait already and max_waiters is 6"):
        await pool.acquire(key="b")
    await cancel(waiting.pop(1)[1])
    await until_waiting(lock, 5)
    waiting += await queue_keys(pool, "a")
    assert await lock.release(taken)
    assert Counter(await served(pool, waiting)) == {"a": 2, "b": 1, "-": 3}


async def test_a_key_at_its_limit_has_a_queue_too(client: Redlease) -> None:
    """Waiters of a key that has no turn count as others do; with 0 a key's request is granted or refused at once."""
    pool = client.semaphore("r", 5, per_key=1, max_waiters_per_key=1)
    taken = await pool.acquire(key="a")
    waiting = await queue_keys(pool, "a")
    with pytest.raises(QueueFull):
        await pool.acquire(key="a")
    none = client.semaphore("r", 5, max_waiters_per_key=0)
    with pytest.raises(QueueFull, match="0 requests of key 'b' wait already"):
        await asyncio.gather(*(none.acquire(key="b") for _ in range(2)))
    assert await pool.release(taken)
    assert await served(pool, waiting) == "a"


async def test_the_newest_of_a_key_fits_a_full_queue(client: Redlease) -> None:
    """`max_waiters_per_key` does not refuse a request that takes the place of others of its key."""
    pool = client.semaphore("r", 1, max_waiters_per_key=1)
    taken = await pool.acquire()
    (_, older), *_ = await queue_keys(pool, "a")
    newest = asyncio.create_task(pool.acquire(key="a", when_full="replace-waiter"))
    with pytest.raises(Superseded):
        await older
    assert await pool.release(taken)
    assert await pool.release(await newest)


async def test_dead_waiters_do_not_fill_a_key(make_client: MakeClient, engine: str) -> None:
    """Those of a process that ended make room for a request of their key, behind one that lives too."""
    client = await make_client()
    pool = client.semaphore("r", 1, max_waiters_per_key=3)
    taken = await pool.acquire()
    waiting = await queue_keys(pool, "a")
    dying = await make_client(waiter_lease=0.3)
    dead = await queue_keys(dying.semaphore("r", 1), "aa")
    await dying.abandon()
    await until_waiting(pool, 1)
    waiting += await queue_keys(pool, "aa")
    with pytest.raises(QueueFull, match="3 requests"):
        await pool.acquire(key="a")
    assert await pool.release(taken)
    assert await served(pool, waiting) == "aaa"
    await cancel(*(task for _, task in dead))


async def test_what_never_fits_a_key_is_refused(client: Redlease) -> None:
    """A weight above the limit of a key is an error, and so is a share without a key, or a key that is no text."""
    pool = client.semaphore("r", capacity=5, per_key=2)
    with pytest.raises(ValueError, match="2"):
        await pool.acquire(key="a", weight=3)
    await pool.release(await pool.acquire(weight=3))
    for wrong in ({"share": 2}, {"key": ""}, {"key": "k" * 257}, {"key": 7}, {"key": "a", "share": 0}):
        with pytest.raises(ValueError, match=r"share|key"):
            await pool.acquire(**wrong)
    with pytest.raises(ValueError, match="per_key"):
        client.semaphore("r", capacity=5, per_key=-1)
    assert (await pool.inspect()).holders == ()


async def test_a_limit_is_raised_and_lowered(client: Redlease) -> None:
    """The next acquire stores another limit: a higher one is used at once, and a lower one takes nobody's permit."""
    pool, wider = client.semaphore("r", capacity=6, per_key=1), client.semaphore("r", capacity=6, per_key=3)
    first = await pool.acquire(key="a")
    waiting = await queue_up(pool, 3, key="a")
    other = await wider.acquire(key="b")
    permits = [await waiting[0], await waiting[1]]
    assert not waiting[2].done()
    narrow = await pool.acquire(key="c")
    assert await pool.release(permits[0])
    assert await pool.release(permits[1])
    assert [holder.key for holder in (await pool.inspect()).holders] == ["a", "b", "c"]
    assert await pool.release(first)
    permits = [await waiting[2], other, narrow]
    assert all([await pool.release(permit) for permit in permits])


async def test_a_limit_that_an_expired_permit_uses(make_client: MakeClient, engine: str) -> None:
    """A permit whose lease is over does not count: the next request of its key is granted at that moment."""
    pool = (await make_client(lease=0.3)).semaphore("r", capacity=5, per_key=1)
    await pool.acquire(key="a")
    assert (await asyncio.wait_for(pool.acquire(key="a"), 5)).key == "a"
    await asyncio.sleep(0.35)
    assert await pool.try_acquire(key="a") is not None


async def test_a_dead_waiter_holds_up_nobody_of_its_key(make_client: MakeClient, engine: str) -> None:
    """Of a key at its limit the first waiter may be dead and too heavy: the next one is granted all the same."""
    client, gone = [await make_client(waiter_lease=0.6) for _ in range(2)]
    pool = client.semaphore("r", capacity=5, per_key=2)
    await pool.acquire(key="a")
    dead = await queue_up(gone.semaphore("r", capacity=5, per_key=2), 1, key="a", weight=2)
    waiting = await queue_up(pool, 1, key="a")
    await gone.abandon()
    assert (await asyncio.wait_for(waiting[0], 10)).key == "a"
    await cancel(*dead)


async def test_who_leaves_costs_its_key_no_turn(client: Redlease) -> None:
    """The next request of a key gets the turn of one that gave up."""
    lock = client.lock("r")
    taken = await lock.acquire()
    waiting = await queue_keys(lock, "aabbb")
    await cancel(waiting[0][1])
    await until_waiting(lock, 4)
    assert await lock.release(taken)
    order = await served(lock, waiting[1:])
    assert sorted(order[:2]) == ["a", "b"]


async def test_a_priority_counts_within_a_key(client: Redlease) -> None:
    """It passes requests of its own key, and its key gets no more turns for it."""
    lock = client.lock("r")
    taken = await lock.acquire()
    waiting = await queue_keys(lock, "aabb")
    urgent = (await queue_up(lock, 1, key="a", ticket="urgent", priority=1))[0]
    assert await lock.release(taken)
    order = await served(lock, [*waiting, ("A", urgent)])
    assert order.index("A") < order.index("a")
    assert sorted(order[:4].lower()) == ["a", "a", "b", "b"]


async def test_a_key_stays_with_its_permit(client: Redlease, make_client: MakeClient) -> None:
    """A repeated request and an adoption keep it, with its units; `hold` takes one too."""
    pool = client.semaphore("r", capacity=3, per_key=1)
    permit = await pool.acquire(key="a", ticket="t")
    again = await (await make_client()).semaphore("r", capacity=3, per_key=1).acquire(key="a", ticket="t")
    assert (again.fence, again.key) == (permit.fence, "a")
    hold = await pool.adopt(permit)
    assert hold.permit.key == "a"
    assert [holder.key for holder in (await pool.inspect()).holders] == ["a"]
    assert await pool.try_acquire(key="a") is None
    assert await hold.release()
    async with pool.hold(key="a", share=2) as hold:
        assert hold.permit.key == "a"
        position = await pool.position(hold.permit.ticket)
        assert position is not None
        assert position.rank == 0


async def test_nothing_is_left_of_a_key(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """When nobody holds or waits with a key any more, the state of the resource has no trace of it."""
    pool = client.semaphore("r", capacity=1, per_key=1)
    taken = await pool.acquire(key="a")
    waiting = await queue_keys(pool, "abc-")
    await cancel(waiting[1][1])
    assert await pool.release(taken)
    assert sorted(await served(pool, [waiting[0], *waiting[2:]])) == ["-", "a", "c"]
    fields = {field[:1] for field in await raw.hkeys(f"{prefix}:{{r}}:state")}
    assert not fields & {"p", "q", "g", "t"}


async def test_a_ticket_has_one_key(client: Redlease, make_client: MakeClient) -> None:
    """Another key with a ticket that waits or is held is refused, and replaces nobody."""
    lock, other = client.lock("r"), (await make_client()).lock("r")
    held = await lock.acquire(ticket="held", key="a")
    (first,) = await queue_up(lock, 1, key="b")
    (waiting,) = await queue_up(lock, 1, ticket="waiting", key="a")
    for ticket, key in (("held", "b"), ("held", None), ("waiting", "b"), ("waiting", None)):
        with pytest.raises(ValueError, match=f"ticket '{ticket}' is known with another key than {key!r}"):
            await other.acquire(ticket=ticket, key=key, when_full="replace-waiter", timeout=20)
    assert [waiter.key for waiter in (await lock.inspect()).waiters] == ["b", "a"]
    assert await lock.release(held)
    assert await served(lock, [("b", first), ("a", waiting)]) == "ba"


async def test_who_is_held_back_waits_whatever_it_weighs(client: Redlease) -> None:
    """A weight that an operator has allowed to a key fits again when the key is no longer held back."""
    pool = client.semaphore("r", capacity=10, per_key=2)
    with pytest.raises(ValueError, match="weight 3 can never fit, a key may have at most 2"):
        await pool.acquire(key="a", weight=3)
    await pool.release(await pool.acquire(key="a"))
    await pool.set_limit(5, key="a")
    await pool.back_off("a", 0.3)
    new = await pool.acquire(key="a", weight=3, timeout=20)
    (waiting,) = await queue_up(pool, 1, key="a", weight=4)
    await pool.back_off("a", 0.3)
    assert await pool.release(new)
    assert await pool.release(await waiting)


async def test_a_writer_waits_no_longer_than_a_reader(client: Redlease) -> None:
    """The turn of a writer costs as much as that of a reader, so readers with keys do not pass one for ever."""
    lock = client.rwlock("r")
    first = await lock.read.acquire()
    writers = await queue_up(lock.write, 1, key="w")
    readers = await queue_up(lock.read, 4, key="a")
    assert await lock.read.release(first)
    writer = await writers[0]
    assert not any(reader.done() for reader in readers)
    assert await lock.write.release(writer)
    for reader in readers:
        assert await lock.read.release(await reader)
