"""The servers that the tests run: each is what it says, and can be killed, paused and put forward in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import redis

from redlease.embedded import EmbeddedServer

from servers import Server, find_binary, server_version

if TYPE_CHECKING:
    from conftest import OwnServer, Servers


def test_engines_are_what_they_are_called(real_engine: str) -> None:
    """A `redis-server` of another version that stands first on PATH deceives nobody."""
    binary = find_binary(real_engine)
    assert binary is not None
    major_minor = server_version(binary)[:2]
    assert {"redis62": (6, 2), "redis7": (7, 0), "valkey9": (9, 0)}[real_engine] <= major_minor
    assert real_engine != "redis62" or major_minor == (6, 2)


def test_shared_servers_are_started_once(servers: Servers, real_engine: str) -> None:
    """All tests talk to the same server of an engine, over TCP or its unix socket."""
    assert servers[real_engine] is servers[real_engine]
    for url in (servers[real_engine].url, servers[real_engine].unix_url):
        with redis.Redis.from_url(url) as client:
            assert client.ping()


def test_a_restarted_server_is_empty(own_server: OwnServer, real_engine: str) -> None:
    """A killed server comes back on its port without its data, and with its arguments."""
    server = own_server(real_engine, "--maxmemory", "50mb")
    server.cli("SET", "key", "value")
    before = server.pid
    server.restart()
    assert server.pid != before
    assert server.cli("GET", "key") is None
    assert server.cli("CONFIG", "GET", "maxmemory") in (["maxmemory", "52428800"], {"maxmemory": "52428800"})


def test_a_paused_server_answers_late(own_server: OwnServer, real_engine: str) -> None:
    """A paused server takes connections and bytes, and answers once it goes on."""
    server = own_server(real_engine)
    with redis.Redis.from_url(server.url, socket_timeout=0.2, retry=None) as client:
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        server.resume()
        assert client.ping()


def test_a_server_that_cannot_start_says_why(real_engine: str) -> None:
    """The error carries what the server logged."""
    with pytest.raises(RuntimeError, match="no-such-setting"):
        Server(real_engine, "--no-such-setting", "1").start()


def test_a_server_that_wants_a_password_starts(own_server: OwnServer, real_engine: str) -> None:
    """Asking for a password is an answer."""
    server = own_server(real_engine, "--requirepass", "secret")
    with redis.Redis(port=server.port, password="secret") as client:
        assert client.ping()


def test_a_clock_is_stepped(own_server: OwnServer, clock_engine: str) -> None:
    """TIME steps, in scripts too, forward and back; keys expire by it; and the server's timers go on."""
    server = own_server(clock_engine, faketime=True)
    assert abs(server.clock_offset()) < 0.1
    server.cli("SET", "key", "value", "PX", 60_000)
    server.step_clock(3600)
    hour_ahead = int(server.cli("EVAL", "return redis.call('TIME')[1]", 0)) - time.time()
    assert abs(hour_ahead - 3600) < 2
    assert server.cli("GET", "key") is None
    server.step_clock(-3600)
    assert abs(server.clock_offset() + 3600) < 0.1
    server.step_clock(0.5)
    assert abs(server.clock_offset() - 0.5) < 0.1
    # A blocking command with a timeout ends by the server's timers, which live by the monotonic clock.
    began = time.monotonic()
    assert server.cli("BLPOP", "nothing", "0.2") is None
    assert time.monotonic() - began > 0.1


def test_the_embedded_server_is_the_newest_engine() -> None:
    """What users get by `Redlease.embedded()` is the engine that is tested as valkey9."""
    server = EmbeddedServer()
    with redis.Redis.from_url(server.start()) as client:
        info = client.info("server")
        assert isinstance(info, dict)
        assert str(info["valkey_version"]).startswith("9.")
    server.stop()
