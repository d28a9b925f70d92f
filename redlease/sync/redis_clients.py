"""From a blocking client of redis-py to an asyncio one with the same servers, credentials and TLS."""

from __future__ import annotations

import inspect
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel

NonBlocking = redis.asyncio.Redis | redis.asyncio.RedisCluster

# Objects of redis-py's blocking side, which have no meaning on the other one, and what redlease sets itself.
_NOT_TAKEN = {"connection_pool", "event_dispatcher", "parser_class", "redis_connect_func", "retry", "self"}
_OF_ONE_SIDE = ("maint_", "orig_", "himport_")
_KINDS: dict[type, type] = {
    redis.UnixDomainSocketConnection: redis.asyncio.UnixDomainSocketConnection,
    redis.SSLConnection: redis.asyncio.SSLConnection,
    redis.Connection: redis.asyncio.Connection,
}


def non_blocking(given: Any) -> NonBlocking:
    """Returns an asyncio client that connects as the given one does; an asyncio client as it is.

    Raises:
        ValueError: It is no client of redis-py, or one whose connections have no asyncio counterpart.
    """
    if isinstance(given, redis.RedisCluster):
        return _cluster(given)
    if isinstance(given, redis.asyncio.Redis | redis.asyncio.RedisCluster):
        return given
    pool: object = getattr(given, "connection_pool", None)
    if not isinstance(pool, redis.ConnectionPool):
        text = "a URL: give it to `Redlease.from_url`" if isinstance(given, str) else type(given)
        raise ValueError(f"redlease needs a client of redis-py, not {text}")  # its repr may show a password
    if isinstance(pool, redis.sentinel.SentinelConnectionPool):
        return _of_sentinels(pool)
    kind = _kind(pool.connection_class)
    settings = _taken(kind, pool.connection_kwargs)
    return redis.asyncio.Redis(connection_pool=redis.asyncio.ConnectionPool(connection_class=kind, **settings))


def _kind(blocking: type) -> type[Any]:
    if blocking.__module__.startswith("fakeredis."):
        import fakeredis  # noqa: PLC0415  who has a connection of it has it

        return fakeredis.FakeAsyncRedis().connection_pool.connection_class
    if blocking not in _KINDS:
        raise ValueError(f"{blocking} has no asyncio counterpart: give `Redlease.from_url` the URL")
    return _KINDS[blocking]


def _taken(kind: type, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings that the constructors of that class and its bases take."""
    constructors = [vars(each)["__init__"] for each in kind.__mro__ if "__init__" in vars(each)]
    names = {name for each in constructors for name in inspect.signature(each).parameters} - _NOT_TAKEN
    return {name: value for name, value in settings.items() if name in names and not name.startswith(_OF_ONE_SIDE)}


def _cluster(given: redis.RedisCluster) -> redis.asyncio.RedisCluster:
    nodes = given.nodes_manager
    settings = nodes.connection_kwargs
    is_tls = settings.get("connection_class") is redis.SSLConnection or bool(settings.get("ssl"))
    others = {"host", "port", "startup_nodes", "ssl", "address_remap"}
    taken = {name: value for name, value in _taken(redis.asyncio.RedisCluster, settings).items() if name not in others}
    startup = [redis.asyncio.cluster.ClusterNode(node.host, node.port) for node in nodes.startup_nodes.values()]
    return redis.asyncio.RedisCluster(startup_nodes=startup, ssl=is_tls, address_remap=nodes.address_remap, **taken)


def _of_sentinels(pool: redis.sentinel.SentinelConnectionPool) -> redis.asyncio.Redis:
    manager = pool.sentinel_manager
    if type(manager) is not redis.sentinel.Sentinel:
        raise ValueError("a subclass of Sentinel has no asyncio counterpart: give `Redlease.from_url` the URL")
    if not pool.is_master:
        raise ValueError(f"a replica grants no locks: give the client that `master_for({pool.service_name!r})` makes")
    addresses = [_address(sentinel) for sentinel in manager.sentinels]
    settings = _taken(redis.asyncio.Redis, manager.sentinel_kwargs)
    make: Any = redis.asyncio.sentinel.Sentinel  # untyped
    sentinels = make(addresses, manager.min_other_sentinels, settings, force_master_ip=manager._force_master_ip)
    is_tls = issubclass(pool.connection_class, redis.SSLConnection)
    kind = redis.asyncio.SSLConnection if is_tls else redis.asyncio.Connection
    primary: redis.asyncio.Redis = sentinels.master_for(
        pool.service_name, ssl=is_tls, **_taken(kind, pool.connection_kwargs)
    )
    return primary


def _address(sentinel: redis.Redis) -> tuple[str, int]:
    settings = sentinel.connection_pool.connection_kwargs
    return settings["host"], settings["port"]
