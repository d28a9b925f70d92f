"""A permit lapses and is passed on, and its former holder writes after the new one: every guard refuses that."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from redlease import StaleFence
from redlease.guards.http import FencingMiddleware
from redlease.guards.sql import FenceTable

from databases import database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from redlease import Redlease

    from conftest import MakeClient, Servers

TIMES = 100
LEASE = 0.02


@contextlib.asynccontextmanager
async def in_redis(client: Redlease) -> AsyncIterator[Any]:
    """A list in Redis, to which the guard's script adds."""
    guard = client.guard("ledger")
    key = f"{guard.hash_tag}:written"

    async def write(fence: int) -> None:
        await guard.run(fence, "redis.call('RPUSH', KEYS[1], ARGV[1])", [key], [fence])

    async def written() -> list[int]:
        found = await guard.run(2**53 - 1, "return redis.call('LRANGE', KEYS[1], 0, -1)", [key])
        return [int(fence) for fence in found]

    yield write, written


@contextlib.asynccontextmanager
async def in_sql(kind: str, place: str) -> AsyncIterator[Any]:
    """A table, beside a table of fences."""
    fences = FenceTable("late_fences")
    async with database(kind, place) as begin:
        async with begin() as transaction:
            await transaction.execute(fences.ddl)
            await transaction.execute("CREATE TABLE late_writes (fence BIGINT)")

        async def write(fence: int) -> None:
            async with begin() as transaction:
                await transaction.execute(f"INSERT INTO late_writes VALUES ({fence})")
                await transaction.check(fences, "ledger", fence)

        async def written() -> list[int]:
            async with begin() as transaction:
                count = await transaction.value("SELECT count(*) FROM late_writes")
                places = range(count)
                query = "SELECT fence FROM late_writes ORDER BY fence LIMIT 1 OFFSET {}"
                return [await transaction.value(query.format(place)) for place in places]

        yield write, written


@contextlib.asynccontextmanager
async def in_http(client: Redlease) -> AsyncIterator[Any]:
    """A service behind the middleware."""
    taken = []

    async def service(scope: Any, receive: Any, send: Any) -> None:
        taken.append(scope["redlease.fence"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    app = FencingMiddleware(service, client.guard("ledger"), required=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:

        async def write(fence: int) -> None:
            answer = await http.post("http://ledger/", headers={"Fencing-Token": str(fence)})
            if answer.status_code == 409:
                raise StaleFence(answer.json()["detail"])
            assert answer.status_code == 204

        async def written() -> list[int]:
            return taken

        yield write, written


@pytest.mark.slow
@pytest.mark.parametrize("where", ["redis", "sqlite", "postgresql", "http"])
async def test_every_late_write_is_refused(
    where: str, make_client: MakeClient, servers: Servers, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of a hundred, none is written; every write of a holder is."""
    client = await make_client(url=servers["valkey9"].url, lease=LEASE)
    lock = client.lock("ledger")
    stages = {
        "redis": lambda: in_redis(client),
        "sqlite": lambda: in_sql("sqlite3", str(tmp_path / "data")),
        "postgresql": lambda: in_sql("psycopg async", request.getfixturevalue("postgres")),
        "http": lambda: in_http(client),
    }
    refused, holders = 0, []
    async with stages[where]() as (write, written):
        for number in range(TIMES):
            former = await lock.acquire()
            if number % 2:  # it was stopped between two writes
                await write(former.fence)
                holders.append(former.fence)
            holder = await client.lock("ledger", lease=30).acquire()
            await write(holder.fence)
            holders.append(holder.fence)
            try:
                await write(former.fence)
            except StaleFence:
                refused += 1
            await write(holder.fence)
            holders.append(holder.fence)
            assert await lock.release(holder)
        assert sorted(await written()) == holders
    assert refused == TIMES
