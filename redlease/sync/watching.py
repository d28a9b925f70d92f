"""Snapshots of a resource after each change, for a thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from types import TracebackType
from typing import Self

from redlease.errors import RedleaseError
from redlease.models import Snapshot

from .thread.bound import ProcessClient


class Watch(Iterator[Snapshot]):
    """What `watch()` returns: an iterator over snapshots, which waits for the next change. Any thread may close it."""

    _is_closed = False
    _waiting: asyncio.Task[object] | None = None  # what waits for the next change; for the loop's thread

    def __init__(self, client: ProcessClient, make: Callable[[], AsyncGenerator[Snapshot, None]]) -> None:
        self._client = client
        self._background = client.background
        self._snapshots = make()

    def __next__(self) -> Snapshot:
        if self._background.is_foreign:
            raise RedleaseError("this watch is of the process that this one was forked from: call watch() again")
        snapshot = None if self._is_closed else self._client.call(self._next)
        if snapshot is None:
            raise StopIteration
        return snapshot

    async def _next(self) -> Snapshot | None:
        self._waiting = asyncio.current_task()
        try:
            return await anext(self._snapshots, None)
        except asyncio.CancelledError:
            if not self._is_closed:
                raise
            return None
        finally:
            self._waiting = None

    def close(self) -> None:
        """Ends the iteration, also that of a thread that waits for the next change. Idempotent."""
        if not self._is_closed and not self._background.ended:
            self._is_closed = True
            with contextlib.suppress(RedleaseError):  # its client was closed meanwhile
                self._background.run(self._client, self._close, must_finish=True)

    async def _close(self) -> None:
        if (waiting := self._waiting) is not None:
            waiting.cancel()
            await asyncio.wait([waiting])
        await self._snapshots.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
