"""Tasks of one client that find a queue full, again and again, cost the server one call at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from redlease import QueueFull, Unavailable

from helpers import cancel, eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Semaphore

    from conftest import MakeClient, OwnServer
    from servers import Server

TASKS, ROUNDS = 20, 50


@pytest.fixture
def own(own_server: OwnServer) -> Server:
    """A server that nobody else uses, since its scripts are counted."""
    return own_server("valkey9")


@pytest.fixture
async def full(own: Server, make_client: MakeClient) -> AsyncIterator[Semaphore]:
    """A pool with the greatest number of waiters of the key "k", which another client put there."""
    client, other = await make_client(url=own.url), await make_client(url=own.url)
    held = await other.semaphore("r", 1).acquire(ticket="held")
    task = asyncio.create_task(other.semaphore("r", 1).acquire(key="k", ticket="waits"))
    pool = client.semaphore("r", 1, max_waiters_per_key=1)
    await until_waiting(pool, 1)
    with pytest.raises(QueueFull):
        await pool.acquire(key="k")
    yield pool
    await cancel(task)
    await pool.release("held")
    await pool.release("waits")
    del held


def scripts(server: Server) -> int:
    """Return how many scripts the server has run."""
    return int(server.cli("INFO", "commandstats")["cmdstat_evalsha"]["calls"])


async def refused(pool: Semaphore, **options: Any) -> None:
    """Ask, and be refused."""
    with pytest.raises(QueueFull, match="1 requests of key 'k' wait already"):
        await pool.acquire(key="k", **options)


async def test_many_tasks_cost_no_more_than_one(full: Semaphore, own: Server) -> None:
    """Twenty tasks that are refused fifty times each cost a call for each time, not for each task, and no release."""

    async def insist() -> None:
        for _ in range(ROUNDS):
            await refused(full)

    before = scripts(own)
    await asyncio.gather(*(insist() for _ in range(TASKS)))
    assert scripts(own) - before <= 2 * ROUNDS + 5


async def test_room_is_found_at_once(full: Semaphore, make_client: MakeClient, own: Server) -> None:
    """When a waiter has left, the next request waits in its place, and the others are refused by what they find."""
    other = (await make_client(url=own.url)).semaphore("r", 1)
    asking = [asyncio.create_task(full.acquire(key="k")) for _ in range(TASKS)]
    await asyncio.gather(*asking, return_exceptions=True)
    assert await other.release("waits")
    asking = [asyncio.create_task(full.acquire(key="k")) for _ in range(TASKS)]
    done, waiting = await asyncio.wait(asking, timeout=2)
    assert (len(done), len(waiting)) == (TASKS - 1, 1)
    assert {type(task.exception()) for task in done} == {QueueFull}
    await cancel(*waiting)


async def test_what_was_made_later_is_not_refused_by_an_earlier_answer(full: Semaphore) -> None:
    """A waiter leaves after one request was refused: the next one, made at once, is not refused with it."""
    first = asyncio.create_task(refused(full))
    await asyncio.sleep(0)
    assert await full.release("waits")
    await first
    second = asyncio.create_task(full.acquire(key="k"))
    await until_waiting(full, 1)
    await cancel(second)


async def test_a_known_ticket_asks_for_itself(full: Semaphore) -> None:
    """Whoever asks with the ticket of a permit gets that, while the others are refused."""
    others = [asyncio.create_task(refused(full)) for _ in range(TASKS)]
    again = await full.acquire(ticket="held")
    assert again.ticket == "held"
    await asyncio.gather(*others)


async def test_another_asks_for_one_that_gives_up(full: Semaphore) -> None:
    """The task whose request was on its way is cancelled: the others have their answer all the same."""
    tasks = [asyncio.create_task(refused(full)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each) for each in outcomes] == [asyncio.CancelledError, type(None), type(None)]


async def test_other_requests_do_not_wait_for_it(full: Semaphore, own: Server) -> None:
    """A request of another key, or with other settings, is sent at once."""
    asking = asyncio.create_task(refused(full))
    before = len(full._session.pending)
    others = [asyncio.create_task(full.acquire(key=key)) for key in ("l", None, "m")]
    await eventually(lambda: sum(bool(each.sequence) for each in full._session.pending.values()) == before + 3)
    await asking
    await cancel(*others)


async def test_who_waits_for_an_answer_during_an_outage(full: Semaphore, own: Server) -> None:
    """A timeout that ends while the server is away says so; when it is back, everybody has an answer."""
    own.pause()
    try:
        tasks = [asyncio.create_task(full.acquire(key="k", timeout=0.4)) for _ in range(2)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        own.resume()
    assert {type(each) for each in outcomes} <= {Unavailable, QueueFull}
    assert isinstance(outcomes[0], Unavailable)
    await asyncio.gather(*(refused(full) for _ in range(TASKS)))
