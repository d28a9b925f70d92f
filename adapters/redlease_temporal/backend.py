"""What keeps a resource for workflow code: the one interface behind which the backends stand."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, RetryState

from redlease.models import Permit, Snapshot

from . import calls
from .errors import AcquireTimeout, Unavailable, refusal
from .run import Run, current

T = TypeVar("T")

ONCE = RetryPolicy(maximum_attempts=1)
OFTEN = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5))
# A local activity ends by itself within a second of its start. These are for a worker that stands still.
LOCAL_LIMIT = timedelta(seconds=10)
LOCAL_IN_ALL = timedelta(seconds=60)  # with the time that it waits for one of the worker's slots for local activities


class Backend(Protocol):
    """Keeps one resource on behalf of workflow runs.

    Attributes:
        away: Who may be away while a request waits, for messages.
    """

    away: str

    async def acquire(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        """Waits for a permit. Whatever ends this but a grant takes the request out of the queue."""

    async def try_acquire(self, run: Run, wish: calls.Wish) -> Permit | None:
        """A permit, if that takes no waiting."""

    async def adopt(self, run: Run, adopting: calls.Adopting) -> Permit:
        """Takes over a permit for this run."""

    async def renew(self, renewing: calls.Renewing) -> Permit:
        """Gives a permit a new lease."""

    async def release(self, giving: calls.Giving) -> bool:
        """Takes a ticket out; whether a live permit or place was."""

    async def end(self, giving: calls.Giving) -> bool:
        """As `release`, for a hold that knows of no loss: where asking costs something, nobody is asked."""

    async def check(self, checking: calls.Checking) -> bool:
        """Whether a permit is held now."""

    async def inspect(self, inspecting: calls.Inspecting) -> Snapshot:
        """Looks at the resource."""

    def kept_by(self, permit: Permit) -> str:
        """The id of the workflow that keeps a permit; empty where no workflow does."""


async def local(name: str, arg: Any, result: type[T], activity_id: str | None = None) -> T:
    """Calls a local activity of the library once; its failure is an `ActivityError`, as that of any activity."""
    try:
        returned: T = await workflow.execute_local_activity(
            name,
            arg,
            result_type=result,
            activity_id=activity_id,
            start_to_close_timeout=LOCAL_LIMIT,
            schedule_to_close_timeout=LOCAL_IN_ALL,
            retry_policy=ONCE,
        )
    except ApplicationError as error:
        # The failure of a local activity comes as it was raised, not as the cause of one that names the activity.
        raise ActivityError(
            "Activity task failed",
            scheduled_event_id=0,
            started_event_id=0,
            identity="",
            activity_type=name,
            activity_id=activity_id or "",
            retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
        ) from error
    return returned


async def answered(
    name: str, arg: Any, result: type[T], activity_id: str | None = None, *, away: str, resource: str
) -> T:
    """Calls a local activity whose failure is the caller's: the error that it tells of, or `Unavailable`."""
    try:
        return await local(name, arg, result, activity_id)
    except ActivityError as error:
        raise_if_cancelled(error)
        if (refused := refusal(error)) is not None:
            raise refused from error
        message = f"resource {resource!r}: {away} was not reached in time ({error.cause}). It is safe to try again"
        raise Unavailable(message, resource=resource) from error


async def prolonged(name: str, arg: Any, activity_id: str | None = None, *, away: str, resource: str) -> Permit:
    """As `answered`, for a permit that is renewed or adopted."""
    permit = await answered(name, arg, calls.Prolonged, activity_id, away=away, resource=resource)
    if permit.shape >= calls.BY_COMMAND:
        current().on_used(permit.resource, permit.ticket)
    return permit.permit()


def timed_out(away: str, wish: calls.Wish, timeout: timedelta) -> AcquireTimeout:
    """The error for a request that was not granted in time."""
    resource = wish.terms.resource
    message = (
        f"resource {resource!r}: no permit within {timeout.total_seconds():g} s: others hold it or are ahead in "
        f"the queue, or {away} is away; `inspect()` shows them. The request is out of the queue"
    )
    return AcquireTimeout(message, resource=resource, ticket=wish.ticket)


def raise_if_cancelled(error: ActivityError) -> None:
    """A cancelled task ends by CancelledError, as asyncio's timeouts and task groups expect it, not by a failure."""
    task = asyncio.current_task()
    if is_cancelled(error) and task is not None and task.cancelling():
        raise asyncio.CancelledError from error


def is_cancelled(error: ActivityError) -> bool:
    """Whether an activity failed by being cancelled."""
    return isinstance(error.cause, CancelledError)
