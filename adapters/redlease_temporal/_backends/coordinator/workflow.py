"""The workflow that keeps one resource, ID `lock:{resource}`: a queue driven by signals, started on demand.

`QueueState` decides what happens to the resource. This workflow passes signals and time to it, sends the notifications
that it returns to the runs, and looks at the runs that hold. The state always changes before notifications are sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest

from temporalio import workflow
from temporalio.exceptions import FailureError

from redlease._core.limits import CAPACITY_MAX
from redlease.models import Permit, Position, Snapshot
from redlease_temporal._common.status_polls import POLL_TIMEOUT
from redlease_temporal._payloads import locks
from redlease_temporal._payloads.coordinator import (
    POLL,
    WORKFLOW,
    Adoption,
    Confirmed,
    CoordinatorRequest,
    Downgrade,
    PermitReply,
    Release,
    Renewal,
    Requester,
    RunStatusReply,
    RunToPoll,
    invalid_reason,
    workflow_id_of,
)
from redlease_temporal._payloads.locks import micros
from redlease_temporal._workflow_side.backend import RETRY_OFTEN
from redlease_temporal._workflow_side.mailbox import signal

from . import views
from .entries import Notification
from .queue_state import QueueState

EVENTS_MAX = 2_000  # history length after which a run continues as new
SENDING_MAX = 100  # concurrent signals: the server allows 2,000 per run
POLLS_PER_CALL = 200


@dataclass
class SavedState:
    """What a run passes to the next one. `unsent`: notifications still to be sent."""

    state: QueueState
    unsent: list[Notification] = field(default_factory=list)


def _ignore_holders(_coordinator_id: str, _holders: dict[Requester, str], _for_ms: int) -> None:
    """Stands in for the interceptor's callback in a replay."""


def now_us() -> int:
    """The workflow's time in microseconds since the epoch."""
    return micros(workflow.now())


# No versioning behavior: the internal worker is unversioned, and the server rejects one from such a worker.
@workflow.defn(name=WORKFLOW)
class Coordinator:
    """Keeps the resource that its ID names, until it has been unused for a minute."""

    @workflow.init
    def __init__(self, saved: SavedState | None = None) -> None:
        resource = workflow.info().workflow_id.removeprefix(workflow_id_of(""))
        self._state = saved.state if saved else QueueState(resource, last_used_ms=now_us() // 1000)
        self._unsent = saved.unsent if saved else []
        self._sending = 0
        self._timer_ms: int | None = None
        self._timer: asyncio.Task[None] | None = None
        self._ended = False
        # Reports the holders that others wait for, outside of the history; the worker's interceptor sets it.
        self.report_holders: Callable[[str, dict[Requester, str], int], None] = _ignore_holders
        self._reported_holders: dict[Requester, str] = {}

    @workflow.run
    async def run(self, saved: SavedState | None = None) -> None:
        """Serves until it is idle; a signal that arrives as it ends makes it continue."""
        del saved
        while True:
            self._notify(self._state.expire(now_us()))
            if self._state.idle(now_us() // 1000) and not self._unsent and not self._sending:
                return
            if self._is_long() and not self._sending:
                workflow.continue_as_new(SavedState(self._state, self._unsent))
            if due := self._state.due(now_us() // 1000):
                await self._poll(due[:POLLS_PER_CALL])
                continue
            self._set_timer()
            self._report_holders(repeat=True)
            await self._wait_for_event(self._timer_ms)

    async def _wait_for_event(self, timer_ms: int | None) -> None:
        """Waits until the timer has fired, until an earlier one is needed, or until the run is too long."""
        await workflow.wait_condition(
            lambda: (
                self._timer_ms != timer_ms
                or self._state.next_ms(now_us() // 1000) < (self._timer_ms or 0)
                or (self._is_long() and not self._sending)
            )
        )

    def _is_long(self) -> bool:
        info = workflow.info()
        return info.get_current_history_length() >= EVENTS_MAX or info.is_continue_as_new_suggested()

    # Time

    def _set_timer(self) -> None:
        """Keeps the current timer unless something is due before it fires: a new timer costs events."""
        next_ms = self._state.next_ms(now_us() // 1000)
        if self._timer_ms is not None and self._timer_ms <= next_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ms = next_ms
        self._timer = asyncio.create_task(self._run_timer(max(1, next_ms - now_us() // 1000)))

    async def _run_timer(self, delay_ms: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        self._timer_ms, self._timer = None, None

    async def _poll(self, due: list[Requester]) -> None:
        """Asks the server for the status of runs, in one call."""
        runs = [RunToPoll(answer.workflow_id, answer.run_id) for answer in due]
        replies: list[RunStatusReply] = []
        try:
            replies = await workflow.execute_local_activity(
                POLL,
                runs,
                result_type=list[RunStatusReply],
                start_to_close_timeout=POLL_TIMEOUT,
                schedule_to_close_timeout=POLL_TIMEOUT,
                retry_policy=RETRY_OFTEN,
            )
        except FailureError as error:
            # A failed look must not end the workflow: these runs are looked at again, a limited number of times.
            workflow.logger.warning("the status of %d runs is unknown: %s", len(due), error.cause or error)
        for requester, answer in zip_longest(due, replies[: len(due)]):
            self._notify(self._state.apply_status(requester, answer.status if answer else "unknown", now_us()))

    # Notifications

    def _notify(self, effects: list[Notification]) -> None:
        self._unsent += effects
        self._send_notifications()
        self._report_holders()

    def _report_holders(self, *, repeat: bool = False) -> None:
        """Reports to this process which runs hold while others wait: when that has changed or, with `repeat`, again."""
        now_ms = now_us() // 1000
        holders = self._state.contended(now_ms)
        if holders != self._reported_holders or (repeat and holders):
            self._reported_holders = holders
            self.report_holders(workflow.info().workflow_id, holders, self._state.next_ms(now_ms) - now_ms)

    def _may_send(self) -> bool:
        return bool(self._unsent) and self._sending < SENDING_MAX and not self._is_long()

    def _send_notifications(self) -> None:
        while self._may_send():
            self._sending += 1
            asyncio.create_task(self._send_notification(self._unsent.pop(0)))  # noqa: RUF006  the workflow's loop keeps it

    async def _send_notification(self, effect: Notification) -> None:
        # Without run id: after continue-as-new or a reset, the new run receives the signal.
        delivered = False
        try:
            delivered = await signal(effect.to.workflow_id, *_signal_of(workflow.info().workflow_id, effect))
        except Exception:  # noqa: BLE001  logged; the other notifications come next
            workflow.logger.exception("%r could not be notified of %s", effect.to.workflow_id, effect.kind)
        if not delivered and effect.kind == "granted":
            self._notify(self._state.take_back(effect, now_us()))
        self._sending -= 1
        self._send_notifications()

    # Signals from runs

    @workflow.signal
    def request(self, request: CoordinatorRequest) -> None:
        """A run requests a permit."""
        if reason := invalid_reason(request):
            self._notify([Notification("refused", request.requester, error="ValueError", reason=reason)])
            return
        self._notify(self._state.request(request, now_us()))

    @workflow.signal
    def release(self, release: Release) -> None:
        """Releases or withdraws a ticket; sent by hand, the ticket alone is enough."""
        self._notify(self._state.release(release, now_us()))

    @workflow.signal
    def renew(self, renewal: Renewal) -> None:
        """Renews a permit."""
        if not invalid_reason(renewal):
            self._notify(self._state.renew(renewal, now_us()))

    @workflow.signal
    def downgrade(self, downgrade: Downgrade) -> None:
        """A run gives back all but one unit of its permit."""
        self._notify(self._state.downgrade(downgrade, now_us()))

    @workflow.signal
    def adopt(self, adoption: Adoption) -> None:
        """A run takes a permit over."""
        if not invalid_reason(adoption):
            self._notify(self._state.adopt(adoption, now_us()))

    @workflow.signal
    def confirm(self, confirmed: Confirmed) -> None:
        """After a reset: the new run holds what the old one held."""
        self._notify(self._state.confirmed(confirmed, now_us()))

    @workflow.signal
    def resize(self, capacity: int) -> None:
        """An administrator changes the capacity, until a primitive declares another one."""
        if 1 <= capacity <= CAPACITY_MAX:
            self._notify(self._state.resize(capacity, now_us()))

    # Queries

    @workflow.query
    def snapshot(self, limit: int = 100) -> Snapshot:
        """The current state of the resource."""
        return views.snapshot(self._state, limit, now_us() // 1000)

    @workflow.query
    def position(self, ticket: str) -> Position | None:
        """The position of a ticket in the queue."""
        return views.position(self._state, ticket)

    @workflow.query
    def permit(self, ticket: str, fence: int) -> PermitReply:
        """The permit, if it is held with that fence."""
        return PermitReply(self._state.permit(ticket, fence))

    @workflow.query
    def are_held(self, permits: list[tuple[str, int]]) -> list[bool]:
        """Whether each of these permits, by ticket and fence, is held."""
        return [self._state.permit(ticket, fence) is not None for ticket, fence in permits]

    @workflow.query
    def adopted(self, ticket: str, request: str) -> PermitReply:
        """The permit, if a run adopted it by that request."""
        return PermitReply(self._state.adopted(ticket, request))

    @workflow.query
    def outcome(self, call: str) -> bool:
        """Whether that call of `release` released something."""
        return self._state.outcome(call)


def _signal_of(coordinator_id: str, effect: Notification) -> tuple[str, object]:
    resource = coordinator_id.removeprefix(workflow_id_of(""))
    permit: Permit | None = effect.permit
    if permit is None or effect.kind == "refused":
        return locks.REFUSED_SIGNAL, locks.RefusedSignal(
            effect.to.request, effect.error, f"resource {resource!r}: {effect.reason}"
        )
    if effect.kind == "granted":
        return locks.GRANTED_SIGNAL, locks.GrantedSignal(permit, effect.to.request, coordinator_id)
    if effect.kind == "lost":
        return locks.LOST_SIGNAL, locks.LostSignal(
            resource, permit.ticket, permit.fence, effect.reason, effect.replaced
        )
    return locks.CONFIRM_SIGNAL, locks.ConfirmSignal(resource, permit.ticket, permit.fence, coordinator_id)
