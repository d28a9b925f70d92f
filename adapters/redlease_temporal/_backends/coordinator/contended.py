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

from redlease._core import clock
from redlease_temporal._common import run_monitor
from redlease_temporal._common.retrying import LogOnce
from redlease_temporal._common.run_monitor import RunMonitor, RunState, RunStatus
from redlease_temporal._payloads.coordinator import Release, Requester

SIGNAL_TIMEOUT = timedelta(seconds=3)  # how long the server may take to accept a signal
REPORT_GRACE_MS = (
    30_000.0  # a coordinator that reports nothing for this long past its due time has moved to another process
)
WAKING_RELEASE = Release("", 0)  # wakes the coordinator, so that the next process that serves it watches


@dataclass(slots=True)
class _WatchedHolder:
    """One holder. `until_ms`: by this process's clock; the coordinator reports again before that."""

    coordinator_id: str
    ticket: str
    requester: Requester
    until_ms: float
    on_state: Callable[[RunState], None] = field(init=False)

    @property
    def run(self) -> run_monitor.RunKey:
        return (self.requester.workflow_id, self.requester.run_id)


class ContendedHolders:
    """The holders that the coordinators of this process have reported. Create it in the event loop of their worker."""

    def __init__(self, client: Client, monitor: RunMonitor) -> None:
        self._client = client
        self._monitor = monitor
        self._loop = asyncio.get_running_loop()
        self._log_once = LogOnce()
        self._watched: dict[str, dict[Requester, _WatchedHolder]] = {}
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
            coordinator_ids = list(self._watched)
            for coordinator_id in coordinator_ids:
                self._replace_watched(coordinator_id, {}, 0)
            await asyncio.gather(
                *(self._signal(coordinator_id, WAKING_RELEASE) for coordinator_id in coordinator_ids),
                return_exceptions=True,
            )

    def report(self, coordinator_id: str, holders: dict[Requester, str], for_ms: int) -> None:
        """Replaces the holders to watch for a coordinator; `for_ms`: how long until it reports again.

        Called from the coordinator's thread.
        """
        with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
            self._loop.call_soon_threadsafe(self._replace_watched, coordinator_id, holders, for_ms)

    def _replace_watched(self, coordinator_id: str, holders: dict[Requester, str], for_ms: int) -> None:
        before = self._watched.pop(coordinator_id, {})
        until_ms = clock.now_ms() + for_ms + REPORT_GRACE_MS
        now: dict[Requester, _WatchedHolder] = {}
        for requester, ticket in holders.items():
            watched = before.pop(requester, None)
            if watched is None:
                watched = _WatchedHolder(coordinator_id, ticket, requester, until_ms)
                self._watch(watched)
            watched.until_ms = until_ms
            now[requester] = watched
        for watched in before.values():
            self._monitor.unwatch(watched.run, watched.on_state)
        if now:
            self._watched[coordinator_id] = now

    def _watch(self, watched: _WatchedHolder) -> None:
        watched.on_state = lambda state: self._on_state(watched, state)
        self._monitor.watch(watched.run, watched.on_state, every_ms=run_monitor.BUSY_POLL_MS)

    def _on_state(self, watched: _WatchedHolder, state: RunState) -> None:
        if clock.now_ms() > watched.until_ms:
            self._unwatch(watched)
        elif state.status is RunStatus.CLOSED and watched.requester not in self._releasing:
            task = self._releasing[watched.requester] = asyncio.create_task(self._release(watched))
            task.add_done_callback(lambda _: self._releasing.pop(watched.requester, None))

    async def _release(self, watched: _WatchedHolder) -> None:
        """Releases what the request of a closed run still holds; if that fails, the next look retries."""
        requester = watched.requester
        release = Release(watched.ticket, None, requester.request, run_id=requester.run_id)
        what = f"workflow {watched.requester.workflow_id!r} is closed: telling {watched.coordinator_id!r}"
        try:
            await self._signal(watched.coordinator_id, release)
        except Exception as error:  # noqa: BLE001  it is logged, and retried
            self._log_once.warn(what, error)
        else:
            self._log_once.succeeded(what)
            self._unwatch(watched)

    def _unwatch(self, watched: _WatchedHolder) -> None:
        self._monitor.unwatch(watched.run, watched.on_state)
        of_coordinator = self._watched.get(watched.coordinator_id, {})
        if of_coordinator.get(watched.requester) is watched:
            del of_coordinator[watched.requester]
            if not of_coordinator:
                del self._watched[watched.coordinator_id]

    async def _signal(self, coordinator_id: str, release: Release) -> None:
        try:
            await self._client.get_workflow_handle(coordinator_id).signal(
                "release", release, rpc_timeout=SIGNAL_TIMEOUT
            )
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:  # without a coordinator no run holds anything
                raise
