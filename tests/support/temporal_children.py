"""Worker processes, for tests that kill and stop them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from children import Child, running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

TESTS = Path(__file__).parent
WORKER = TESTS / "temporal_worker.py"


class WorkerProcess(Child):
    """A worker in a process of its own, as seen by the test that started it.

    ``kill``, ``pause`` and ``resume`` are those of any child.
    """

    def __init__(self, process: asyncio.subprocess.Process, errors: IO[bytes]) -> None:
        super().__init__(process)
        self._errors = errors
        self._said: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def ready(self, within: float = 30.0) -> None:
        """Wait until the worker polls."""
        await self.event("ready", within)

    async def event(self, name: str, within: float = 45.0) -> dict[str, Any]:
        """Wait for the first thing of this name that the process has said and nobody took; others are left in order."""
        found = await self._take(lambda said: said["event"] == name, within)
        assert found is not None, f"the worker did not say {name!r} but {self._said}; {self.errors()}"
        return found

    async def next(self, within: float = 45.0) -> dict[str, Any]:
        """Wait for the first thing that the process has said and nobody took, whatever it is."""
        found = await self._take(lambda _: True, within)
        assert found is not None, f"the worker said nothing; {self.errors()}"
        return found

    def said(self, name: str) -> list[dict[str, Any]]:
        """Return what the process has said of this name and nobody took."""
        return [said for said in self._said if said["event"] == name]

    def terminate(self) -> None:
        """Ask the worker with SIGTERM to shut down as it does in a deployment."""
        self.process.terminate()

    async def ended(self, within: float = 15.0) -> int:
        """Wait until the process has ended, and return its status."""
        status = await asyncio.wait_for(self.process.wait(), within)
        await self._reading
        return status

    async def end(self) -> None:
        """Kill the process if it still runs, and take in its last words."""
        with contextlib.suppress(ProcessLookupError):
            self.kill()
        await self.ended()

    def errors(self) -> str:
        """Return what the process wrote to its standard error."""
        return os.pread(self._errors.fileno(), 1_000_000, 0).decode(errors="replace")

    async def _take(self, wanted: Callable[[dict[str, Any]], bool], within: float) -> dict[str, Any] | None:
        """Take the first thing that is wanted, waiting for it; None when the time or the process has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while True:
                    for said in self._said:
                        if wanted(said):
                            self._said.remove(said)
                            return said
                    if self._reading.done():
                        break
                    self._more.clear()
                    await self._more.wait()
        return None

    async def _read(self) -> None:
        """Take in what the process says, until it has ended."""
        assert self.process.stdout is not None
        try:
            async for line in self.process.stdout:
                self._said.append(json.loads(line))
                self._more.set()
        finally:
            # Whoever waits is woken in a later turn, when this task counts as done.
            self._more.set()


@contextlib.asynccontextmanager
async def start_worker(file: Path, *arguments: Any) -> AsyncIterator[WorkerProcess]:
    """Run a Python file with these arguments, each encoded as JSON, and kill it with the block.

    It finds the modules in the tests' directory, as the tests themselves do.
    """
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(file), *(json.dumps(argument) for argument in arguments)]
    with tempfile.TemporaryFile() as errors:
        async with running(*command, stderr=errors, env=os.environ | {"PYTHONPATH": path}) as process:
            worker = WorkerProcess(process, errors)
            try:
                yield worker
            finally:
                await worker.end()
                # A test that fails shows it.
                sys.stderr.write(worker.errors())
