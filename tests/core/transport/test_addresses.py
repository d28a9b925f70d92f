"""URLs and what nodes say of where things are: read without a server."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import ConnectionPool, RedisCluster, SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from redlease._core.protocol import encoding
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.replies import ServerInfo
from redlease._core.transport.addresses import Address, GivenServers, NamedServers, read_address
from redlease._core.transport.topology import SLOTS, changed_slots, read_moved, read_slots
from redlease._core.transport.urls import read_url

HERE = Address("127.0.0.1", 7000)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host:7000", Address("host", 7000)),
        ("host", Address("host", 6379)),
        ("[::1]:7000", Address("::1", 7000)),
        ("[::1]", Address("::1", 6379)),
        ("::1:7000", Address("::1", 7000)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    """Names and numbers, with a port or without, and written out again."""
    assert read_address(text) == address
    assert read_address(str(address)) == address


@pytest.mark.parametrize("path", ["", "/", "/3", "/3/"])
def test_a_database_in_a_url(path: str) -> None:
    """The path of a URL is the number of a database."""
    pool = read_url(f"redis://host{path}", {})
    assert isinstance(pool, ConnectionPool)
    assert pool.connection_kwargs.get("db", 0) == (3 if "3" in path else 0)


@pytest.mark.parametrize("path", ["/mine", "/-1", "/0/1", "/0x"])
def test_what_is_no_database(path: str) -> None:
    """What redis-py would take for the database 0 in silence is refused."""
    with pytest.raises(ValueError, match="number of a database"):
        read_url(f"redis://host{path}", {})


@pytest.mark.parametrize(
    "url", ["redis://host", "rediss://host", "unix:///tmp/s", "redis+cluster://host", "redis+sentinel://host/service"]
)
def test_an_option_that_there_is_not(url: str) -> None:
    """A misspelt setting is told when the client is made, and not when it connects."""
    with pytest.raises(ValueError, match="waiter_leese"):
        read_url(url, {"waiter_leese": 3})
    read_url(url, {"socket_connect_timeout": 3})


@pytest.mark.parametrize("text", ["host:", "host:x", "host:0", "host:65536", ":"])
def test_no_addresses(text: str) -> None:
    """What has no port where one should be is refused, with what was read."""
    with pytest.raises(ValueError, match="host:port"):
        read_address(text)


def test_what_a_url_of_a_cluster_says_goes_to_every_node() -> None:
    """User, password, TLS and options are those of nodes found later, too; a password may have any character."""
    where = read_url("rediss+cluster://me:p%40s%3A%2C@one,two:7000/0?ssl_ca_certs=ca.pem", {"client_name": "x"})
    assert isinstance(where, NamedServers)
    assert where.seeds == [Address("one", 6379), Address("two", 7000)]
    pool = where.pool(Address("::1", 7001))
    assert pool.connection_class is SSLConnection
    subscribed_keys = {"host": "::1", "port": 7001, "username": "me", "password": "p@s:,", "ssl_ca_certs": "ca.pem"}
    assert subscribed_keys.items() <= pool.connection_kwargs.items()
    assert pool.connection_kwargs["client_name"] == "x"


def test_what_a_url_of_sentinels_says() -> None:
    """User and password are the primary's, TLS is for both, and the Sentinels have credentials of their own."""
    url = "rediss+sentinel://me:pass@one:1,two/prime/3?sentinel_username=s&sentinel_password=t&ssl_ca_certs=ca.pem"
    pool = read_url(url, {})
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "prime"
    subscribed_keys = {"db": 3, "username": "me", "password": "pass", "ssl_ca_certs": "ca.pem"}
    assert subscribed_keys.items() <= pool.connection_kwargs.items()
    assert issubclass(pool.connection_class, SSLConnection)
    asked = [sentinel.connection_pool for sentinel in pool.sentinel_manager.sentinels]
    assert [(one.connection_kwargs["host"], one.connection_kwargs["port"]) for one in asked] == [
        ("one", 1),
        ("two", 26379),
    ]
    for one in asked:
        own = {"username": "s", "password": "t", "ssl_ca_certs": "ca.pem"}
        assert own.items() <= one.connection_kwargs.items()
        assert one.connection_class is SSLConnection


@pytest.mark.parametrize("host", [b"10.0.0.1", b"", b"?", None])
def test_slots(host: Any) -> None:
    """Every slot has the first node of its range for a master; a node without a name is where the one asked is."""
    reply = [[0, 8191, [host, 1, b"id"], [b"10.0.0.9", 2, b"id"]], [8192, SLOTS - 2, [b"::1", 3]]]
    topology = read_slots(reply, HERE)
    first = Address("10.0.0.1" if host == b"10.0.0.1" else HERE.host, 1)
    assert topology.owners[:8192] == [first] * 8192
    assert topology.owners[8192:] == [Address("::1", 3)] * (SLOTS - 8193) + [None]
    assert topology.nodes == {first, Address("10.0.0.9", 2), Address("::1", 3)}


def test_changed_slots() -> None:
    """The slots whose master is another, or gone, or new."""
    old: list[Address | None] = [HERE] * SLOTS
    new = [*old]
    new[3], new[7] = None, Address("127.0.0.1", 7001)
    assert changed_slots(old, new) == changed_slots(new, old) == {3, 7}
    assert changed_slots(old, [*old]) == frozenset()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("MOVED 3999 10.0.0.1:6381", Address("10.0.0.1", 6381)),
        ("ASK 3999 ::1:6381", Address("::1", 6381)),
        ("MOVED 3999 :6381", Address(HERE.host, 6381)),
        ("MOVED 3999 node.example:6381", Address("node.example", 6381)),
    ],
)
def test_redirections(text: str, address: Address) -> None:
    """A redirection names the slot and where it is; without a host that is where the node is that said so."""
    assert read_moved(text, HERE) == (3999, address)


def test_a_client_of_redis_py_gives_its_settings() -> None:
    """Nodes that a `RedisCluster` has not seen get its credentials too."""
    given = GivenServers(RedisCluster("one", 7000, username="me", password="pass"))
    assert given.seeds == [Address("one", 7000)]
    subscribed_keys = {"host": "two", "port": 7001, "username": "me", "password": "pass"}
    assert subscribed_keys.items() <= given.pool(Address("two", 7001)).connection_kwargs.items()


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "", "cluster://h:7000"])
def test_urls_of_something_else(url: str) -> None:
    """The error names every scheme there is."""
    with pytest.raises(ValueError, match=r"redis://, rediss://, unix://, redis\+cluster://.* rediss\+sentinel://"):
        read_url(url, {})


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "redis+sentinel"])
@pytest.mark.parametrize("mark", ["/", "?", "#"])
def test_a_password_that_is_not_encoded(scheme: str, mark: str) -> None:
    """The error says what to do, and shows nothing of the password."""
    with pytest.raises(ValueError, match="percent-encoded") as raised:
        read_url(f"{scheme}://me:sec{mark}ret@host:7000/mymaster?socket_timeout=1", {})
    assert "sec" not in str(raised.value)
    assert read_url(f"{scheme}://me:sec%2Fret@host:7000{'/mymaster' * ('sentinel' in scheme)}?client_name=a@b", {})


@pytest.mark.parametrize(("url", "options"), [("h/1", {}), ("h?db=1", {}), ("h", {"db": 1})])
def test_a_database_of_a_cluster(url: str, options: dict[str, Any]) -> None:
    """A cluster has one database, whichever way another one is asked for."""
    with pytest.raises(ValueError, match=r"only database 0, not '?1"):
        read_url(f"redis+cluster://{url}", options)
    assert read_url("redis+cluster://h/0?db=0", {})


@pytest.mark.parametrize("url", [None, 5, b"redis://host"])
def test_urls_that_are_no_strings(url: Any) -> None:
    """They are misuse."""
    with pytest.raises(ValueError, match="must be a string"):
        read_url(url, {})


@pytest.mark.parametrize(("version", "has"), [("6.2.14", False), ("7.0.0", True), ("9.1.2", True), ("", True)])
def test_which_servers_have_sharded_channels(version: str, has: bool) -> None:
    """Redis has them from 7.0 on."""
    assert ServerInfo(version, "master").has_sharded_channels is has


def test_the_hash_tag_of_a_resource() -> None:
    """It is the escaped name, whatever the name."""
    for name in ("r", "a}b{", "{x}", "ä"):
        assert encoding.hash_tag(Resource("p", name).state_key) == encoding.escape(name).encode()
