"""The queue: grants follow arrival among live waiters, and nobody passes (P2)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from redlease import AcquireTimeout

from helpers import cancel, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Permit, Redlease, Semaphore

    from conftest import MakeClient


async def drain(pool: Semaphore, tasks: list[asyncio.Task[Permit]]) -> list[int]:
    """Release each permit as it comes, and return the numbers of the tasks in the order of their fences."""
    done: list[tuple[int, int]] = []

    async def take(number: int, task: asyncio.Task[Permit]) -> None:
        permit = await task
        done.append((permit.fence, number))
        await pool.release(permit)

    await asyncio.gather(*(take(number, task) for number, task in enumerate(tasks)))
    return [number for _, number in sorted(done)]


async def test_grants_follow_arrival(client: Redlease) -> None:
    """Tasks of one client are granted in the order in which they asked."""
    lock = client.lock("r")
    permit = await lock.acquire()
    tasks = [asyncio.create_task(lock.acquire()) for _ in range(50)]
    await until_waiting(lock, 50)
    await lock.release(permit)
    assert await drain(lock, tasks) == list(range(50))


async def test_grants_follow_arrival_across_clients(make_client: MakeClient, engine: str) -> None:
    """Tasks of several clients are granted in the order in which the server saw them."""
    locks = [(await make_client()).lock("r") for _ in range(3)]
    permit = await locks[0].acquire()
    tasks = []
    for number in range(9):
        tasks += await queue_up(locks[number % 3], 1)
    await locks[0].release(permit)
    assert await drain(locks[1], tasks) == list(range(9))


async def test_a_newcomer_passes_nobody(client: Redlease, make_client: MakeClient) -> None:
    """Who asks at the moment of a release stands behind those who waited, try_acquire included."""
    lock, other = client.lock("r"), (await make_client()).lock("r")
    permit = await lock.acquire()
    tasks = await queue_up(lock, 2)
    released, newcomer, attempt = await asyncio.gather(lock.release(permit), queue_up(other, 1), other.try_acquire())
    assert released
    assert attempt is None
    assert await drain(lock, [*tasks, *newcomer]) == [0, 1, 2]


async def test_a_heavy_waiter_is_not_starved(client: Redlease) -> None:
    """While a heavy request is at the head, light ones behind it wait though they would fit."""
    pool = client.semaphore("r", capacity=3)
    held = [await pool.acquire() for _ in range(2)]
    heavy = await queue_up(pool, 1, weight=3)
    light = await queue_up(pool, 2)
    assert await pool.try_acquire() is None
    with pytest.raises(AcquireTimeout):
        await pool.acquire(timeout=0)
    assert await pool.release(held[0])
    assert await pool.try_acquire() is None
    assert not heavy[0].done()
    assert await pool.release(held[1])
    permit = await heavy[0]
    assert permit.weight == 3
    assert not light[0].done()
    assert await pool.release(permit)
    assert [(await task).weight for task in light] == [1, 1]


async def test_all_that_fit_are_granted_at_once(client: Redlease) -> None:
    """One release of a heavy permit grants every waiter for whom there is room now."""
    pool = client.semaphore("r", capacity=5)
    heavy = await pool.acquire(weight=5)
    tasks = [(await queue_up(pool, 1, weight=weight))[0] for weight in (2, 1, 2, 1)]
    assert await pool.release(heavy)
    permits = [await task for task in tasks[:3]]
    assert [permit.weight for permit in permits] == [2, 1, 2]
    assert not tasks[3].done()
    assert [permit.fence for permit in permits] == sorted(permit.fence for permit in permits)
    assert await pool.release(permits[1])
    assert (await tasks[3]).weight == 1


async def test_a_head_that_leaves_lets_those_behind_it_in(client: Redlease) -> None:
    """When a heavy head gives up, the light ones that it kept out are granted at once."""
    pool = client.semaphore("r", capacity=3)
    await pool.acquire(weight=2)
    heavy = await queue_up(pool, 1, weight=3)
    light = await queue_up(pool, 1)
    await cancel(*heavy)
    assert (await asyncio.wait_for(light[0], 5)).weight == 1


async def test_who_leaves_disturbs_nobody(client: Redlease) -> None:
    """The others keep their order when some of them give up."""
    lock = client.lock("r")
    permit = await lock.acquire()
    tasks = await queue_up(lock, 10)
    await cancel(*tasks[1::2])
    await until_waiting(lock, 5)
    await lock.release(permit)
    assert await drain(lock, tasks[::2]) == [0, 1, 2, 3, 4]


@pytest.mark.slow
async def test_a_place_is_kept_as_long_as_it_takes(make_client: MakeClient, engine: str) -> None:
    """Who waits for twice the waiter lease and more keeps place and order."""
    locks = [(await make_client(waiter_lease=1)).lock("r") for _ in range(2)]
    hold = await locks[0].hold()
    tasks = [(await queue_up(locks[number % 2], 1))[0] for number in range(4)]
    order = await until_waiting(locks[0], 4)
    await asyncio.sleep(2.5)
    assert await until_waiting(locks[0], 4) == order
    assert await hold.release()
    assert await drain(locks[0], tasks) == [0, 1, 2, 3]


async def test_fences_grow_with_every_grant(client: Redlease) -> None:
    """Each grant has a greater fence than every one before it, whatever the capacity."""
    pool = client.semaphore("r", capacity=3)
    fences = []
    for _ in range(30):
        permit = await pool.acquire()
        fences.append(permit.fence)
        await pool.release(permit)
    assert fences == sorted(set(fences))
    assert (await pool.inspect()).fence == fences[-1]


@pytest.mark.slow
async def test_places_of_the_past_leave_nothing_behind(
    make_client: MakeClient, engine: str, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """However often a client has waited, the keys of the resource do not grow."""
    lock = (await make_client(waiter_lease=0.5)).lock("r")

    async def contended() -> None:
        permit = await lock.acquire()
        (task,) = await queue_up(lock, 1)
        await lock.release(permit)
        await lock.release(await task)

    async def size() -> int:
        places: int = await raw.zcard(f"{prefix}:{{r}}:waiters")
        fields: int = await raw.hlen(f"{prefix}:{{r}}:state")
        return places + fields

    await contended()
    before = await size()
    for _ in range(60):
        await contended()
    await asyncio.sleep(0.6)  # what can lapse has lapsed
    await contended()
    assert await size() <= before + 5
