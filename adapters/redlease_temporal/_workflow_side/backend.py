"""The interface of the backends, and the calls that they share."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, FailureError, RetryState

from redlease._core import limits
from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import locks
from redlease_temporal.errors import AcquireTimeout, Unavailable, refusal

from .cancellation import ended
from .run import Run

T = TypeVar("T")

NO_RETRY = RetryPolicy(maximum_attempts=1)
RETRY_OFTEN = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5))
# A local activity ends within a second of its start. These limits are for a worker that is suspended.
LOCAL_ATTEMPT_TIMEOUT = timedelta(seconds=10)
LOCAL_TIMEOUT = timedelta(seconds=60)  # includes the wait for one of the worker's slots for local activities


class Backend(Protocol):
    """Keeps one resource on behalf of workflow runs.

    Attributes:
        name: As it is given to `lock(backend=...)`.
        service: The system that may be unreachable while a request waits, as error messages name it.
        weight_max: The most units that one permit may hold.
        has_turns: Whether it knows keys, shares and limits of keys.
        has_rates: Whether it knows rates.
        replaces: Whether a request can take the place of others.
    """

    name: str
    service: str
    weight_max: int
    has_turns: bool
    has_rates: bool
    replaces: bool

    async def acquire(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Waits for a permit. Any end but a grant withdraws the request."""

    async def try_acquire(self, run: Run, call: locks.AcquireCall) -> Permit | None:
        """Returns a permit if one is free, without waiting; else None."""

    async def adopt(self, run: Run, call: locks.AdoptCall) -> Permit:
        """Takes over a permit for this run."""

    async def renew(self, call: locks.RenewCall) -> Permit:
        """Renews a permit."""

    async def release(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit or withdraws a request; returns whether the ticket was held or queued."""

    async def end(self, call: locks.ReleaseCall) -> bool:
        """As `release`, for a hold that knows of no loss; returns as soon as the release is sure to follow.

        A release takes effect when the workflow task is recorded that decided it, and not before. Temporal may execute
        that task again, and its code may then take another way, on which it still needs the permit.
        """

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """Gives back all but one unit of a permit, as a release does; returns whether it is held."""

    async def check(self, call: locks.CheckCall) -> bool:
        """Whether a permit is held now."""

    async def inspect(self, call: locks.InspectCall) -> Snapshot:
        """The current state of the resource."""

    async def position(self, call: locks.PositionCall) -> Position | None:
        """The position of a ticket in the queue; None if it neither waits nor holds a permit."""

    def resource_workflow(self, permit: Permit) -> str | None:
        """The id of the workflow that keeps a permit; empty if none does; None if this namespace cannot ask for it."""


class LocalBackend:
    """The parts that all backends share: local activities call whatever keeps the resource.

    Args:
        terms: Those of the resource.
    """

    name: str
    service: str
    weight_max = limits.CAPACITY_MAX
    has_turns = False
    has_rates = False
    replaces = False

    def __init__(self, terms: locks.ResourceTerms) -> None:
        self._terms = terms

    async def _call_activity(self, name: str, arg: Any, result: type[T], activity_id: str | None = None) -> T:
        return await answered(name, arg, result, activity_id, service=self.service, resource=self._terms.resource)


async def try_once(backend: Backend, run: Run, call: locks.AcquireCall, timeout: timedelta) -> Permit:
    """Acquires with a timeout of zero, without queueing.

    Raises:
        AcquireTimeout: No permit was free.
    """
    permit = await backend.try_acquire(run, dataclasses.replace(call, spec=dataclasses.replace(call.spec, queue=False)))
    if permit is None:
        raise timed_out(backend.service, call, timeout)
    return permit


async def local(name: str, arg: Any, result: type[T], activity_id: str | None = None) -> T:
    """Calls a local activity of the library once; its failure is an `ActivityError`, as for any activity."""
    try:
        returned: T = await ended(
            workflow.start_local_activity(
                name,
                arg,
                result_type=result,
                activity_id=activity_id,
                start_to_close_timeout=LOCAL_ATTEMPT_TIMEOUT,
                schedule_to_close_timeout=LOCAL_TIMEOUT,
                retry_policy=NO_RETRY,
            )
        )
    except ActivityError:
        raise
    except FailureError as error:
        # The SDK raises the failure of a local activity itself, not an ActivityError with that as its cause: where the
        # activity reported it, always, and where it timed out, only in a replay.
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
    name: str, arg: Any, result: type[T], activity_id: str | None = None, *, service: str, resource: str
) -> T:
    """Calls a local activity; raises the error that it reports, or `Unavailable`."""
    try:
        return await local(name, arg, result, activity_id)
    except ActivityError as error:
        raise failed_call(error, service=service, resource=resource) from error


def failed_call(error: ActivityError, *, service: str, resource: str) -> Exception:
    """The error that a failed activity reports, or `Unavailable`."""
    message = f"resource {resource!r}: {service} was not reached in time ({error.cause}). It is safe to try again"
    return refusal(error) or Unavailable(message, resource=resource)


def read(returned: RawValue | None, kind: type[T]) -> T:
    """Decodes the result of a remote activity that was called with `RawValue` as its result type.

    An operator can complete such an activity with any result. If the SDK decoded it, a result of another type would
    fail the workflow task again and again.

    Raises:
        ValueError: The result is of another type.
    """
    try:
        value = None if returned is None else workflow.payload_converter().from_payload(returned.payload, kind)
    except Exception as error:
        raise ValueError(f"its result cannot be read as {kind.__name__}: {error}") from error
    if not isinstance(value, kind):
        raise ValueError(f"its result is {value!r}, and no {kind.__name__}")
    return value


def timed_out(service: str, call: locks.AcquireCall, timeout: timedelta) -> AcquireTimeout:
    """The error for a request that was not granted in time."""
    resource = call.terms.resource
    message = (
        f"resource {resource!r}: no permit within {timeout.total_seconds():g} s: others hold it or are ahead in "
        f"the queue, or {service} is away; `inspect()` shows them. The request is out of the queue"
    )
    return AcquireTimeout(message, resource=resource, ticket=call.spec.ticket)
