"""What a URL leads to: one server, a primary that Sentinels know, or a cluster."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool

from .addresses import REDIS_PORT, SENTINEL_PORT, NamedServers
from .sentinel import primary_pool

CLUSTER = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
SENTINEL = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}


def read_url(url: str, options: dict[str, Any]) -> ConnectionPool | NamedServers:
    """Where a client is led by a URL: to one server, to a primary that Sentinels know, or to a cluster.

    Raises:
        ValueError: The URL or an option is wrong.
    """
    scheme = urlsplit(url).scheme
    if scheme in SENTINEL:
        return primary_pool(NamedServers(url, SENTINEL[scheme], SENTINEL_PORT, options))
    if scheme in CLUSTER:
        servers = NamedServers(url, CLUSTER[scheme], REDIS_PORT, options)
        if servers.path not in ([], ["0"]):
            raise ValueError(f"a cluster has the database 0 alone, not {'/'.join(servers.path)!r}")
        return servers
    return ConnectionPool.from_url(url, **options)
