"""Those who use a library at the same time: tasks of one event loop, or threads for a library that blocks.

Workloads are written once, as coroutines. A library that blocks never suspends one, so that a thread runs it to its
end by a single `send`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, Protocol


class Callers(Protocol):
    """Starts callers and waits for them."""

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine to its end and returns what it returns."""

    def start(self, caller: Coroutine[Any, Any, None]) -> None:
        """Lets a caller run beside the others."""

    def running(self) -> int:
        """How many of those that were started have not ended."""

    async def finished(self) -> list[BaseException]:
        """Waits until all that were started have ended, and returns the errors that some of them ended with."""

    async def sleep(self, seconds: float) -> None:
        """Lets the others run meanwhile."""


class Tasks:
    """Tasks of one event loop."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(main)

    def start(self, caller: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(caller))

    def running(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def finished(self) -> list[BaseException]:
        tasks, self._tasks = self._tasks, []
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        return [error for error in ended if error is not None]

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Threads:
    """A thread for each caller."""

    def __init__(self) -> None:
        # A thousand stacks of the usual 8 MB are more address space than some machines grant.
        threading.stack_size(512 * 1024)
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        try:
            main.send(None)
        except StopIteration as end:
            return end.value
        raise RuntimeError("a caller of a library that blocks has waited for an event loop")

    def start(self, caller: Coroutine[Any, Any, None]) -> None:
        thread = threading.Thread(target=self._run_one, args=(caller,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def running(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    async def finished(self) -> list[BaseException]:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join()
        errors, self._errors = self._errors, []
        return errors

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no event loop here to be blocked

    def _run_one(self, caller: Coroutine[Any, Any, None]) -> None:
        try:
            self.run(caller)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is returned by `finished`
            self._errors.append(error)
