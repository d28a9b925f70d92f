"""Writes that replicas must have, on connections of their own.

WAIT counts the replicas that have all writes of the connection on which it is called, and holds up that connection
until they do: on the shared connection it would hold up every caller, and of its writes it knows nothing elsewhere.
Writes that are made while one WAIT runs share the next one, like the commits of a database in one flush.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any, NamedTuple

from redis import exceptions
from redis.asyncio import ConnectionPool

from redlease._core.protocol import encoding

from .base import end
from .opening.driver import open_connection

ANSWER_MS = 5000  # how long connecting and answering may take, beside the wait for the replicas


class Demand(NamedTuple):
    """How many replicas must have a write, and how long to wait for them."""

    replicas: int
    timeout_ms: int


class Written(NamedTuple):
    """The reply to a write, and how many replicas have it."""

    reply: Any
    replicas: int


class ReplicatedWrites:
    """The connection to one server for writes of one demand: a WAIT for more would hold up those that ask for less."""

    def __init__(self, pool: ConnectionPool, demand: Demand) -> None:
        self._pool = pool
        self._demand = demand
        self._queue: deque[tuple[bytes, asyncio.Future[Written]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._connection: Any = None

    async def write(self, command: bytes) -> Written:
        """Sends a command; returns its reply as soon as enough replicas have it, or the time for that is over.

        Raises:
            ResponseError: The server refused the command, or WAIT.
            ConnectionError: The server was not reached, or it is unknown what it did.
        """
        future: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._queue.append((command, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="redlease replicated writes")
        return await future

    async def close(self) -> None:
        """Closes the connection; writes without an answer fail."""
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await end(self._task)
        await self._disconnect()
        while self._queue:
            self._fail([self._queue.popleft()[1]], exceptions.ConnectionError("the client is closed"))

    async def _run(self) -> None:
        while self._queue:
            # Who gave up meanwhile gives its grant back.
            batch = [(command, future) for command, future in self._queue if not future.done()]
            self._queue.clear()
            if not batch:
                continue
            commands, futures = [command for command, _ in batch], [future for _, future in batch]
            try:
                async with asyncio.timeout((ANSWER_MS + self._demand.timeout_ms) / 1000):
                    await self._write(commands, futures)
            except BaseException as error:
                await self._disconnect()
                self._fail(futures, exceptions.ConnectionError(str(error) or "no answer in time"))
                if not isinstance(error, Exception):
                    raise

    async def _write(self, commands: list[bytes], futures: list[asyncio.Future[Written]]) -> None:
        if self._connection is None:
            self._connection = await open_connection(self._pool, 2)
        wait = encoding.plain("WAIT", str(self._demand.replicas), str(self._demand.timeout_ms))
        await self._connection.send_packed_command(b"".join([*commands, wait]), check_health=False)
        *replies, replicas = [await self._read() for _ in (*commands, wait)]
        for reply, future in zip(replies, futures, strict=True):
            refused = next((each for each in (reply, replicas) if isinstance(each, exceptions.ResponseError)), None)
            if refused is not None:
                self._fail([future], refused)
            elif not future.done():
                future.set_result(Written(reply, replicas))

    async def _read(self) -> Any:
        try:
            return await self._connection.read_response(disconnect_on_error=False)
        except exceptions.ResponseError as error:
            return error

    @staticmethod
    def _fail(futures: list[asyncio.Future[Written]], error: Exception) -> None:
        for future in futures:
            if not future.done():
                future.set_exception(error)

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await connection.disconnect(nowait=True)


class Replication:
    """The connections of one client for writes that replicas must have: one for each server and demand."""

    def __init__(self) -> None:
        self._writes: dict[tuple[ConnectionPool, Demand], ReplicatedWrites] = {}

    def to(self, pool: ConnectionPool, demand: Demand) -> ReplicatedWrites:
        """Returns the connection for such a demand to the server that a pool leads to."""
        if (pool, demand) not in self._writes:
            self._writes[pool, demand] = ReplicatedWrites(pool, demand)
        return self._writes[pool, demand]

    async def close(self) -> None:
        """Closes all of them."""
        writes, self._writes = self._writes, {}
        for each in writes.values():
            await each.close()
