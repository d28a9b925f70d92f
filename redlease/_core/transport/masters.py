"""Plain commands to every master, for operators: each master is asked over a connection of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from redis import exceptions
from redis.asyncio import ConnectionPool

from redlease._core.protocol.error_replies import ErrorReply
from redlease.errors import RedleaseError, Unavailable

from .addresses import Address
from .base import Transport
from .opening.driver import error_text, open_connection
from .opening.handshake import explain

Command = Sequence[str | bytes | int]

SCAN_COUNT = 1000  # keys that one SCAN looks at: about a millisecond of the server's time


class Refused(RedleaseError):
    """Raised when a master answers a plain command with an error."""


class Master:
    """A master, and a connection to it that nothing else uses, opened by the first command."""

    def __init__(self, pool: ConnectionPool, limit_s: float) -> None:
        self._pool = pool
        self._limit_s = limit_s
        self._connection: Any = None

    @property
    def name(self) -> str:
        """Its address, or the path of its unix socket."""
        settings = self._pool.connection_kwargs
        # Behind Sentinels only the connection knows which server it has found.
        host, port = (getattr(self._connection, name, settings.get(name)) for name in ("host", "port"))
        return str(Address(host, int(port))) if host and port else str(settings.get("path", "in this process"))

    async def ask(self, *words: str | bytes | int) -> Any:
        """Sends a command and returns its reply, with bytes for strings.

        Raises:
            Refused: The server replied with an error.
            Unavailable: It was not reached, or did not reply in time.
        """
        (reply,) = await self.ask_all([words])
        if isinstance(reply, Refused):
            raise reply
        return reply

    async def ask_all(self, commands: Sequence[Command]) -> list[Any]:
        """Sends commands together and returns their replies in order, `Refused` for those that the server refused.

        Raises:
            Unavailable: It was not reached, or did not reply in time.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                self._connection = self._connection or await open_connection(self._pool, 2)
                await self._connection.send_packed_command(self._connection.pack_commands(commands))
                return [await self._read(command) for command in commands]
        except (exceptions.RedisError, OSError) as error:
            raise Unavailable(
                f"the server {self.name} did not answer: {explain(error, self._pool)}. Try again"
            ) from error

    async def _read(self, command: Command) -> Any:
        try:
            return await self._connection.read_response(disable_decoding=True)
        except exceptions.ResponseError as error:
            return Refused(_refusal(self.name, str(command[0]), error_text(error)))

    async def scan(self, pattern: str) -> AsyncGenerator[list[bytes], None]:
        """Yields the keys that match a pattern, in batches; a key may come twice."""
        cursor = b"0"
        while True:
            cursor, keys = await self.ask("SCAN", cursor.decode(), "MATCH", pattern, "COUNT", SCAN_COUNT)
            yield keys
            if cursor == b"0":
                return

    async def close(self) -> None:
        """Closes the connection, if there is one."""
        if self._connection is not None:
            await self._connection.disconnect(nowait=True)


def _refusal(name: str, command: str, text: str) -> str:
    grant = (
        f". Grant it to the Redis user: ACL SETUSER <user> +{command.lower()}" if ErrorReply(text).not_allowed else ""
    )
    return f"the server {name} refused {command}: {text.rstrip('. ')}{grant}"


@contextlib.asynccontextmanager
async def master_connections(transport: Transport) -> AsyncIterator[list[Master]]:
    """Returns every master that the transport knows of; closes the connections to them at the end of the block.

    Raises:
        Unavailable: No server was reached in time.
        RedleaseError: The servers refused this client.
    """
    limit_s = transport.limit_ms / 1000
    try:
        async with asyncio.timeout(limit_s):
            await transport.until_ready()
    except TimeoutError:
        raise Unavailable(f"the Redis server could not be reached: {transport.trouble}. Check the URL") from None
    masters = [Master(pool, limit_s) for pool in transport.master_pools()]
    try:
        yield masters
    finally:
        for master in masters:
            await master.close()
