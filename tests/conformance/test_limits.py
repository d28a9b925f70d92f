"""Bad input: each mistake is a ValueError that says what is allowed, at once, and nothing reaches the server."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from redlease import Redlease

from helpers import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import redis.asyncio

TOO_MANY = 2**31

# What the client itself refuses no server ever sees, so one engine is as good as all of them.
on_one_engine = pytest.mark.parametrize("engine", ["fakeredis"], indirect=True)


@on_one_engine
@pytest.mark.parametrize("name", ["", "x" * 513, "é" * 257, None, 7, b"r"])
async def test_names(client: Redlease, name: Any) -> None:
    """A name is a string of 1 to 512 bytes."""
    with pytest.raises(ValueError, match="resource name"):
        client.lock(name)
    with pytest.raises(ValueError, match="resource name"):
        client.semaphore(name, capacity=2)


@on_one_engine
@pytest.mark.parametrize("capacity", [0, -1, TOO_MANY, 1.0, 2.5, True, None, "3"])
async def test_capacities(client: Redlease, capacity: Any) -> None:
    """A capacity is a whole number from 1 to 2**31 - 1."""
    with pytest.raises(ValueError, match="capacity"):
        client.semaphore("r", capacity=capacity)
    with pytest.raises(ValueError, match="capacity"):
        await client.semaphore("r", capacity=2).resize(capacity)


@on_one_engine
@pytest.mark.parametrize("weight", [0, -1, TOO_MANY, 1.0, True, None, "1"])
async def test_weights(client: Redlease, weight: Any) -> None:
    """A weight is a whole number from 1 on."""
    lock = client.lock("r")
    for ask in (lock.acquire, lock.try_acquire, lock.hold):
        with pytest.raises(ValueError, match="weight"):
            await ask(weight=weight)


async def test_a_weight_over_the_capacity(client: Redlease) -> None:
    """What can never fit is refused at once, by the capacity that counts now, and leaves nothing."""
    lock = client.lock("r")
    for ask in (lock.acquire, lock.try_acquire, lock.hold):
        with pytest.raises(ValueError, match="weight 2 can never fit"):
            await ask(weight=2)
    pool = client.semaphore("s", capacity=2)
    await pool.resize(4)
    assert (await pool.acquire(weight=4)).weight == 4
    assert (await lock.inspect()).waiters == ()


async def test_the_largest_capacity_and_weight(client: Redlease) -> None:
    """The limits themselves are allowed."""
    pool = client.semaphore("r", capacity=TOO_MANY - 1)
    permit = await pool.acquire(weight=TOO_MANY - 1)
    assert await pool.try_acquire() is None
    assert permit.weight == permit.capacity == TOO_MANY - 1
    assert await pool.release(permit)


@on_one_engine
@pytest.mark.parametrize(
    "seconds", [0, -1, 0.001, math.nan, math.inf, 1e12, 10**400, True, "30", timedelta(0), timedelta(-1)]
)
async def test_leases(client: Redlease, seconds: Any) -> None:
    """A lease is longer than nothing and shorter than for ever, in seconds or as a timedelta."""
    for make in (
        lambda: client.lock("r", lease=seconds),
        lambda: client.lock("r", waiter_lease=seconds),
        lambda: Redlease.from_url("redis://localhost", lease=seconds),
        lambda: Redlease.from_url("redis://localhost", waiter_lease=seconds),
    ):
        with pytest.raises(ValueError, match="lease"):
            make()
    permit = await client.lock("r").acquire()
    with pytest.raises(ValueError, match="lease"):
        await client.lock("r").renew(permit, lease=seconds)


@on_one_engine
@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf, -(10**400), True, "1"])
async def test_timeouts(client: Redlease, seconds: Any) -> None:
    """A timeout is not negative; None is for ever."""
    lock = client.lock("r")
    for ask in (lock.acquire, lock.hold):
        with pytest.raises(ValueError, match="timeout"):
            await ask(timeout=seconds)


@on_one_engine
@pytest.mark.parametrize("make", [lambda client, **options: client.lock("r").acquire(**options)])
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"ticket": ""}, "ticket"),
        ({"ticket": "x" * 257}, "ticket"),
        ({"ticket": 5}, "ticket"),
        ({"owner": ""}, "owner"),
        ({"owner": "x" * 257}, "owner"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"metadata": {1: "v"}}, "metadata"),
        ({"metadata": {"k": "x" * 4097}}, "metadata"),
        ({"metadata": {"k": "\x01" * 2000}}, "metadata .* JSON"),
        ({"metadata": {f"{number:x}": "" for number in range(1100)}}, "metadata .* JSON"),
        ({"metadata": {"k": "\ud800"}}, "metadata .* UTF-8"),
        ({"ticket": "\ud800"}, "ticket .* UTF-8"),
        ({"metadata": ["k"]}, "metadata"),
    ],
)
async def test_texts(client: Redlease, make: Callable[..., Any], options: dict[str, Any], what: str) -> None:
    """Operations and owners are short strings, metadata maps strings to strings and is small."""
    with pytest.raises(ValueError, match=what):
        await make(client, **options)


@on_one_engine
@pytest.mark.parametrize(
    "change",
    [
        {"resource": "other"},
        {"ticket": ""},
        {"ticket": "x" * 257},
        {"weight": 0},
        {"lease_ms": -5},
        {"lease_ms": 10**15},
        {"lease_ms": 10**30},
    ],
)
async def test_a_permit_that_was_written_by_hand(client: Redlease, change: dict[str, Any]) -> None:
    """A permit with what no permit of the resource can have is refused, and the true one stays as it is."""
    pool = client.semaphore("r", capacity=3)
    permit = await pool.acquire()
    wrong = replace(permit, **change)
    for use in (pool.renew, pool.release, pool.is_held, pool.adopt):
        with pytest.raises(ValueError, match=r"permit|ticket"):
            await use(wrong)
    assert (await pool.inspect()).holders == (permit,)


async def test_what_is_adopted_is_what_the_server_has(client: Redlease) -> None:
    """The weight of a hold is that of the server's permit, whatever the copy says; too much metadata is refused."""
    pool = client.semaphore("r", capacity=3)
    permit = await pool.acquire(weight=2)
    with pytest.raises(ValueError, match="metadata"):
        await pool.adopt(replace(permit, metadata={"k": "x" * 4097}))
    hold = await pool.adopt(replace(permit, weight=99))
    assert hold.permit.weight == 2
    assert await hold.release()


@on_one_engine
async def test_an_error_repeats_little_of_what_was_given(client: Redlease) -> None:
    """However much was passed by mistake, the message fits on a screen."""
    for wrong in ("x" * 10**6, ["x" * 10**6], b"x" * 10**6):
        with pytest.raises(ValueError, match="capacity") as caught:
            client.semaphore("r", capacity=wrong)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 300


@on_one_engine
async def test_other_parameters(client: Redlease) -> None:
    """Whatever else is wrong is named as well."""
    lock = client.lock("r")
    with pytest.raises(ValueError, match="on_lost"):
        lock.hold(on_lost="panic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_hold"):
        lock.hold(max_hold=0)
    with pytest.raises(ValueError, match="max_waiters"):
        client.lock("r", max_waiters=-1)
    with pytest.raises(ValueError, match="max_items"):
        await lock.inspect(max_items=0)
    with pytest.raises(ValueError, match="ticket"):
        await lock.release("")
    for prefix in ("", "a{b", "a}b", None):
        with pytest.raises(ValueError, match="prefix"):
            Redlease.from_url("redis://localhost", prefix=prefix)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="idle_ttl"):
        Redlease.from_url("redis://localhost", idle_ttl=-1)
    with pytest.raises(ValueError, match="://"):
        Redlease.from_url("localhost:6379")


@on_one_engine
async def test_mistakes_leave_nothing(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """A refused request leaves no key."""
    lock = client.lock("r")
    for options in ({"weight": 0}, {"weight": 5}, {"ticket": ""}, {"timeout": -1}):
        with pytest.raises(ValueError, match=r"."):
            await lock.acquire(**options)
    assert await keys_of(raw, f"{prefix}:{{r}}*") == []
