"""The asyncio client behind a blocking one, and the losses of which a thread is still to be notified."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any, Generic, Protocol, TypeVar

import redlease
from redlease.errors import ClientClosed, LeaseLost, RedleaseError
from redlease.guards.redis import CHECK

from .background import Background, Undo, process
from .greenlets import check_threads

T = TypeVar("T")


class LossSource(Protocol):
    """What a thread has entered with `on_lost="raise"`."""

    def _take_loss(self) -> LeaseLost | None:
        """Returns the error if it is lost and its thread has not been notified yet."""


class ThreadBlocks(threading.local):
    """What the current thread has entered with `on_lost="raise"`."""

    def __init__(self) -> None:
        # Weak: what an interruption has left in it must be collected. Not a WeakSet, of which no finalizer may enter
        # another block while this looks through it.
        self.blocks: dict[int, weakref.ref[LossSource]] = {}

    def add(self, block: LossSource) -> None:
        """Has the thread notified when it is lost."""
        self.blocks[id(block)] = weakref.ref(block)

    def discard(self, block: LossSource) -> None:
        """Has the thread notified no more."""
        self.blocks.pop(id(block), None)

    def raise_loss(self) -> None:
        """Raises `LeaseLost`, once for each block of this thread whose permit is lost."""
        for key, reference in self.blocks.copy().items():
            if (block := reference()) is None:
                self.blocks.pop(key, None)
            elif (loss := block._take_loss()) is not None:
                raise loss


thread_blocks = ThreadBlocks()


def _forget_in_child() -> None:
    """Forgets the blocks that the forking thread was in, which are its parent's."""
    thread_blocks.blocks.clear()


if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_forget_in_child)


class ProcessClient:
    """The asyncio client of one blocking client: each process that uses it makes its own.

    Args:
        make: Makes the asyncio client. Called at once too, so that it raises for a wrong parameter.
    """

    def __init__(self, make: Callable[[], redlease.Redlease]) -> None:
        self._make = make
        self._twin = self._made()
        self._background: Background | None = None
        self._is_observed = self._twin._session.manager.emit is not None
        self._is_closed = False

    def __repr__(self) -> str:
        return repr(self._twin)

    def _made(self) -> redlease.Redlease:
        made = self._make()
        made._operations.load_too(CHECK)  # here already, so that a guard which any thread makes changes nothing
        return made

    @property
    def twin(self) -> redlease.Redlease:
        """The asyncio client of this process."""
        if self._background is not None and self._background.ended and not self._is_closed:
            self._join()
        return self._twin

    @property
    def background(self) -> Background:
        """The loop that runs the client in this process; starts it on first use.

        Raises:
            RedleaseError: The client is closed, or gevent has replaced threads.
        """
        background = self._background
        return self._join() if background is None or background.ended or self._is_closed else background

    def _join(self) -> Background:
        check_threads()
        while True:
            self.check_open()
            here, old = process(), self._background
            if old is not None and not old.ended:
                return old
            twin = self._twin if old is None else self._made()  # the old one's is of the process before a fork
            fresh = Background() if here.background is None else None
            with here.lock:  # no calls in here: see Process
                background = here.background or fresh
                if background is not None and self._background is old and not self._is_closed:
                    here.background = background
                    background.clients[twin] = None
                    self._twin, self._background = twin, background
            if fresh is not None and here.background is not fresh:
                fresh.discard()  # another thread was faster

    def check_open(self) -> None:
        """Raises RedleaseError if the client is closed, or the process ends."""
        if self._is_closed or process().exits:
            raise ClientClosed

    def call(self, work: Callable[[], Coroutine[Any, Any, T]], *, undo: Undo[T] | None = None) -> T:
        """Runs what begins something new; first raises the loss of a permit that the thread is to be notified of."""
        if thread_blocks.blocks:
            thread_blocks.raise_loss()
        context = copy_context() if self._is_observed else None  # spans are children of the caller's own
        return self.background.run(self, work, undo=undo, context=context)

    def release(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Runs what gives something back, which goes on in the background if its thread is interrupted."""
        return self.background.run(self, work, must_finish=True)

    def open(self) -> None:
        """Connects."""

        async def enter() -> None:
            await self._twin.__aenter__()

        async def close(_: None) -> None:
            await self._twin.close()

        try:
            self.call(enter, undo=close)
        except BaseException:
            self._leave()
            raise

    def close(self, how: Callable[[redlease.Redlease], Coroutine[Any, Any, None]]) -> None:
        """Closes the client of this process in that way, and ends the loop with its last client."""
        if (background := self._background) is not None and not background.ended:
            background.refuse_own_thread()
        self._is_closed = True
        twin, background = self._twin, self._background  # no thread changes them any more
        if background is None or background.ended:  # not used yet in this process, or closed
            return

        async def close_and_end_calls() -> None:
            try:
                await how(twin)
            finally:
                background.end_calls(self)
                background.leave(twin)

        try:
            background.run(self, close_and_end_calls, must_finish=True)
        except ClientClosed:
            pass  # another thread has closed it too
        except RedleaseError:
            if not background.ended:
                raise
        if not background.clients:
            background.join()

    def _leave(self) -> None:
        self._is_closed = True
        twin, background = self._twin, self._background

        async def leave() -> None:
            if background is not None:
                background.leave(twin)

        if background is not None and not background.ended:
            with contextlib.suppress(RedleaseError):  # it has ended since
                background.run(self, leave, must_finish=True)
            if not background.clients:
                background.join()


def with_own_server(settings: dict[str, Any]) -> Callable[[], redlease.Redlease]:
    """Returns what makes a client with its own server, and in a forked child one of the server that runs already."""
    of_parent: list[redlease.Redlease] = []

    def make() -> redlease.Redlease:
        for each in of_parent:
            if each._server is not None and each._server.is_running:
                return redlease.Redlease.from_url(each._server.url, **settings)
        of_parent[:] = [redlease.Redlease.embedded(**settings)]
        return of_parent[0]

    return make


class Bound(Generic[T]):
    """A blocking object whose asyncio twin is made again in each process.

    Args:
        client: The client that it belongs to.
        make: Makes the twin. Called at once too, so that it raises for a wrong parameter.
    """

    def __init__(self, client: ProcessClient, make: Callable[[redlease.Redlease], T]) -> None:
        client.check_open()
        self._client = client
        self._make_twin = make
        self._made = client.twin, make(client.twin)

    def __repr__(self) -> str:
        return repr(self._made[1])

    @property
    def _twin(self) -> T:
        client, twin = self._made
        current = self._client.twin
        if client is not current:
            self._made = current, (twin := self._make_twin(current))
        return twin
