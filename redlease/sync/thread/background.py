"""The background thread: one event loop a process, which runs the calls of all its blocking clients.

A thread posts its call to the loop and waits on a lock until the result is there: one wake-up of the loop a call, and
one of the thread. What interrupts the wait (Ctrl-C, what a signal handler raises, or another thread has it raise) ends
the call on the loop before it comes out of the thread, so that nothing is left behind.

Finalizers and signal handlers call redlease too, between any two steps of what is written here, and the step they
interrupt goes on only after they have returned. So each call has locks of its own, no step announces what only a later
one does, and under the one lock that threads share, that of `Process`, no function is called.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from threading import get_ident
from typing import Any, Generic, TypeVar

import redlease
from redlease._core.log import about
from redlease.errors import ClientClosed, RedleaseError

T = TypeVar("T")
Undo = Callable[[T], Coroutine[Any, Any, object]]

logger = logging.getLogger("redlease")

# How long an interrupted thread waits at most until its call has ended, and a thread that ends the loop until it has.
INTERRUPTED_S, STOP_S = 1.0, 5.0

# A thread that waits for a lock gets an exception of another thread (`PyThreadState_SetAsyncExc`, with which Temporal,
# dramatiq and RQ cancel) only once it has the lock, and no message can wake it for that. So it waits in slices.
# A wake-up costs about 15 us: 200 threads that wait take 0.6 % of a core, and would take 3 % with slices of 0.1 s. With
# INTERRUPTED_S, a cancelled wait ends within two seconds.
SLICE_S = 0.5

WAKE = b"."


def _nothing() -> None:
    return None


class Call(Generic[T]):
    """One call of a thread. Until `done` is released, everything else belongs to the loop's thread.

    `done` is released when there is a result; `ended` when an interrupted call has ended and left nothing behind.

    Args:
        background: Where it runs.
        client: The client that it is a call of, which ends it when it is closed.
        work: Makes the coroutine.
        undo: Gives the result back if the thread was interrupted and did not get it.
        must_finish: An interruption does not cancel it, as it releases something.
        context: Of the thread, for a call whose events are to be emitted in it.
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
            self.error = self._background.ending()  # or interrupted: then nobody looks at it
        except BaseException as error:  # noqa: BLE001  it is raised in the thread
            self.error = error
        self._finish()

    def fail(self) -> None:
        """Ends the wait of the thread, since the client is closed."""
        if not self._is_over:
            self.error = self._background.ending()
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
        clients: Those that are open, under the lock of the process.
        posted: What is to be done on the loop.
        gone: Blocks that are not left yet: what releases their permits when nobody can leave them any more.
        ended: Whether it takes no more calls.
        why: Why it ended, if no client was closed.
        exits: Whether the interpreter ends: daemon threads that wait then wait on, and print no error.
        orphaned: Whether this process was forked from the one whose thread it was.
    """

    ended = False
    why = ""
    exits = False
    is_foreign = False
    _ident: int | None = None  # of its thread, as soon as that can tell
    _is_launched = False
    _taken = 0  # how often the loop has looked at what was posted
    _woken = -1  # the last value of `_taken` for which a wake was sent

    def __init__(self) -> None:
        self.calls: set[Call[Any]] = set()
        self.clients: dict[redlease.Redlease, None] = {}
        self.posted: deque[Callable[[], object]] = deque()
        self.gone: dict[int, object] = {}
        self._context = Context()  # of no caller: what runs on for the client would keep it alive
        self._stopping = asyncio.Event()
        # Not `call_soon_threadsafe`, which is Python and can be interrupted before it has done anything.
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._wake: Callable[[bytes], int] = self._wake_writer.send
        self._thread = threading.Thread(target=self._live, name="redlease", daemon=True)
        self._begun = threading.Lock()

    def discard(self) -> None:
        """Closes one that was never used."""
        self._wake_reader.close()
        self._wake_writer.close()

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
            if not call.done.acquire(True, SLICE_S):
                self._wait_for(call)
            error = call.error
        except BaseException:
            # However often it is interrupted: the interpreter looks for signals after a call of C, not before it.
            try:
                self.posted.append(call.abandon)
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
            call.error = None  # the error's traceback refers to the call
            del error, call  # and to this frame

    def _wait_for(self, call: Call[Any]) -> None:
        """Waits on. A function of its own: from Python 3.12 on, the jump of a loop is in no `try` that is around it.

        Raises:
            RedleaseError: Nobody will end the wait, as the call is of a signal handler that came too late.
        """
        while not call.done.acquire(True, SLICE_S):
            if self.is_foreign or (self.exits and get_ident() == threading.main_thread().ident):
                raise ClientClosed

    def ending(self) -> RedleaseError:
        """Returns the error of a call that was under way when it ended."""
        return RedleaseError(self.why) if self.why else ClientClosed()

    @property
    def is_own_thread(self) -> bool:
        """Whether the current thread is the loop's, or the one that starts it."""
        if self._ident is not None:
            return get_ident() == self._ident
        # It starts, and may run finalizers before it can tell its number: its stack tells who it is.
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        begun_by = frame.f_locals.get("self")
        return begun_by is self or begun_by is self._thread

    def refuse_own_thread(self) -> None:
        """Raises RedleaseError in the loop's own thread: it cannot wait for itself."""
        if self.is_own_thread:
            raise RedleaseError(
                "this is redlease's own thread, which runs a handler of logging or a finalizer, and cannot wait for "
                "itself: call it in another thread"
            )

    def post(self, action: Callable[[], object]) -> None:
        """Has the loop's thread do something soon. It never waits.

        Raises:
            RedleaseError: The loop has ended.
        """
        self.posted.append(action)
        if self.ended:
            raise self.ending()
        if not self._is_launched:
            # Not `Thread.start`, which waits for the thread under a lock that the thread needs: a finalizer that
            # interrupts it there, and waits for this loop, would wait forever. Who is interrupted here starts it too.
            start_new_thread(self._begin, ())
            self._is_launched = True
        # The wake is noted once it is sent: who interrupts this before that sends one too, and it is in vain at most.
        # When the loop has looked meanwhile, the note is of an earlier look and stops nobody.
        if self._woken != (taken := self._taken):
            with contextlib.suppress(OSError):  # it is woken often already, or has ended since
                self._wake(WAKE)
            self._woken = taken

    def wake(self, _: object = None) -> None:
        """Has the loop's thread look at what others have put into `posted`."""
        with contextlib.suppress(RedleaseError):
            self.post(_nothing)

    def stop(self, within_s: float = STOP_S) -> None:
        """Ends the thread, and waits until it has ended."""
        if self._is_launched:
            with contextlib.suppress(RedleaseError):
                self.post(self._stopping.set)
            self.join(within_s)

    def join(self, within_s: float = STOP_S) -> None:
        """Waits until the thread has ended, if it has begun."""
        if self._ident is not None and not self.is_foreign:
            self._thread.join(within_s)

    # In its thread

    def _begin(self) -> None:
        """Starts the thread, in one that is there for nothing else, unless another one has."""
        if self._begun.acquire(blocking=False):
            try:
                self._thread.start()
            except BaseException as error:  # noqa: BLE001  the process has too many threads
                self._report(error)
                self._end()

    def _live(self) -> None:
        self._ident = get_ident()
        try:
            with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
                try:
                    runner.run(self._until_stopped(), context=self._context)
                except BaseException as error:  # noqa: BLE001  SystemExit in a callback of the user's, for example
                    self._report(error)
                runner.run(self._abandon(), context=self._context)
        finally:
            self._end()

    def _report(self, error: BaseException) -> None:
        self.why = f"redlease's background thread was ended by {error!r}, and holds nothing any more. Call again"
        logger.critical(
            "the thread of redlease.sync was ended: nothing is renewed any more", exc_info=error, extra=about()
        )

    def _end(self) -> None:
        """Ends what threads wait for, in whatever way the loop has ended, so that none waits forever."""
        process().forget(self)
        self.ended = True
        self._do_posted()
        for call in list(self.calls):  # cancelled before their first step
            call.fail()
        self._wake_reader.close()
        self._wake_writer.close()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        self._taken += 1  # before it looks: who posts from now on wakes it again
        self._do_posted()

    def _do_posted(self) -> None:
        for _ in range(len(self.posted)):
            try:
                self.posted.popleft()()
            except Exception:
                logger.exception("a call from another thread failed unexpectedly", extra=about())

    def end_calls(self, client: object) -> None:
        """Ends what threads still wait for of a client that is closed."""
        for call in [call for call in self.calls if call.client is client]:
            call.cancel()

    async def _until_stopped(self) -> None:
        asyncio.get_running_loop().add_reader(self._wake_reader, self._take)
        await self._stopping.wait()

    async def _abandon(self) -> None:
        for client in list(self.clients):
            await client.abandon()
        self.ended = True  # before the last look: who posts from now on sees it
        self._do_posted()
        asyncio.get_running_loop().remove_reader(self._wake_reader)

    def leave(self, client: redlease.Redlease) -> None:
        """Counts a client no more, and ends the loop if that was the last one."""
        if process().is_last(self, client):
            self._stopping.set()


class Process:
    """What a process has at most one of. A forked child has another one: no lock of its parent's threads stays locked.

    Attributes:
        lock: Guards `background`, its clients, and what a blocking client has of them. No function is called under it:
            so no finalizer or signal handler, which may need it, runs meanwhile.
        background: The running loop, if there is one.
        orphans: The loops of the parents. Kept: closing one would change the selector that parent and child share.
        exits: Whether the interpreter ends.
    """

    exits = False

    def __init__(self, orphans: tuple[Background, ...] = ()) -> None:
        self.lock = threading.Lock()
        self.background: Background | None = None
        self.orphans = orphans

    def is_last(self, background: Background, client: redlease.Redlease) -> bool:
        """Counts a client of a loop no more; returns True if it was the last one, whose loop takes no others then."""
        with self.lock:
            if client in background.clients:
                del background.clients[client]
            if background.clients:
                return False
            if self.background is background:
                self.background = None
        return True

    def forget(self, background: Background) -> None:
        """Lets the next client have another loop, as this one has ended."""
        with self.lock:
            if self.background is background:
                self.background = None


_process = Process()


def process() -> Process:
    """Returns what is of this process."""
    return _process


def _begin_in_child() -> None:
    global _process  # noqa: PLW0603  the one of the parent is of no use here
    left = _process.background
    if left is not None:
        left.is_foreign = left.ended = True
    _process = Process((*_process.orphans, *([left] if left is not None else [])))


def _end_with_process() -> None:
    # Permits and places stay until they expire, as when the process is killed.
    background, _process.background, _process.exits = _process.background, None, True
    if background is not None:
        background.exits = True
        background.stop(1.0)
        background.ended = True  # if it is stuck, too: what finalizers call from here on would wait forever


atexit.register(_end_with_process)
if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_begin_in_child)
