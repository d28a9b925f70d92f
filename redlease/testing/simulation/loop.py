"""An event loop with virtual time that runs the callbacks of several simulated processes."""

from __future__ import annotations

import asyncio
import heapq
import sys
from asyncio import events
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from itertools import count
from typing import Any, TypeVar

from .process import PROCESS, Process

SOON, ARRIVED, DUE = range(3)  # the order in which an event loop that was blocked runs what is ready
TURN_S = 5e-6  # how long a callback takes
IDLE_S = 0.01  # a pause of everybody that is long enough for a look

T = TypeVar("T")


class SimulatedLoop(asyncio.AbstractEventLoop):
    """Runs what is due in the order of its time, and advances the time from one to the next.

    A process runs its callbacks in the order that asyncio promises. One that stands still runs none until it goes on.

    Attributes:
        now: The virtual time in seconds.
        current: The process whose callback runs.
        failures: What callbacks and forgotten tasks have raised.
        on_idle: Called when nobody had anything to do for a moment, before anything else runs.
        connect: Makes what `create_connection` returns.
    """

    def __init__(self, nobody: Process) -> None:
        self.now = 0.0
        self.current = self._nobody = nobody
        self.failures: list[dict[str, Any]] = []
        self.on_idle: Callable[[], None] = lambda: None
        self.connect: Callable[..., Coroutine[Any, Any, tuple[asyncio.BaseTransport, Any]]] | None = None
        self.tasks: dict[asyncio.Task[Any], None] = {}  # not a set: that has no order
        self._heap: list[tuple[float, int, float, int, asyncio.Handle, Process]] = []
        self._numbers = count()
        self._running = self._closed = False

    # Time

    def time(self) -> float:
        """The time of the process that runs, which may be ahead of the others after it blocked its loop."""
        return max(self.now, self.current.busy_until)

    def put(self, when: float, kind: int, process: Process, callback: Callable[..., object], *args: Any) -> None:
        """Schedule a callback of a process."""
        self._push(when, kind, asyncio.Handle(callback, args, self, process.context), process)

    def _push(self, when: float, kind: int, handle: asyncio.Handle, process: Process) -> None:
        heapq.heappush(self._heap, (when, kind, when, next(self._numbers), handle, process))

    def run(self, until: float, is_over: Callable[[], bool]) -> None:
        """Run until it is over, or there is nothing left to do, or the time is up."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finish_generator)
        self._running = True
        events._set_running_loop(self)
        try:
            while self._heap and self._heap[0][0] <= until and not is_over():
                self._step()
        finally:
            events._set_running_loop(None)
            self._running = False
            sys.set_asyncgen_hooks(*hooks)

    def _step(self) -> None:
        when, kind, due, number, handle, process = heapq.heappop(self._heap)
        if handle._cancelled or not process.is_alive:
            return
        if when < process.busy_until:
            heapq.heappush(self._heap, (process.busy_until, kind, due, number, handle, process))
            return
        if when > self.now:
            was, self.now = self.now, when
            if when - was > IDLE_S:
                self.current = self._nobody
                self.on_idle()
        self.current = process
        handle._run()
        self.now += TURN_S

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())

    # What asyncio calls

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        process = self.current if context is None else context.get(PROCESS, self.current)
        self._push(max(self.now, process.busy_until), SOON, handle, process)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        process = self.current if context is None else context.get(PROCESS, self.current)
        self._push(max(when, self.now), DUE, handle, process)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled handle is passed over when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **settings: Any) -> asyncio.Task[T]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, **settings)
        self.tasks[task] = None
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: Callable[[], Any], *_: object, **settings: Any
    ) -> tuple[asyncio.BaseTransport, Any]:
        if self.connect is None or settings.get("ssl"):
            raise NotImplementedError("a simulation has no network but its own, and no TLS")
        return await self.connect(protocol_factory)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._heap.clear()
