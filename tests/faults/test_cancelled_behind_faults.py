"""Cancelled ten thousand times at random behind a proxy that drops, doubles and delays replies (P6)."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
import redis.asyncio

from redlease import LeaseLost, Unavailable

from helpers import eventually, left_over
from proxy import Chances, Fault

if TYPE_CHECKING:
    from redlease import Semaphore

    from conftest import MakeClient, MakeProxy, OwnServer

TASKS = 10_000
AT_ONCE = 50
CAPACITY = 3


async def use(pool: Semaphore, dice: random.Random) -> None:
    """Use the pool in one of the ways there are; what `acquire` has returned is given back, whatever comes."""
    if dice.random() < 0.6:
        async with pool.hold():
            await asyncio.sleep(dice.choice((0, 0, 0.001)))
        return
    permit = await pool.acquire()
    try:
        await asyncio.sleep(0)
    finally:
        await pool.release(permit)


async def cancel_some(pool: Semaphore, dice: random.Random, count: int) -> int:
    """Start and cancel so many tasks, one after the other; return how many were cancelled indeed."""
    cancelled = 0
    for _ in range(count):
        task = asyncio.create_task(use(pool, dice))
        if dice.random() < 0.5:
            for _ in range(dice.randrange(12)):
                await asyncio.sleep(0)
        else:
            await asyncio.sleep(dice.uniform(0, 0.01))
        task.cancel()
        await asyncio.wait([task])
        cancelled += task.cancelled()
        if not task.cancelled() and not isinstance(task.exception(), LeaseLost | Unavailable | None):
            raise AssertionError(f"a task ended with {task.exception()!r}")
    return cancelled


@pytest.mark.slow
async def test_ten_thousand_cancellations_behind_a_broken_proxy(
    own_server: OwnServer, make_client: MakeClient, make_proxy: MakeProxy, prefix: str
) -> None:
    """Replies are dropped, doubled and late while tasks are cancelled anywhere: no permit and no place is left."""
    dice = random.Random(6)
    server = own_server("valkey9")
    proxy = await make_proxy(server, seed=6)
    pools = [(await make_client(url=proxy.url, lease=2)).semaphore("r", CAPACITY) for _ in range(2)]
    proxy.chances = Chances(drop=0.002, echo=0.002, delay=0.005, delay_max=0.01)
    workers = [cancel_some(pools[number % 2], dice, TASKS // AT_ONCE) for number in range(AT_ONCE)]
    assert sum(await asyncio.gather(*workers)) > TASKS / 4
    proxy.chances = Chances()
    assert min(proxy.faults[fault] for fault in (Fault.DROP, Fault.ECHO, Fault.DELAY)) > 3
    async with redis.asyncio.Redis.from_url(server.url, decode_responses=True) as raw:

        async def nothing_is_left() -> bool:
            return await left_over(raw, prefix) == []

        await eventually(nothing_is_left, 10)
    assert await pools[0].try_acquire(weight=CAPACITY) is not None
