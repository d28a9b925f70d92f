"""A limit of an operator, while many processes want more than it allows."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from children import Child, child
from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redlease import HistoryEntry, Redlease

    from conftest import Servers

CAPACITY, ALLOWED = 40, 3
ENDS = {"released", "lost"}


def in_use_at_each_grant(entries: list[HistoryEntry]) -> Iterator[tuple[int, int]]:
    """Yield the time of each grant and how many hold then."""
    held: set[str] = set()
    for entry in entries:
        if entry.event == "granted":
            held.add(entry.ticket)
            yield entry.at_ms, len(held)
        elif entry.event in ENDS:
            held.discard(entry.ticket)


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("engine", ["valkey9"])
async def test_a_hundred_clients_keep_to_a_limit(client: Redlease, servers: Servers, prefix: str, engine: str) -> None:
    """From the moment in which it is set until it ends no grant exceeds it, whoever is killed or declares more."""
    pool = client.semaphore("r", capacity=CAPACITY, history=100_000)

    async def is_over() -> bool:
        return not (await pool.inspect()).limits

    async with contextlib.AsyncExitStack() as stack:

        async def begin(capacity: int) -> Child:
            pressing = child("press", servers.url(engine), prefix=prefix, clients=25, capacity=capacity)
            started = await stack.enter_async_context(pressing)
            await started.event("pressing")
            return started

        children = [await begin(CAPACITY) for _ in range(4)]
        await pool.set_limit(ALLOWED, until=3)
        (limit,) = (await pool.inspect()).limits
        children[0].kill()
        await begin(2 * CAPACITY)
        await eventually(is_over, 20)
        await begin(CAPACITY)
    entries = await pool.history(100_000)
    assert limit.until_ms is not None
    grants = list(in_use_at_each_grant(entries))
    (set_at,) = (entry.at_ms for entry in entries if entry.event == "limited")
    assert max(held for at_ms, held in grants if at_ms < set_at) > ALLOWED
    meanwhile = [held for at_ms, held in grants if set_at < at_ms < limit.until_ms]
    assert meanwhile
    assert max(meanwhile) <= ALLOWED
    assert max(held for at_ms, held in grants if at_ms > limit.until_ms) > ALLOWED
