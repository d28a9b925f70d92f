"""Tracks one ticket for a workflow run: queues it, delivers the grant, and renews the permit until the run ends.

A tracker is one task that can be stopped at any moment. Its state stays in Redis: the permit or queue entry, and the
record. The relay that owns the record next continues from there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import logging
from collections.abc import Coroutine
from typing import Any

from temporalio.client import AsyncActivityCancelledError
from temporalio.service import RPCError, RPCStatusCode

from redlease import RedleaseError, Withdrawn
from redlease._core import clock
from redlease._core.operations import WITHOUT_KEY, AcquireRequest, Granted, Message, Queued, Turn, pack_terms
from redlease.models import Permit
from redlease_temporal._common.retrying import LogOnce, retry_until_done
from redlease_temporal._common.run_monitor import RunKey, RunState, RunStatus
from redlease_temporal._payloads import locks
from redlease_temporal._payloads.locks import AcquireStatus
from redlease_temporal.errors import failure

from .notifications import BY_SIGNAL_TOKEN, notify_of_grant, notify_of_loss
from .recorded_release import RecordedRelease
from .registry import TicketRecord
from .relay import Relay
from .tracker_errors import ExpiredError, GoneError, LostError, RefusedError

logger = logging.getLogger("redlease.temporal")

RENEWALS_PER_LEASE = 3
NOTICE_S = 2.0  # how often a renewal checks for waiters: services that queue do not notify relays
FIRST_CHECK_S = 1.0  # when a new hold is first checked: most are released earlier and cost no check
WITHDRAWAL_S = 1.0  # a run that gives up its wait reports that to the server within this time
SERVER_TIMEOUT_S = 5.0  # how long the Temporal server may take to answer


class TicketTracker:
    """Tracks one record.

    `at_once`: a local activity waits for the outcome, and its marker in the history records the grant.
    """

    def __init__(self, relay: Relay, record: TicketRecord, *, at_once: bool = False) -> None:
        self.record = record
        self._relay = relay
        self.at_once = at_once
        self._resource = relay.operations.resource(record.terms.resource)
        self._status: asyncio.Future[AcquireStatus] = asyncio.get_running_loop().create_future()
        self._woken = asyncio.Event()
        self.from_queue = asyncio.Event()
        self._run: RunKey = (record.workflow_id, record.run_id)  # the run that has the permit
        self._monitor, self._operations = relay.monitor, relay.operations
        self._adopt_until_ms: float | None = None
        self._closed = False
        self._held_ms = 0
        # Whether the run may know of the grant: it may if another relay delivered it, unless the run is only now
        # asking.
        self._may_be_delivered = record.fence > 0 and not at_once
        self._started = self._is_loss_logged = False
        self._replaced_by = ""  # the ticket of a newer request that ended the permit
        self._tried_token = ""  # the token with which this tracker last tried to deliver the grant
        self._log_once = LogOnce()
        self._task: asyncio.Task[None] | None = None
        self.release = RecordedRelease(relay, self)

    # Lifecycle

    def start(self) -> None:
        """Starts its task, and listens to the run and the ticket."""
        self._monitor.watch(self._run, self._on_state)
        self._operations.listen(self.record.request, self._on_message)
        self._task = self._relay.spawn(retry_until_done(f"{self}: looking after its ticket", self._track))
        self.release.start()

    def stop(self) -> None:
        """Stops its task and leaves the state in Redis as it is."""
        self._monitor.unwatch(self._run, self._on_state)
        self._operations.unlisten(self.record.request, self._on_message)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self.release.stop()
        if not self._status.done():
            self._status.set_exception(TimeoutError())  # the caller retries
        self._status.exception()  # marks the exception as retrieved

    async def status(self) -> AcquireStatus:
        """The request's status, once the server has answered.

        Raises:
            RedleaseError: The server refused the request.
            ValueError: The request does not fit the resource.
            TimeoutError: The tracker stopped first.
        """
        return await asyncio.shield(self._status)

    def attach(self, token: bytes) -> None:
        """Sets the task token of the activity that waits for the grant."""
        self.record.token = base64.b64encode(token).decode()
        self._woken.set()

    @property
    def permit(self) -> Permit:
        """The permit as granted."""
        record, lease_ms = self.record, self.record.terms.lease_ms
        return Permit(
            *(record.terms.resource, record.ticket, record.fence, record.weight, record.capacity, lease_ms),
            *(record.granted_at_ms, record.granted_at_ms + lease_ms, record.owner, record.metadata),
            record.key or None,
        )

    # Events

    def _on_message(self, message: Message) -> None:
        """Another client removed the ticket, replaced it or changed its lease: check at once."""
        self._replaced_by = message.by or self._replaced_by
        self._woken.set()

    def wake(self) -> None:
        """A waiter needs the resource: check more often whether the run has ended."""
        self._monitor.poll_often(self._run, self._on_state, often=True)

    def poll_soon(self) -> None:
        """Nobody has looked at the run since another relay was killed: it may have ended."""
        self._monitor.poll_soon(self._run)

    def _on_state(self, state: RunState) -> None:
        if state.status is RunStatus.OPEN:
            self._adopt_until_ms = None
        elif state.status is RunStatus.CLOSED and not self._closed:
            self._end()
        elif state.status is RunStatus.CONTINUED and self._adopt_until_ms is None:
            self._adopt_until_ms = clock.now_ms() + self._relay.settings.adopt_window_ms
            if not self.record.fence:  # the waiting activity ended with its run
                self._end()
        elif state.status is RunStatus.RESET:
            self._relay.spawn(
                retry_until_done(f"{self}: following its reset", lambda: self._move_to(state.open_run_id))
            )

    def _end(self) -> None:
        self._closed = True
        self._relay.spawn(retry_until_done(f"{self}: giving back what its run had", self._run_closed))

    async def _move_to(self, run_id: str) -> None:
        """After a reset: the new run has the permit if its history records the grant, else it requests it again.

        What was downgraded is lost, as the new run may continue from before that.
        """
        if await self._relay.is_reduced(self.record):
            await self._signal_loss("its run was reset after a downgrade")
            await self._run_closed()
            return
        moved = dataclasses.replace(self.record, run_id=run_id, recorded=False, token="")
        if self._is_current() and await self._relay.registry.save(moved):
            self._relay.track(type(self)(self._relay, moved))

    def _is_current(self) -> bool:
        """Whether no other tracker has replaced this one."""
        return self._relay.trackers.get(self.record.id) is self

    async def _run_closed(self) -> None:
        """The run ended: releases its permit, unless `on_close` leaves it to expire."""
        self.stop()
        record = self.record
        if not record.fence or record.on_close == "release":
            if record.fence and not record.recorded and not await self._answered(self._is_recorded()):
                # A late execution of the request: whoever has adopted its ticket's permit keeps it, under that fence.
                record = dataclasses.replace(record, fence=0)
            if not self._is_current():
                return  # the run was reset meanwhile, and has asked for the permit again
            await self._relay.release(record)
        elif await self.release.has_marker():
            await self.release.carry_out()
        await self.finish()

    async def finish(self) -> None:
        """Drops the record: nothing is left to do for it."""
        if self._is_current():
            await self._relay.registry.drop(self.record.id)
            self._relay.forget(self)

    # The task

    async def _track(self) -> None:
        """Continues from the state in the record; after an unexpected exception it is called again."""
        record, restarted = self.record, self._started
        self._started = True
        try:
            if record.fence and not record.recorded:  # an earlier copy of the request was granted
                if await (self._check() if restarted else self._renew()):
                    self._set_status(AcquireStatus(self.permit))
                else:
                    await self._requeue_after_expiry()
            while not await self._granted_and_recorded():
                await self._requeue_after_expiry()
                await self._save()
                if self.at_once:
                    await self.finish()
                    return
                while not record.token:  # until the waiting activity starts, or the run ends
                    await self._pause(None)
            await self._keep_renewed()
        except LostError:
            await self._signal_loss()
            await self.finish()
        except GoneError:
            self._relay.forget(self)
        except RefusedError as refused:
            await self._refuse(refused.reason)

    async def _requeue_after_expiry(self) -> None:
        """Forgets a grant that expired before the history recorded it, so that the request is queued again.

        Raises:
            LostError: The run may believe that it holds the permit.
        """
        if self.at_once and self._status.done():
            # The marker may still be recorded: the workflow task may be waiting for other local activities.
            raise LostError
        while self._may_be_delivered:
            recorded = await self._answered(self._is_recorded())
            if recorded:
                raise LostError
            self._may_be_delivered = recorded is None
            if self._may_be_delivered:
                await self._pause(self._renewal_s)
        self.record.fence, self.record.full = 0, "wait"  # what has come since then is newer

    async def _granted_and_recorded(self) -> bool:
        if not self.record.fence:
            await self._queue()
        return self.record.recorded or await self._deliver_grant()

    async def _queue(self) -> None:
        """Waits in the queue; if the entry expires while this relay owns the record, queues again where it stood."""
        record, granted = self.record, None
        while granted is None:
            try:
                granted = await self._wait_in_queue()
            except ExpiredError:
                await self._save()
            except (RedleaseError, ValueError) as error:
                raise RefusedError(error) from error
        record.fence, record.granted_at_ms, record.capacity = granted.fence, granted.granted_at_ms, granted.capacity
        record.recorded = False
        await self._save()
        self._may_be_delivered = False
        self._set_status(AcquireStatus(self.permit))

    async def _wait_in_queue(self) -> Granted:
        record, terms = self.record, self._relay.terms(self.record)
        turn = Turn(record.key, record.share) if record.key else WITHOUT_KEY
        packed_terms = pack_terms(terms, record.weight, record.label, turn=turn)
        ask = AcquireRequest(
            *(self._resource, terms, record.ticket, record.request, record.weight, packed_terms),
            arrival=record.arrival,
            key=record.key,
        )
        # After a suspension this process must not queue again before _save() has shown that it still owns the record.
        granted = await self._operations.queue(
            ask, on_queued=self._queued, on_expired=ExpiredError, full=record.when_full
        )
        if granted is None:
            raise GoneError
        return granted

    def _queued(self, queued: Queued) -> None:
        self.at_once = False  # a remote activity waits from now on: the local one's marker records no grant
        self.record.local_id = self.record.wait_id
        if self._relay.settings.by_signal:
            self.record.token = BY_SIGNAL_TOKEN
            self._set_status(AcquireStatus(None, queued.ahead, locks.BY_SIGNAL))
        self._set_status(AcquireStatus(None, queued.ahead))
        if self.record.arrival != queued.sequence:
            self.record.arrival = queued.sequence
            self._relay.spawn(self._relay.registry.save(self.record))
            self._relay.spawn(self._relay.registry.broadcast(f"contended {self.record.terms.resource}"))

    async def _deliver_grant(self) -> bool:
        """Delivers the grant until the run's history has it; returns False if the grant expired first.

        An undelivered grant is renewed once per delivery attempt, then left to expire. While the Temporal server does
        not answer, the grant is renewed for up to the grace period, since the history may have it.
        """
        record = self.record
        if self.at_once:
            if not record.renewed:
                return True  # nobody renews it
            await self._pause(min(FIRST_CHECK_S, self._renewal_s))
        known_ms = clock.now_ms()
        recorded: bool | None = False
        while True:
            token = record.token
            unknown = recorded is None and clock.now_ms() - known_ms < self._relay.settings.unknown_grace_ms
            if not await (self._renew() if unknown or token != self._tried_token else self._check()):
                return False
            self._tried_token = token
            recorded = await self._answered(self._is_recorded() if self.at_once else self._complete(token))
            if recorded:
                record.recorded = True
                self.from_queue.set()
                await self._save()
                return True
            if recorded is not None:
                known_ms = clock.now_ms()
            await self._pause(self._renewal_s if recorded is not None else self._renewal_s / 2)

    async def _answered(self, request: Coroutine[Any, Any, bool | None]) -> bool | None:
        """The Temporal server's answer; None if it did not come in time for the next renewal."""
        try:
            async with asyncio.timeout(min(SERVER_TIMEOUT_S, self._renewal_s / 2)):
                answer = await request
        except TimeoutError:
            self._log_once.warn(f"{self}: asking the Temporal server", TimeoutError("no answer in time"))
            return None
        if answer is not None:
            self._log_once.succeeded(f"{self}: asking the Temporal server")
        return answer

    async def _complete(self, token: str) -> bool | None:
        """Completes the waiting activity. True if the history has the completion, None if that is not known."""
        self._may_be_delivered = True
        try:
            await notify_of_grant(self._relay.temporal, self.record, token, self.permit)
        except AsyncActivityCancelledError:
            return False
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                self._log_once.warn(f"{self}: the grant could not be reported to the Temporal server yet", error)
                return None
            # Either an earlier completion succeeded and its reply was lost, or this attempt has ended. If the run is
            # open, its history shows which.
            if self.record.token == token:
                self.record.token = ""
            await self._monitor.poll(self._run)
            return await self._is_recorded()
        return True

    async def _is_recorded(self) -> bool | None:
        """Whether the run's history has the grant; None if that is not known."""
        record = self.record
        if self._relay.settings.by_signal:
            return True
        try:
            return await self._monitor.has_recorded(
                self._run, record.event_id, record.local_id, record.wait_id, record.fence
            )
        except RPCError as error:
            self._log_once.warn(f"{self}: the Temporal server did not say whether the run has the grant", error)
            return None

    async def _keep_renewed(self) -> None:
        """Renews the permit until it is lost, or until it may not be renewed and expires."""
        while self.record.renewed and await (self._renew() if self._may_renew() else self._check()):
            await self._pause(min(self._renewal_s, NOTICE_S))
        if self.record.renewed:
            await self._save()  # raises if the permit was released: a release drops the record first
            if self._adopt_until_ms is None:
                await self._signal_loss()
        elif self.record.release is not None:
            return  # its release is to come, and drops the record
        await self.finish()

    def _may_renew(self) -> bool:
        is_over = self.record.max_hold_ms is not None and self._held_ms >= self.record.max_hold_ms
        is_left = self._adopt_until_ms is not None and clock.now_ms() >= self._adopt_until_ms
        if is_over or is_left or self._closed:  # closed: a release is under way
            return False
        return self._monitor.unknown_ms(self._run) < self._relay.settings.unknown_grace_ms

    async def _signal_loss(self, reason: str = "it expired, or was released by its ticket") -> None:
        """Signals the loss of the permit to the run, or to the run that continued it."""
        if not self._is_loss_logged:
            logger.warning("%s: the permit (fence %d) is lost; telling the workflow", self, self.record.fence)
        self._is_loss_logged = True
        await notify_of_loss(self._relay.temporal, self.record, reason, self._log_once, replaced_by=self._replaced_by)

    async def _refuse(self, error: RedleaseError | ValueError) -> None:
        """Reports the server's refusal to the local activity or to the waiting one."""
        # If the ticket was withdrawn before this tracker queued it, its own run most likely withdrew it, in a workflow
        # task that is still under way. That task cancels the activity; the server would reject the task if the activity
        # failed first.
        is_withdrawn = isinstance(error, Withdrawn) and not self._status.done()
        if not self._status.done():
            self._status.set_exception(error)
        if is_withdrawn:
            await asyncio.sleep(WITHDRAWAL_S)
        if self.record.token and self.record.token != BY_SIGNAL_TOKEN:
            handle = self._relay.temporal.get_async_activity_handle(task_token=base64.b64decode(self.record.token))
            with contextlib.suppress(RPCError, AsyncActivityCancelledError):
                await handle.fail(failure(error))
        await self.finish()

    # Calls

    async def _save(self) -> None:
        if not await self._relay.registry.save(self.record):
            raise GoneError

    async def _renew(self) -> bool:
        """Renews the permit for its full lease; returns whether it is still held."""
        record = self.record
        renewed = await self._operations.renew(
            *(self._resource, record.ticket, record.fence, record.terms.lease_ms),
            idle_ttl_ms=self._relay.settings.idle_ttl_ms,
            limit_ms=None,
        )
        if renewed.expires_at_ms:
            # max_hold counts by the server's clock, so that it is the same for whichever relay owns the record.
            self._held_ms = renewed.expires_at_ms - record.terms.lease_ms - record.granted_at_ms
            self._monitor.poll_often(self._run, self._on_state, often=renewed.waiting > 0)
        return renewed.expires_at_ms > 0

    async def fill_lease(self) -> None:
        """Renews a held permit one last time, so that the next relay has a full lease to take it over."""
        if self.record.fence and self.record.recorded and self._may_renew():
            await self._renew()

    async def _check(self) -> bool:
        """Whether the permit is held; does not renew it."""
        return await self._operations.check(self._resource, self.record.ticket, self.record.fence, limit_ms=None)

    async def _pause(self, seconds: float | None) -> None:
        """Waits for that time, or until an event wakes the tracker."""
        await clock.pause(self._woken, seconds)
        self._woken.clear()

    @property
    def _renewal_s(self) -> float:
        return self.record.terms.lease_ms / 1000 / RENEWALS_PER_LEASE

    def _set_status(self, status: AcquireStatus) -> None:
        if not self._status.done():
            self._status.set_result(status)

    def __str__(self) -> str:
        return f"resource {self.record.terms.resource!r}: workflow {self.record.workflow_id!r}"
