"""The state of one workflow run: its ticket numbers, its holds, and the permits that guard its calls.

A context variable holds it, which the interceptors set at each entry into workflow code.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from temporalio import workflow
from temporalio.api.common.v1 import Payload
from temporalio.exceptions import ApplicationError

from redlease._core import limits
from redlease.models import Permit
from redlease_temporal._payloads.locks import HEADER, GrantedSignal, LostSignal, PermitHeader
from redlease_temporal.errors import Unavailable

from .cancellation import retrieve_exception
from .mailbox import RunMailbox
from .metrics import ResourceLabel
from .requests import original_run_of

T = TypeVar("T")

CONFIRM_S = (2.0, 600.0)  # the first and the longest pause of a run that was reset, until it knows what it still has


class RunHold(Protocol):
    """A hold as its run sees it."""

    @property
    def permit_header(self) -> PermitHeader | None:
        """The guard for an activity started now; None once the hold is released or detached."""

    def lose(self, reason: str, *, replaced: bool = False) -> None:
        """Marks the permit as lost; `replaced`: a newer request waits until it is given back."""

    async def confirm(self) -> None:
        """Makes sure, after a reset, that the run still has the permit; raises Unavailable if nobody could say."""


@dataclass
class Run:
    """The state of one run.

    Attributes:
        task_queue: Of the internal worker.
        wait_attempt_s: See `Settings`.
        resource_label: What stands for a resource in metrics; None leaves it out.
        inherited: The guards under which the parent started this run.
        mailbox: Answers from the workflows that keep resources.
        under_way: Work that must finish before the run ends.
        releases: The releases of each resource that are under way.
        resets: How often the server has reset the run.
        confirming: The task that asks what the run still has after a reset.
        on_reset: What else to do after a reset.
        requests: The tasks that make requests, and how often each had been cancelled before.
    """

    task_queue: str
    wait_attempt_s: float
    resource_label: ResourceLabel | None = None
    inherited: list[PermitHeader] = field(default_factory=list)
    tickets: dict[str, int] = field(default_factory=dict)
    holds: list[RunHold] = field(default_factory=list)
    granted: dict[tuple[str, str], Permit] = field(default_factory=dict)
    mailbox: RunMailbox = field(default_factory=RunMailbox)
    under_way: set[asyncio.Future[Any]] = field(default_factory=set)
    releases: dict[str, set[asyncio.Future[Any]]] = field(default_factory=dict)
    resets: int = 0
    confirming: asyncio.Task[None] | None = None
    on_reset: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    requests: list[tuple[asyncio.Task[Any], int]] = field(default_factory=list)

    def track(self, work: asyncio.Future[Any]) -> None:
        """Makes `wait_until_idle` wait until this work is done."""
        self.under_way.add(work)
        work.add_done_callback(self.under_way.discard)

    def background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs work that no cancellation reaches: the run does not end before it."""
        task = asyncio.create_task(work)
        task.add_done_callback(retrieve_exception)
        self.track(task)
        return task

    def releasing(self, resource: str, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Runs a release in the background. `release_delivered` waits for it."""
        task, under_way = self.background(work), self.releases.setdefault(resource, set())
        under_way.add(task)
        task.add_done_callback(under_way.discard)
        return task

    async def release_delivered(self, resource: str) -> None:
        """Waits until what this run released of a resource is free for its next request."""
        while self.releases.get(resource):
            await workflow.wait(list(self.releases[resource]))

    def confirm_after_reset(self) -> None:
        """The server has reset the run: what it held may be another's, and nobody knows of its requests any more."""
        self.resets += 1
        if self.confirming is not None:
            self.confirming.cancel()
        # The run may end before the answers come: only a local activity that is under way holds it up.
        self.confirming = asyncio.create_task(_confirm([*(hold.confirm for hold in self.holds), *self.on_reset]))
        self.confirming.add_done_callback(retrieve_exception)

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
        is_cancelled = any(task.cancelling() > before for task, before in self.requests)
        return not (is_cancelled or self.under_way or self.mailbox.tasks)

    def number(self, resource: str) -> int:
        """Counts the requests for a resource: a replay of the same code gets the same numbers."""
        number = self.tickets[resource] = self.tickets.get(resource, 0) + 1
        return number

    def on_granted(self, granted: GrantedSignal) -> None:
        """Handles the signal of a grant: from a relay if waiting is by signal, or from the resource's keeper."""
        if granted.resource_workflow:
            self.mailbox.on_granted(granted)
        else:
            self.granted[granted.permit.resource, granted.permit.ticket] = granted.permit

    def on_lost(self, lost: LostSignal) -> None:
        """Handles the signal of a loss, which a relay may send more than once, and late."""
        for hold in list(self.holds):
            permit_header = hold.permit_header
            if permit_header is not None and permit_header.names == (lost.resource, lost.ticket, lost.fence):
                hold.lose(lost.reason, replaced=lost.replaced)


async def _confirm(questions: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Asks all questions until each is answered, less and less often: each costs events, however long an outage is."""
    pause_s, longest_s = CONFIRM_S
    while True:
        answers = await asyncio.gather(*(question() for question in questions), return_exceptions=True)
        pairs = zip(questions, answers, strict=True)
        questions = [question for question, answer in pairs if isinstance(answer, Unavailable)]
        if not questions:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)


_current: ContextVar[Run] = ContextVar("redlease_run")
# The guards of a call made now: of the holds entered around it, and those that the workflow's parent passed on.
_permit_headers: ContextVar[tuple[Callable[[], PermitHeader | None], ...]] = ContextVar("redlease_around", default=())


def enter(run: Run) -> None:
    """Sets the context for workflow code of this run."""
    _current.set(run)
    _permit_headers.set(tuple(_from_caller(permit_header) for permit_header in run.inherited))


def _from_caller(permit_header: PermitHeader) -> Callable[[], PermitHeader]:
    return lambda: permit_header


def fails_the_task(error: BaseException) -> bool:
    """Whether the workflow task fails, and not the run, if workflow code does not catch this error.

    Temporal then executes the task again, perhaps with code that was mended, and drops the commands that it made.
    """
    ends_the_run = isinstance(error, asyncio.CancelledError | workflow.ContinueAsNewError)
    return not ends_the_run and not workflow.is_failure_exception(error)


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


def pass_permit_header(hold: RunHold) -> None:
    """Adds the hold's guard to all calls that this task starts from now on."""
    _permit_headers.set((*_permit_headers.get(), lambda: hold.permit_header))


def permit_headers_here() -> list[PermitHeader]:
    """The guards of a call that is started now."""
    return [permit_header for find in _permit_headers.get() if (permit_header := find()) is not None]


def with_permit_headers(headers: Mapping[str, Payload]) -> Mapping[str, Payload]:
    """The headers with the guards of the call."""
    permit_headers = permit_headers_here()
    if not permit_headers:
        return headers
    data = json.dumps([permit_header.texts() for permit_header in permit_headers]).encode()
    return {**headers, HEADER: Payload(metadata={"encoding": b"json/plain"}, data=data)}


def read_permit_headers(headers: Mapping[str, Payload]) -> list[PermitHeader]:
    """The guards in a call's headers."""
    payload = headers.get(HEADER)
    return [] if payload is None else [PermitHeader(*permit_header[:4]) for permit_header in json.loads(payload.data)]


def ticket_of(info: workflow.Info, number: str) -> str:
    """The ticket of a run's request: the same in every replay and after a reset."""
    ticket = f"{info.namespace}/{info.workflow_id}/{original_run_of(info)}/{number}"
    if len(ticket.encode()) <= limits.TICKET_BYTES_MAX:
        return ticket
    return f"{original_run_of(info)}/{number}"


def shown_as(info: workflow.Info) -> str:
    """The owner shown for a run: its workflow id, shortened if needed."""
    return limits.shortened(info.workflow_id, limits.OWNER_BYTES_MAX)
