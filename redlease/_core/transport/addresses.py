"""Addresses of servers, and the settings that the servers of one URL or client share."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from redis.asyncio import ConnectionPool, RedisCluster

REDIS_PORT, SENTINEL_PORT = 6379, 26379


class Address(NamedTuple):
    """Host and port of a server."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str, port: int = REDIS_PORT) -> Address:
    """Parses `host`, `host:port`, `[ipv6]:port` or, as servers write it, `ipv6:port`.

    Raises:
        ValueError: The text is not an address.
    """
    host, colon, number = text.rpartition(":")
    if text.endswith("]") or not colon:
        host, number = text, str(port)
    if not number.isdecimal() or not 0 < int(number) < 65536:
        raise ValueError(f"{text!r} is no address: write host:port")
    return Address(host.removeprefix("[").removesuffix("]"), int(number))


class Servers(Protocol):
    """Servers that share user name, password, TLS and options."""

    seeds: list[Address]

    def pool(self, address: Address) -> ConnectionPool:
        """Returns the pool with the settings of a connection to one server."""
        ...

    def reached(self, announced: Address) -> Address:
        """Returns the address to connect to, for an address that a node announced."""
        ...


class GivenServers:
    """The cluster nodes of a redis-py client."""

    def __init__(self, client: RedisCluster) -> None:
        self.seeds = [Address(node.host, int(node.port)) for node in client.nodes_manager.startup_nodes.values()]
        others = {"host", "port", "redis_connect_func", "response_callbacks"}
        self._settings = {name: value for name, value in client.connection_kwargs.items() if name not in others}
        self._remap = client.nodes_manager.remap_host_port

    def pool(self, address: Address) -> ConnectionPool:
        """Returns a pool with the client's settings and another address."""
        return ConnectionPool(host=address.host, port=address.port, **self._settings)

    def reached(self, announced: Address) -> Address:
        """Returns the address as mapped by the client's `address_remap`."""
        return Address(*self._remap(*announced))


class NamedServers:
    """Servers named by one URL.

    Args:
        url: `<scheme>://[user[:password]@]host[:port][,host[:port] ...][/path][?options]`.
        plain: The redis-py scheme of a single one of these servers.
        port: The port of hosts without one.
        options: Further options of a redis-py connection.

    Raises:
        ValueError: The URL is wrong.
    """

    def __init__(self, url: str, plain: str, port: int, options: dict[str, Any]) -> None:
        parts: SplitResult = urlsplit(url)
        user, at, hosts = parts.netloc.rpartition("@")
        self.seeds = [read_address(text.strip(), port) for text in hosts.split(",") if text.strip()]
        if not self.seeds or not all(seed.host for seed in self.seeds):
            raise ValueError(f"the URL names no server: {parts.scheme}://host:port[,host:port]")
        self.path = [unquote(part) for part in parts.path.split("/") if part]
        self.is_tls = plain == "rediss"
        self._head = f"{plain}://{user}{at}"
        self._query = f"?{parts.query}" if parts.query else ""
        self._options = options

    def pool(self, address: Address) -> ConnectionPool:
        """Returns a pool with the settings that redis-py parses from the URL of one server."""
        return ConnectionPool.from_url(f"{self._head}{address}{self._query}", **self._options)

    def reached(self, announced: Address) -> Address:
        """Returns the announced address: a URL has no mapping."""
        return announced
