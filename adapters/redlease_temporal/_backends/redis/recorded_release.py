"""A release that takes effect when the history of its run records it.

The local activity that ends a block asks for the release. Temporal may execute its workflow task again, with newer
events or with code that was mended, and the code may then still need the permit. So the activity only notes the release
in the ticket record. The relay that owns the record carries the release out once the history has the activity's marker.
If the marker never comes, the run keeps the permit.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Protocol

from temporalio.service import RPCError, RPCStatusCode

from redlease._core import clock
from redlease_temporal._common.retrying import LogOnce, retry_until_done

from .registry import TicketRecord
from .relay import Relay

# The pauses between two questions: the first one, the longest one while the workflow task may be executed for the first
# time, and the longest one after that. A task that failed may be executed again at any time, and record it then.
POLL_PAUSES_S = (0.01, 0.5, 10.0)
FIRST_TIME_S = 15.0  # a workflow task takes no longer, unless it waits for local activities
PAGE_EVENTS = 20  # the marker is among the first events after the workflow task


class RecordTracker(Protocol):
    """What tracks the record."""

    record: TicketRecord

    def stop(self) -> None:
        """Stops its tasks and leaves the state in Redis as it is."""

    async def finish(self) -> None:
        """Drops the record: nothing is left to do for it."""


class RecordedRelease:
    """The release that is noted in the record of a tracker, if there is one."""

    def __init__(self, relay: Relay, tracker: RecordTracker) -> None:
        self._relay = relay
        self._tracker = tracker
        self._log_once = LogOnce()
        self._last_event = 0  # no event up to this one is the marker
        self._task: asyncio.Task[None] | None = None
        self._attempt: asyncio.Task[bool | None] | None = None

    def start(self) -> None:
        """Waits for the marker in a task of its own."""
        if self._tracker.record.release is not None and self._task is None:
            self._relay.releases.add(self)
            self._task = self._relay.spawn(retry_until_done(f"{self._tracker}: releasing it", self._wait_for_marker))

    def stop(self) -> None:
        """Leaves the release to whichever relay owns the record next."""
        self._relay.releases.discard(self)
        if self._task is not None:
            self._task.cancel()

    @property
    def resource(self) -> str:
        """The name of the resource."""
        return self._tracker.record.terms.resource

    @property
    def run_id(self) -> str:
        """The run that has released it."""
        return self._tracker.record.run_id

    async def _wait_for_marker(self) -> None:
        pause_s, under_way_s, later_s = POLL_PAUSES_S
        began_ms = clock.now_ms()
        while (recorded := await self.attempt()) is not True:
            await asyncio.sleep(pause_s)
            is_first = recorded is None and clock.now_ms() < began_ms + FIRST_TIME_S * 1000
            pause_s = min(2 * pause_s, under_way_s if is_first else later_s)

    async def attempt(self) -> bool | None:
        """Carries the release out if it is recorded; returns whether it is, None if its task may be under way."""
        if self._attempt is None or self._attempt.done():
            self._attempt = self._relay.spawn(self._attempt_once())
        return await asyncio.shield(self._attempt)

    async def _attempt_once(self) -> bool | None:
        recorded = await self.is_recorded()
        current: object = self._relay.trackers.get(self._tracker.record.id)
        if current is not self._tracker:
            return None  # another tracker or relay has the record, and the release with it
        if recorded:
            self._tracker.stop()
            self._relay.releases.add(self)  # the next requests of the resource wait for it
            try:
                await retry_until_done(f"{self._tracker}: releasing it", self._end)
            finally:
                self._relay.releases.discard(self)
        return recorded

    async def _end(self) -> None:
        await self.carry_out()
        await self._tracker.finish()

    async def is_recorded(self) -> bool | None:
        """Whether the history has the marker; None if the workflow task is under way, or the server did not answer."""
        try:
            return await self.has_marker()
        except RPCError as error:
            what = f"{self._tracker}: the Temporal server did not say whether the run has released the permit"
            self._log_once.warn(what, error)
            return None

    async def has_marker(self) -> bool | None:
        """As `is_recorded`; raises RPCError if the server did not answer."""
        record = self._tracker.record
        if record.release is None:
            return False
        after = max(record.release.event, self._last_event)
        run = (record.workflow_id, record.run_id)
        try:
            recorded, self._last_event = await self._relay.monitor.has_marker(
                run, after, record.release.id, page_events=PAGE_EVENTS
            )
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise
        return recorded

    async def carry_out(self) -> None:
        """Releases the permit, or withdraws the request; returns when Redis has done so."""
        record = self._tracker.record
        if record.release is None:
            return
        fence = record.release.fence
        # The fence names the permit. Without one, it is whatever the request has got by now.
        request = "" if fence else record.request
        await self._relay.release(dataclasses.replace(record, fence=fence, request=request))
