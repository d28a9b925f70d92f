"""`when_full` where a connection is lost, a place lapses, or one call cannot do all: only the newest replaces."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Literal

import pytest
from asking import ask

import redlease.sync
from redlease import Superseded

from helpers import eventually, queue_up, until_waiting

if TYPE_CHECKING:
    from redlease import Permit

    from conftest import MakeClient, MakeProxy, Servers

Mode = Literal["replace-waiter", "replace-holder"]
WAITER: Mode = "replace-waiter"
HOLDER: Mode = "replace-holder"


@pytest.mark.parametrize("when_full", [WAITER, HOLDER])
async def test_a_request_that_is_sent_again_replaces_nobody_anew(
    servers: Servers, make_proxy: MakeProxy, make_client: MakeClient, when_full: Mode
) -> None:
    """After a reconnect requests with keys are sent again; what has come since the first time is newer."""
    proxy = await make_proxy(servers["valkey9"])
    lock = (await make_client(url=servers["valkey9"].url)).lock("r")
    other = (await make_client(url=proxy.url)).lock("r")
    permit = await lock.acquire(key="a")
    (older,) = await queue_up(other, 1, key="a", when_full=when_full, grace=60)
    (newer,) = await queue_up(lock, 1, key="a", priority=1)
    if when_full == HOLDER:
        await lock.release(permit)
        permit = await newer
    before = proxy.commands["EVALSHA"]
    proxy.drop_all()
    await eventually(lambda: proxy.commands["EVALSHA"] > before)
    await other.locked()
    await other.locked()  # what was sent in between has been done
    assert await lock.is_held(permit)
    assert not older.done()
    await lock.release(permit)
    if when_full == WAITER:
        assert await lock.release(await newer)
    assert await lock.release(await older)


async def test_a_request_that_lost_its_place_replaces_nobody(
    servers: Servers, make_client: MakeClient, prefix: str
) -> None:
    """It queues again behind a newer one, which holds the lock by then."""
    client, other = [await make_client(url=servers["valkey9"].url) for _ in range(2)]
    lock = client.lock("r")
    permit = await lock.acquire(key="a")
    (stalled,) = await queue_up(other.lock("r", waiter_lease=60), 1, key="a", when_full=HOLDER, grace=60)
    # As if the process had stood still.
    servers["valkey9"].cli("ZADD", f"{prefix}:{{r}}:waiters", 1, other._session.name)
    await lock.release(permit)
    newer = await lock.acquire(key="a")
    other._session.on_ready()  # it goes on, and asks the server
    await until_waiting(lock, 1)
    await other.lock("r").locked()
    await other.lock("r").locked()
    assert await lock.is_held(newer)
    assert await lock.release(newer)
    assert await lock.release(await stalled)


async def test_a_search_for_dead_waiters_is_over_once_queued(servers: Servers, make_client: MakeClient) -> None:
    """The request that is sent again does not say where to search on."""
    client = await make_client(url=servers["valkey9"].url)
    pool = client.lock("r")
    hold = await pool.hold()
    waiting = ask(client, pool, "first")
    waiting.request = waiting.request._replace(arrival=-1000)  # as where it was told so
    await until_waiting(pool, 1)
    waiting.resend_after(0)
    await pool.locked()
    await hold.release()
    assert await asyncio.wait_for(waiting.future, 5)
    client._session.leave(waiting)
    await pool.release("first")


async def test_what_a_replaced_request_held_up_begins_at_once(servers: Servers, make_client: MakeClient) -> None:
    """More than one call may grant: the client goes on, and nobody waits for a heartbeat, ten seconds later."""
    client = await make_client(url=servers["valkey9"].url)
    pool = client.semaphore("r", capacity=300, waiter_lease=30)
    held = await pool.acquire(key="z")
    (heavy,) = await queue_up(pool, 1, key="a", weight=300, share=1000)
    lights = [asyncio.create_task(pool.acquire(key="b")) for _ in range(120)]
    await until_waiting(pool, 121)
    newer = await asyncio.wait_for(pool.acquire(key="a", when_full=WAITER, share=1000), 5)
    assert len(await asyncio.wait_for(asyncio.gather(*lights), 5)) == 120
    with pytest.raises(Superseded):
        await heavy
    await pool.release_all()
    assert not await pool.is_held(newer)
    assert not await pool.is_held(held)


async def test_a_repeated_request_that_lifts_a_limit_lets_everybody_begin(
    servers: Servers, make_client: MakeClient
) -> None:
    """A held ticket is asked for once more without `per_key`: more begin than one call grants."""
    client = await make_client(url=servers["valkey9"].url)
    pool = client.semaphore("r", capacity=300, per_key=1, waiter_lease=30)
    await pool.acquire(key="a", ticket="first")
    waiting = [asyncio.create_task(pool.acquire(key="a")) for _ in range(120)]
    await until_waiting(pool, 120)
    await client.semaphore("r", capacity=300, per_key=0, waiter_lease=30).acquire(key="a", ticket="first")
    assert len(await asyncio.wait_for(asyncio.gather(*waiting), 5)) == 120
    await pool.release_all()


async def test_a_request_whose_grant_was_lost_replaces_nobody(
    servers: Servers, make_client: MakeClient, prefix: str
) -> None:
    """Its lease was over before its task went on: it asks once more, behind those that have come since."""
    client = await make_client(url=servers["valkey9"].url)
    lock = client.lock("r", lease=0.3)
    await lock.locked()
    asking = asyncio.create_task(lock.acquire(when_full=HOLDER, grace=60))
    await asyncio.sleep(0)  # it is sent
    granted: queue.Queue[Permit] = queue.Queue()
    with redlease.sync.Redlease.from_url(servers["valkey9"].url, prefix=prefix) as other:
        threading.Thread(target=lambda: granted.put(other.lock("r").acquire(timeout=20))).start()
        newer = granted.get(timeout=20)  # the loop stands still until the other one has the lock
        await until_waiting(lock, 1)
        await lock.locked()
        assert await lock.is_held(newer)
        assert await lock.release(newer)
    assert await lock.release(await asking)
