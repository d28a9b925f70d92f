"""Promises in the corners of use: calls that overlap or repeat, leases cut short, keys and waiters that are gone."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest
import redis.asyncio

from redlease import Redlease, RedleaseError
from redlease._core.transport.connection import Connection

from helpers import cancel, eventually, queue_up, until_waiting
from proxy import Fault

if TYPE_CHECKING:
    from redlease import Hold, Lock

    from conftest import MakeClient, MakeProxy, OwnServer, Servers


async def test_the_reply_to_a_release_is_lost(servers: Servers, make_proxy: MakeProxy, make_client: MakeClient) -> None:
    """A body that ended under its lease ended well, though the connection went down with the answer to its release."""
    proxy = await make_proxy(servers["valkey9"])
    client = await make_client(url=proxy.url)
    lock = client.lock("r")
    async with lock.hold():
        proxy.plan(Fault.CUT, 1, "EVALSHA")
    hold = await lock.hold()
    proxy.plan(Fault.CUT, 1, "EVALSHA")
    assert await hold.release()
    assert not hold.lost
    permit = await lock.acquire()
    proxy.plan(Fault.CUT, 1, "EVALSHA")
    assert await lock.release(permit)
    assert proxy.faults[Fault.CUT] == 3


async def test_a_hold_out_of_the_queue_gets_its_full_lease(client: Redlease) -> None:
    """It begins with the rest of the waiter's place, and has its own lease long before that has ended."""
    lock = client.lock("r", lease=60, waiter_lease=10)
    permit = await lock.acquire()
    waiting = asyncio.create_task(_hold(lock))
    await until_waiting(lock, 1)
    await lock.release(permit)
    hold = await waiting
    assert hold.remaining() <= 10
    await eventually(lambda: hold.remaining() > 50)
    await hold.release()


async def test_a_hold_out_of_the_queue_is_detached_with_its_full_lease(client: Redlease) -> None:
    """Detached at once, the permit has the lease that it names."""
    lock = client.lock("r", lease=60, waiter_lease=2)
    first = await lock.acquire()
    waiting = asyncio.create_task(_hold(lock))
    await until_waiting(lock, 1)
    await lock.release(first)
    permit = (await waiting).detach()
    snapshot = await lock.inspect()
    assert snapshot.holders[0].expires_at_ms - snapshot.server_time_ms > 50_000
    assert await lock.release(permit)


async def _hold(lock: Lock) -> Hold:
    return await lock.hold()


async def test_another_copy_of_the_ticket_does_not_shorten_the_lease(client: Redlease, make_client: MakeClient) -> None:
    """Whoever asks with the same ticket and a shorter lease finds the permit and leaves its deadline alone."""
    other = await make_client()
    async with client.lock("r", lease=30).hold(ticket="t") as hold:
        permit = await other.lock("r", lease=0.1).acquire(ticket="t")
        assert permit.fence == hold.fence
        assert permit.expires_at_ms >= hold.permit.expires_at_ms
        adopted = await other.lock("r", lease=0.1).adopt(permit, refence=False)
        assert adopted.permit.expires_at_ms >= hold.permit.expires_at_ms
        adopted.detach()


async def test_a_lease_made_shorter_by_hand_is_filled_by_its_hold(client: Redlease) -> None:
    """A renewal that shortens a permit which is held is told to the hold, and the hold has its lease again."""
    lock = client.lock("r", lease=30)
    async with lock.hold() as hold:
        renewed = await lock.renew(hold.permit, lease=5)
        assert renewed.lease_ms == 5000

        async def filled() -> bool:
            snapshot = await lock.inspect()
            return snapshot.holders[0].expires_at_ms - snapshot.server_time_ms > 20_000

        await eventually(filled, 4.5)
        hold.check()


@pytest.mark.parametrize("prefix", ["a b", "a\tb", "a\nb", "a|b", "a{b", "a\0b", "x" * 129, ""])
async def test_a_prefix_that_would_break_the_protocol(prefix: str) -> None:
    """Spaces, bars, braces and control characters in a prefix are a ValueError at once."""
    with pytest.raises(ValueError, match="prefix"):
        Redlease.from_url("redis://127.0.0.1:1", prefix=prefix)


async def test_an_adoption_that_was_cancelled_may_be_repeated(client: Redlease) -> None:
    """The second call gets what the first may have got, instead of being told that somebody else did."""
    lock = client.lock("r")
    permit = await lock.acquire()
    task = asyncio.ensure_future(lock.adopt(permit))
    for _ in range(2):
        await asyncio.sleep(0)
    await cancel(task)
    hold = await lock.adopt(permit)
    assert hold.fence > permit.fence
    assert await hold.release()


async def test_adopt_checks_what_it_is_given(client: Redlease) -> None:
    """`on_lost` has two values for an adopted hold too."""
    lock = client.lock("r")
    permit = await lock.acquire()
    with pytest.raises(ValueError, match="on_lost"):
        await lock.adopt(permit, on_lost="Cancel")  # type: ignore[arg-type]


async def test_an_adopted_permit_is_lost_to_its_former_hold_at_once(client: Redlease, make_client: MakeClient) -> None:
    """The hold that had it hears of the adoption by a message, not by its next renewal."""
    other = await make_client()
    hold = await client.lock("r", lease=60).hold()
    adopted = await other.lock("r").adopt(hold.permit)
    assert await asyncio.wait_for(hold.wait_lost(), 5)
    assert await adopted.release()


async def test_patience_follows_the_leases_that_are_kept(client: Redlease) -> None:
    """A short lease makes a half-open connection noticed sooner only for as long as it is held."""
    connection = client._connection.endpoint_for(client.lock("r")._resource)
    assert isinstance(connection, Connection)
    usual_ms = connection.silence_limit_ms
    async with client.lock("r", lease=4).hold():
        assert connection.silence_limit_ms < usual_ms
    assert connection.silence_limit_ms == usual_ms


async def test_refused_renewals_are_logged_once(
    own_server: OwnServer, make_client: MakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    """While the server refuses, each hold is tried again with growing pauses, and says so once."""
    server = own_server("valkey9")
    client = await make_client(url=server.url)
    async with client.lock("r", lease=1.5).hold(on_lost="signal") as hold:
        server.cli("CONFIG", "SET", "min-replicas-to-write", "1")
        with caplog.at_level(logging.WARNING, "redlease"):
            await asyncio.wait_for(hold.wait_lost(), 5)
        server.cli("CONFIG", "SET", "min-replicas-to-write", "0")
    assert len([record for record in caplog.records if "renewing permit" in record.getMessage()]) == 1


async def test_one_hold_request_is_entered_once_at_a_time(client: Redlease) -> None:
    """Two tasks that enter one `hold()` object do not release each other's permit: the second is told at once."""
    request = client.semaphore("r", capacity=2).hold()
    entering = asyncio.create_task(request.__aenter__())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="entered already"):
        await request.__aenter__()
    await entering
    await request.__aexit__(None, None, None)
    assert (await client.semaphore("r", capacity=2).inspect()).holders == ()


async def test_a_plain_block_left_by_another_task(client: Redlease) -> None:
    """A lock entered in a task that has ended is released by whoever leaves the block, as fixtures do."""
    lock = client.lock("r")
    await asyncio.create_task(lock.__aenter__())
    assert await lock.locked()
    await asyncio.create_task(lock.__aexit__(None, None, None))
    assert not await lock.locked()


async def test_another_event_loop_is_told_at_once(client: Redlease) -> None:
    """Every call of a client in a loop that is not its own ends with an error that says so, `close()` too."""
    lock = client.lock("r")
    await lock.locked()

    async def elsewhere() -> tuple[object, ...]:
        calls = (lock.inspect(), lock.acquire(), lock.release("t"), client.close())
        return await asyncio.gather(*calls, return_exceptions=True)

    outcomes = await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    assert [type(outcome) for outcome in outcomes] == [RedleaseError] * 4
    assert "another event loop" in str(outcomes[0])
    assert not await lock.locked()


@pytest.mark.slow
async def test_hundreds_of_dead_waiters_are_nobody(client: Redlease, make_client: MakeClient) -> None:
    """Places whose process is gone neither refuse a try, nor fill the queue, nor hide those who live."""
    dying = await make_client()
    lock = client.lock("r")
    permit = await lock.acquire()
    doomed = await queue_up(dying.lock("r", waiter_lease=4), 1)
    doomed += [asyncio.create_task(dying.lock("r", waiter_lease=4).acquire()) for _ in range(249)]
    await until_waiting(lock, 250, 20)
    dying._manager.schedule.close()  # it beats no more, as if it were dead
    await until_waiting(lock, 0, 20)
    living = (await queue_up(client.lock("r", max_waiters=1), 1))[0]
    assert await lock.release(permit)
    permit = await asyncio.wait_for(living, 5)
    assert await lock.release(permit)
    assert await lock.try_acquire() is not None
    await cancel(*doomed)


async def ttls(raw: redis.asyncio.Redis, prefix: str) -> dict[str, int]:
    """Return when each key under the prefix expires, ms."""
    return {key: await raw.pexpiretime(key) async for key in raw.scan_iter(match=f"{prefix}:*")}


async def test_no_key_goes_before_a_place(servers: Servers, make_client: MakeClient, prefix: str) -> None:
    """The keys last as long as the last place in the queue, also where idle ones are kept for less than that."""
    url = servers["valkey9"].url
    client = await make_client(url=url, lease=5, waiter_lease=30, idle_ttl=0.01)
    await client.lock("r").acquire()
    waiting = await queue_up(client.lock("r"), 5)
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as raw:
        expires_ms = await ttls(raw, prefix)
        (waiters,) = [key for key in expires_ms if key.endswith(":waiters")]
        (place,) = await raw.zrange(waiters, 0, -1)
        lapses_ms = await raw.zscore(waiters, str(place))
    assert lapses_ms is not None
    assert min(expires_ms.values()) >= lapses_ms
    await cancel(*waiting)


async def test_the_keys_of_a_resource_expire_together(servers: Servers, make_client: MakeClient, prefix: str) -> None:
    """Whatever was done, by clients with different `idle_ttl`, no key of a resource goes before another or stays."""
    url = servers["valkey9"].url
    short, long = await make_client(url=url, idle_ttl=2), await make_client(url=url, idle_ttl=50)
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as raw:

        async def together() -> None:
            assert len(set((await ttls(raw, prefix)).values())) == 1, await ttls(raw, prefix)

        permit = await short.semaphore("r", 2, lease=0.5).acquire(weight=2)
        await together()
        waiting = asyncio.create_task(long.semaphore("r", 2).acquire())
        await until_waiting(short.semaphore("r", 2), 1)
        await together()
        await short.semaphore("r", 2).renew(permit, lease=40)
        await together()
        await short.semaphore("r", 2).release(permit)
        await waiting
        await long.semaphore("r", 2).acquire()
        await together()
        await cancel((await queue_up(short.semaphore("r", 2), 1))[0])
        await together()


@pytest.mark.parametrize("part", ["holders", "queue", "waiters", "state"])
async def test_a_key_that_was_evicted_wedges_nothing(
    servers: Servers, make_client: MakeClient, prefix: str, part: str
) -> None:
    """With any one key gone, the resource is granted again to its full capacity, and no key is left without an end."""
    server = servers["valkey9"]
    client = await make_client(url=server.url, waiter_lease=0.6)
    pool = client.semaphore("r", 3, lease=0.6)
    for weight in (1, 2):
        await pool.acquire(weight=weight)
    waiting = (await queue_up(pool, 1))[0]
    server.cli("DEL", f"{prefix}:{{r}}:{part}")
    permit = await asyncio.wait_for(waiting, 5)
    await pool.release(permit)
    whole = await asyncio.wait_for(pool.acquire(weight=3, timeout=5), 6)
    assert await pool.try_acquire() is None
    assert await pool.release(whole)
    async with redis.asyncio.Redis.from_url(server.url, decode_responses=True) as raw:
        assert min((await ttls(raw, prefix)).values()) > 0


async def test_a_permit_that_is_gone_gives_back_nothing_twice(
    servers: Servers, make_client: MakeClient, prefix: str
) -> None:
    """A late release of a permit whose key was lost, or its ticket asked for anew, adds nothing to the capacity."""
    server = servers["valkey9"]
    client = await make_client(url=server.url)
    pool = client.semaphore("r", 2)
    stale = await pool.acquire(ticket="x")
    server.cli("DEL", f"{prefix}:{{r}}:holders")
    heavy = await asyncio.wait_for(pool.acquire(weight=2), 5)
    assert not await pool.release(stale)
    assert await pool.try_acquire() is None
    assert await pool.try_acquire(ticket="x") is None
    assert await pool.is_held(heavy)


async def test_what_was_told_while_nobody_listened(servers: Servers, real_engine: str, make_client: MakeClient) -> None:
    """A permit released while its holder's connection was lost is known to be lost soon after that is back."""
    holder, other = [await make_client(url=servers.url(real_engine)) for _ in range(2)]
    for _ in range(5):
        hold = await holder.lock("r", lease=600).hold(ticket="T")
        connection = holder._session.connection
        assert isinstance(connection, Connection)
        connection._abort("the test has cut it")
        assert await other.lock("r").release("T")
        async with asyncio.timeout(10):  # a tenth of its lease is a minute
            assert await hold.wait_lost()
