"""The client: from a URL, a redis client or embedded, it makes the primitives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, Self

from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from . import limits, wire
from .addresses import GivenServers, NamedServers
from .cluster import Cluster
from .connection import Connection
from .embedded import EmbeddedServer, NotStarted
from .errors import RedleaseError, Unavailable, Withdrawn
from .keeper import Keeper
from .limits import Duration
from .route import LIMIT_MS, Reached, Route, everything
from .semaphore import Lock, Semaphore
from .sentinel import own_pool
from .urls import read_url
from .waiting import Room
from .wish import Wish

NAMES_KEPT = 1024  # whose keys are written out once, as long as no more names than that are in use
CLOSE_S = 2.0  # the longest that closing waits for the server


class Redlease:
    """A client: one connection to a server, however many locks, tasks and waiters use it.

    It belongs to the event loop that it is first used in. Entering it connects and looks at the server, leaving it
    releases its holds and takes its waiting calls out of their queues; what `acquire` returned stays.

    Durations are seconds or a `timedelta`, here and everywhere.

    Args:
        redis_client: A client of `redis.asyncio` (`Redis`, `RedisCluster`, one that asks Sentinels) or of fakeredis.
            Its address, TLS and credentials are used for a connection of redlease's own; it is neither used nor closed.
        prefix: What all keys and channels begin with.
        owner: Who is shown as holder; `host:pid` by default.
        lease: Seconds that a permit stays valid without renewal.
        waiter_lease: Seconds that a place in a queue outlives a silent process.
        idle_ttl: Seconds that an idle resource's state stays on the server.

    Raises:
        ValueError: A parameter is wrong.

    Example:
        >>> async with Redlease.from_url("redis://localhost:6379/0") as client:  # doctest: +SKIP
        ...     async with client.lock("invoice:42", lease=30) as hold:
        ...         await pay(fence=hold.fence)
    """

    def __init__(
        self,
        redis_client: Redis | RedisCluster,
        *,
        prefix: str = "redlease",
        owner: str | None = None,
        lease: Duration = 30.0,
        waiter_lease: Duration = 10.0,
        idle_ttl: Duration = 86_400.0,
    ) -> None:
        settings = {"owner": owner, "lease": lease, "waiter_lease": waiter_lease, "idle_ttl": idle_ttl}
        if isinstance(redis_client, RedisCluster):
            self._set_up(GivenServers(redis_client), prefix, **settings)
            return
        pool = getattr(redis_client, "connection_pool", None)
        if not isinstance(pool, ConnectionPool):
            raise ValueError(f"redlease needs a client of redis.asyncio, not {redis_client!r}")
        if isinstance(pool, SentinelConnectionPool):
            pool = own_pool(pool)
        self._set_up(pool, prefix, **settings)

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = "redlease",
        owner: str | None = None,
        lease: Duration = 30.0,
        waiter_lease: Duration = 10.0,
        idle_ttl: Duration = 86_400.0,
        **redis_options: Any,
    ) -> Self:
        """A client of the server at `url`: `redis://`, `rediss://` (TLS), `unix://`, or of several.

        Args:
            url: As redis-py takes it, with user name, password and database. Of a cluster, some of its nodes:
                `redis+cluster://host:port,host:port`. Of a primary that Sentinels know, the Sentinels, the name of the
                service and the database: `redis+sentinel://host:port,host:port/mymaster/0`. Both also with `rediss+`.
            prefix: This and the following as for the class.
            owner: See there.
            lease: See there.
            waiter_lease: See there.
            idle_ttl: See there.
            **redis_options: Further options of a redis-py connection, `ssl_ca_certs` for example.

        Raises:
            ValueError: The URL or a parameter is wrong.
        """
        self = cls.__new__(cls)
        where = read_url(url, redis_options)
        settings = {"owner": owner, "lease": lease, "waiter_lease": waiter_lease, "idle_ttl": idle_ttl}
        self._set_up(where, prefix, **settings)
        return self

    @classmethod
    def embedded(cls, **settings: Any) -> Self:
        """A client with a server of its own: a child process that starts when the client is entered and ends with it.

        Needs `pip install 'redlease[embedded]'`. Takes the settings of the class by keyword.

        Raises:
            ValueError: A setting is wrong. Entering the client raises `RedleaseError` where no server can be started.
        """
        self = cls(Redis(connection_pool=ConnectionPool(connection_class=NotStarted)), **settings)
        self._server = EmbeddedServer()
        return self

    def _set_up(self, where: ConnectionPool | NamedServers | GivenServers, prefix: str, **settings: Any) -> None:
        self._prefix = limits.checked_prefix(prefix)
        self._terms = wire.changed_terms(wire.Terms(owner=f"{socket.gethostname()}:{os.getpid()}"), **settings)
        self._connection = self._route(where)
        self._keeper = Keeper(self._connection)
        self.room = Room(self._keeper)
        self._server: EmbeddedServer | None = None
        # Most make a primitive anew for each use of it, of a few names and with the same settings.
        self._known_resource = lru_cache(maxsize=NAMES_KEPT)(partial(wire.Resource, prefix))
        self._known_wish = lru_cache(maxsize=64, typed=True)(self._usual_wish)

    def _route(self, where: ConnectionPool | NamedServers | GivenServers) -> Route:
        if isinstance(where, NamedServers | GivenServers):
            return Cluster(where, self._prefix, self._on_ready, self._on_message, self._kept)
        channel = f"{self._prefix}:client:{secrets.token_hex(8)}"
        return Connection(where, self._prefix, channel, self._on_ready, self._on_message)

    def _kept(self) -> set[bytes]:
        """The state keys of all resources that something is kept of."""
        asked = {waiting.ask.resource.state_key for waiting in self.room.waitings.values()}
        return asked | set(self.room.places) | {lease.ask.resource.state_key for lease in self._keeper.leases.values()}

    def lock(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
        idle_ttl: Duration | None = None,
        max_waiters: int | None = None,
    ) -> Lock:
        """The lock of that name: a semaphore of capacity 1.

        Args:
            name: Of the resource, at most 512 bytes.
            lease: This and the following instead of the client's.
            owner: See the class.
            waiter_lease: See the class.
            idle_ttl: See the class.
            max_waiters: `QueueFull` is raised at once when so many wait.

        Raises:
            ValueError: A parameter is wrong.
            RedleaseError: The client is closed.
        """
        usual = self._wish(1, lease, owner, waiter_lease, idle_ttl, max_waiters)
        return Lock(self.room, self._resource(name), usual)

    def semaphore(
        self,
        name: str,
        capacity: int,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
        idle_ttl: Duration | None = None,
        max_waiters: int | None = None,
    ) -> Semaphore:
        """The semaphore of that name.

        Args:
            name: Of the resource, at most 512 bytes.
            capacity: Units that may be held at once. A value that differs from the one last declared replaces it.
            lease: This and the following instead of the client's.
            owner: See the class.
            waiter_lease: See the class.
            idle_ttl: See the class.
            max_waiters: `QueueFull` is raised at once when so many wait.

        Raises:
            ValueError: A parameter is wrong.
            RedleaseError: The client is closed.
        """
        limits.checked_count("capacity", capacity)
        usual = self._wish(capacity, lease, owner, waiter_lease, idle_ttl, max_waiters)
        return Semaphore(self.room, self._resource(name), usual)

    def _wish(self, *settings: Any) -> Wish:
        self.room.check_open()
        try:
            return self._known_wish(*settings)
        except TypeError:  # what cannot be a key of the cache is no setting either, and the check says so
            return self._usual_wish(*settings)

    def _usual_wish(  # noqa: PLR0917  by position, as they are looked up for every primitive that is made
        self,
        capacity: int,
        lease: Duration | None,
        owner: str | None,
        waiter_lease: Duration | None,
        idle_ttl: Duration | None,
        max_waiters: int | None,
    ) -> Wish:
        terms = wire.changed_terms(
            self._terms,
            capacity=capacity,
            lease=lease,
            owner=owner,
            waiter_lease=waiter_lease,
            idle_ttl=idle_ttl,
            max_waiters=max_waiters,
        )
        return Wish.usual(terms)

    def _resource(self, name: str) -> wire.Resource:
        return self._known_resource(name) if type(name) is str else wire.Resource(self._prefix, name)

    # Life

    async def __aenter__(self) -> Self:
        try:
            if self._server is not None and isinstance(self._connection, Connection):
                self._connection.go_to(ConnectionPool.from_url(await self._server.start_async()))
            async with asyncio.timeout(LIMIT_MS / 1000):
                await self._connection.until_ready()
        except TimeoutError:
            why = self._connection.trouble
            await self.close()
            raise Unavailable(f"the Redis server could not be reached: {why}. Check the URL and the server") from None
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def abandon(self) -> None:
        """Ends the connection and leaves what this client has on the server, for whoever takes it over, or to lapse."""
        self.room.closed = True
        self._keeper.schedule.close()
        await self._connection.close()

    async def close(self) -> None:
        """Releases the holds, takes the waiting calls out of their queues, and ends the connection, within seconds.

        Raises:
            RedleaseError: It belongs to another event loop, which still runs.
        """
        if not self._connection.at_home and not self._connection.orphaned:
            raise RedleaseError("this client belongs to another event loop, which still runs: close it there")
        if self._connection.orphaned:
            self.room.closed = True
            await self._connection.close()
            return
        self.room.close(_closed_while_waiting)
        await asyncio.sleep(0)  # the waiting calls give up now
        own = []  # the body that closes its own client is told at the end, or it could not close it
        for lease in list(self._keeper.leases.values()):
            if lease.task is not None and lease.task is asyncio.current_task():
                own.append(lease)
            else:
                lease.lose("its client was closed")
            self._keeper.give_back(lease)
        try:
            if self._connection.started and self._connection.refusal is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await self._keeper.drained()
        finally:
            self._keeper.schedule.close()
            await self._connection.close()
            if self._server is not None:
                await self._server.stop_async()
            for lease in own:
                lease.lose("its client was closed")

    def _on_ready(self, reached: Reached = everything) -> None:
        if self._connection.ready:
            self._keeper.on_ready(reached)
        self.room.on_ready(reached)

    def _on_message(self, payload: bytes) -> None:
        if not payload:
            return  # the probe's
        message = wire.read_message(payload)
        lease = self._keeper.leases.get(message.about)
        if lease is not None:
            lease.told(message)
        else:
            self.room.on_message(message)


def _closed_while_waiting(name: str, ticket: str) -> Withdrawn:
    message = f"resource {name!r}: the client was closed while ticket {ticket!r} was waiting. It is out of the queue"
    return Withdrawn(message, resource=name, ticket=ticket)
