"""Parses URLs of a single server, of a primary behind Sentinels, and of a cluster."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

from .addresses import REDIS_PORT, SENTINEL_PORT, NamedServers
from .opening.dialects import Protocol, declared_protocol
from .sentinel import primary_pool

CLUSTER = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
SENTINEL = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
SINGLE = ("redis", "rediss", "unix")

Pool = TypeVar("Pool", bound=ConnectionPool)


def read_url(url: str, options: dict[str, Any]) -> ConnectionPool | NamedServers:
    """Returns the pool for a single server or a primary behind Sentinels, or the servers of a cluster.

    Raises:
        ValueError: The URL or an option is wrong.
    """
    if not isinstance(url, str):
        raise ValueError(f"the URL must be a string, not a {type(url).__name__}")
    scheme = _checked_scheme(url)
    if scheme in SENTINEL:
        return _checked_options(primary_pool(NamedServers(url, SENTINEL[scheme], SENTINEL_PORT, options)))
    if scheme in CLUSTER:
        servers = NamedServers(url, CLUSTER[scheme], REDIS_PORT, options)
        by_option = _checked_options(servers.pool(servers.seeds[0])).connection_kwargs.get("db", 0)
        if servers.path not in ([], ["0"]) or by_option != 0:
            raise ValueError(f"a cluster supports only database 0, not {'/'.join(servers.path) or by_option!r}")
        return servers
    database = urlsplit(url).path.strip("/")
    if scheme != "unix" and database and not database.isdecimal():  # redis-py would silently use 0
        raise ValueError("the path of the URL is the number of a database: redis://host:port/0")
    return _checked_options(ConnectionPool.from_url(url, **options))


def protocol_in(where: ConnectionPool | NamedServers) -> Protocol | None:
    """Returns the protocol that a URL or its options ask for; None if they leave it open."""
    pool = where.pool(where.seeds[0]) if isinstance(where, NamedServers) else where
    return declared_protocol(pool.connection_kwargs)


def _checked_options(pool: Pool) -> Pool:
    """Returns the pool; raises ValueError if its options are wrong, which redis-py checks only on connect."""
    try:
        pool.connection_class(**pool.connection_kwargs)
    except (TypeError, RedisError) as error:
        raise ValueError(f"redis-py makes no connection with these options: {error}") from error
    return pool


def _checked_scheme(url: str) -> str:
    """Returns the scheme; errors show only that part of the URL, since the rest may contain a password."""
    parts = urlsplit(url)
    known = [*SINGLE, *CLUSTER, *SENTINEL]
    if parts.scheme not in known:
        raise ValueError(f"the URL must begin with one of {', '.join(f'{name}://' for name in known)}")
    # After the host, "@" is legal only in the value of an option.
    behind = parts.path + parts.query.partition("=")[0] + parts.fragment
    if parts.scheme != "unix" and "@" not in parts.netloc and "@" in behind:
        raise ValueError('the user name or password in the URL has a "/", "?" or "#": write it percent-encoded')
    return parts.scheme
