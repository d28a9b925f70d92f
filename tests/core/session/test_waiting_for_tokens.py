"""Who waits for a token of a rate asks when it is due, and not in between."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

from redlease import Rate, Redlease

from helpers import queue_up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from conftest import OwnServer

    Clients = Callable[[int], Any]

WAITERS = 30
HOURLY = Rate(1, per=3600)
SOON_SECONDS = 8  # far below what a client waits that is not told: a third of its waiter lease
WAYS = {"rate": ({"rate": HOURLY}, {}), "per_key_rate": ({"per_key_rate": HOURLY}, {"key": "a"})}


@pytest.fixture
async def server(own_server: OwnServer) -> Any:
    """A server whose scripts are counted."""
    return own_server("valkey9")


@pytest.fixture
async def clients(server: Any, prefix: str) -> AsyncIterator[Clients]:
    """What makes clients that would ask every 40 s if they were told nothing."""
    async with AsyncExitStack() as stack:

        async def make(count: int) -> list[Redlease]:
            made = [Redlease.from_url(server.url, prefix=prefix, waiter_lease=120) for _ in range(count)]
            return [await stack.enter_async_context(client) for client in made]

        yield make


async def scripts_run(raw: redis.asyncio.Redis) -> int:
    """Return how many scripts the server has run."""
    stats: dict[str, Any] = await raw.info("commandstats")
    return int(stats["cmdstat_evalsha"]["calls"])


@pytest.mark.parametrize(
    ("limits", "keys"),
    [({"rate": Rate(20)}, [None]), ({"per_key_rate": Rate(20)}, ["a"]), ({"per_key_rate": Rate(7)}, ["a", "b", "c"])],
    ids=["rate", "one key", "three keys"],
)
@pytest.mark.parametrize("count", [3, WAITERS])
async def test_a_waiter_asks_a_few_times(
    server: Any, clients: Clients, limits: dict[str, Rate], keys: list[str | None], count: int
) -> None:
    """Thirty waiters, of few clients or of one each, are granted with at most eight calls each."""
    async with redis.asyncio.Redis.from_url(server.url) as raw:
        pools = [client.semaphore("r", capacity=WAITERS, **limits) for client in await clients(count)]
        await pools[0].pause()
        waiting = []
        for number in range(WAITERS):
            waiting += await queue_up(pools[number % count], 1, key=keys[number % len(keys)])
        before = await scripts_run(raw)
        await pools[0].resume()
        await asyncio.gather(*waiting)
        assert await scripts_run(raw) - before <= 8 * WAITERS


@pytest.mark.parametrize("way", WAYS)
async def test_a_faster_rate_wakes_who_waits(clients: Clients, way: str) -> None:
    """A rate that a refused request declares is that of those who wait already."""
    (limits, key), (first, second) = WAYS[way], await clients(2)
    pool = first.semaphore("r", capacity=9, **limits)
    await pool.acquire(**key)
    (waiting,) = await queue_up(pool, 1, **key)
    faster = second.semaphore("r", capacity=9, **dict.fromkeys(limits, Rate(1)))
    assert await faster.try_acquire(**key) is None
    async with asyncio.timeout(SOON_SECONDS):
        await waiting


@pytest.mark.parametrize("way", WAYS)
async def test_the_next_is_told_when_those_before_it_leave(clients: Clients, way: str) -> None:
    """Who has taken the first place waits for one token, and not for those of the requests that have ended."""
    (limits, key), users = WAYS[way], await clients(12)
    pools = [client.semaphore("r", capacity=90, **dict.fromkeys(limits, Rate(1))) for client in users]
    await pools[0].acquire(**key)
    waiting = [task for pool in pools for task in await queue_up(pool, 1, **key)]
    for task in waiting[:-1]:
        task.cancel()
    async with asyncio.timeout(SOON_SECONDS):
        await waiting[-1]


async def test_who_is_passed_is_told(clients: Clients) -> None:
    """Who is passed by a request for fewer units, which takes a token, learns when the next one is due."""
    first, second = await clients(2)
    pool, other = (client.semaphore("r", capacity=3, rate=Rate(1, per=1.5, burst=2)) for client in (first, second))
    held = [await pool.acquire()]
    (heavy,) = await queue_up(pool, 1, weight=3)
    held.append(await other.acquire(priority=1))
    for permit in held:
        await pool.release(permit)
    async with asyncio.timeout(SOON_SECONDS):
        await heavy


@pytest.mark.parametrize("way", ["rate", "per_key_rate", "per_key"])
async def test_a_repeated_request_declares_nothing_anew(server: Any, clients: Clients, way: str) -> None:
    """A waiter whose request its client repeats: what another client has declared since stays."""
    waits, declares = await clients(2)
    slow, fast = (1, 4) if way == "per_key" else (HOURLY, Rate(1000, burst=4))
    pool = waits.semaphore("r", capacity=9, **{way: slow})
    other = declares.semaphore("r", capacity=9, **{way: fast})
    await pool.acquire(key="a")
    (waiting,) = await queue_up(pool, 1, key="a")
    await other.pause()
    assert await other.try_acquire(key="b") is None
    (request,) = waits._session.pending
    async with redis.asyncio.Redis.from_url(server.url) as raw:
        await raw.publish(waits._session.connection.channel, f"x {request}")  # it repeats the request to see what is so
    await waits.lock("another").locked()  # its reply comes behind the message
    await pool.inspect()  # and this one behind that of the request
    await other.resume()
    async with asyncio.timeout(SOON_SECONDS):
        await waiting
        for _ in range(2):
            await other.acquire(key="a")


async def test_a_vendor_that_is_ready_earlier(clients: Clients) -> None:
    """Who waits for a key that was held back learns that it is no longer."""
    (client,) = await clients(1)
    pool = client.semaphore("r", capacity=9)
    await pool.back_off("a", 60)
    (waiting,) = await queue_up(pool, 1, key="a")
    await pool.back_off("a", 0.5)
    assert await pool.end_back_off("a")
    async with asyncio.timeout(SOON_SECONDS):
        await waiting


@pytest.mark.parametrize("how", ["per_key", "held back"])
async def test_who_cannot_be_granted_does_not_ask(server: Any, clients: Clients, how: str) -> None:
    """While other keys use every token, waiters of a key at its limit call no more than if there were no rate."""
    (busy, *waiters), grants = await clients(11), 60
    pool, *pools = (c.semaphore("r", capacity=50, per_key=1, rate=Rate(100, burst=3)) for c in (busy, *waiters))
    await pool.acquire(key="a")
    if how == "held back":
        await pool.back_off("a", 60)
    waiting = [task for each in pools for task in await queue_up(each, 1, key="a")]
    async with redis.asyncio.Redis.from_url(server.url) as raw:
        before = await scripts_run(raw)
        for _ in range(grants):
            await pool.release(await pool.acquire(key="b"))
        assert await scripts_run(raw) - before <= 5 * grants
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_the_next_is_told_of_what_else_it_waits_for(clients: Clients) -> None:
    """Those before it leave when a token is there, and the resource is paused: it learns when the pause ends."""
    users = await clients(12)
    pools = [client.semaphore("r", capacity=90, rate=Rate(1)) for client in users]
    await pools[0].acquire()
    waiting = [task for pool in pools for task in await queue_up(pool, 1)]
    await pools[0].pause(until=1.8)
    await asyncio.sleep(1.2)
    for task in waiting[:-1]:
        task.cancel()
    async with asyncio.timeout(SOON_SECONDS):
        await waiting[-1]


async def test_the_next_of_a_key_that_is_held_back(clients: Clients) -> None:
    """The first waiter of a key leaves while the key is held back: the next one learns until when it is."""
    first, second = await clients(2)
    pool, other = (client.semaphore("r", capacity=9, per_key=1) for client in (first, second))
    held = await pool.acquire(key="a")
    (leaves,), (stays,) = await queue_up(pool, 1, key="a"), await queue_up(other, 1, key="a")
    await pool.back_off("a", 1)
    await pool.release(held)
    leaves.cancel()
    async with asyncio.timeout(SOON_SECONDS):
        await stays


async def test_a_turn_that_comes_while_there_is_no_token(clients: Clients) -> None:
    """A release gives a key its turn while nobody has a token: its waiter learns when the next one is due."""
    rate = Rate(1, per=0.6)
    pool, *others = (each.semaphore("r", capacity=9, per_key=1, rate=rate) for each in await clients(4))
    held = [await pool.acquire(key="a"), await pool.acquire(key="b")]
    (of_a,), (of_b,) = await queue_up(others[0], 1, key="a"), await queue_up(others[1], 1, key="b")
    await others[2].acquire(key="c")
    of_b.cancel()
    await pool.release(held[0])
    async with asyncio.timeout(SOON_SECONDS):
        await of_a


@pytest.mark.parametrize("way", ["rate", "per_key_rate", "per_key"])
async def test_a_ticket_that_holds_declares(clients: Clients, way: str) -> None:
    """A request for a permit that is held already declares more: who waits gets it."""
    first, second = await clients(2)
    less, more = (1, 2) if way == "per_key" else (HOURLY, Rate(2))
    pool, other = first.semaphore("r", 9, **{way: less}), second.semaphore("r", 9, **{way: more})
    await pool.acquire(key="a", ticket="T")
    (waiting,) = await queue_up(pool, 1, key="a")
    await other.acquire(key="a", ticket="T")
    async with asyncio.timeout(SOON_SECONDS):
        await waiting
