"""Those that are measured: redlease, the floor, and lock libraries that pip installs, each used as its users would."""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from importlib import metadata
from types import TracebackType
from typing import Any, ClassVar, Self

import redis
import redis.asyncio

import redlease.sync
from redlease import Redlease

from callers import Callers, Tasks, Threads
from floor import FloorSemaphores

BEFORE = "REDLEASE_BEFORE"  # the environment variable

# More connections than these only wait for the one thread of the server.
CONNECTIONS_MAX = 64


@dataclass(frozen=True, slots=True)
class Terms:
    """What a workload wants; durations in seconds."""

    capacity: int = 1
    callers: int = 1  # how many use it at once
    blocked: bool = False  # whether they all wait, each on a connection of its own where the library needs that
    lease: float = 30.0
    renewed: bool = False
    idle_ttl: float = 86_400.0


class Peer:
    """A library behind the one thing that workloads want of it: `async with peer.hold(name):`.

    Attributes:
        name: As tables show it.
        needs: The module whose presence tells that it is installed.
        distribution: Whose version is told.
        only_locks: It has no capacity above 1.
        renews: It keeps what is held alive by itself.
    """

    name: ClassVar[str]
    needs: ClassVar[str] = "redlease"
    distribution: ClassVar[str] = "redlease"
    only_locks: ClassVar[bool] = False
    renews: ClassVar[bool] = True

    def __init__(self, url: str, terms: Terms) -> None:
        self.url, self.terms = url, terms
        self.callers: Callers = Tasks()

    @classmethod
    def is_installed(cls) -> bool:
        return importlib.util.find_spec(cls.needs) is not None

    @classmethod
    def version(cls) -> str:
        return metadata.version(cls.distribution)

    async def open(self) -> None:
        """Connects, so that no workload measures handshakes."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        """Holds one unit of the resource for as long as the block runs."""
        raise NotImplementedError


class OfRedlease(Peer):
    """This library."""

    name = "redlease"

    async def open(self) -> None:
        self._client = Redlease.from_url(self.url, lease=self.terms.lease, idle_ttl=self.terms.idle_ttl)
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        if self.terms.capacity == 1:
            return self._client.lock(name).hold()
        return self._client.semaphore(name, capacity=self.terms.capacity).hold()


class OfRedleaseBefore(OfRedlease):
    """This library as it was at another commit, from the directory that an environment variable names."""

    name = "redlease before"

    @classmethod
    def is_installed(cls) -> bool:
        return BEFORE in os.environ


class OfRedleaseSync(Peer):
    """The blocking face of this library, in threads."""

    name = "redlease.sync (threads)"

    def __init__(self, url: str, terms: Terms) -> None:
        super().__init__(url, terms)
        self.callers = Threads()

    async def open(self) -> None:
        self._client = redlease.sync.Redlease.from_url(
            self.url, lease=self.terms.lease, idle_ttl=self.terms.idle_ttl
        ).__enter__()

    async def close(self) -> None:
        self._client.close()

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        if self.terms.capacity == 1:
            return Blocking(self._client.lock(name).hold())
        return Blocking(self._client.semaphore(name, capacity=self.terms.capacity).hold())


class Floor(Peer):
    """The limit."""

    name = "floor"
    needs = "hiredis"
    distribution = "hiredis"
    renews = False

    async def open(self) -> None:
        self._semaphores = FloorSemaphores(self.url, self.terms.capacity)
        await self._semaphores.open()

    async def close(self) -> None:
        await self._semaphores.close()

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        return self._semaphores.hold(name)


class _OnRedisPy(Peer):
    """A library that is given a client of redis-py, with as many connections as help it."""

    def connections(self) -> int:
        return max(2, min(CONNECTIONS_MAX, self.terms.callers))

    async def open(self) -> None:
        count = self.connections()
        pool: Any = redis.asyncio.BlockingConnectionPool.from_url(
            self.url, max_connections=count, timeout=None, socket_timeout=None
        )
        self._redis = redis.asyncio.Redis(connection_pool=pool)
        for connection in [await pool.get_connection() for _ in range(count)]:
            await pool.release(connection)

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()


class RedisPyLock(_OnRedisPy):
    """The Lock of redis-py, which asks again every 0.1 s while it waits."""

    name = "redis-py Lock"
    needs = distribution = "redis"
    only_locks = True
    renews = False

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        return self._redis.lock(name, timeout=self.terms.lease, thread_local=False)


class PyRedisSemaphore(_OnRedisPy):
    """py-redis-semaphore, which waits in a BLPOP."""

    name = "py-redis-semaphore"
    needs, distribution = "redis_semaphore", "py-redis-semaphore"

    def connections(self) -> int:
        return self.terms.callers + 16 if self.terms.blocked else super().connections()

    async def open(self) -> None:
        from redis_semaphore import AcquireMode, Semaphore, SemaphoreConfig

        logging.disable(logging.WARNING)
        await super().open()
        self._semaphore, self._config = Semaphore, SemaphoreConfig
        self._settings = {"limit": self.terms.capacity, "lock_timeout": self.terms.lease, "acquire_timeout": None}
        self._settings["acquire_mode"] = AcquireMode.BLPOP

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        held: AbstractAsyncContextManager[Any] = self._semaphore(self._redis, self._config(name=name, **self._settings))
        return held


class AdvancedSemaphores(Peer):
    """asyncio-advanced-semaphores, which waits in a BLPOP and needs Python 3.12."""

    name = "asyncio-advanced-semaphores"
    needs, distribution = "asyncio_advanced_semaphores", "asyncio-advanced-semaphores"

    async def open(self) -> None:
        from asyncio_advanced_semaphores import RedisConfig, RedisSemaphore

        logging.disable(logging.WARNING)
        # It lets those that wait have four in ten of its connections.
        count = min(1500, max(300, 3 * self.terms.callers))
        self._config, self._semaphore = RedisConfig(url=self.url, max_connections=count), RedisSemaphore
        # It renews five times in each of these; the least that it takes without a warning is 10 s.
        self._alive_s = int(self.terms.lease) if self.terms.renewed else 180

    async def close(self) -> None:
        """Nothing: its connections belong to the event loop and end with it."""

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        semaphore = self._semaphore(
            name=name, value=self.terms.capacity, config=self._config, heartbeat_max_interval=self._alive_s
        )
        held: AbstractAsyncContextManager[Any] = semaphore.cm()
        return held


class PythonRedisLock(Peer):
    """python-redis-lock, which blocks its thread in a BLPOP."""

    name = "python-redis-lock (threads)"
    needs, distribution = "redis_lock", "python-redis-lock"
    only_locks = True

    def __init__(self, url: str, terms: Terms) -> None:
        super().__init__(url, terms)
        self.callers = Threads()

    async def open(self) -> None:
        import redis_lock

        self._lock = redis_lock.Lock
        self._redis = redis.Redis.from_url(self.url, max_connections=4096, socket_timeout=None)
        pool = self._redis.connection_pool
        for connection in [pool.get_connection() for _ in range(min(600, self.terms.callers))]:
            pool.release(connection)

    async def close(self) -> None:
        self._redis.close()

    def hold(self, name: str) -> AbstractAsyncContextManager[Any]:
        return Blocking(self._lock(self._redis, name, expire=int(self.terms.lease), auto_renewal=self.terms.renewed))


class Blocking:
    """A block of a library that blocks, entered and left as that of one that does not."""

    def __init__(self, block: AbstractContextManager[Any]) -> None:
        self._block = block

    async def __aenter__(self) -> Self:
        self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._block.__exit__(kind, error, traceback)


PEERS: dict[str, type[Peer]] = {
    "floor": Floor,
    "redlease": OfRedlease,
    "before": OfRedleaseBefore,
    "redlease-sync": OfRedleaseSync,
    "redis-py": RedisPyLock,
    "python-redis-lock": PythonRedisLock,
    "py-redis-semaphore": PyRedisSemaphore,
    "asyncio-advanced-semaphores": AdvancedSemaphores,
}
