"""A sequence whose handler runs in the thread that calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar

import redlease
from redlease._core.limits import Duration
from redlease._core.primitives.sequence import Item

from .hold import Hold
from .semaphore import Lock
from .thread.bound import Bound, ProcessClient

T = TypeVar("T")


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
            checkpoints, plan, twin = run._checkpoints, run._plan, hold._twin
            handled = self._unless_lost(hold, checkpoints.begin, twin, plan)
            known = 0
            while known < handled:
                for result in self._unless_lost(hold, checkpoints.results, known):
                    yield json.loads(result)
                    known += 1
            for index in range(handled, len(run._items)):
                result = self._result_of(run, index, hold)
                self._unless_lost(hold, checkpoints.record, twin, plan, index, result)
                yield json.loads(result)

    def _result_of(self, run: redlease.SequenceRun[Item], index: int, hold: Hold) -> str:
        """Handles one item, with as many attempts as it may have; returns its result as JSON."""
        pauses = run._retry.pauses()
        while True:
            hold.check()
            try:
                result = self._handler(run._items[index], hold)
            except Exception as error:
                self._unless_lost(hold, run._record_error, index, hold._twin, error)
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise run._failed(index, error) from error
            else:
                return self._unless_lost(hold, run._checked, index, hold._twin, result)
            hold.wait_lost(pause_s)

    def _unless_lost(self, hold: Hold, work: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Calls the server, for as long as the permit is held; raises LeaseLost then."""

        async def do() -> T:
            doing, losing = asyncio.create_task(work(*args)), asyncio.create_task(hold._twin.wait_lost())
            try:
                await asyncio.wait([doing, losing], return_when=asyncio.FIRST_COMPLETED)
                if not doing.done():
                    hold._twin.check()
                return await doing
            finally:
                doing.cancel()
                losing.cancel()
                await asyncio.gather(doing, losing, return_exceptions=True)

        return self._client.call(do)
