"""The place that a client has on a resource for all its requests that wait there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asking import ask

from helpers import cancel, eventually, queue_up, until_waiting

if TYPE_CHECKING:
    import redis.asyncio

    from redlease import Redlease


async def test_a_shorter_waiter_lease_never_shortens_the_place(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """Behind a request with a waiter lease of a minute one of half a second queues: the place keeps its minute."""
    long, short = client.lock("r", waiter_lease=60), client.lock("r", waiter_lease=0.5)
    hold = await long.hold()

    async def ends() -> float:
        (place,) = await raw.zrange(f"{prefix}:{{r}}:waiters", 0, -1)
        return float(await raw.zscore(f"{prefix}:{{r}}:waiters", str(place)) or 0)

    tasks = await queue_up(long, 1)
    first = await ends()
    tasks += [asyncio.create_task(short.acquire(ticket="short"))]
    await until_waiting(long, 2)
    assert await ends() >= first

    async def is_later() -> bool:
        return await ends() > first

    await eventually(is_later)  # the beat that the short one asks for keeps the place for the minute too
    await cancel(*tasks)
    await hold.release()


async def test_requests_of_one_moment_end_in_one_place(client: Redlease, raw: redis.asyncio.Redis, prefix: str) -> None:
    """Two requests ask under different names of the place, neither with an answer: both come to wait under the last."""
    pool = client.lock("r")
    hold = await pool.hold()
    first = ask(client, pool, "first")
    client._session.name = client._session.new_name()  # as when another resource's place has lapsed
    second = ask(client, pool, "second")
    await until_waiting(pool, 2)

    async def places() -> set[str]:
        records = await raw.hmget(f"{prefix}:{{r}}:state", "tfirst", "tsecond")
        return {str(record.decode() if isinstance(record, bytes) else record).split(" ")[4] for record in records}

    async def is_one() -> bool:
        return await places() == {client._session.name}

    await eventually(is_one)
    await hold.release()
    for waiting in (first, second):
        assert await asyncio.wait_for(waiting.future, 5)
        client._session.leave(waiting)
        await pool.release(waiting.request.ticket)


async def test_a_place_that_the_server_alone_knows_is_not_used_again(
    client: Redlease, raw: redis.asyncio.Redis, prefix: str
) -> None:
    """A place that has lapsed on the server before this client heard of it: its next request waits in another one."""
    pool = client.lock("r")
    hold = await pool.hold()
    lapsed = client._session.name
    await raw.zadd(f"{prefix}:{{r}}:waiters", {lapsed: 1})
    waiting = ask(client, pool, "first")
    await until_waiting(pool, 1)
    assert client._session.name != lapsed
    await hold.release()
    assert await asyncio.wait_for(waiting.future, 5)
    client._session.leave(waiting)
    await pool.release("first")
