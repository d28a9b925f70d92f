"""The client, which makes the primitives: from a URL, from a redis-py client, or with an embedded server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType
from typing import Any, Self

from redis.asyncio import ConnectionPool, Redis, RedisCluster
from redis.asyncio.sentinel import SentinelConnectionPool

from redlease._core.protocol.arguments import Terms
from redlease.embedded import EmbeddedServer, NotStarted
from redlease.errors import RedleaseError, Unavailable, Withdrawn
from redlease.events import OnEvent, harmless

from . import limits, options
from .limits import Duration
from .log import about
from .operations import Operations
from .options import own_name
from .primitives.factory import PrimitiveFactory
from .protocol import replies
from .session.leases import LeaseManager
from .session.queueing import Session
from .transport.addresses import GivenServers, NamedServers
from .transport.base import LIMIT_MS, Reached, Transport, all_resources
from .transport.cluster import Cluster
from .transport.connection import Connection
from .transport.sentinel import own_pool
from .transport.urls import protocol_in, read_url

logger = logging.getLogger("redlease")

CLOSE_S = 2.0  # how long `close` waits for the server at most


class Redlease(PrimitiveFactory):
    """A client: one connection to a server, however many locks, tasks and waiters use it.

    A client belongs to the event loop of its first use. Entering it connects and checks the server; leaving it releases
    its holds and removes its waiting calls from their queues, but keeps the permits that `acquire` returned.

    Durations are seconds or a `timedelta`, here and everywhere.

    Args:
        redis_client: A client of `redis.asyncio` (`Redis`, `RedisCluster`, a Sentinel's `master_for`) or of fakeredis.
            redlease opens its own connection with its address, TLS and credentials; it neither uses nor closes it.
        prefix: The prefix of all keys and channels.
        owner: The name shown as holder; `host:pid` by default.
        lease: Seconds that a permit stays valid without renewal.
        waiter_lease: Seconds after which the server drops the queue place of a process that has stopped responding. All
            requests of one client for one resource share a place, which lasts as long as the longest of their leases.
        idle_ttl: Seconds that an idle resource's state stays on the server.
        history: How many entries of history the server keeps of each resource at least, for `history()`, up to 100,000.
            It is a setting of the resource, which the next acquire stores; None leaves it as it is, at first 0.
        call_timeout: Seconds, outages included, after which a call without a `timeout` of its own raises `Unavailable`:
            `try_acquire`, `timeout=0`, `renew`, `release`, `is_held`, `inspect` and the like. Entering the client may
            take 5 s or this long, whichever is longer. `acquire()` and `hold()` without a `timeout` wait forever.
        poll_interval: Seconds between two heartbeats of waiting requests, if the messages of the server do not arrive:
            a hand-off then takes up to that long. The client finds that out on each connect, and warns.
        on_event: Called with each event of `redlease.events`, in the thread of the event loop: it must not block, and
            hands what takes time to others. What it raises is logged, once, and changes nothing.

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
        history: int | None = None,
        call_timeout: Duration = 5.0,
        poll_interval: Duration = 0.5,
        on_event: OnEvent | None = None,
    ) -> None:
        settings: dict[str, Any] = {"owner": owner, "lease": lease, "waiter_lease": waiter_lease, "idle_ttl": idle_ttl}
        settings |= {"history": history, "call_timeout": call_timeout, "poll_interval": poll_interval}
        if isinstance(redis_client, RedisCluster):
            self._set_up(GivenServers(redis_client), prefix, on_event=on_event, **settings)
            return
        given: Any = redis_client
        pool = getattr(given, "connection_pool", None)
        if not isinstance(pool, ConnectionPool):
            text = "a URL: give it to `Redlease.from_url`" if isinstance(given, str) else type(given)
            raise ValueError(f"redlease needs a client of redis.asyncio, not {text}")  # its repr may show a password
        if isinstance(pool, SentinelConnectionPool):
            pool = own_pool(pool)
        self._set_up(pool, prefix, on_event=on_event, **settings)

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
        history: int | None = None,
        call_timeout: Duration = 5.0,
        poll_interval: Duration = 0.5,
        on_event: OnEvent | None = None,
        **redis_options: Any,
    ) -> Self:
        """Makes a client for the server at `url`: `redis://`, `rediss://` (TLS), `unix://`, a cluster or Sentinels.

        Args:
            url: As redis-py takes it, with user name, password and database. For a cluster, some of its nodes:
                `redis+cluster://host:port,host:port`. For a primary behind Sentinels, the Sentinels, the name of the
                service and the database: `redis+sentinel://host:port,host:port/mymaster/0`. Both also with `rediss+`.
            prefix: This and the following as for the class.
            owner: See there.
            lease: See there.
            waiter_lease: See there.
            idle_ttl: See there.
            history: See there.
            call_timeout: See there.
            poll_interval: See there.
            on_event: See there.
            **redis_options: Further options of a redis-py connection, `ssl_ca_certs` for example. With `protocol=2` or
                `3`, here or in the URL, the client speaks that version of RESP; else it speaks 3 where that works.

        Raises:
            ValueError: The URL or a parameter is wrong.
        """
        self = cls.__new__(cls)
        where = read_url(url, redis_options)
        settings: dict[str, Any] = {"owner": owner, "lease": lease, "waiter_lease": waiter_lease, "idle_ttl": idle_ttl}
        settings |= {"history": history, "call_timeout": call_timeout, "poll_interval": poll_interval}
        self._set_up(where, prefix, on_event=on_event, **settings)
        self._connection.protocol = protocol_in(where)
        return self

    @classmethod
    def embedded(cls, **settings: Any) -> Self:
        """Makes a client with its own server: a child process that starts when the client is entered and ends with it.

        Needs `pip install 'redlease[embedded]'`. Takes the settings of the class by keyword.

        Raises:
            ValueError: A setting is wrong. Entering the client raises `RedleaseError` if the server cannot be started.
        """
        self = cls(Redis(connection_pool=ConnectionPool(connection_class=NotStarted)), **settings)
        self._server = EmbeddedServer()
        return self

    def _set_up(
        self,
        where: ConnectionPool | NamedServers | GivenServers,
        prefix: str,
        *,
        call_timeout: Duration,
        poll_interval: Duration,
        on_event: OnEvent | None,
        **settings: Any,
    ) -> None:
        limit_ms = limits.milliseconds("call_timeout", call_timeout, 1)
        poll_interval_ms = limits.milliseconds("poll_interval", poll_interval, 1)
        emit = None if on_event is None else harmless(on_event)
        self._prefix = limits.checked_prefix(prefix)
        self._terms = options.changed_terms(Terms(owner=""), **settings)
        self._connection = self._route(where)
        self._connection.limit_ms = limit_ms
        self._manager = LeaseManager(self._connection)
        self._connection.emit = self._manager.emit = emit
        self._session = Session(self._manager, poll_interval_ms)
        self._operations = Operations(self._session, self._prefix)
        self._server: EmbeddedServer | None = None
        self._has_heard_noise = False
        self._set_up_factory()

    def __repr__(self) -> str:
        # Not the pool or the URL, which contain the password.
        connected = "connected" if self._connection.manner is None else f"connected, {self._connection.manner}"
        state = "closed" if self._session.closed else connected if self._connection.ready else "not connected"
        return f"<{type(self).__name__} prefix={self._prefix!r} owner={self._terms.owner!r}, {state}>"

    def _route(self, where: ConnectionPool | NamedServers | GivenServers) -> Transport:
        if isinstance(where, NamedServers | GivenServers):
            return Cluster(where, self._prefix, self._on_ready, self._on_message, self._subscribed_keys)
        return Connection(where, self._prefix, self._on_ready, self._on_message)

    def _subscribed_keys(self) -> set[bytes]:
        """Returns the state keys of all resources that this client holds or waits for."""
        asked = {waiting.request.resource.state_key for waiting in self._session.pending.values()}
        return (
            asked
            | set(self._session.waiter_leases)
            | {lease.request.resource.state_key for lease in self._manager.leases.values()}
        )

    # Life

    async def __aenter__(self) -> Self:
        try:
            if self._server is not None and isinstance(self._connection, Connection):
                self._connection.go_to(ConnectionPool.from_url(await self._server.start_async()))
            async with asyncio.timeout(max(LIMIT_MS, self._connection.limit_ms) / 1000):
                await self._connection.until_ready()
        except TimeoutError:
            why = self._connection.trouble
            await self.close()
            raise Unavailable(f"the Redis server could not be reached: {why}. Check the URL and the server") from None
        except BaseException:
            await self.close()
            raise
        # Primitives made from now on are used in this process; earlier ones determine their owner on first use.
        self._terms = self._terms._replace(owner=self._terms.owner or own_name())
        self._forget_specs()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def abandon(self) -> None:
        """Closes the connection without releasing anything: permits and places stay until adopted or expired."""
        self._session.closed = True
        self._manager.schedule.close()
        await self._operations.close()
        await self._connection.close()

    async def close(self) -> None:
        """Releases the holds, removes the waiting calls from their queues, and closes the connection, within seconds.

        Raises:
            RedleaseError: The client belongs to another event loop, which still runs.
        """
        if not self._connection.in_own_loop and not self._connection.is_foreign:
            raise RedleaseError("this client belongs to another event loop, which still runs: close it there")
        if self._connection.is_foreign:
            self._session.closed = True
            await self._connection.close()
            return
        self._session.close(_closed_while_waiting)
        await asyncio.sleep(0)  # lets the waiting calls end
        own = []  # leases of the current task: it gets their loss at the end, or it could not finish closing
        for lease in list(self._manager.leases.values()):
            if lease.task is not None and lease.task is asyncio.current_task():
                own.append(lease)
            else:
                lease.lose("its client was closed", "closed")
            self._manager.release(lease)
        try:
            if self._connection.started and self._connection.refusal is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await self._manager.drained()
        finally:
            self._manager.schedule.close()
            await self._operations.close()
            await self._connection.close()
            if self._server is not None:
                await self._server.stop_async()
            for lease in own:
                lease.lose("its client was closed", "closed")

    def _on_ready(self, reached: Reached = all_resources) -> None:
        if self._connection.ready:
            self._manager.on_ready(reached)
        self._session.on_ready(reached)

    def _on_message(self, payload: bytes) -> None:
        if not payload:
            return  # sent by the probe
        try:
            message = replies.read_message(payload)
        except ValueError as error:
            self._unreadable(error)
            return
        lease = self._manager.leases.get(message.about)
        if lease is not None:
            lease.on_message(message)
        else:
            self._session.on_message(message)

    def _unreadable(self, error: ValueError) -> None:
        """Warns once of a message on this client's channel that no script of this library wrote."""
        if not self._has_heard_noise:
            self._has_heard_noise = True
            logger.warning(
                "a message that redlease did not write came to this client's channel, and is ignored: %s",
                error,
                extra=about(),
            )


def _closed_while_waiting(name: str, ticket: str) -> Withdrawn:
    message = f"resource {name!r}: the client was closed while ticket {ticket!r} was waiting. It is out of the queue"
    return Withdrawn(message, resource=name, ticket=ticket)
