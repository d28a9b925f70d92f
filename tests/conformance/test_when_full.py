"""`when_full`: a request that cannot be granted at once waits, is refused, or takes the place of older ones."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Literal

import pytest

from redlease import LeaseLost, Permit, QueueFull, Superseded, Withdrawn
from redlease._core.hold import HeldLease

from helpers import cancel, eventually, queue_up, until_waiting

if TYPE_CHECKING:
    from redlease import Redlease, Semaphore

    from conftest import MakeClient

WAITER: Literal["replace-waiter"] = "replace-waiter"
HOLDER: Literal["replace-holder"] = "replace-holder"
pytestmark = pytest.mark.timeout(60)


async def superseded(*tasks: asyncio.Task[Any]) -> None:
    """Wait until each of the requests has been replaced."""
    for task in tasks:
        with pytest.raises(Superseded, match="a newer request replaced ticket") as raised:
            await task
        assert isinstance(raised.value, Withdrawn)
        assert raised.value.resource == "r"
        assert raised.value.ticket


async def asked(pool: Semaphore, ticket: str, **options: Any) -> asyncio.Task[Permit]:
    """Start a request, and return it when it waits; it may have taken the place of others by then."""
    task = asyncio.create_task(pool.acquire(ticket=ticket, **options))

    async def waits() -> bool:
        return ticket in await waiting_tickets(pool)

    await eventually(waits)
    return task


async def served(pool: Semaphore, *tasks: asyncio.Task[Permit]) -> list[int]:
    """Release each permit as it comes, in whatever order; return the fences."""

    async def take(task: asyncio.Task[Permit]) -> int:
        permit = await task
        assert await pool.release(permit)
        return permit.fence

    return await asyncio.gather(*(take(task) for task in tasks))


async def waiting_tickets(pool: Semaphore) -> list[str]:
    """Return who waits, in the order of the queue."""
    return [waiter.ticket for waiter in (await pool.inspect()).waiters]


async def test_refuse(client: Redlease) -> None:
    """A request that cannot be granted at once raises `QueueFull`, and is not queued."""
    lock = client.lock("r")
    permit = await lock.acquire(when_full="refuse")
    for refused in (lock.acquire(when_full="refuse"), lock.hold(when_full="refuse").__aenter__()):
        with pytest.raises(QueueFull, match="no permit is free, and when_full is 'refuse'"):
            await refused
    assert not await waiting_tickets(lock)
    assert await lock.release(permit)
    async with lock.hold(when_full="refuse", timeout=5) as hold:
        assert hold.fence > permit.fence


async def test_of_a_key_only_the_newest_waits(client: Redlease) -> None:
    """Each request replaces the one of its key that waits; those of other keys, and those who hold, stay."""
    pool = client.semaphore("r", capacity=1)
    permit = await pool.acquire(key="a")
    ((of_b,), (without,)) = (await queue_up(pool, 1, key="b", ticket="b"), await queue_up(pool, 1, ticket="none"))
    older: list[asyncio.Task[Permit]] = []
    for number in range(3):
        older.append(await asked(pool, f"a{number}", key="a", when_full=WAITER))
        await superseded(*older[:-1][-1:])
        assert set(await waiting_tickets(pool)) == {"b", "none", f"a{number}"}
    assert await pool.is_held(permit)
    assert await pool.release(permit)
    assert min(await served(pool, of_b, without, older[-1])) > permit.fence


async def test_without_a_key(client: Redlease) -> None:
    """Requests without a key are one more key; one that replaces others may itself be replaced, or pass by none."""
    lock = client.lock("r")
    permit = await lock.acquire()
    of_key = await asked(lock, "of a key", key="a", when_full=WAITER)
    plain = await queue_up(lock, 3)
    newest = await asked(lock, "newest", when_full=WAITER)
    await superseded(*plain)
    (later,) = await queue_up(lock, 1)
    assert (await lock.inspect()).waiting == 3
    assert await lock.release(permit)
    await served(lock, of_key, newest, later)


async def test_a_waiter_that_replaces_does_not_count(client: Redlease) -> None:
    """`max_waiters` does not refuse a request that replaces others."""
    lock = client.lock("r", max_waiters=1)
    permit = await lock.acquire()
    (older,) = await queue_up(lock, 1)
    newer = await asked(lock, "newer", when_full=WAITER)
    await superseded(older)
    with pytest.raises(QueueFull):
        await lock.acquire()
    assert await lock.release(permit)
    assert await lock.release(await newer)


async def test_the_newest_of_many_takes_over(client: Redlease) -> None:
    """It finds the holder of its key among hundreds, wherever that stands; those of other keys stay."""
    pool = client.semaphore("r", capacity=600)
    held = await asyncio.gather(*(pool.acquire(key=f"k{number}") for number in range(600)))
    await asyncio.gather(*(pool.renew(permit) for permit in held[:300]))
    newest = [asyncio.create_task(pool.acquire(key=f"k{number}", when_full=HOLDER)) for number in (0, 250, 299, 599)]

    async def ended() -> bool:
        return sum([not await pool.is_held(permit) for permit in held]) == len(newest)

    await eventually(ended)
    for number, task in zip((0, 250, 299, 599), newest, strict=True):
        assert not await pool.is_held(held[number])
        assert await pool.release(held[number])
        await task


@pytest.mark.of_tasks("a loss cancels a body that is a task")
async def test_the_newest_takes_over(client: Redlease) -> None:
    """The body of the older hold is cancelled, with an error that names the newer; that begins when it has ended."""
    lock, began, ended = client.lock("r"), asyncio.Event(), asyncio.Event()
    errors: list[LeaseLost] = []

    async def older() -> None:
        try:
            async with lock.hold(key="main", ticket="build 1") as hold:
                began.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    assert hold.lost
                    assert not await lock.is_held(hold.permit)
                    assert (await lock.inspect()).waiting == 1
                    ended.set()
        except LeaseLost as error:
            errors.append(error)

    body = asyncio.create_task(older())
    await began.wait()
    async with lock.hold(key="main", ticket="build 2", when_full=HOLDER) as newer:
        assert ended.is_set()
        assert not newer.lost
    await body
    assert "the newer request 'build 2' replaced it" in str(errors[0])
    assert (errors[0].resource, errors[0].ticket) == ("r", "build 1")


async def test_a_permit_is_replaced(client: Redlease) -> None:
    """What `acquire` returned is no longer held at once; the newer begins when it is released, by its old fence."""
    lock = client.lock("r")
    older = await lock.acquire()
    (newer,) = await queue_up(lock, 1, when_full=HOLDER, grace=60)
    await until_not_held(lock, older)
    with pytest.raises(LeaseLost):
        await lock.renew(older)
    with pytest.raises(LeaseLost):
        await lock.adopt(older)
    assert not newer.done()
    assert await lock.release(older)
    permit = await newer
    assert permit.fence > older.fence
    assert await lock.release(permit)


async def is_not_held(pool: Semaphore, permit: Permit) -> bool:
    """Tell whether a permit is not held."""
    return not await pool.is_held(permit)


async def until_not_held(pool: Semaphore, permit: Permit) -> None:
    """Wait until a permit is not held."""
    await eventually(lambda: is_not_held(pool, permit))


async def test_the_grace_time(client: Redlease) -> None:
    """Who does not release is waited for as long as `grace`, or until its lease ends."""
    lock = client.lock("r", lease=60)
    older = await lock.acquire()
    newer = await lock.acquire(when_full=HOLDER, grace=0.2, timeout=30)
    assert newer.fence > older.fence
    assert not await lock.release(older)
    assert await lock.release(newer)
    short = client.lock("r", lease=0.3)
    await short.acquire()
    newer = await lock.acquire(when_full=HOLDER, grace=60, timeout=30)
    assert await lock.release(newer)


async def test_as_many_as_it_takes(client: Redlease) -> None:
    """Of the holders of its key the oldest go, until the newer fits; those of other keys stay."""
    pool = client.semaphore("r", capacity=4)
    other = await pool.acquire(key="b")
    older = [await pool.acquire(key="a") for _ in range(3)]
    (waiter,) = await queue_up(pool, 1, key="a")
    newer = await asked(pool, "newer", key="a", weight=2, when_full=HOLDER, grace=60)
    await superseded(waiter)
    await until_not_held(pool, older[1])
    assert [await pool.is_held(permit) for permit in (*older, other)] == [False, False, True, True]
    for permit in older[:2]:
        assert await pool.release(permit)
    permit = await newer
    assert await pool.is_held(older[2])
    for each in (permit, older[2], other):
        assert await pool.release(each)


async def test_a_key_at_its_limit(client: Redlease) -> None:
    """A request replaces a holder of its key for the sake of `per_key`, though capacity is free."""
    pool = client.semaphore("r", capacity=4, per_key=1)
    older = await pool.acquire(key="a")
    newer = await pool.acquire(key="a", when_full=HOLDER, grace=0.1, timeout=30)
    assert not await pool.is_held(older)
    assert await pool.release(newer)


async def test_a_free_unit_replaces_nobody(client: Redlease) -> None:
    """A request that is granted at once replaces nobody."""
    pool = client.semaphore("r", capacity=2)
    older = await pool.acquire()
    newer = await pool.acquire(when_full=HOLDER)
    assert await pool.is_held(older)
    assert await pool.release(older)
    assert await pool.release(newer)


async def test_many_at_once(client: Redlease) -> None:
    """However many requests of a key ask at once, the last to arrive is granted in the end, and one holds at a time."""
    lock = client.lock("r", history=1000)
    first = await lock.acquire(key="a")
    tasks = [asyncio.create_task(lock.acquire(key="a", when_full=HOLDER, grace=60)) for _ in range(20)]
    await eventually(lambda: sum(task.done() for task in tasks) == 19)
    (left,) = (task for task in tasks if not task.done())
    await superseded(*(task for task in tasks if task is not left))
    assert await lock.release(first)
    assert await lock.release(await left)
    events = [entry.event for entry in await lock.history(1000)]
    assert events.count("superseded") == 20
    assert events.count("granted") == events.count("released") == 2


async def test_who_was_replaced_may_ask_again(make_client: MakeClient, engine: str) -> None:
    """A ticket whose permit was replaced is refused until it ends, and then it is one like any other."""
    client, other = await make_client(), await make_client()
    lock = client.lock("r", lease=60)
    older = await lock.acquire(ticket="t")
    (newer,) = await queue_up(other.lock("r"), 1, when_full=HOLDER, grace=60)
    await until_not_held(lock, older)
    await superseded(asyncio.ensure_future(lock.acquire(ticket="t")))
    assert await lock.release(older)
    assert await lock.release(await newer)
    again = await lock.acquire(ticket="t")
    assert again.fence > newer.result().fence
    assert await lock.release(again)


async def test_history_and_cancellation(client: Redlease) -> None:
    """The history says who was replaced; a request that is cancelled after it replaced others leaves nothing behind."""
    lock = client.lock("r", history=100)
    older = await lock.acquire(ticket="holder")
    (waiter,) = await queue_up(lock, 1, ticket="waiter")
    newer = await asked(lock, "newer", when_full=HOLDER, grace=60)
    await superseded(waiter)
    await until_not_held(lock, older)
    await cancel(newer)
    await until_waiting(lock, 0)
    told = [(entry.event, entry.ticket, entry.fence) for entry in await lock.history()]
    assert told == [
        ("granted", "holder", older.fence),
        ("superseded", "waiter", 0),
        ("superseded", "holder", older.fence),
    ]
    assert await lock.release(older)
    assert await lock.release(await lock.acquire())


@pytest.mark.of_tasks("it shows that a message comes between the grant and the body")
async def test_who_is_replaced_before_its_body_begins_makes_room(client: Redlease) -> None:
    """However often a hold is replaced just as it is granted, the next does not wait for the grace time of 60 s."""
    lock = client.lock("r")

    async def newest() -> bool:
        try:
            async with lock.hold(when_full=HOLDER, grace=60):
                await asyncio.sleep(0)
        except (LeaseLost, Superseded):
            return False
        return True

    for _ in range(10):
        outcomes = await asyncio.gather(*(newest() for _ in range(20)))
        assert any(outcomes)
    assert await lock.release(await lock.acquire(timeout=20))


async def test_a_block_that_is_left_makes_room(client: Redlease) -> None:
    """With `on_lost="signal"` nothing is cancelled; the newer begins when the block is left or the hold released."""
    lock = client.lock("r")
    async with lock.hold(on_lost="signal") as older:
        newer = await asked(lock, "newer", when_full=HOLDER, grace=60)
        await eventually(lambda: older.lost)
        assert not newer.done()
    assert await lock.release(await newer)
    hold = await lock.hold(on_lost="signal")
    newest = await asked(lock, "newest", when_full=HOLDER, grace=60)
    await eventually(lambda: hold.lost)
    assert not await hold.release()
    assert await lock.release(await newest)


@pytest.mark.of_tasks("a message is kept from the client, whose loop is that of the test")
async def test_a_holder_that_did_not_hear_of_it(
    make_client: MakeClient, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next renewal says that the permit is lost; the newer begins when its block is left."""
    client, other = await make_client(), await make_client()
    lock = client.lock("r", lease=3)
    monkeypatch.setattr(HeldLease, "on_message", lambda _, message: None)
    with pytest.raises(LeaseLost, match="replaced"):
        async with lock.hold() as older:
            newer = await asked(other.lock("r"), "newer", when_full=HOLDER, grace=60)
            await eventually(lambda: older.lost)
    assert await other.lock("r").release(await asyncio.wait_for(newer, 20))


@pytest.mark.slow
async def test_more_than_a_hundred(client: Redlease) -> None:
    """However many wait, all of them are replaced."""
    lock = client.lock("r", lease=300, waiter_lease=300)
    permit = await lock.acquire(ticket="first")
    older = await queue_up(lock, 105)
    newest = await asked(lock, "newest", when_full=WAITER)
    await superseded(*older)
    assert await waiting_tickets(lock) == ["newest"]
    assert await lock.release(permit)
    assert await lock.release(await newest)


async def test_beside_limits(client: Redlease) -> None:
    """A limit of an operator counts as the capacity does; while grants are paused the older one is replaced too."""
    pool = client.semaphore("r", capacity=3)
    older = await pool.acquire()
    await pool.set_limit(1)
    limited = await asked(pool, "limited", when_full=HOLDER, grace=60)
    await until_not_held(pool, older)
    await pool.pause()
    assert await pool.release(older)
    newest = await asked(pool, "newest", when_full=HOLDER)
    await superseded(limited)
    await pool.resume()
    assert await pool.release(await newest)


@pytest.mark.parametrize("key", ["a", None])
async def test_the_units_of_a_permit_are_for_who_replaced_it(client: Redlease, key: str | None) -> None:
    """They do not go to requests of other keys that have waited for longer, at a limit of its key or without one."""
    for per_key in (None, 1):
        pool = client.semaphore("r", capacity=2, per_key=per_key)
        other = await pool.acquire(key="b")
        older = await pool.acquire(key=key)
        (waiting,) = await queue_up(pool, 1, key="c")
        newer = await asked(pool, "newer", key=key, when_full=HOLDER, grace=60)
        await until_not_held(pool, older)
        assert await pool.release(older)
        permit = await newer
        assert not waiting.done()
        assert await pool.release(permit)
        assert await pool.release(await waiting)
        assert await pool.release(other)


async def test_who_asks_again_after_the_grace_time_leaves_the_units_to_who_replaced_it(client: Redlease) -> None:
    """The call that finds the replaced permit expired is that of its own ticket."""
    pool = client.semaphore("r", capacity=2)
    other = await pool.acquire(key="z")
    await pool.acquire(ticket="old", key="a")
    (waiting,) = await queue_up(pool, 1, key="b")
    newer = await asked(pool, "newer", key="a", when_full=HOLDER, grace=0.2)
    again = asyncio.create_task(pool.acquire(ticket="old", key="a"))
    permit = await newer
    assert not waiting.done()
    assert await pool.release(permit)

    async def ends(task: asyncio.Task[Permit]) -> None:
        with contextlib.suppress(Superseded):  # until the grace time is over
            await pool.release(await task)

    await asyncio.gather(ends(waiting), ends(again))
    assert await pool.release(other)


async def test_a_request_with_a_priority_that_came_later_is_not_replaced(client: Redlease) -> None:
    """The order of arrival counts, and not that in which they are served."""
    lock = client.lock("r")
    permit = await lock.acquire(key="a")
    (older,) = await queue_up(lock, 1, key="a")
    newer = await asked(lock, "newer", key="a", when_full=WAITER)
    await superseded(older)
    (urgent,) = await queue_up(lock, 1, key="a", priority=1)
    assert await lock.release(permit)
    assert await lock.release(await urgent)
    assert await lock.release(await newer)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"when_full": "drop"}, "when_full must be one of"),
        ({"when_full": WAITER, "timeout": 0}, "goes without a timeout of 0"),
        ({"when_full": HOLDER, "priority": 1}, "goes without a priority"),
        ({"when_full": HOLDER, "grace": -1}, "grace"),
    ],
)
async def test_wrong_parameters(client: Redlease, options: dict[str, Any], match: str) -> None:
    """They are refused before anything is sent."""
    with pytest.raises(ValueError, match=match):
        await client.lock("r").acquire(**options)
    with pytest.raises(ValueError, match=match):
        client.lock("r").hold(**options)


async def test_read_write_locks(client: Redlease) -> None:
    """A read-write lock has no such thing."""
    with pytest.raises(ValueError, match="read-write lock"):
        await client.rwlock("r").read.acquire(when_full=HOLDER)
