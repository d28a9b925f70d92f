"""Contention and outage told apart: AcquireTimeout when others held it, Unavailable when the server was away."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, Redlease, Unavailable

from helpers import until_waiting

if TYPE_CHECKING:
    from conftest import MakeClient, OwnServer
    from servers import Server


@pytest.fixture
def server(own_server: OwnServer) -> Server:
    """A server for one test alone."""
    return own_server("valkey9")


async def test_others_held_it(server: Server, make_client: MakeClient) -> None:
    """With the server there it is AcquireTimeout, in the queue or not: the outcome is known."""
    lock = (await make_client(url=server.url)).lock("r")
    await lock.acquire()
    for timeout in (0, 0.2):
        with pytest.raises(AcquireTimeout) as caught:
            await lock.acquire(timeout=timeout)
        assert not isinstance(caught.value, Unavailable)
        assert "unknown" not in str(caught.value)


@pytest.mark.slow
async def test_the_server_was_out_of_reach(server: Server, make_client: MakeClient) -> None:
    """Whoever asks in an outage, and whoever waited when it began, gets Unavailable, which is a TimeoutError too."""
    lock = (await make_client(url=server.url)).lock("r")
    await lock.acquire()
    waiting = asyncio.create_task(lock.acquire(timeout=1.5, ticket="t"))
    await until_waiting(lock, 1)
    server.kill()
    for asking in (lock.acquire(timeout=0.3, ticket="u"), lock.hold(timeout=0.3, ticket="u"), waiting):
        with pytest.raises(Unavailable) as caught:
            await asking
        error = caught.value
        assert isinstance(error, TimeoutError)
        assert not isinstance(error, AcquireTimeout)
        assert (error.resource, error.ticket) == ("r", "t" if asking is waiting else "u")
        assert "the outcome is unknown" in str(error).lower()
        assert "out of the queue" not in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.ticket) == (Unavailable, str(error), error.ticket)


async def test_a_server_that_is_silent(server: Server, make_client: MakeClient) -> None:
    """A connection that is open and brings no answer is no contention either, and the error does not call it lost."""
    lock = (await make_client(url=server.url)).lock("r")
    server.pause()
    try:
        with pytest.raises(Unavailable, match="has not answered"):
            await lock.acquire(timeout=0.3)
    finally:
        server.resume()


@pytest.mark.slow
async def test_an_outage_that_is_over_when_the_time_is(server: Server, make_client: MakeClient) -> None:
    """What counts is the end: a request that stands in the queue again by then was kept waiting by others."""
    lock = (await make_client(url=server.url)).lock("r")
    await lock.acquire()
    waiting = asyncio.create_task(lock.acquire(timeout=4))
    await until_waiting(lock, 1)
    server.pause()
    await asyncio.sleep(0.3)
    server.resume()
    with pytest.raises(AcquireTimeout):
        await waiting


@pytest.mark.slow
async def test_how_long_calls_wait_for_the_server(server: Server, make_client: MakeClient) -> None:
    """`call_timeout` bounds each call that has no timeout of its own, and the error names it."""
    client = await make_client(url=server.url, call_timeout=0.25)
    lock = client.lock("r")
    permit = await lock.acquire()
    server.kill()
    loop = asyncio.get_running_loop()
    began = loop.time()
    calls: list[Any] = [lock.try_acquire(), lock.acquire(timeout=0), lock.hold(timeout=0).__aenter__()]
    calls += [lock.inspect(), lock.locked(), lock.release("u"), lock.release(permit), lock.renew(permit)]
    calls += [lock.is_held(permit), lock.adopt(permit), lock.resize(1), lock.release_all()]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
        assert "within 0.25 s" in str(outcome)
    assert loop.time() - began < 4  # the default is 5 s
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lock.acquire(), 0.5)  # which has no bound


async def test_entering_a_client_takes_its_time(server: Server, make_client: MakeClient) -> None:
    """A first connection is given some seconds however short the calls are to be."""
    server.pause()
    entering = asyncio.create_task(make_client(url=server.url, call_timeout=0.05))
    await asyncio.sleep(0.3)
    server.resume()
    assert not await (await entering).lock("r").locked()


@pytest.mark.parametrize("wrong", [0, -1, "5", True, None])
def test_a_call_timeout_that_is_none(wrong: Any) -> None:
    """It is a duration above 0, and refused before anything is done."""
    with pytest.raises(ValueError, match="call_timeout"):
        Redlease.from_url("redis://localhost", call_timeout=wrong)
