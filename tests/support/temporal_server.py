"""Temporal's servers for tests: started, killed, paused, and restarted with or without their data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import tempfile
from typing import IO, Self

from temporalio.client import Client

from redlease.embedded import ProcessGroup

from children import freeze
from ports import free_port
from temporal_built import VERSION, find_built
from temporal_cli import find_cli

OLDEST, NEWEST = "1.29.1", VERSION  # the CLI's, and the one that is built here
START_WITHIN = 30.0

SETTINGS = {
    # By default this server hands out some 20 tasks a second, as it has one shard where others have hundreds: what a
    # test or a benchmark then measures is that limit.
    "history.transferProcessorMaxPollRPS": "2000",
    "history.timerProcessorMaxPollRPS": "2000",
    "history.outboundProcessorMaxPollRPS": "2000",
}
# Its data is lost with the process alone, so nothing is waited for until it is on the disk.
PRAGMAS = {"journal_mode": "WAL", "synchronous": "OFF"}
# What the newer server does only when it is told so.
NEWEST_SETTINGS = {"frontend.WorkflowPauseEnabled": "true"}


def chosen_version() -> str:
    """Return the version of the server that the adapter's tests run on: REDLEASE_TEMPORAL, else the oldest.

    Raises:
        ValueError: There is no such version.
    """
    version = os.environ.get("REDLEASE_TEMPORAL") or OLDEST
    if version not in {OLDEST, NEWEST}:
        raise ValueError(f"REDLEASE_TEMPORAL is {version!r}, and the tests have {OLDEST} and {NEWEST}")
    return version


class TemporalServer:
    """One server process on a loopback port, ended with the tests.

    Its data is new at each start, or with `keep` outlives a kill. It is in a file in either case: SQLite in memory is
    lost with its one connection, which the server closes when it interrupts a query of a call that was cancelled; then
    the default namespace is gone. Starting takes some tenths of a second; nothing else blocks for longer than some
    milliseconds. Without a `version` it is the one chosen.
    """

    namespace = "default"

    def __init__(self, *arguments: str, keep: bool = False, version: str | None = None) -> None:
        """Choose a free port; nothing runs before ``start``."""
        self.version = version or chosen_version()
        self.port = free_port()
        self._arguments = arguments
        self._keep = keep
        self._group = ProcessGroup()
        # It lives as long as the server, whose `stop` closes it.
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        """Start."""
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.stop()

    @property
    def address(self) -> str:
        """What clients connect to."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    async def start(self) -> Self:
        """Start the server and wait until it answers."""
        assert self._process is None, "the server runs already"
        try:
            async with asyncio.timeout(START_WITHIN):
                # It draws ports for itself too, one of which another process may take before it does.
                if not await self._begun() and not await self._begun():
                    raise RuntimeError("the process has ended")
        except (RuntimeError, TimeoutError) as error:
            log = self.log()
            await self.stop()
            # A crash says why at its beginning, and then shows the stacks of some hundred goroutines.
            told = log if len(log) < 4000 else f"{log[:2000]}\n...\n{log[-2000:]}"
            raise RuntimeError(f"The Temporal server did not start: {error or 'it took too long'}. {told}") from error
        except BaseException:
            await self.stop()
            raise
        return self

    async def _begun(self) -> bool:
        """Start the process; return whether it came to answer, and did not end before."""
        command = [*self._program(), *self._settings(), *self._arguments]
        self._process = self._group.spawn(command, output=self._log, env=dict(os.environ))
        while not await self._answers():
            if self._process.poll() is not None:
                self._process = None
                return False
            await asyncio.sleep(0.01)
        return True

    def kill(self) -> None:
        """End the server with SIGKILL; without `keep` every workflow is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    async def restart(self) -> Self:
        """Kill the server and start it on the same port."""
        self.kill()
        return await self.start()

    def pause(self) -> None:
        """Stop the process with SIGSTOP: connections stay open and nothing answers."""
        freeze(self.pid)

    def resume(self) -> None:
        """Let a paused process go on."""
        os.kill(self.pid, signal.SIGCONT)

    async def stop(self) -> None:
        """End the server and remove its directory; may be repeated."""
        self.kill()
        self._group.end()
        for pause in self._group.ending():
            await asyncio.sleep(pause)
        self._log.close()

    def log(self) -> str:
        """Return what the server has logged."""
        return os.pread(self._log.fileno(), 1_000_000, 0).decode(errors="replace")

    def _program(self) -> list[str]:
        if self.version == NEWEST:
            return [str(find_built())]
        return [str(find_cli()), "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--log-level", "error"]

    def _settings(self) -> list[str]:
        words = ["--port", str(self.port)]
        for name, value in (SETTINGS | (NEWEST_SETTINGS if self.version == NEWEST else {})).items():
            words += ["--dynamic-config-value", f"{name}={value}"]
        for name, value in PRAGMAS.items():
            words += ["--sqlite-pragma", f"{name}={value}"]
        name = "kept" if self._keep else secrets.token_hex(8)
        return [*words, "--db-filename", str(self._group.directory / f"{name}.db")]

    async def _answers(self) -> bool:
        """Tell whether the server takes requests; connecting asks it what it can do."""
        # Connecting retries for ten seconds by itself, so it is first seen whether anybody listens.
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.close()
            await writer.wait_closed()
            with contextlib.suppress(RuntimeError):
                await Client.connect(self.address)
                return True
        return False
