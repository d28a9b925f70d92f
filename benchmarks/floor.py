"""The floor: the least that a first-come, first-served semaphore on Redis can cost a Python program.

Two scripts, one message a hand-off, one connection on which the calls of one turn of the event loop leave in one
write. It has no leases, no fences worth the name, no timeouts and no reconnect, and forgets nobody who died: a limit
to measure against, and no lock to use.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import hiredis

# KEYS: holders queue fence. ARGV: ticket capacity. Reply: a fence, or 0 when it is queued.
ENTER = """
if redis.call('SCARD', KEYS[1]) >= tonumber(ARGV[2]) then
  redis.call('RPUSH', KEYS[2], ARGV[1])
  return 0
end
redis.call('SADD', KEYS[1], ARGV[1])
return redis.call('INCR', KEYS[3])
"""

# KEYS: as above. ARGV: ticket channel. Reply: 1 when it was held.
LEAVE = """
if redis.call('SREM', KEYS[1], ARGV[1]) == 0 then return 0 end
local first = redis.call('LPOP', KEYS[2])
if first then
  redis.call('SADD', KEYS[1], first)
  redis.call('PUBLISH', ARGV[2], first .. ' ' .. redis.call('INCR', KEYS[3]))
end
return 1
"""


def _digest(script: str) -> bytes:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest().encode()


def packed(*words: bytes | str | int) -> bytes:
    """A command as it goes over the wire."""
    command: bytes = hiredis.pack_command(words)  # type: ignore[arg-type] # its type says a tuple of one
    return command


ENTER_SHA, LEAVE_SHA = _digest(ENTER), _digest(LEAVE)


class Wire(asyncio.Protocol):
    """One connection in RESP3, driven by hiredis."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self._on_message = on_message
        self._reader = hiredis.Reader()
        self._loop = asyncio.get_running_loop()
        self._asked: deque[asyncio.Future[Any]] = deque()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not False:
            if isinstance(reply, hiredis.PushNotification):
                if reply[0] == b"message":
                    self._on_message(reply[2])
                continue
            asked = self._asked.popleft()
            if isinstance(reply, hiredis.ReplyError):
                asked.set_exception(reply)
            elif not asked.done():
                asked.set_result(reply)

    def call(self, *words: bytes | str | int) -> asyncio.Future[Any]:
        """The reply to a command, which leaves with the others of this turn."""
        if not self._unsent:
            self._loop.call_soon(self._flush)
        self._unsent.append(packed(*words))
        asked = self._loop.create_future()
        self._asked.append(asked)
        return asked

    def subscribe(self, channel: bytes) -> None:
        """Asks for the messages of a channel; the answer comes as one of them."""
        assert self._transport is not None
        self._transport.write(packed("SUBSCRIBE", channel))

    def close(self) -> None:
        assert self._transport is not None
        self._transport.close()

    def _flush(self) -> None:
        assert self._transport is not None
        self._transport.write(b"".join(self._unsent))
        self._unsent.clear()


class FloorSemaphores:
    """Semaphores of one capacity on one connection.

    Example:
        >>> semaphores = FloorSemaphores("redis://localhost:6379", capacity=3)
        >>> await semaphores.open()  # doctest: +SKIP
        >>> async with semaphores.hold("name"):  # doctest: +SKIP
        ...     ...
    """

    def __init__(self, url: str, capacity: int) -> None:
        self._address, self._capacity = urlsplit(url), capacity
        self._channel = b"floor:" + secrets.token_hex(8).encode()
        self._operations = itertools.count(1)
        self._waiting: dict[bytes, asyncio.Future[None]] = {}

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        _, self._wire = await loop.create_connection(
            lambda: Wire(self._granted), self._address.hostname or "localhost", self._address.port or 6379
        )
        await self._wire.call("HELLO", "3")
        await asyncio.gather(*(self._wire.call("SCRIPT", "LOAD", script) for script in (ENTER, LEAVE)))
        self._wire.subscribe(self._channel)
        await self._wire.call("PING")

    async def close(self) -> None:
        self._wire.close()

    def hold(self, name: str) -> FloorHold:
        return FloorHold(self, name)

    async def enter(self, name: str) -> bytes:
        ticket = b"%d" % next(self._operations)
        # The message may come with the reply, in the same read.
        granted = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        keys = (f"{name}:holders", f"{name}:queue", f"{name}:fence")
        if await self._wire.call("EVALSHA", ENTER_SHA, 3, *keys, ticket, self._capacity):
            del self._waiting[ticket]
        else:
            await granted
        return ticket

    async def leave(self, name: str, ticket: bytes) -> None:
        keys = (f"{name}:holders", f"{name}:queue", f"{name}:fence")
        await self._wire.call("EVALSHA", LEAVE_SHA, 3, *keys, ticket, self._channel)

    def _granted(self, message: bytes) -> None:
        self._waiting.pop(message.split(b" ", 1)[0]).set_result(None)


class FloorHold:
    """One unit for as long as the block runs."""

    def __init__(self, semaphores: FloorSemaphores, name: str) -> None:
        self._semaphores, self._name = semaphores, name

    async def __aenter__(self) -> Self:
        self._ticket = await self._semaphores.enter(self._name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._semaphores.leave(self._name, self._ticket)
