"""Whatever blocking client of redis-py is given, redlease connects as that one does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import redis
import redis.asyncio
import redis.asyncio.sentinel
from redis.sentinel import Sentinel

from redlease.sync import Redlease
from redlease.sync.redis_clients import non_blocking

if TYPE_CHECKING:
    from conftest import Servers


def pool_of(given: redis.Redis) -> redis.asyncio.ConnectionPool:
    """Return the pool of the asyncio client for a blocking one."""
    made = non_blocking(given)
    assert isinstance(made, redis.asyncio.Redis)
    return made.connection_pool


@pytest.mark.slow
def test_a_cluster(servers: Servers, prefix: str) -> None:
    """A client of a cluster is one of the same cluster, with holds on each of its masters."""
    given = redis.RedisCluster("127.0.0.1", servers.cluster.masters[0].port)
    with Redlease(given, prefix=prefix) as client:
        for number in range(8):
            with client.lock(f"r{number}").hold() as hold:
                assert hold.fence
    given.close()


def test_sentinels() -> None:
    """The Sentinels, their settings, the service, and user name, password and database of the primary are the same."""
    make: Any = Sentinel  # untyped
    sentinels = make([("one", 1), ("two", 2)], 1, {"password": "s"})
    made = non_blocking(sentinels.master_for("mymaster", password="p", db=3))
    assert isinstance(made, redis.asyncio.Redis)
    pool = made.connection_pool
    assert isinstance(pool, redis.asyncio.sentinel.SentinelConnectionPool)
    manager: Any = pool.sentinel_manager
    assert (pool.service_name, pool.is_master, manager.min_other_sentinels) == ("mymaster", True, 1)
    assert [each.connection_pool.connection_kwargs["host"] for each in manager.sentinels] == ["one", "two"]
    assert [each.connection_pool.connection_kwargs["password"] for each in manager.sentinels] == ["s", "s"]
    assert (pool.connection_kwargs["password"], pool.connection_kwargs["db"]) == ("p", 3)
    with pytest.raises(ValueError, match="replica"):
        non_blocking(sentinels.slave_for("mymaster"))


def test_tls_and_credentials() -> None:
    """A client with TLS has an asyncio one with the same certificates, user name and password."""
    given = redis.Redis(
        host="h", port=7, username="u", password="p", db=2, ssl=True, ssl_ca_certs="/ca.pem", decode_responses=True
    )
    pool = pool_of(given)
    wanted = {"host": "h", "port": 7, "username": "u", "password": "p", "db": 2, "ssl_ca_certs": "/ca.pem"}
    assert pool.connection_class is redis.asyncio.SSLConnection
    assert wanted.items() <= pool.connection_kwargs.items()


def test_a_unix_socket() -> None:
    """A client of a unix socket has one of the same path."""
    pool = pool_of(redis.Redis(unix_socket_path="/run/redis.sock"))
    assert pool.connection_class is redis.asyncio.UnixDomainSocketConnection
    assert pool.connection_kwargs["path"] == "/run/redis.sock"


def test_what_has_no_counterpart() -> None:
    """A class of connections of one's own is refused."""

    class Own(redis.Connection):
        pass

    pool = redis.ConnectionPool(connection_class=Own)
    with pytest.raises(ValueError, match="no asyncio counterpart"):
        non_blocking(redis.Redis(connection_pool=pool))
