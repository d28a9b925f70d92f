"""Rates: besides a free unit a grant needs a token, of which there are so many in a time."""

from __future__ import annotations

import asyncio
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Rate

from helpers import queue_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio

    from redlease import Permit, Redlease, Semaphore

    from conftest import MakeClient


def assert_keeps_to(rate: Rate, permits: Sequence[Permit | None]) -> None:
    """Assert that no time between two grants has more than the rate allows; a fence is the µs of its grant."""
    assert isinstance(rate.per, float | int)
    fences = sorted(permit.fence for permit in permits if permit is not None)
    for earlier, later in combinations(range(len(fences)), 2):
        seconds = (fences[later] - fences[earlier]) / 1e6
        allowed = rate.burst + rate.count / rate.per * seconds
        assert later - earlier + 1 <= allowed + 0.001, f"{later - earlier + 1} in {seconds} s"


async def test_a_burst_at_once(client: Redlease) -> None:
    """So many are granted at once, however many units are free, and then no more until a token is due."""
    pool = client.semaphore("r", capacity=10, rate=Rate(1, per=60, burst=3))
    at_once = [await pool.try_acquire() for _ in range(4)]
    assert [permit is not None for permit in at_once] == [True, True, True, False]
    assert await pool.locked()


async def test_then_the_rate(client: Redlease) -> None:
    """After the burst each waits for a token."""
    rate = Rate(20, burst=3)
    pool = client.semaphore("r", capacity=20, rate=rate)
    assert_keeps_to(rate, await asyncio.gather(*(pool.acquire() for _ in range(10))))


async def test_a_release_gives_no_token_back(client: Redlease) -> None:
    """Grants count, not permits."""
    pool = client.semaphore("r", capacity=1, rate=Rate(1, per=60))
    assert await pool.release(await pool.acquire())
    assert await pool.try_acquire() is None
    (limit,) = (await pool.inspect()).limits
    assert limit.kind == "rate"
    assert limit.until_ms is not None
    assert (await pool.inspect()).in_use == 0
    assert (await pool.inspect()).allowed == 1


async def test_who_waits_for_a_token_keeps_the_order(client: Redlease, make_client: MakeClient) -> None:
    """Requests of several clients are granted in the order of arrival, and none before its token."""
    rate = Rate(20)
    pools = [each.semaphore("r", capacity=100, rate=rate) for each in (client, await make_client())]
    taken = await pools[0].acquire()
    await pools[0].pause()
    waiting = []
    for number in range(9):
        waiting += await queue_up(pools[number % 2], 1)
    await pools[0].resume()
    permits = [await asyncio.wait_for(task, 10) for task in waiting]
    assert [permit.fence for permit in permits] == sorted(permit.fence for permit in permits)
    assert_keeps_to(rate, [taken, *permits])


async def test_another_rate_replaces_it(client: Redlease) -> None:
    """Whoever acquires with another rate sets it, and nobody waits for a token of the one before."""
    slow, fast = (client.semaphore("r", capacity=10, rate=Rate(*rate)) for rate in ((1, 3600), (1000, 1.0)))
    await slow.acquire()
    assert await slow.try_acquire() is None
    (waiting,) = await queue_up(slow, 1)
    await asyncio.wait_for(fast.acquire(), 5)
    await asyncio.wait_for(waiting, 5)


async def test_a_repeated_request_sets_the_rate_too(client: Redlease) -> None:
    """Who holds a permit already and asks for it with another rate lets those who wait for a token hear of it."""
    slow, fast = (client.semaphore("r", capacity=10, rate=Rate(*rate)) for rate in ((1, 3600), (1000, 1.0)))
    await slow.acquire(ticket="T")
    (waiting,) = await queue_up(slow, 1)
    await fast.acquire(ticket="T")
    await asyncio.wait_for(waiting, 5)


async def test_two_rates_in_turn_allow_no_more_than_the_higher_one(client: Redlease) -> None:
    """As in a rolling deployment: each change sets the rate, and none gives a token away."""
    lower, higher = Rate(40, burst=2), Rate(50, burst=3)
    pools = [client.semaphore("r", capacity=100, rate=rate) for rate in (lower, higher)]
    permits = await asyncio.gather(*(pools[number % 2].acquire() for number in range(20)))
    assert_keeps_to(higher, permits)


async def test_a_rate_is_switched_off(client: Redlease) -> None:
    """`rate=0` ends it for all, as 0 does with the other settings; a semaphore without one leaves it as it is."""
    slow, same, free = (
        client.semaphore("r", capacity=10, **given) for given in ({"rate": Rate(1, 3600)}, {}, {"rate": 0})
    )
    await slow.acquire()
    assert await same.try_acquire() is None
    (waiting,) = await queue_up(same, 1)
    await free.acquire()
    await asyncio.wait_for(waiting, 5)
    assert await same.try_acquire() is not None
    assert (await same.inspect()).limits == ()


async def test_each_key_has_its_own_tokens(client: Redlease) -> None:
    """One that has none waits, and those behind it with other keys, or without one, do not."""
    pool = client.semaphore("r", capacity=10, per_key_rate=Rate(1, per=3600, burst=2))
    assert [await pool.try_acquire(key="a") is not None for _ in range(3)] == [True, True, False]
    (waiting,) = await queue_up(pool, 1, key="a")
    assert await pool.try_acquire(key="b") is not None
    assert await pool.try_acquire() is not None
    limits = {limit.key: limit for limit in (await pool.inspect()).limits}
    assert limits.keys() == {"a"}
    assert limits["a"].kind == "rate"
    await client.semaphore("r", capacity=10, per_key_rate=0).acquire()
    assert (await asyncio.wait_for(waiting, 5)).key == "a"


async def test_who_waits_for_a_token_of_its_key_hears_when_it_is_due(client: Redlease) -> None:
    """It is granted then, though the leases of those who hold end much later."""
    rate = Rate(20, burst=2)
    pool = client.semaphore("r", capacity=100, per_key_rate=rate)
    tasks = [asyncio.create_task(pool.acquire(key=key)) for key in "abc" for _ in range(8)]
    permits = await asyncio.wait_for(asyncio.gather(*tasks), 10)
    for key in "abc":
        of_key = [permit for permit in permits if permit.key == key]
        assert len(of_key) == 8
        assert_keeps_to(rate, of_key)


async def test_what_a_key_had_is_forgotten_when_its_tokens_are_back(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A key that is gone leaves nothing behind for longer than that."""
    pool = client.semaphore("r", capacity=10, per_key_rate=Rate(100, burst=2))
    for key in "abc":
        async with pool.hold(key=key):
            pass
    await asyncio.sleep(0.05)
    async with pool.hold(key="d"):
        pass
    assert await raw.zcard(f"{prefix}:{{r}}:holders") == 1  # what the last key has spent


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": 0},
        {"count": 1, "per": 0},
        {"count": 1, "burst": 0},
        {"count": 1.5},
        {"count": 1, "per": 3600, "burst": 9000},
    ],
    ids=str,
)
async def test_a_wrong_rate(client: Redlease, wrong: dict[str, float]) -> None:
    """It is a ValueError when it is made, and so is something else in its place."""
    with pytest.raises(ValueError, match=r"Rate|limit|per|burst"):
        Rate(**wrong)  # type: ignore[arg-type]
    for parameter in ("rate", "per_key_rate"):
        for given in (5, False, "1:1"):
            with pytest.raises(ValueError, match=f"^{parameter} must be a Rate"):
                client.semaphore("r", capacity=1, **{parameter: given})  # type: ignore[arg-type]


async def estimated_minutes(pool: Semaphore) -> list[int]:
    """Return how many minutes each waiter waits, about."""
    positions = [await pool.position(waiter.ticket) for waiter in (await pool.inspect()).waiters]
    return [round((position.estimated_wait or 0) / 60) for position in positions if position]


@pytest.mark.parametrize(
    ("rates", "key"), [({"rate": Rate(1, per=60)}, None), ({"per_key_rate": Rate(1, per=60)}, "a")]
)
async def test_how_long_a_waiter_waits_for_a_token(client: Redlease, rates: dict[str, Any], key: str | None) -> None:
    """The estimate is no less than what the rate allows, that of all or that of its key."""
    pool = client.semaphore("r", capacity=9, **rates)
    await pool.acquire(key=key)
    waiting = await queue_up(pool, 3, key=key)
    assert await estimated_minutes(pool) == [1, 2, 3]
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
