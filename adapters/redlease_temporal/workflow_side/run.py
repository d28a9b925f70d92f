"""The state of one workflow run: its ticket numbers, its holds, and the permits that guard its calls.

A context variable holds it, which the interceptors set at each entry into workflow code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.exceptions import ApplicationError

from redlease import limits
from redlease.models import Permit
from redlease_temporal.payloads.locks import HEADER, Granted, Guard, Lost

from .mailbox import RunMailbox
from .metrics import ResourceLabel
from .requests import original_run_of


class Held(Protocol):
    """A hold as its run sees it."""

    @property
    def guard(self) -> Guard | None:
        """The guard for an activity started now; None once the hold is released or detached."""

    def lose(self, why: str, *, replaced: bool = False) -> None:
        """Marks the permit as lost; `replaced`: a newer request waits until it is given back."""


@dataclass
class Run:
    """The state of one run.

    Attributes:
        task_queue: Of the internal worker.
        wait_attempt_s: See `Settings`.
        resource_label: What stands for a resource in metrics; None leaves it out.
        inherited: The guards under which the parent started this run.
        mailbox: Answers from the workflows that keep resources.
        fresh: The history length when a local activity granted each permit.
        used: The history length when a local activity last needed each permit.
        under_way: Work that must finish before the run ends.
        left_behind: That of it which nobody awaits.
        requests: The tasks that make requests, and how often each had been cancelled before.
    """

    task_queue: str
    wait_attempt_s: float
    resource_label: ResourceLabel | None = None
    inherited: list[Guard] = field(default_factory=list)
    tickets: dict[str, int] = field(default_factory=dict)
    holds: list[Held] = field(default_factory=list)
    granted: dict[tuple[str, str], Permit] = field(default_factory=dict)
    mailbox: RunMailbox = field(default_factory=RunMailbox)
    fresh: dict[tuple[str, str], int] = field(default_factory=dict)
    used: dict[tuple[str, str], int] = field(default_factory=dict)
    under_way: set[asyncio.Future[Any]] = field(default_factory=set)
    left_behind: set[asyncio.Future[Any]] = field(default_factory=set)
    requests: list[tuple[asyncio.Task[Any], int]] = field(default_factory=list)

    def track(self, work: asyncio.Future[Any]) -> None:
        """Makes `wait_until_idle` wait until this work is done."""
        self.under_way.add(work)
        work.add_done_callback(self.under_way.discard)

    def leave_behind(self, work: asyncio.Future[Any]) -> None:
        """Makes `wait_for_what_is_left` wait until this work is done."""
        if not work.done():
            self.left_behind.add(work)
            work.add_done_callback(self.left_behind.discard)

    async def wait_for_what_is_left(self) -> None:
        """Waits until what this run released is released, so that it does not stand in the way of its own request."""
        while self.left_behind:
            await workflow.wait(list(self.left_behind))

    @contextlib.contextmanager
    def requesting(self) -> Iterator[None]:
        """Makes `wait_until_idle` wait, if this task is cancelled, until it has withdrawn its request."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is made by a task")
        request = (task, task.cancelling())
        self.requests.append(request)
        try:
            yield
        finally:
            self.requests.remove(request)

    async def wait_until_idle(self) -> None:
        """Waits until no local activity of the library is under way and none is about to start.

        If a local activity ended after the command that ends the run, its marker would follow that command: the server
        rejects such a workflow task, and every retry of it. A new one starts when a request is cancelled while the main
        code runs to its end. A signal sent in the task that ends the run would not be delivered.
        """
        while True:
            # A cancellation does not stop the wait, as the run ends in any case. Evicting the run cancels it too, and
            # must not wait again.
            with contextlib.suppress(asyncio.CancelledError):
                await workflow.wait_condition(self._is_idle)
                return

    def _is_idle(self) -> bool:
        """Called when no task of the run can proceed: every cancelled task has handled its cancellation."""
        given_up = any(task.cancelling() > before for task, before in self.requests)
        return not (given_up or self.under_way or self.mailbox.tasks)

    def on_fresh(self, permit: Permit) -> None:
        """A local activity granted a permit, which this workflow task is to record."""
        self.fresh[permit.resource, permit.ticket] = workflow.info().get_current_history_length()

    def on_used(self, resource: str, ticket: str) -> None:
        """A local activity that needs a permit starts or ends, which this workflow task is to record."""
        self.used[resource, ticket] = workflow.info().get_current_history_length()

    def reexecution_needs(self, resource: str, ticket: str) -> bool:
        """Whether this workflow task, if Temporal re-executes it, needs a permit that is held now.

        Temporal re-executes it if a signal arrives while it ends the run, or if its worker dies. Local activities that
        were not recorded then run again, and must not find the permit released that they used. If the grant was not
        recorded either, the re-execution gets a new one.
        """
        now = workflow.info().get_current_history_length()
        return self.used.get((resource, ticket)) == now and self.fresh.get((resource, ticket)) != now

    def number(self, resource: str) -> int:
        """Counts the requests for a resource: a replay of the same code gets the same numbers."""
        number = self.tickets[resource] = self.tickets.get(resource, 0) + 1
        return number

    def on_granted(self, granted: Granted) -> None:
        """Handles the signal of a grant: from a relay if waiting is by signal, or from the resource's keeper."""
        if granted.keeper:
            self.mailbox.on_granted(granted)
        else:
            self.granted[granted.permit.resource, granted.permit.ticket] = granted.permit

    def on_lost(self, lost: Lost) -> None:
        """Handles the signal of a loss, which a relay may send more than once, and late."""
        for held in list(self.holds):
            guard = held.guard
            if guard is not None and guard.names == (lost.resource, lost.ticket, lost.fence):
                held.lose(lost.why, replaced=lost.replaced)


_current: ContextVar[Run] = ContextVar("redlease_run")
# The guards of a call made now: of the holds entered around it, and those that the workflow's parent passed on.
_around: ContextVar[tuple[Callable[[], Guard | None], ...]] = ContextVar("redlease_around", default=())


def enter(run: Run) -> None:
    """Sets the context for workflow code of this run."""
    _current.set(run)
    _around.set(tuple(_inherited(guard) for guard in run.inherited))


def _inherited(guard: Guard) -> Callable[[], Guard]:
    """A guard from the parent, who may release the permit without notice: so each use asks whether it is held."""
    asked = replace(guard, until_ms=0)
    return lambda: asked


def current() -> Run:
    """The run of the current code; raises if the worker has no plugin."""
    run = _current.get(None)
    if run is None:
        raise ApplicationError(
            "redlease: this worker does not know of locks. Give RedleasePlugin to the client or worker that runs "
            "the workflow",
            type="RuntimeError",
            non_retryable=True,
        )
    return run


def begin_guarding(held: Held) -> None:
    """Adds the hold's guard to all calls that this task starts from now on."""
    _around.set((*_around.get(), lambda: held.guard))


def guards_here() -> list[Guard]:
    """The guards of a call that is started now."""
    return [guard for find in _around.get() if (guard := find()) is not None]


def with_guards(headers: Mapping[str, Payload]) -> Mapping[str, Payload]:
    """The headers with the guards of the call."""
    guards = guards_here()
    if not guards:
        return headers
    data = json.dumps([guard.texts() for guard in guards]).encode()
    return {**headers, HEADER: Payload(metadata={"encoding": b"json/plain"}, data=data)}


def read_guards(headers: Mapping[str, Payload]) -> list[Guard]:
    """The guards in a call's headers."""
    payload = headers.get(HEADER)
    return [] if payload is None else [Guard(*guard[:5]) for guard in json.loads(payload.data)]


def ticket_of(info: workflow.Info, number: int) -> str:
    """The ticket of a run's request: the same in every replay and after a reset."""
    ticket = f"{info.namespace}/{info.workflow_id}/{original_run_of(info)}/{number}"
    if len(ticket.encode()) <= limits.TICKET_BYTES_MAX:
        return ticket
    return f"{original_run_of(info)}/{number}"


def shown_as(info: workflow.Info) -> str:
    """The owner shown for a run: its workflow id, shortened if needed."""
    return limits.shortened(info.workflow_id, limits.OWNER_BYTES_MAX)
