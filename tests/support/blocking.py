"""The blocking face behind the interface of the asyncio one, so that one suite shows the promises of both.

Each task has a thread, in which it calls the blocking objects. A cancelled task interrupts its thread's call, as Ctrl-C
does in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import redlease
import redlease.sync
from redlease.sync.thread import background
from redlease.sync.watching import Watch

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator


class Interrupted(BaseException):
    """What an interrupted thread raises, as it would KeyboardInterrupt."""


class InterruptibleLock:
    """A lock whose `acquire` can be interrupted in any thread; that of the interpreter only in the main thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_interrupted = False
        self._begun = begun_of.get(threading.get_ident())
        self.locked, self.release = self._lock.locked, self._lock.release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.locked() and self._begun is not None:
            self._begun.set()  # it is posted
        is_acquired = self._lock.acquire(blocking, timeout)
        if self._is_interrupted:
            raise Interrupted
        return is_acquired

    def interrupt(self) -> None:
        """Raise in the thread that waits, if one does."""
        if self._lock.locked():
            self._is_interrupted = True
            self._lock.release()


class InterruptibleCall(background.Call[Any]):
    """A call that can be interrupted by way of its thread."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        lock: Any = InterruptibleLock()
        self.done = lock
        self.done.acquire()
        waits_for[threading.get_ident()] = lock


# By thread: what its last call waits for, and what tells that it is posted.
begun_of: dict[int, threading.Event] = {}
waits_for: dict[int, InterruptibleLock] = {}


class Worker:
    """The thread of one task."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        begun_of[threading.get_ident()] = self._begun
        while (job := self._jobs.get()) is not None:
            future, function = job
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  it is raised in the task
                future.set_exception(error)
            self._begun.set()
            del future, function, job

    async def run(self, function: Callable[[], Any]) -> Any:
        """Return or raise what the function does; interrupt it if the task is cancelled."""
        future: Future[Any] = Future()
        self._begun.clear()
        self._jobs.put((future, function))
        self._begun.wait(1)  # so that threads ask in the order in which their tasks do
        result = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            while not result.done():  # it may not wait yet
                if (lock := waits_for.get(self._thread.ident or 0)) is not None:
                    lock.interrupt()
                await asyncio.wait([result], timeout=0.01)
            if result.exception() is None:  # the interruption came too late, and finds a program that has the permit
                await asyncio.to_thread(_give_back, result.result())
            raise

    def stop(self, _: object) -> None:
        """End the thread."""
        self._jobs.put(None)


def _give_back(result: object) -> None:
    if isinstance(result, redlease.sync.Hold):
        result.release()


workers: WeakKeyDictionary[asyncio.Task[Any], Worker] = WeakKeyDictionary()


def worker() -> Worker:
    """Return the thread of the current task."""
    task = asyncio.current_task()
    assert task is not None
    if task not in workers:
        workers[task] = Worker()
        task.add_done_callback(workers[task].stop)
    return workers[task]


KINDS = (
    *(getattr(redlease.sync, name) for name in redlease.sync.__all__ if hasattr(redlease.sync, name)),
    Watch,
)
PROXIED = tuple(kind for kind in KINDS if isinstance(kind, type) and kind.__module__.startswith("redlease.sync"))


def blocking(value: Any) -> Any:
    """Return what is behind a proxy."""
    return value._blocking if isinstance(value, Proxy) else value


def wrapped(value: Any) -> Any:
    """Return a blocking object as an asyncio one, and everything else as it is."""
    if inspect.isgenerator(value) or isinstance(value, Watch):
        return iterate(value)
    if not isinstance(value, PROXIED):
        return value
    if isinstance(value, tuple):
        return Proxy(value)
    known: dict[str, Any] = vars(value)
    return known.setdefault("_proxy", Proxy(value))


async def iterate(iterator: Iterator[Any]) -> AsyncGenerator[Any, None]:
    """Yield what a blocking iterator does, and close it at the end."""
    try:
        while True:
            value = await worker().run(lambda: next(iterator, None))
            if value is None:
                return
            yield wrapped(value)
    finally:
        close: Any = getattr(iterator, "close", None)
        await worker().run(close)


class Adopting:
    """What `adopt` returns: a thread gets the hold at once, a task when it awaits or enters it."""

    def __init__(self, adopt: Callable[[], Awaitable[Any]]) -> None:
        self._adopt = adopt
        self._hold: Any = None

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._adopt().__await__()

    async def __aenter__(self) -> Any:
        self._hold = await self._adopt()
        return await self._hold.__aenter__()

    async def __aexit__(self, *error: object) -> Any:
        return await self._hold.__aexit__(*error)


class Proxy:
    """One blocking object with the methods of its asyncio twin."""

    def __init__(self, blocking: Any) -> None:
        self._blocking = blocking

    def __repr__(self) -> str:
        return repr(self._blocking)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(self._blocking, name):  # what is inside of a client is its asyncio client's
            return getattr(self._twin(), name)
        value = getattr(self._blocking, name)
        if not callable(value):
            return wrapped(value)
        kind: Any = getattr(redlease, type(self._blocking).__name__, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            return wrapped(value(*map(blocking, args), **kwargs))

        async def call_in_thread(*args: Any, **kwargs: Any) -> Any:
            return wrapped(await worker().run(lambda: value(*map(blocking, args), **kwargs)))

        if name == "adopt":
            return lambda *args, **kwargs: Adopting(functools.partial(call_in_thread, *args, **kwargs))
        is_async = inspect.iscoroutinefunction(getattr(kind, name, None)) or name == "detach"
        return call_in_thread if is_async and name != "detach" else call

    def _twin(self) -> Any:
        return (
            self._blocking._client.twin if isinstance(self._blocking, redlease.sync.Redlease) else self._blocking._twin
        )

    def __iter__(self) -> Iterator[Any]:
        return map(wrapped, self._blocking)

    def __getitem__(self, index: int) -> Any:
        return wrapped(self._blocking[index])

    def __len__(self) -> int:
        return len(self._blocking)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._got().__await__()

    async def _got(self) -> Any:
        got = self._blocking.results if hasattr(self._blocking, "results") else self._blocking.acquire
        return wrapped(await worker().run(got))

    async def __aenter__(self) -> Any:
        return wrapped(await worker().run(self._blocking.__enter__))

    async def __aexit__(self, *error: object) -> Any:
        return await worker().run(lambda: self._blocking.__exit__(*error))

    def __aiter__(self) -> AsyncIterator[Any]:
        return iterate(iter(self._blocking))


@contextlib.contextmanager
def interruptible_calls() -> Iterator[None]:
    """Have the calls of threads be such as can be interrupted."""
    usual = background.Call
    background.Call = InterruptibleCall  # type: ignore[misc]
    yield
    background.Call = usual  # type: ignore[misc]
