"""Whoever may publish to a client's channel can make it ask the server, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import pytest

from redlease import LeaseLost

from helpers import eventually

if TYPE_CHECKING:
    from redlease import Redlease

    from conftest import MakeClient, Servers


@pytest.fixture
def engine(real_engine: str) -> str:
    """Only engines that are processes: fakeredis counts no commands, and a cluster has other channels."""
    return real_engine


@pytest.fixture
async def other(servers: Servers, real_engine: str, make_client: MakeClient) -> Redlease:
    """Who holds what the client waits for."""
    return await make_client(url=servers.url(real_engine))


def state_key(client: Redlease) -> str:
    """The key that the messages about a resource name."""
    return client.lock("r")._resource.state_key.decode()


async def queued(client: Redlease) -> None:
    """Return when somebody waits."""

    async def waits() -> bool:
        return bool((await client.lock("r").inspect()).waiters)

    await eventually(waits)


async def heard(client: Redlease, raw: Any, *payloads: str) -> None:
    """Publish to the client's channel, and return when the client has read it."""
    channel = client._session.connection.channel
    for payload in payloads:
        assert await raw.publish(channel, payload) == 1
    await client.lock("another").locked()  # its reply comes behind them


async def test_a_forged_capacity_fails_nobody(client: Redlease, other: Redlease, raw: Any) -> None:
    """A message that the capacity is 0 makes the client ask, and is not believed: who waits is granted."""
    permit = await other.lock("r").acquire()
    waiting = asyncio.ensure_future(client.lock("r").acquire())
    await queued(other)
    await heard(client, raw, *[f"c 0 {state_key(client)}"] * 5)
    await other.lock("r").release(permit)
    assert (await waiting).fence > permit.fence


async def test_a_forged_grant_runs_nothing(client: Redlease, other: Redlease, raw: Any) -> None:
    """The ticket of a waiter is for everybody to see; a grant that names it, or the client's next requests, is none."""
    holder = await other.lock("r").acquire()
    waiting = asyncio.ensure_future(client.lock("r").hold(ticket="seen by all"))
    await queued(other)
    now_ms = int(time.time() * 1000)
    known = ["seen by all", *(client._session.connection.client_id + f"-{n:x}" for n in range(1, 10))]
    await heard(client, raw, *(f"g {name.replace(' ', '_')} {2**52} {now_ms} {now_ms + 60_000} 1" for name in known))
    await heard(client, raw, *(f"x {name.replace(' ', '_')}" for name in known))
    assert not waiting.done()
    await other.lock("r").release(holder)
    hold = await waiting
    assert holder.fence < hold.fence < 2**52
    await heard(client, raw, *(f"x {name.replace(' ', '_')}" for name in known))
    hold.check()
    await hold.release()


async def test_what_is_drawn_cannot_be_guessed(client: Redlease) -> None:
    """No request id tells another one, nor does a ticket tell its request."""
    lock, session = client.lock("r"), client._session
    asks = [lock._ask(lock._default_spec, ids)[0] for ids in (session.ids, session.hold_ids) for _ in range(500)]
    assert len({ask.request_id for ask in asks}) == len({ask.ticket for ask in asks}) == 1000
    for ask in asks:
        assert ask.request_id not in ask.ticket
        assert ask.ticket not in ask.request_id
        assert len(ask.request_id) >= 20
        assert client._session.connection.client_id not in ask.request_id


async def test_a_fence_ahead_of_the_clock_is_not_believed(client: Redlease, other: Redlease, raw: Any) -> None:
    """Who can read the request's id too may make its client ask; the fence that a body gets is the server's."""
    permit = await other.lock("r").acquire()
    waiting = asyncio.ensure_future(client.lock("r").hold(ticket="T"))
    await queued(other)
    (request,) = client._session.pending
    now_ms = int(time.time() * 1000)
    await heard(client, raw, f"g {request} {2**52} {now_ms} {now_ms + 60_000} 1")
    assert not waiting.done()
    await other.lock("r").release(permit)
    async with await waiting as hold:
        assert hold.fence < 2**52


async def test_a_waiter_is_not_taken_out_by_a_message(client: Redlease, other: Redlease, raw: Any) -> None:
    """Messages that it was taken out, or weighs too much, make the client ask: it keeps its place."""
    permit = await other.lock("r").acquire()
    waiting = asyncio.ensure_future(client.lock("r").acquire(ticket="first"))
    await queued(other)
    second = asyncio.ensure_future(other.lock("r").acquire(ticket="second"))
    (request,) = client._session.pending
    await heard(client, raw, f"x {request}", f"m {request} 0", f"l {request} 0")
    await other.lock("r").release(permit)
    granted = await waiting
    assert not second.done()
    await client.lock("r").release(granted)
    await second


async def test_what_redlease_did_not_write_is_ignored(
    client: Redlease, other: Redlease, raw: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Noise is told of once; holds, waiters and the connection go on."""
    async with client.lock("own").hold() as hold:
        with caplog.at_level(logging.WARNING, logger="redlease"):
            noise = ["g", "hello", "g x y", "c", "c x y", "x", " ", "g 1 2", "\N{SNOWMAN}", "r a 1", "l", "q 1 2"]
            await heard(client, raw, *noise * 3)
        hold.check()
    assert len([record for record in caplog.records if "did not write" in record.message]) == 1
    assert await other.lock("own").try_acquire() is not None


async def test_the_server_still_ends_a_hold_by_a_message(client: Redlease, other: Redlease) -> None:
    """What the scripts say is heard as before: released by its ticket, a hold of a long lease ends at once."""
    with pytest.raises(LeaseLost):
        async with client.lock("r", lease=60).hold(ticket="T"):
            assert await other.lock("r").release("T")
            await asyncio.sleep(20)
