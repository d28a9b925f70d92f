"""A client closes in bounded time, whatever its tasks wait in."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from unittest import mock

import pytest

from redlease import Redlease
from redlease._core.transport import cluster, connection
from redlease._core.transport.opening.driver import ClientDriver


@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
async def test_a_cancellation_that_is_swallowed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that redis-py turns into an error, as it may before Python 3.12, does not keep `close` waiting."""
    begun = asyncio.Event()
    swallowed = 0

    async def swallowing(*_: Any) -> Any:
        nonlocal swallowed
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            swallowed += 1
            raise ConnectionError("what it waited for was done just then") from None

    monkeypatch.setattr(connection, "open_driver", swallowing)
    monkeypatch.setattr(cluster, "query_node", swallowing)
    # The next attempt begins after this pause, in which nothing swallows anything.
    monkeypatch.setattr(connection, "BACKOFF_S", (1000.0, 1000.0))
    monkeypatch.setattr(cluster, "BACKOFF_S", (1000.0, 1000.0))
    client = Redlease.from_url(f"{kind}://127.0.0.1:1")
    asking = asyncio.create_task(client.lock("r").acquire())
    await begun.wait()
    closing = asyncio.create_task(client.close())
    await asyncio.wait([closing], timeout=8)
    assert closing.done()
    await closing
    assert swallowed
    assert asking.done()
    assert asking.exception() is not None


async def test_a_close_that_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cancels `close` is obeyed at once, and the connection's task ends by itself when it can."""
    begun, release = asyncio.Event(), asyncio.Event()

    async def stubborn(*_: Any) -> Any:
        begun.set()
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        raise ConnectionError("over")

    monkeypatch.setattr(connection, "open_driver", stubborn)
    client = Redlease.from_url("redis://127.0.0.1:1")
    asking = asyncio.create_task(client.lock("r").acquire())
    await begun.wait()
    (serving,) = (task for task in asyncio.all_tasks() if task.get_name() == "redlease connection")
    closing = asyncio.create_task(client.close())
    await asyncio.wait([closing], timeout=0.3)
    assert not closing.done()
    closing.cancel()
    await asyncio.wait([closing], timeout=8)
    assert closing.cancelled()
    release.set()
    await asyncio.wait([asking, serving], timeout=8)
    assert serving.done()
    assert asking.exception() is not None


class Swallows:
    """A connection of redis-py that sends on when its sending is cancelled."""

    def __init__(self) -> None:
        self.sending = asyncio.Event()

    async def send_packed_command(self, *_: Any, **__: Any) -> None:
        """Wait until it is cancelled, and return as if nothing had been."""
        self.sending.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    async def read_response(self, **_: Any) -> None:
        """Wait for ever."""
        await asyncio.Event().wait()

    async def disconnect(self, *, nowait: bool) -> None:
        """Do nothing."""


async def test_a_send_that_swallows_a_cancellation() -> None:
    """The driver of a client that is handed in closes though its sending goes on."""
    swallows = Swallows()
    driver = ClientDriver(swallows, Swallows(), mock.Mock())
    driver.write(b"x")
    await swallows.sending.wait()
    driver.abort()
    closing = asyncio.create_task(driver.wait_closed())
    await asyncio.wait([closing], timeout=8)
    assert closing.done()
