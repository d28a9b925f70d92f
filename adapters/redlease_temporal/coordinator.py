"""The workflow that keeps one resource, ID `lock:{resource}`: a queue by signals, started on demand.

What happens to the resource is decided by its books; here they are told of signals and of time, what follows is told to
the runs, and the runs that hold are looked at. Everything is booked before anybody is told of it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import FailureError

from redlease.models import Permit, Snapshot

from . import calls
from .bookkeeping import Books, Effect
from .coordinator_calls import (
    LOOK,
    WORKFLOW,
    Adoption,
    Confirmed,
    Found,
    Owner,
    Release,
    Renewal,
    Request,
    Requester,
    Seen,
    workflow_id_of,
)

EVENTS_MAX = 2_000  # of a run's history, after which it is continued as new
TELLING_MAX = 100  # signals under way at one time: the server allows a run 2,000
LOOKS_A_CALL = 200
LOOK_LIMIT = timedelta(seconds=20)
AGAIN = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5))
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass
class Saved:
    """What a run takes over from the one before it. `untold`: what is still to be told."""

    books: Books
    untold: list[Effect] = field(default_factory=list)


def now_us() -> int:
    """The time of the workflow, in microseconds since the epoch."""
    return (workflow.now() - EPOCH) // timedelta(microseconds=1)


# No versioning behavior: the internal worker is unversioned, and the server refuses one from such a worker.
@workflow.defn(name=WORKFLOW)
class Coordinator:
    """Keeps the resource that its ID names, until nobody has used it for a minute."""

    @workflow.init
    def __init__(self, saved: Saved | None = None) -> None:
        resource = workflow.info().workflow_id.removeprefix(workflow_id_of(""))
        self._books = saved.books if saved else Books(resource, used_ms=now_us() // 1000)
        self._untold = saved.untold if saved else []
        self._telling = 0
        self._rings_ms: int | None = None
        self._timer: asyncio.Task[None] | None = None
        self._ended = False

    @workflow.run
    async def run(self, saved: Saved | None = None) -> None:
        """Serves until it is idle; what arrives as it ends makes it go on."""
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
            await self._something(self._rings_ms)

    async def _something(self, rings_ms: int | None) -> None:
        """Returns when the timer has rung, when another is needed, or when the run is to end."""
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
        """One timer goes on until something is due before it rings: most are overtaken, and a new one costs events."""
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
        """Asks the server how runs stand, in one call."""
        owners = [Owner(each.workflow_id, each.run_id) for each in due]
        seen = await workflow.execute_local_activity(
            LOOK,
            owners,
            result_type=list[Seen],
            start_to_close_timeout=LOOK_LIMIT,
            retry_policy=AGAIN,
        )
        for requester, each in zip(due, seen, strict=True):
            self._note(self._books.looked(requester, each.fate, now_us()))

    # Telling

    def _note(self, effects: list[Effect]) -> None:
        self._untold += effects
        self._tell()

    def _untold_can_go(self) -> bool:
        return bool(self._untold) and self._telling < TELLING_MAX and not self._is_long()

    def _tell(self) -> None:
        while self._untold_can_go():
            self._telling += 1
            asyncio.create_task(self._tell_one(self._untold.pop(0)))  # noqa: RUF006  the workflow's loop keeps it

    async def _tell_one(self, effect: Effect) -> None:
        # Without run id: a run that was continued as new or reset answers for the one before it.
        handle = workflow.get_external_workflow_handle(effect.to.workflow_id)
        name, said = _signal_of(workflow.info().workflow_id, effect)
        try:
            await handle.signal(name, said)
        except FailureError:
            if effect.kind == "granted":
                self._note(self._books.gone(effect, now_us()))
        finally:
            self._telling -= 1
            self._tell()

    # What runs say

    @workflow.signal
    def request(self, asked: Request) -> None:
        """A run asks for a permit."""
        self._note(self._books.request(asked, now_us()))

    @workflow.signal
    def release(self, release: Release) -> None:
        """A ticket is to be taken out; by hand, one with its ticket alone is enough."""
        self._note(self._books.release(release, now_us()))

    @workflow.signal
    def renew(self, renewal: Renewal) -> None:
        """A permit is to have a new lease."""
        self._note(self._books.renew(renewal, now_us()))

    @workflow.signal
    def adopt(self, adoption: Adoption) -> None:
        """A run takes a permit over."""
        self._note(self._books.adopt(adoption, now_us()))

    @workflow.signal
    def confirm(self, confirmed: Confirmed) -> None:
        """A run holds what the run before it held."""
        self._note(self._books.confirmed(confirmed, now_us()))

    @workflow.signal
    def resize(self, capacity: int) -> None:
        """An administrator changes the capacity, until a primitive declares another one."""
        if capacity >= 1:
            self._note(self._books.resize(capacity, now_us()))

    # What can be asked

    @workflow.query
    def snapshot(self, limit: int = 100) -> Snapshot:
        """The resource as it is."""
        return self._books.snapshot(limit, now_us() // 1000)

    @workflow.query
    def permit(self, ticket: str, fence: int) -> Found:
        """The permit with that fence."""
        return Found(self._books.permit(ticket, fence))

    @workflow.query
    def adopted(self, ticket: str, request: str) -> Found:
        """The permit that a run has adopted by that request."""
        return Found(self._books.adopted(ticket, request))

    @workflow.query
    def outcome(self, call: str) -> bool:
        """Whether that call of `release` took something out."""
        return self._books.outcome(call)


def _signal_of(keeper: str, effect: Effect) -> tuple[str, object]:
    resource = keeper.removeprefix(workflow_id_of(""))
    permit: Permit | None = effect.permit
    if permit is None or effect.kind == "refused":
        return calls.REFUSED_SIGNAL, calls.Refused(
            effect.to.request, effect.error, f"resource {resource!r}: {effect.why}"
        )
    if effect.kind == "granted":
        return calls.GRANTED_SIGNAL, calls.Granted(permit, effect.to.request, keeper)
    if effect.kind == "lost":
        return calls.LOST_SIGNAL, calls.Lost(resource, permit.ticket, permit.fence, effect.why)
    return calls.CONFIRM_SIGNAL, calls.Confirm(resource, permit.ticket, permit.fence, keeper)
