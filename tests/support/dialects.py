"""A proxy that makes a server speak like others: without RESP3, without some commands, or without messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from proxy import MESSAGES, READ_SIZE, SUBSCRIBING, Framer, first_word, is_message

if TYPE_CHECKING:
    from collections.abc import Callable

NO_HELLO = b"-ERR unknown command 'HELLO', with args beginning with: '3' \r\n"
NO_PROTO = b"-NOPROTO unsupported protocol version\r\n"
STILL_RESP2 = b"*6\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$5\r\n7.0.0\r\n$5\r\nproto\r\n:2\r\n"
SUBSCRIBED_ONLY = b"-ERR Can't execute '%b': only (P|S)SUBSCRIBE / PING / QUIT / RESET are allowed in this context\r\n"


@dataclass
class Client:
    """What a connection has done so far."""

    has_resp3: bool = False
    has_subscribed: bool = False
    # What the next replies of the server are replaced by; None: passed on.
    replies: deque[bytes | None] = field(default_factory=deque)


class Closes(Exception):
    """The server closes the connection."""


def without_resp3(_: Client, name: str, frame: bytes) -> bytes | None:
    """HELLO 3 is refused, as where RESP2 was chosen for a database."""
    return NO_PROTO if name == "HELLO" and b"\r\n3\r\n" in frame else None


def keeps_resp2(_: Client, name: str, frame: bytes) -> bytes | None:
    """HELLO 3 is answered as if it were granted, and RESP2 is spoken, as with Kvrocks unless RESP3 is switched on."""
    return STILL_RESP2 if name == "HELLO" and b"\r\n3\r\n" in frame else None


def without_hello(_: Client, name: str, frame: bytes) -> bytes | None:
    """There is no HELLO, as in Redis 5 and behind Envoy."""
    return NO_HELLO if name == "HELLO" else None


def broken_by_subscribe(client: Client, name: str, frame: bytes) -> bytes | None:
    """HELLO 3 is granted, and no other command after SUBSCRIBE, as with miniredis."""
    client.has_resp3 = client.has_resp3 or (name == "HELLO" and b"\r\n3\r\n" in frame)
    if client.has_resp3 and client.has_subscribed and name not in {*SUBSCRIBING, "PING"}:
        return SUBSCRIBED_ONLY % name.lower().encode()
    client.has_subscribed = client.has_subscribed or name in SUBSCRIBING
    return None


def closed_by_publish(client: Client, name: str, frame: bytes) -> bytes | None:
    """A RESP3 connection is closed once a script publishes, as with some versions of Garnet."""
    client.has_resp3 = client.has_resp3 or (name == "HELLO" and b"\r\n3\r\n" in frame)
    if client.has_resp3 and name.startswith("EVAL") and b"\r\ndeliver\r\n" in frame:
        raise Closes
    return None


def lacks(*names: str) -> Callable[[Client, str, bytes], bytes | None]:
    """Some commands are unknown."""

    def answer(_: Client, name: str, frame: bytes) -> bytes | None:
        return b"-ERR unknown command '%b'\r\n" % name.encode() if name in names else None

    return answer


class DialectProxy:
    """Listens on ``port`` of loopback for a server whose dialect differs.

    ``has_messages``: whether what is published arrives.
    """

    def __init__(
        self,
        upstream_port: int,
        *answers: Callable[[Client, str, bytes], bytes | None],
        has_messages: bool = True,
    ) -> None:
        """Prepare; nothing listens before it is entered."""
        self._upstream_port = upstream_port
        self._answers = answers
        self.has_messages = has_messages
        self.is_silent = False  # whether nothing more comes from connections that have subscribed
        self.connections = 0
        self.port = 0

    async def __aenter__(self) -> Self:
        """Listen."""
        self._stack = contextlib.AsyncExitStack()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        listener = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self._stack.callback(listener.close)
        self.port = listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close everything."""
        await self._stack.aclose()
        self.close_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close_all(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.transport.abort()

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        self._writers |= {writer, to_server}
        client = Client()
        pumps = [
            asyncio.ensure_future(self._requests(client, reader, to_server)),
            asyncio.ensure_future(self._replies(client, from_server, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in (writer, to_server):
                each.transport.abort()
            self._writers -= {writer, to_server}

    async def _requests(self, client: Client, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        framer = Framer()
        while data := await reader.read(READ_SIZE):
            for frame in framer.feed(data):
                name = first_word(frame)
                try:
                    reply = next(filter(None, (answer(client, name, frame) for answer in self._answers)), None)
                except Closes:
                    return
                if reply is not None:  # the server answers another command in its place, so that the order is kept
                    client.replies.append(reply)
                    to_server.write(b"*1\r\n$5\r\nNOCMD\r\n")
                    continue
                if name in SUBSCRIBING:
                    client.has_subscribed = True
                else:
                    client.replies.append(None)
                to_server.write(frame)
            await to_server.drain()

    async def _replies(self, client: Client, from_server: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        framer = Framer()
        while data := await from_server.read(READ_SIZE):
            for frame in framer.feed(data):
                if self.is_silent and client.has_subscribed:
                    continue
                if not is_message(frame):
                    reply = client.replies.popleft() if client.replies else None
                    writer.write(reply or frame)
                elif self.has_messages or first_word(frame) not in MESSAGES:
                    writer.write(frame)
            await writer.drain()


def answers_of(dialect: Any) -> tuple[Any, ...]:
    """Return the answers of a dialect as a tuple."""
    return dialect if isinstance(dialect, tuple) else (dialect,)
