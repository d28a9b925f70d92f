"""Opens the connections of a client to a server, and returns what drives them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from redis import exceptions
from redis.asyncio import ConnectionPool

from .dialects import Protocol
from .driver import ClientDriver, Driver, Receiver, SocketDriver, open_connection
from .socket_pair import SocketPair


async def open_driver(pool: ConnectionPool, receiver: Receiver, protocol: Protocol) -> Driver:
    """Opens one connection to the pool's server with RESP3, or two with RESP2, and returns its driver."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(version: int) -> Any:
            connection = await open_connection(pool, version)
            stack.push_async_callback(connection.disconnect, nowait=True)
            return connection

        first = await opened(protocol)
        driver: Driver
        if protocol == 3 and isinstance(first._writer, asyncio.StreamWriter):
            driver = SocketDriver(first, receiver)
            stack.pop_all()
            return driver
        if protocol == 3:  # fakeredis
            await first.disconnect(nowait=True)
            first = await opened(2)
        second = await opened(2)
        if isinstance(first._writer, asyncio.StreamWriter):
            if _peer(first) != _peer(second):
                raise exceptions.ConnectionError("two connections lead to different servers")
            driver = SocketPair(first, second, receiver)
        else:
            driver = ClientDriver(first, second, receiver)
        stack.pop_all()
        return driver


def _peer(connection: Any) -> Any:
    """Returns the address of the server; behind Sentinels a failover may come between two connections."""
    return getattr(connection, "host", None), getattr(connection, "port", None)
