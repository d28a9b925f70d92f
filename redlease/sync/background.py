"""The background thread: one event loop a process, which runs the calls of all its blocking clients.

A thread posts its call to the loop and waits on a lock until the result is there: one wake-up of the loop a call, and
one of the thread. What interrupts the wait (Ctrl-C, or whatever a signal handler raises) ends the call on the loop
before it comes out of the thread, so that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from threading import get_ident
from typing import Any, Generic, TypeVar

import redlease
from redlease.errors import RedleaseError
from redlease.transport.base import CLOSED

T = TypeVar("T")
Undo = Callable[[T], Coroutine[Any, Any, object]]

# How long an interrupted thread waits at most until its call has ended, and a thread that ends the loop until it has.
INTERRUPTED_S, STOP_S = 1.0, 5.0
WAKE = b"."


class Call(Generic[T]):
    """One call of a thread. Until `done` is released, everything else belongs to the loop's thread.

    `done` is released when there is a result; `ended` when an interrupted call has ended and left nothing behind.

    Args:
        background: Where it runs.
        client: The client that it is a call of, which ends it when it is closed.
        work: Makes the coroutine.
        undo: Gives the result back if the thread was interrupted and did not get it.
        must_finish: An interruption does not cancel it, as it releases something.
        context: Of the thread, for a call whose events are to be told in it.
    """

    value: T
    error: BaseException | None = None
    _task: asyncio.Task[None] | None = None
    _ending: asyncio.Task[None] | None = None
    _is_over = False

    def __init__(
        self,
        background: Background,
        client: object,
        work: Callable[[], Coroutine[Any, Any, T]],
        undo: Undo[T] | None,
        *,
        must_finish: bool,
        context: Context | None = None,
    ) -> None:
        self.client = client
        self.done, self.ended = threading.Lock(), threading.Lock()
        self.done.acquire()
        self.ended.acquire()
        self._background = background
        self._work = work
        self._undo = undo
        self._must_finish = must_finish
        self._context = context

    def start(self) -> None:
        """Starts the call on the loop, unless that has ended."""
        if self._background.ended:
            self.fail()
        elif self._task is None and not self._is_over:
            self._background.calls.add(self)
            self._task = asyncio.create_task(self._run(), context=self._context)

    async def _run(self) -> None:
        try:
            self.value = await self._work()
        except asyncio.CancelledError:
            self.error = RedleaseError(CLOSED)  # or interrupted: then nobody looks at it
        except BaseException as error:  # noqa: BLE001  it is raised in the thread
            self.error = error
        self._finish()

    def fail(self) -> None:
        """Ends the wait of the thread, since the client is closed."""
        if not self._is_over:
            self.error = RedleaseError(CLOSED)
            self._finish()

    def _finish(self) -> None:
        self._background.calls.discard(self)
        self._is_over = True
        self._task = None  # so that it goes in this thread: an interruption of a finalizer would be swallowed
        if self.done.locked() and not self._background.exits:
            self.done.release()

    def cancel(self) -> None:
        """Cancels the call, whose thread gets an error."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def abandon(self) -> None:
        """Ends the call, whose thread was interrupted and does not wait for the result."""
        if self._ending is None and not self._background.ended:
            self._ending = asyncio.create_task(self._end())

    async def _end(self) -> None:
        if self._must_finish:
            self.start()
        else:
            if (task := self._task) is not None:
                task.cancel()
                await asyncio.wait([task])
            if self._is_over and self.error is None and self._undo is not None:
                with contextlib.suppress(RedleaseError):  # it is repeated in the background, or the lease ends
                    await self._undo(self.value)
        self._background.calls.discard(self)
        self.ended.release()


class Background:
    """An event loop in a daemon thread, from the first use of a client until the last one is closed.

    Attributes:
        calls: The calls under way; for the loop's thread.
        ended: Whether it takes no more calls.
        exits: Whether the interpreter ends: daemon threads that wait then wait on, and print no error.
        orphaned: Whether this process was forked from the one whose thread it was.
    """

    ended = False
    exits = False
    orphaned = False
    _is_woken = False

    def __init__(self) -> None:
        self.calls: set[Call[Any]] = set()
        self._clients: set[redlease.Redlease] = set()
        self._posted: deque[Callable[[], None]] = deque()
        self._context = Context()  # of no caller: what runs on for the client would keep it alive
        self._stopping = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        # Not `call_soon_threadsafe`, which is Python and can be interrupted before it has done anything.
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._wake: Callable[[bytes], int] = self._mouth.send
        self._thread = threading.Thread(target=self._live, name="redlease", daemon=True)

    def start(self) -> None:
        """Starts the thread, unless it runs."""
        if self._thread.ident is None:
            self._thread.start()

    # Called by any thread

    def run(
        self,
        client: object,
        work: Callable[[], Coroutine[Any, Any, T]],
        *,
        undo: Undo[T] | None = None,
        must_finish: bool = False,
        context: Context | None = None,
    ) -> T:
        """Runs the coroutine that `work` makes on the loop; returns or raises in this thread what it returns or raises.

        `context`: what it runs in, by default one of no thread.

        Raises:
            RedleaseError: The client is closed, or this is the loop's own thread.
        """
        self.refuse_own_thread()
        call = Call(self, client, work, undo, must_finish=must_finish, context=context)
        try:
            self.post(call.start)
            call.done.acquire()
            error = call.error
        except BaseException:
            # However often it is interrupted: the interpreter looks for signals after a call of C, not before it.
            try:
                self._posted.append(call.abandon)
            finally:
                try:  # noqa: SIM105  `suppress` is no call of C
                    self._wake(WAKE)
                except OSError:  # it is woken often already, or has ended
                    pass
            if not self.ended:
                call.ended.acquire(timeout=INTERRUPTED_S)
            raise
        # The interpreter handles no signal between the `try` and this return: the result is the caller's.
        if error is None:
            return call.value
        try:
            raise error
        finally:
            del error, call  # the error's traceback refers to this frame

    @property
    def is_own_thread(self) -> bool:
        """Whether the current thread is the loop's."""
        return get_ident() == self._thread.ident

    def refuse_own_thread(self) -> None:
        """Raises RedleaseError in the loop's own thread: it cannot wait for itself."""
        if self.is_own_thread:
            raise RedleaseError(
                "this is redlease's own thread, which runs a handler of logging or a finalizer, and cannot wait for "
                "itself: call it in another thread"
            )

    def post(self, action: Callable[[], None]) -> None:
        """Has the loop's thread do something soon.

        Raises:
            RedleaseError: The loop has ended.
        """
        self._posted.append(action)
        if self.ended:
            raise RedleaseError(CLOSED)
        if not self._is_woken:
            self._is_woken = True
            with contextlib.suppress(OSError):  # it has ended since, and has done what was posted before
                self._wake(WAKE)

    # On the loop

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._ear.recv(4096)
        self._is_woken = False
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def end_calls(self, client: object) -> None:
        """Ends what threads still wait for of a client that is closed."""
        for call in [call for call in self.calls if call.client is client]:
            call.cancel()

    def _live(self) -> None:
        with self._runner as runner:
            runner.run(self._until_stopped(), context=self._context)
        for call in list(self.calls):  # cancelled before their first step
            call.fail()
        self._ear.close()
        self._mouth.close()

    async def _until_stopped(self) -> None:
        self._loop.add_reader(self._ear, self._take)
        await self._stopping.wait()
        for client in list(self._clients):
            await client.abandon()
        self.ended = True  # before the last look: who posts from now on sees it
        while self._posted:
            self._posted.popleft()()
        self._loop.remove_reader(self._ear)

    def stop(self, within_s: float = STOP_S) -> None:
        """Ends the thread, and waits until it has ended."""
        with contextlib.suppress(RedleaseError):
            self.post(self._stopping.set)
        self._thread.join(within_s)

    # Clients, under the lock of the process

    def add(self, client: redlease.Redlease) -> None:
        """Counts a client."""
        self._clients.add(client)

    def drop(self, client: redlease.Redlease) -> bool:
        """Counts a client no more; returns True if it was the last."""
        self._clients.discard(client)
        return not self._clients


class Process:
    """What a process has at most one of. A forked child has another one: no lock of its parent's threads stays locked.

    Attributes:
        lock: Guards `background` and the joining of clients.
        background: The running loop, if there is one.
        orphans: The loops of the parents. Kept: closing one would change the selector that parent and child share.
    """

    def __init__(self, orphans: tuple[Background, ...] = ()) -> None:
        self.lock = threading.Lock()
        self.background: Background | None = None
        self.orphans = orphans

    def join(self, client: redlease.Redlease) -> Background:
        """Returns the running loop for a client, to be called under the lock; starts it if it does not run."""
        if self.background is None:
            self.background = Background()
        self.background.start()
        self.background.add(client)
        return self.background

    def leave(self, background: Background, client: redlease.Redlease) -> None:
        """Ends the loop if that was its last client."""
        with self.lock:
            is_last = background.drop(client)
            if is_last and self.background is background:
                self.background = None
        if is_last:
            background.stop()


_process = Process()


def process() -> Process:
    """Returns what is of this process."""
    return _process


def _begin_in_child() -> None:
    global _process  # noqa: PLW0603  the one of the parent is of no use here
    left = _process.background
    if left is not None:
        left.orphaned = left.ended = True
    _process = Process((*_process.orphans, *([left] if left is not None else [])))


def _end_with_process() -> None:
    # Permits and places stay until they expire, as when the process is killed.
    background, _process.background = _process.background, None
    if background is not None:
        background.exits = True
        background.stop(1.0)


atexit.register(_end_with_process)
if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_begin_in_child)
