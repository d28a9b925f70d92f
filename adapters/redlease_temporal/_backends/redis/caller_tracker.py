"""Tracks a ticket whose permit belongs to a caller: a run that asked through Nexus, perhaps in another namespace.

Two runs take part. The caller has the permit: it is renewed while that run is open. A workflow of the lock service
waits for the grant; the grant is delivered to it, and ends it.
"""

from __future__ import annotations

import dataclasses
import logging

from temporalio.service import RPCError, RPCStatusCode

from redlease_temporal._common.retrying import retry_until_done
from redlease_temporal._common.run_monitor import RunState, RunStatus

from .registry import TicketRecord
from .relay import Relay
from .tracker import FIRST_CHECK_S, NOTICE_S, TicketTracker

logger = logging.getLogger("redlease.temporal")


class CallerTracker(TicketTracker):
    """Tracks one record that names a caller."""

    def __init__(self, relay: Relay, record: TicketRecord, *, at_once: bool = False) -> None:
        super().__init__(relay, record, at_once=at_once)
        assert record.caller is not None
        self._caller = record.caller
        self._run = (record.caller.workflow_id, record.caller.run_id)
        self._monitor = relay.monitor_of(record.caller.namespace)
        self._waiting = (record.workflow_id, record.run_id)

    def start(self) -> None:
        """Starts its task, and listens to both runs and the ticket."""
        super().start()
        if not self.record.recorded:
            self._relay.monitor.watch(self._waiting, self._on_waiting_state)

    def stop(self) -> None:
        """Stops its task and leaves the state in Redis as it is."""
        self._relay.monitor.unwatch(self._waiting, self._on_waiting_state)
        super().stop()

    def _on_waiting_state(self, state: RunState) -> None:
        if state.status is RunStatus.CLOSED and not self.record.recorded and not self._closed:
            self._relay.spawn(retry_until_done(f"{self}: its waiting workflow has closed", self._waiting_closed))

    async def _waiting_closed(self) -> None:
        """Gives up the request if the workflow that waited for the grant was ended without it."""
        if self._is_current() and not self.record.recorded and await self._is_recorded() is False:
            self._end()

    async def _is_recorded(self) -> bool | None:
        """Whether the history of the workflow that waits has the grant; None if that is not known."""
        record = self.record
        try:
            return await self._relay.monitor.has_recorded(
                self._waiting, record.event_id, record.local_id, record.wait_id, record.fence
            )
        except RPCError as error:
            self._log_once.warn(f"{self}: the Temporal server did not say whether the grant arrived", error)
            return None

    async def _keep_renewed(self) -> None:
        """Renews the permit while the caller is open, if it was notified of it; nobody waits for it any more."""
        self._relay.monitor.unwatch(self._waiting, self._on_waiting_state)
        if await self._has_arrived():
            await super()._keep_renewed()
            return
        await self._save()  # raises if another relay has a later request with this ticket
        logger.warning("%s: the operation of the caller ended without the grant; giving it back", self)
        await self._relay.release(self.record)

    async def _has_arrived(self) -> bool:
        """False if the caller's operation ended without this grant, so that nobody knows of it.

        A handler that was suspended may execute a request that was repeated, or given up, meanwhile.
        """
        pause_s = min(FIRST_CHECK_S, self._renewal_s)
        while self._caller.event_id and self._may_renew() and await self._renew():
            await self._pause(pause_s)
            arrived = await self._answered(self._is_received())
            if arrived is not None:
                return arrived
            pause_s = min(NOTICE_S, self._renewal_s)
        return True

    async def _is_received(self) -> bool | None:
        try:
            return await self._monitor.has_received(self._run, self._caller.event_id, self.record.fence)
        except RPCError as error:
            self._log_once.warn(f"{self}: the Temporal server did not say whether the grant reached its caller", error)
            return True if error.status == RPCStatusCode.PERMISSION_DENIED else None

    async def _move_to(self, run_id: str) -> None:
        """After a reset the new run has the permit, and the request: it repeats it under the same ticket, if at all."""
        moved = dataclasses.replace(self.record, caller=dataclasses.replace(self._caller, run_id=run_id, event_id=0))
        if self._is_current() and await self._relay.registry.save(moved):
            self._relay.track(CallerTracker(self._relay, moved))

    async def _run_closed(self) -> None:
        """The caller ended: gives back what it had, and ends the workflow that waits for it."""
        if not self.record.recorded:
            await self._end_waiting()
        await super()._run_closed()

    async def _end_waiting(self) -> None:
        workflow_id, run_id = self._waiting
        try:
            await self._relay.temporal.get_workflow_handle(workflow_id, run_id=run_id or None).cancel()
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise

    async def _signal_loss(self, reason: str = "it expired, or was released by its ticket") -> None:
        """Logs the loss: a caller in any language need not know a signal of this library."""
        logger.warning(
            "%s: the permit (fence %d) of workflow %r in namespace %r is lost: %s",
            *(self, self.record.fence, self._caller.workflow_id, self._caller.namespace, reason),
        )


def tracker_for(relay: Relay, record: TicketRecord, *, at_once: bool = False) -> TicketTracker:
    """Makes the tracker of a ticket: of a caller's, or of a run of the relay's own namespace."""
    kind = TicketTracker if record.caller is None else CallerTracker
    return kind(relay, record, at_once=at_once)
