"""What belongs to one workflow run: how many tickets it has had, what it holds, and under which permits it runs.

It is found by a context variable, which the interceptors set at each entry into workflow code.
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

from .calls import HEADER, Granted, Guard, Lost
from .post import Post


class Held(Protocol):
    """A hold as its run sees it."""

    @property
    def guard(self) -> Guard | None:
        """What an activity begun now needs; None once it is given up."""

    def lose(self, why: str) -> None:
        """It is lost."""


@dataclass
class Run:
    """The state of one run.

    `task_queue`: of the internal worker; `wait_attempt_s`: see `Settings`; `inherited`: what its parent began it under;
    `post`: what workflows that keep resources have answered to its requests; `fresh` and `used`: how long the history
    was when a permit was granted by a local activity, and when it was last needed by one; `under_way`: what is to be
    done before the run ends; `requests`: the tasks that make some, and how often each had been cancelled before.
    """

    task_queue: str
    wait_attempt_s: float
    inherited: list[Guard] = field(default_factory=list)
    tickets: dict[str, int] = field(default_factory=dict)
    holds: list[Held] = field(default_factory=list)
    granted: dict[tuple[str, str], Permit] = field(default_factory=dict)
    post: Post = field(default_factory=Post)
    fresh: dict[tuple[str, str], int] = field(default_factory=dict)
    used: dict[tuple[str, str], int] = field(default_factory=dict)
    under_way: set[asyncio.Future[Any]] = field(default_factory=set)
    requests: list[tuple[asyncio.Task[Any], int]] = field(default_factory=list)

    def see_through(self, work: asyncio.Future[Any]) -> None:
        """Something begins that is done before the run ends."""
        self.under_way.add(work)
        work.add_done_callback(self.under_way.discard)

    @contextlib.contextmanager
    def requesting(self) -> Iterator[None]:
        """This task makes a request: once it is cancelled, that is given up before the run ends."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is made by a task")
        request = (task, task.cancelling())
        self.requests.append(request)
        try:
            yield
        finally:
            self.requests.remove(request)

    async def settle(self) -> None:
        """Returns when the run may end: no local activity of the library is under way, and none is to follow.

        One that ends after the command which ends the run adds its marker behind that; the server refuses such a task,
        and every further doing of it. One follows when a request is cancelled beside the code that goes on to the end.
        A signal that is sent in the task which ends the run is not delivered.
        """
        while True:
            # The run ends in any case. One that is taken out of memory is cancelled too, and may not wait anew.
            with contextlib.suppress(asyncio.CancelledError):
                await workflow.wait_condition(self._is_settled)
                return

    def _is_settled(self) -> bool:
        """Asked when no task of the run can go on by itself: who has been cancelled has taken that in."""
        given_up = any(task.cancelling() > before for task, before in self.requests)
        return not (given_up or self.under_way or self.post.tasks)

    def on_fresh(self, permit: Permit) -> None:
        """A permit was granted by a local activity, which this workflow task is to record."""
        self.fresh[permit.resource, permit.ticket] = workflow.info().get_current_history_length()

    def on_used(self, resource: str, ticket: str) -> None:
        """A local activity that needs a permit begins or ends, which this workflow task is to record."""
        self.used[resource, ticket] = workflow.info().get_current_history_length()

    def is_needed_again(self, resource: str, ticket: str) -> bool:
        """Whether this workflow task, should it be done anew, will need a permit that is held now.

        It is done anew when a signal arrives while it ends the run, or when its worker dies, and with it the local
        activities that it has not recorded: they must not find released what they have used. A grant that is not
        recorded either is another one then.
        """
        now = workflow.info().get_current_history_length()
        return self.used.get((resource, ticket)) == now and self.fresh.get((resource, ticket)) != now

    def number(self, resource: str) -> int:
        """Counts the requests for a resource: a re-run of the same code comes to the same numbers."""
        number = self.tickets[resource] = self.tickets.get(resource, 0) + 1
        return number

    def on_granted(self, granted: Granted) -> None:
        """A permit is granted: a relay says so, where waiting is by signal, or the workflow that keeps the resource."""
        if granted.keeper:
            self.post.on_granted(granted)
        else:
            self.granted[granted.permit.resource, granted.permit.ticket] = granted.permit

    def on_lost(self, lost: Lost) -> None:
        """A relay says that a permit is lost; it may say so more than once, and late."""
        for held in list(self.holds):
            guard = held.guard
            if guard is not None and guard.names == (lost.resource, lost.ticket, lost.fence):
                held.lose(lost.why)


_current: ContextVar[Run] = ContextVar("redlease_run")
# What is begun now is begun under these: the holds entered around it, and what the workflow's parent passed on.
_around: ContextVar[tuple[Callable[[], Guard | None], ...]] = ContextVar("redlease_around", default=())


def enter(run: Run) -> None:
    """Workflow code of this run begins here."""
    _current.set(run)
    _around.set(tuple(_inherited(guard) for guard in run.inherited))


def _inherited(guard: Guard) -> Callable[[], Guard]:
    """What the parent passed on: it may give that back without a word to its children, so each use asks."""
    asked = replace(guard, until_ms=0)
    return lambda: asked


def current() -> Run:
    """The run that this code belongs to; raises where the worker has no plugin."""
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
    """What this task begins from now on needs the hold."""
    _around.set((*_around.get(), lambda: held.guard))


def guards_here() -> list[Guard]:
    """What guards a call that is begun now."""
    return [guard for find in _around.get() if (guard := find()) is not None]


def with_guards(headers: Mapping[str, Payload]) -> Mapping[str, Payload]:
    """The headers with what guards the call."""
    guards = guards_here()
    if not guards:
        return headers
    data = json.dumps([guard.texts() for guard in guards]).encode()
    return {**headers, HEADER: Payload(metadata={"encoding": b"json/plain"}, data=data)}


def read_guards(headers: Mapping[str, Payload]) -> list[Guard]:
    """What guards a call, out of its headers."""
    payload = headers.get(HEADER)
    return [] if payload is None else [Guard(*guard) for guard in json.loads(payload.data)]


def ticket_of(info: workflow.Info, number: int) -> str:
    """The ticket of a run's request: the same wherever and however often the run is replayed, or reset."""
    ticket = f"{info.namespace}/{info.workflow_id}/{info.original_execution_run_id}/{number}"
    if len(ticket.encode()) <= limits.TICKET_BYTES_MAX:
        return ticket
    return f"{info.original_execution_run_id}/{number}"


def shown_as(info: workflow.Info) -> str:
    """Who is shown as a run's owner: the workflow id, as much of it as there is room for."""
    return limits.shortened(info.workflow_id, limits.OWNER_BYTES_MAX)
