"""Watches runs that hold what others wait for at a coordinator, from outside of the coordinator's history.

A coordinator looks at runs itself, but seldom, as each look costs it events. So it reports holders that others wait for
to the process that runs it, and this process looks at them as often as a relay does. When such a run has closed, this
process sends the release that the run did not send: in the history it looks like any other release.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import timedelta

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from redlease import clock
from redlease_temporal.common import run_monitor
from redlease_temporal.common.lasting import Once
from redlease_temporal.common.run_monitor import Look, RunMonitor, RunStatus
from redlease_temporal.payloads.coordinator import Release, Requester

ANSWER = timedelta(seconds=3)  # how long the server may take to accept a signal
LATE_MS = 30_000.0  # a coordinator that reports nothing for this long past its due time has moved to another process
NOTHING = Release("", 0)  # wakes the coordinator, so that the next process that serves it watches


@dataclass(slots=True)
class _Holding:
    """One holder. `until_ms`: by this process's clock; the coordinator reports again before that."""

    keeper: str
    ticket: str
    requester: Requester
    until_ms: float
    looked: Callable[[Look], None] = field(init=False)

    @property
    def run(self) -> run_monitor.RunKey:
        return (self.requester.workflow_id, self.requester.run_id)


class Contended:
    """The holders that the coordinators of this process have reported. Create it in the event loop of their worker."""

    def __init__(self, client: Client, monitor: RunMonitor) -> None:
        self._client = client
        self._monitor = monitor
        self._loop = asyncio.get_running_loop()
        self._once = Once()
        self._holdings: dict[str, dict[Requester, _Holding]] = {}
        self._releasing: dict[Requester, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works until the block ends, in which the worker runs."""
        try:
            yield
        finally:
            for task in self._releasing.values():
                task.cancel()
            await asyncio.gather(*self._releasing.values(), return_exceptions=True)
            keepers = list(self._holdings)
            for keeper in keepers:
                self._take_in(keeper, {}, 0)
            await asyncio.gather(*(self._signal(keeper, NOTHING) for keeper in keepers), return_exceptions=True)

    def tell(self, keeper: str, holders: dict[Requester, str], for_ms: int) -> None:
        """Replaces the holders to watch for a coordinator; `for_ms`: how long until it reports again.

        Called from the coordinator's thread.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
            self._loop.call_soon_threadsafe(self._take_in, keeper, holders, for_ms)

    def _take_in(self, keeper: str, holders: dict[Requester, str], for_ms: int) -> None:
        before = self._holdings.pop(keeper, {})
        until_ms = clock.now_ms() + for_ms + LATE_MS
        now: dict[Requester, _Holding] = {}
        for requester, ticket in holders.items():
            holding = before.pop(requester, None)
            if holding is None:
                holding = _Holding(keeper, ticket, requester, until_ms)
                self._watch(holding)
            holding.until_ms = until_ms
            now[requester] = holding
        for holding in before.values():
            self._monitor.unwatch(holding.run, holding.looked)
        if now:
            self._holdings[keeper] = now

    def _watch(self, holding: _Holding) -> None:
        holding.looked = lambda look: self._looked(holding, look)
        self._monitor.watch(holding.run, holding.looked, every_ms=run_monitor.OFTEN_MS)

    def _looked(self, holding: _Holding, look: Look) -> None:
        if clock.now_ms() > holding.until_ms:
            self._drop(holding)
        elif look.fate is RunStatus.CLOSED and holding.requester not in self._releasing:
            task = self._releasing[holding.requester] = asyncio.create_task(self._release(holding))
            task.add_done_callback(lambda _: self._releasing.pop(holding.requester, None))

    async def _release(self, holding: _Holding) -> None:
        """Releases what the request of a closed run still holds; if that fails, the next look retries."""
        release = Release(holding.ticket, None, holding.requester.request)
        what = f"workflow {holding.requester.workflow_id!r} is closed: telling {holding.keeper!r}"
        try:
            await self._signal(holding.keeper, release)
        except Exception as error:  # noqa: BLE001  it is logged, and retried
            self._once.tell(what, error)
        else:
            self._once.over(what)
            self._drop(holding)

    def _drop(self, holding: _Holding) -> None:
        self._monitor.unwatch(holding.run, holding.looked)
        of_keeper = self._holdings.get(holding.keeper, {})
        if of_keeper.get(holding.requester) is holding:
            del of_keeper[holding.requester]
            if not of_keeper:
                del self._holdings[holding.keeper]

    async def _signal(self, keeper: str, release: Release) -> None:
        try:
            await self._client.get_workflow_handle(keeper).signal("release", release, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:  # without a coordinator no run holds anything
                raise
