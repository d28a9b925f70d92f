"""Opens a connection with redis-py and drives it.

redis-py finds the server and opens, secures and authenticates the connection. Then `SocketDriver` takes over its
asyncio transport: it writes bytes as given, and hiredis parses the replies. With RESP2, `SocketPair` drives two such.
If there is no asyncio transport (fakeredis), `ClientDriver` uses two connections of that client through redis-py's own
calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import hiredis
from redis import exceptions
from redis.asyncio import ConnectionPool

from redlease._core.log import report


class Reading(Protocol):
    """Gets everything that is read on a connection, and `on_read` after each batch. `reply` may be a `ReplyError`."""

    def on_reply(self, reply: Any) -> None: ...
    def on_push(self, push: list[Any]) -> None: ...
    def on_read(self) -> None: ...
    def on_lost(self, why: str) -> None: ...


class Receiver(Reading, Protocol):
    """Gets also the error that answers SUBSCRIBE on a connection of its own."""

    def on_subscription_refused(self, error: ReplyError) -> None: ...


class ReplyError(Exception):
    """An error reply, with the server's text."""


class Driver(Protocol):
    """An open connection."""

    inline_push: bool  # whether the answer to SUBSCRIBE comes in the order of the replies
    protocol: int  # the RESP version of the connection for commands

    def write(self, data: bytes) -> None: ...
    def subscribe(self, data: bytes) -> None: ...
    def abort(self) -> None: ...
    async def wait_closed(self) -> None: ...


# Pool settings that must be overridden: retries would repeat commands unnoticed, timeouts would close an idle
# connection, and redlease decodes replies and checks the connection itself.
_OURS: dict[str, Any] = {
    "decode_responses": False,
    "health_check_interval": 0,
    "maint_notifications_config": None,
    "maint_notifications_pool_handler": None,
    "retry": None,
    "retry_on_error": [],
    "retry_on_timeout": False,
    "socket_timeout": None,
}


async def open_connection(pool: ConnectionPool, protocol: int) -> Any:
    """Opens a connection with the pool's address, TLS and credentials, which the pool neither counts nor closes."""
    known = set(pool.connection_kwargs)
    settings = pool.connection_kwargs | {name: value for name, value in _OURS.items() if name in known}
    settings["socket_timeout"] = None
    connection: Any = pool.connection_class(**settings | {"protocol": protocol})
    try:
        await connection.connect()
    except BaseException:
        with contextlib.suppress(Exception):
            await connection.disconnect(nowait=True)
        raise
    return connection


class SocketDriver(asyncio.Protocol):
    """Drives the asyncio transport of a connection that redis-py opened.

    `_reader` and `_writer` are private attributes of redis-py; only this module relies on them.
    """

    inline_push = True
    protocol = 3

    def __init__(self, connection: Any, receiver: Reading) -> None:
        self._connection = connection
        self._receiver: Reading | None = receiver
        self._parser = hiredis.Reader(replyError=ReplyError)
        self._transport: asyncio.Transport = connection._writer.transport
        left_over = bytes(getattr(connection._reader, "_buffer", b""))
        self._transport.set_protocol(self)
        if left_over:
            self.data_received(left_over)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    subscribe = write

    def data_received(self, data: bytes) -> None:
        parser, receiver = self._parser, self._receiver
        parser.feed(data)
        try:
            while self._receiver is not None and receiver is not None:
                reply = parser.gets()
                if reply is False:
                    receiver.on_read()
                    return
                if type(reply) is hiredis.PushNotification:
                    receiver.on_push(reply)
                else:
                    receiver.on_reply(reply)
        except hiredis.ProtocolError as error:
            self._lost(f"what it sent is not the Redis protocol: {error}")

    def eof_received(self) -> None:
        self._lost("the server closed it")

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(str(error) if error else "it was closed")

    def _lost(self, why: str) -> None:
        receiver, self._receiver = self._receiver, None
        self.abort()
        if receiver is not None:
            receiver.on_lost(why)

    def abort(self) -> None:
        """Closes at once and discards data that was not sent yet."""
        self._receiver = None
        self._transport.abort()
        self._connection._reader = self._connection._writer = None

    async def wait_closed(self) -> None:
        """Returns at once: `abort` has closed the transport."""


# redis-py removes the code from the text of errors for which it has a class.
_CODES: dict[type[Exception], str] = {
    exceptions.NoScriptError: "NOSCRIPT",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.NoPermissionError: "NOPERM",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.MovedError: "MOVED",  # a subclass of the next one
    exceptions.AskError: "ASK",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.MasterDownError: "MASTERDOWN",  # a subclass of the next one
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
}


def error_text(error: Exception) -> str:
    """Returns the text of a redis-py error, with the server's code in front."""
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), "")
    text = str(error)
    return text if not code or text.startswith(code) else f"{code} {text}"


class ClientDriver:
    """Drives two connections through redis-py's calls, one for commands and one for messages, both with RESP2."""

    inline_push = False
    protocol = 2

    def __init__(self, commands: Any, messages: Any, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver
        self._connections = (commands, messages)
        self._out: asyncio.Queue[tuple[Any, bytes]] = asyncio.Queue()
        self._tasks = [
            asyncio.create_task(self._run(self._send), name="redlease sends"),
            asyncio.create_task(self._run(self._receive_replies), name="redlease receives replies"),
            asyncio.create_task(self._run(self._receive_messages), name="redlease receives messages"),
        ]

    def write(self, data: bytes) -> None:
        self._out.put_nowait((self._connections[0], data))

    def subscribe(self, data: bytes) -> None:
        self._out.put_nowait((self._connections[1], data))

    def abort(self) -> None:
        self._receiver = None
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        """Returns when the tasks have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001  after any error the connection is unusable
            if not isinstance(error, (exceptions.RedisError, OSError)):
                report(error)
            receiver = self._receiver
            self.abort()
            if receiver is not None:
                receiver.on_lost(str(error))

    async def _send(self) -> None:
        try:
            while self._receiver is not None:  # a cancellation may be swallowed, see `end` in base.py
                connection, data = await self._out.get()
                await connection.send_packed_command(data, check_health=False)
        finally:
            for connection in self._connections:
                await connection.disconnect(nowait=True)

    async def _receive_replies(self) -> None:
        while self._receiver is not None:
            try:
                reply = await self._connections[0].read_response(disable_decoding=True, disconnect_on_error=False)
            except exceptions.ResponseError as error:
                reply = ReplyError(error_text(error))
            if reply is None:
                raise exceptions.ConnectionError("the connection was closed")
            if self._receiver is not None:  # None if another task of this driver has failed meanwhile
                self._receiver.on_reply(reply)
            if self._receiver is not None:
                self._receiver.on_read()

    async def _receive_messages(self) -> None:
        while self._receiver is not None:
            try:
                push = await self._connections[1].read_response(disable_decoding=True, disconnect_on_error=False)
            except exceptions.ResponseError as error:
                if self._receiver is not None:
                    self._receiver.on_subscription_refused(ReplyError(error_text(error)))
                continue
            if push is None:
                raise exceptions.ConnectionError("the connection was closed")
            if self._receiver is not None:
                self._receiver.on_push(push)
            if self._receiver is not None:
                self._receiver.on_read()
