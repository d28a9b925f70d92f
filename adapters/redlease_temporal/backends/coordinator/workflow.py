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

from redlease.limits import CAPACITY_MAX
from redlease.models import Permit, Position, Snapshot
from redlease_temporal.common.owner_looks import LOOK_LIMIT
from redlease_temporal.payloads import locks
from redlease_temporal.payloads.coordinator import (
    LOOK,
    WORKFLOW,
    Adoption,
    Confirmed,
    Downgrade,
    Found,
    Owner,
    Release,
    Renewal,
    Request,
    Requester,
    Seen,
    fault_of,
    workflow_id_of,
)
from redlease_temporal.payloads.locks import micros
from redlease_temporal.workflow_side.backend import OFTEN
from redlease_temporal.workflow_side.mailbox import signal

from . import views
from .entries import Notification
from .queue_state import QueueState

EVENTS_MAX = 2_000  # history length after which a run continues as new
TELLING_MAX = 100  # concurrent signals: the server allows 2,000 per run
LOOKS_A_CALL = 200


@dataclass
class Saved:
    """What a run passes to the next one. `untold`: notifications still to be sent."""

    books: QueueState
    untold: list[Notification] = field(default_factory=list)


def _nobody(_keeper: str, _holders: dict[Requester, str], _for_ms: int) -> None:
    """Stands in for the interceptor's callback in a replay."""


def now_us() -> int:
    """The workflow's time in microseconds since the epoch."""
    return micros(workflow.now())


# No versioning behavior: the internal worker is unversioned, and the server rejects one from such a worker.
@workflow.defn(name=WORKFLOW)
class Coordinator:
    """Keeps the resource that its ID names, until it has been unused for a minute."""

    @workflow.init
    def __init__(self, saved: Saved | None = None) -> None:
        resource = workflow.info().workflow_id.removeprefix(workflow_id_of(""))
        self._books = saved.books if saved else QueueState(resource, used_ms=now_us() // 1000)
        self._untold = saved.untold if saved else []
        self._telling = 0
        self._rings_ms: int | None = None
        self._timer: asyncio.Task[None] | None = None
        self._ended = False
        # Reports the holders that others wait for, outside of the history; the worker's interceptor sets it.
        self.tell_of_holders: Callable[[str, dict[Requester, str], int], None] = _nobody
        self._told_of: dict[Requester, str] = {}

    @workflow.run
    async def run(self, saved: Saved | None = None) -> None:
        """Serves until it is idle; a signal that arrives as it ends makes it continue."""
        del saved
        while True:
            self._note(self._books.lapse(now_us()))
            if self._books.idle(now_us() // 1000) and not self._untold and not self._telling:
                return
            if self._is_long() and not self._telling:
                workflow.continue_as_new(Saved(self._books, self._untold))
            if due := self._books.due(now_us() // 1000):
                await self._look(due[:LOOKS_A_CALL])
                continue
            self._set_timer()
            self._tell_of_holders(anew=True)
            await self._something(self._rings_ms)

    async def _something(self, rings_ms: int | None) -> None:
        """Waits until the timer has fired, until an earlier one is needed, or until the run is too long."""
        await workflow.wait_condition(
            lambda: (
                self._rings_ms != rings_ms
                or self._books.next_ms(now_us() // 1000) < (self._rings_ms or 0)
                or (self._is_long() and not self._telling)
            )
        )

    def _is_long(self) -> bool:
        info = workflow.info()
        return info.get_current_history_length() >= EVENTS_MAX or info.is_continue_as_new_suggested()

    # Time

    def _set_timer(self) -> None:
        """Keeps the current timer unless something is due before it fires: a new timer costs events."""
        next_ms = self._books.next_ms(now_us() // 1000)
        if self._rings_ms is not None and self._rings_ms <= next_ms:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._rings_ms = next_ms
        self._timer = asyncio.create_task(self._ring(max(1, next_ms - now_us() // 1000)))

    async def _ring(self, delay_ms: int) -> None:
        await asyncio.sleep(delay_ms / 1000)
        self._rings_ms, self._timer = None, None

    async def _look(self, due: list[Requester]) -> None:
        """Asks the server for the status of runs, in one call."""
        owners = [Owner(each.workflow_id, each.run_id) for each in due]
        seen: list[Seen] = []
        try:
            seen = await workflow.execute_local_activity(
                LOOK,
                owners,
                result_type=list[Seen],
                start_to_close_timeout=LOOK_LIMIT,
                schedule_to_close_timeout=LOOK_LIMIT,
                retry_policy=OFTEN,
            )
        except FailureError as error:
            # A failed look must not end the workflow: these runs are looked at again, a limited number of times.
            workflow.logger.warning("how %d runs stand was not found out: %s", len(due), error.cause or error)
        for requester, each in zip_longest(due, seen[: len(due)]):
            self._note(self._books.looked(requester, each.fate if each else "unknown", now_us()))

    # Notifications

    def _note(self, effects: list[Notification]) -> None:
        self._untold += effects
        self._tell()
        self._tell_of_holders()

    def _tell_of_holders(self, *, anew: bool = False) -> None:
        """Reports to this process who holds while others wait: when that has changed or, with `anew`, again."""
        now_ms = now_us() // 1000
        holders = self._books.contended(now_ms)
        if holders != self._told_of or (anew and holders):
            self._told_of = holders
            self.tell_of_holders(workflow.info().workflow_id, holders, self._books.next_ms(now_ms) - now_ms)

    def _untold_can_go(self) -> bool:
        return bool(self._untold) and self._telling < TELLING_MAX and not self._is_long()

    def _tell(self) -> None:
        while self._untold_can_go():
            self._telling += 1
            asyncio.create_task(self._tell_one(self._untold.pop(0)))  # noqa: RUF006  the workflow's loop keeps it

    async def _tell_one(self, effect: Notification) -> None:
        # Without run id: after continue-as-new or a reset, the new run receives the signal.
        heard = False
        try:
            heard = await signal(effect.to.workflow_id, *_signal_of(workflow.info().workflow_id, effect))
        except Exception:  # noqa: BLE001  logged; the other notifications come next
            workflow.logger.exception("%r could not be told of %s", effect.to.workflow_id, effect.kind)
        if not heard and effect.kind == "granted":
            self._note(self._books.gone(effect, now_us()))
        self._telling -= 1
        self._tell()

    # Signals from runs

    @workflow.signal
    def request(self, asked: Request) -> None:
        """A run requests a permit."""
        if why := fault_of(asked):
            self._note([Notification("refused", asked.requester, error="ValueError", why=why)])
            return
        self._note(self._books.request(asked, now_us()))

    @workflow.signal
    def release(self, release: Release) -> None:
        """Releases or withdraws a ticket; sent by hand, the ticket alone is enough."""
        self._note(self._books.release(release, now_us()))

    @workflow.signal
    def renew(self, renewal: Renewal) -> None:
        """Renews a permit."""
        if not fault_of(renewal):
            self._note(self._books.renew(renewal, now_us()))

    @workflow.signal
    def downgrade(self, downgrade: Downgrade) -> None:
        """A run gives back all but one unit of its permit."""
        self._note(self._books.downgrade(downgrade, now_us()))

    @workflow.signal
    def adopt(self, adoption: Adoption) -> None:
        """A run takes a permit over."""
        if not fault_of(adoption):
            self._note(self._books.adopt(adoption, now_us()))

    @workflow.signal
    def confirm(self, confirmed: Confirmed) -> None:
        """After a reset: the new run holds what the old one held."""
        self._note(self._books.confirmed(confirmed, now_us()))

    @workflow.signal
    def resize(self, capacity: int) -> None:
        """An administrator changes the capacity, until a primitive declares another one."""
        if 1 <= capacity <= CAPACITY_MAX:
            self._note(self._books.resize(capacity, now_us()))

    # Queries

    @workflow.query
    def snapshot(self, limit: int = 100) -> Snapshot:
        """The current state of the resource."""
        return views.snapshot(self._books, limit, now_us() // 1000)

    @workflow.query
    def position(self, ticket: str) -> Position | None:
        """Where a ticket stands in the queue."""
        return views.position(self._books, ticket)

    @workflow.query
    def permit(self, ticket: str, fence: int) -> Found:
        """The permit, if it is held with that fence."""
        return Found(self._books.permit(ticket, fence))

    @workflow.query
    def are_held(self, permits: list[tuple[str, int]]) -> list[bool]:
        """Whether each of these permits, by ticket and fence, is held."""
        return [self._books.permit(ticket, fence) is not None for ticket, fence in permits]

    @workflow.query
    def adopted(self, ticket: str, request: str) -> Found:
        """The permit, if a run adopted it by that request."""
        return Found(self._books.adopted(ticket, request))

    @workflow.query
    def outcome(self, call: str) -> bool:
        """Whether that call of `release` released something."""
        return self._books.outcome(call)


def _signal_of(keeper: str, effect: Notification) -> tuple[str, object]:
    resource = keeper.removeprefix(workflow_id_of(""))
    permit: Permit | None = effect.permit
    if permit is None or effect.kind == "refused":
        return locks.REFUSED_SIGNAL, locks.Refused(
            effect.to.request, effect.error, f"resource {resource!r}: {effect.why}"
        )
    if effect.kind == "granted":
        return locks.GRANTED_SIGNAL, locks.Granted(permit, effect.to.request, keeper)
    if effect.kind == "lost":
        return locks.LOST_SIGNAL, locks.Lost(resource, permit.ticket, permit.fence, effect.why, effect.replaced)
    return locks.CONFIRM_SIGNAL, locks.Confirm(resource, permit.ticket, permit.fence, keeper)
