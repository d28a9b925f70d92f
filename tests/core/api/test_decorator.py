"""The decorator: each call runs while it holds a permit, of the whole or of its key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, Hold, QueueFull
from redlease.testing import fake_client

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Redlease


@pytest.fixture
async def client() -> AsyncIterator[Redlease]:
    """A client on fakeredis: what is shown here is the client's own."""
    async with fake_client() as client:
        yield client


async def test_calls_exclude_each_other(client: Redlease) -> None:
    """Calls of one function, and of another under the same lock, run one at a time and return what they return."""
    lock = client.lock("r")
    inside = 0

    @lock.holding()
    async def double(number: int, *, plus: int = 0) -> int:
        """Doubles."""
        nonlocal inside
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        inside -= 1
        return number * 2 + plus

    other = lock.holding()(double.__wrapped__)  # type: ignore[attr-defined]
    results = await asyncio.gather(*(function(3, plus=number) for number in range(5) for function in (double, other)))
    assert sorted(results) == sorted([6 + number for number in range(5)] * 2)
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")


async def test_a_key_names_the_resource_of_a_call(client: Redlease) -> None:
    """Calls with one key exclude each other, calls with others do not; what the key is, `inspect` shows."""
    lock = client.lock("customer")
    go = asyncio.Event()

    @lock.holding(name_for=lambda order, **_: order.partition("/")[0], timeout=0)
    async def ship(order: str, *, to: str = "") -> str:
        await go.wait()
        return order + to

    first = asyncio.create_task(ship("ann/1", to="!"))
    await eventually(client.lock("customer:ann").locked)
    with pytest.raises(AcquireTimeout, match="customer:ann"):
        await ship("ann/2")
    second = asyncio.create_task(ship("bob/1"))
    await eventually(client.lock("customer:bob").locked)
    assert not await lock.locked()
    go.set()
    assert [await first, await second] == ["ann/1!", "bob/1"]


async def test_whose_turn_a_call_takes(client: Redlease) -> None:
    """The key of a call's turn comes from its arguments or is given; `per_key` counts, and the resource is the same."""
    pool = client.semaphore("r", capacity=5, per_key=1)

    @pool.holding(key=lambda tenant: tenant, share=2, when_full="refuse")
    async def of_a_tenant(tenant: str, hold: Hold | None = None) -> str | None:
        assert hold is not None
        assert hold.permit.key == tenant
        assert hold.resource == "r"
        with pytest.raises(QueueFull):
            await of_a_tenant(tenant)
        return hold.permit.key

    @pool.holding(key="fixed")
    async def of_one(hold: Hold | None = None) -> str | None:
        return None if hold is None else hold.permit.key

    assert list(await asyncio.gather(of_a_tenant("a"), of_a_tenant("b"), of_one())) == ["a", "b", "fixed"]
    with pytest.raises(ValueError, match="the key of a call"):
        await of_a_tenant("")
    refused: list[dict[str, Any]] = [{"share": 2}, {"key": ""}, {"when_full": "never"}]
    for wrong in refused:
        with pytest.raises(ValueError, match=r"\w"):
            pool.holding(**wrong)


async def test_the_hold_is_passed_where_it_is_asked_for(client: Redlease) -> None:
    """A parameter annotated as a hold gets it, in a method too, unless the caller passes one."""
    pool = client.semaphore("r", capacity=2)

    @pool.holding(weight=2, metadata={"job": "7"})
    async def whole(hold: Hold | None = None) -> Hold | None:
        if hold is not None and hold.remaining() > 0:
            assert hold.permit.metadata == {"job": "7"}
            assert hold.permit.weight == 2
            hold.check()
        return hold

    class Ledger:
        @client.lock("ledger").holding()
        async def pay(self, amount: int, *, hold: Hold) -> tuple[int, str]:
            return amount, hold.resource

    hold = await whole()
    assert hold is not None
    assert hold.resource == "r"
    assert await whole(hold) is hold
    assert await whole(hold=None) is None
    assert await Ledger().pay(7) == (7, "ledger")  # type: ignore[call-arg]


async def test_what_is_refused(client: Redlease) -> None:
    """Wrong parameters and functions that cannot be awaited are refused at the decorator, keys at a call."""
    lock = client.lock("r")
    with pytest.raises(ValueError, match="timeout"):
        lock.holding(timeout=-1)
    with pytest.raises(ValueError, match="on_lost"):
        lock.holding(on_lost="shout")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="async def"):
        lock.holding()(lambda: None)  # type: ignore[arg-type, return-value]

    async def by_position(hold: Hold, /) -> None: ...

    with pytest.raises(ValueError, match="by name"):
        lock.holding()(by_position)

    @lock.holding(name_for=lambda order: order)
    async def ship(order: str) -> None:
        pytest.fail(f"shipped {order}")

    with pytest.raises(ValueError, match="key of a call"):
        await ship("")
    assert not await lock.locked()
