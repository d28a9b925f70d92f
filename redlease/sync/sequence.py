"""A sequence whose handler runs in the thread that calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from typing import Any, Generic

import redlease
from redlease._core.limits import Duration
from redlease._core.primitives.sequence import Item, Step

from .hold import Hold
from .semaphore import Lock
from .thread.bound import Bound, ProcessClient


class SequenceRun(Bound[redlease.SequenceRun[Item]], Generic[Item]):
    """What `client.sequence(...)` returns: `results()` gives the list of results, `for` each one as its item is done.

    Each of them is one call, as `await` and `async for` are of `redlease.SequenceRun`. The handler runs in the calling
    thread. With `for`, an item is handled when its result is asked for, and the lock is held until the loop ends: use
    `contextlib.closing(iter(...))` if it may be left early.
    """

    def __init__(
        self,
        client: ProcessClient,
        resource: str,
        items: Iterable[Item],
        handler: Callable[[Item, Hold], Any],
        *,
        timeout: Duration | None,
        lease: Duration | None,
        **options: Any,
    ) -> None:
        kept = list(items)

        def make(client: redlease.Redlease) -> redlease.SequenceRun[Item]:
            given: Any = handler  # checked there, and called here
            return client.sequence(resource, kept, given, timeout=timeout, lease=lease, **options)

        super().__init__(client, make)
        self._lock = Lock(client, lambda client: client.lock(resource, lease=lease))
        self._handler = handler
        self._timeout = timeout

    @property
    def id(self) -> str:
        """The id of the sequence."""
        return self._twin.id

    def results(self) -> list[Any]:
        """Handles what is not done; returns the results of all items. Raises what `redlease.Redlease.sequence` says."""
        return list(self)

    def __iter__(self) -> Generator[Any, None, None]:
        run = self._twin
        if not run._items:
            return
        with self._lock.hold(timeout=self._timeout, metadata={"sequence": run.id}) as hold:
            steps = run._steps(hold._twin)
            while (step := self._next(steps, hold)) is not None:
                if isinstance(step, list):
                    yield from map(json.loads, step)
                    continue
                try:
                    step.result = self._handler(step.item, hold)
                except Exception as error:  # noqa: BLE001  the next step records it
                    step.error = error
                del step  # its error's traceback refers to this frame

    def _next(self, steps: AsyncGenerator[Step[Item], None], hold: Hold) -> Step[Item] | None:
        """Returns the next step, None after the last; raises LeaseLost as soon as the permit is lost."""

        async def following() -> Step[Item] | None:
            return await anext(steps, None)

        async def unless_lost() -> Step[Item] | None:
            doing, losing = asyncio.create_task(following()), asyncio.create_task(hold._twin.wait_lost())
            try:
                await asyncio.wait([doing, losing], return_when=asyncio.FIRST_COMPLETED)
                if not doing.done():
                    hold._twin.check()
                return await doing
            finally:
                doing.cancel()
                losing.cancel()
                await asyncio.gather(doing, losing, return_exceptions=True)
                del doing  # which keeps its error, whose traceback refers to this frame

        return self._client.call(unless_lost)
