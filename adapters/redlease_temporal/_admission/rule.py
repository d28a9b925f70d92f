"""`@concurrency`: a limit on the open runs of a workflow. The rule of a class, and how runs and parents apply it.

A start over the limit is refused, not queued: clients and parents with the plugin refuse it, and a run that was started
otherwise fails at once. Or it replaces the oldest: see `replacing`. A workflow ID holds its place until its last run
has closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal, TypeVar

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, ApplicationError

import redlease
from redlease._core import limits
from redlease._core.limits import GRACE_S, Duration
from redlease_temporal._workflow_side.backend import LOCAL_ATTEMPT_TIMEOUT, RETRY_OFTEN, local, read
from redlease_temporal._workflow_side.cancellation import ended
from redlease_temporal._workflow_side.run import current
from redlease_temporal.errors import as_usage_error

C = TypeVar("C", bound=type)
Backend = Literal["redis", "slots"]

# Local activities, and the remote ones that retry when a local one gets no answer.
RESERVE, ADMIT, CANCEL_RESERVATION = "redlease.reserve", "redlease.admit", "redlease.cancel_reservation"
LATER = {RESERVE: "redlease.reserve_later", ADMIT: "redlease.admit_later"}
REPLACING = {RESERVE: "redlease.reserve_replacing", ADMIT: "redlease.admit_replacing"}
WORKFLOW = "__temporal_workflow_definition"


class WorkflowConcurrencyLimitExceeded(ApplicationError, redlease.RedleaseError):
    """Raised when a workflow is not started, or fails as it starts, because `limit` others of its kind run.

    It was not queued: start it again later. As the failure of a run its three attributes are the failure's details.

    Attributes:
        workflow_type: The workflow's type.
        partition_key: The key whose limit is reached; None if the limit is the type's.
        limit: How many may run at once.
    """

    def __init__(self, workflow_type: str, partition_key: str | None, limit: int) -> None:
        of = "" if partition_key is None else f" with key {partition_key!r}"
        message = (
            f"workflow {workflow_type!r}: {limit} of them{of} run, and more may not (@concurrency). It was not queued: "
            "start it again when one has ended"
        )
        kind = WorkflowConcurrencyLimitExceeded.__name__
        super().__init__(message, workflow_type, partition_key, limit, type=kind, non_retryable=True)
        self.resource, self.ticket = resource_of(workflow_type, partition_key), None
        self.workflow_type = workflow_type
        self.partition_key = partition_key
        self.limit = limit

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.workflow_type, self.partition_key, self.limit)


@dataclass(frozen=True)
class AdmissionRequest:
    """A workflow that needs a place.

    Attributes:
        chain: The first run of its chain, empty before that has started.
        replaces: Whether the oldest workflow is cancelled if no place is free, and has `grace_ms` to end.
        requested_at: When its start asked for a place, if it had to wait for one; 0 if it did not.
    """

    workflow_type: str
    workflow_id: str
    limit: int
    partition_key: str | None = None
    chain: str = ""
    backend: Backend = "redis"
    replaces: bool = False
    grace_ms: int = 0
    requested_at: float = 0

    @property
    def resource(self) -> str:
        """The resource whose units are the places."""
        return resource_of(self.workflow_type, self.partition_key)

    def refusal(self) -> WorkflowConcurrencyLimitExceeded:
        """The error if there is no free place."""
        return WorkflowConcurrencyLimitExceeded(self.workflow_type, self.partition_key, self.limit)


@dataclass(frozen=True)
class Rule:
    """The parameters of the decorator."""

    workflow_type: str
    limit: int
    key: Callable[..., object] | None
    backend: Backend = "redis"
    replaces: bool = False
    grace_ms: int = 0

    def request(self, workflow_id: str, args: Sequence[Any]) -> AdmissionRequest:
        """The request of a workflow with these arguments; raises ValueError if its key cannot be computed."""
        request = AdmissionRequest(
            *(self.workflow_type, workflow_id, self.limit),
            backend=self.backend,
            replaces=self.replaces,
            grace_ms=self.grace_ms,
        )
        if self.key is None:
            return request
        try:
            key = str(self.key(*args))
        except Exception as error:
            raise ValueError(
                f"workflow {self.workflow_type!r}: the key of @concurrency could not be computed from {args!r}: "
                f"{error!r}. Start it with arguments of the types that its run method is declared with"
            ) from error
        limits.checked_text("name of a limit", resource_of(self.workflow_type, key), limits.NAME_BYTES_MAX)
        return replace(request, partition_key=key)


_rules: dict[str, Rule] = {}


def concurrency(
    *,
    max: int,  # noqa: A002
    key: Callable[..., object] | None = None,
    backend: Backend = "redis",
    when_full: Literal["refuse", "replace"] = "refuse",
    grace: Duration = GRACE_S,
) -> Callable[[C], C]:
    """Lets at most `max` workflows of a class run at once, and refuses further starts. Put it above `workflow.defn`.

    A place is held from the start until the last run of that workflow ID has closed, however it ends: over crashes,
    retries, continue-as-new and reset. Where clients and parents that start it import the class and have the plugin,
    the start raises `WorkflowConcurrencyLimitExceeded`; a run that was started otherwise fails with it at once.

    Args:
        max: How many may run at once.
        key: Called with the workflow's arguments; each value that it returns, as text, has a limit of its own. It runs
            in clients and workflows, so it must depend on the arguments alone.
        backend: What keeps the places: "redis", or without Redis "slots": one workflow per place, for limits up to
            about ten.
        when_full: What a start does over the limit: "refuse", or "replace": the oldest is cancelled, and the start goes
            on when that one has closed. Of several starts at one time some may be refused all the same.
        grace: How long, in seconds, the oldest may take to close; after that the start is refused.

    Raises:
        ValueError: A parameter is wrong, or the class is no workflow yet.

    Example:
        >>> @concurrency(max=2, key=lambda order: order.customer)  # doctest: +SKIP
        ... @workflow.defn
        ... class Checkout: ...
    """
    limit = limits.checked_count("max", max)
    if backend not in {"redis", "slots"}:
        raise ValueError(f"backend must be 'redis' or 'slots', not {backend!r}")
    if when_full not in {"refuse", "replace"}:
        raise ValueError(f"when_full of @concurrency must be 'refuse' or 'replace', not {when_full!r}")
    grace_ms = limits.milliseconds("grace", grace)

    def decorate(defined: C) -> C:
        name = getattr(getattr(defined, WORKFLOW, None), "name", None)
        if not name:
            raise ValueError(f"{defined!r}: put @concurrency above @workflow.defn, which is to name the workflow")
        if not workflow.unsafe.in_sandbox():  # the sandbox creates the class again for each run, in modules of its own
            _rules[name] = Rule(name, limit, key, backend, when_full == "replace", grace_ms)
        return defined

    return decorate


def rule_of(workflow_type: str) -> Rule | None:
    """The rule of a workflow type, if this process has imported one."""
    return _rules.get(workflow_type)


def resource_of(workflow_type: str, partition_key: str | None) -> str:
    """The name of the resource whose units are the places of a limit."""
    limit = "concurrency:" + workflow_type.replace("%", "%25").replace(":", "%3A")  # so that a colon ends the type
    return limit if partition_key is None else f"{limit}:{partition_key}"


# In workflows


def admission_request(rule: Rule, workflow_id: str, args: Sequence[Any]) -> AdmissionRequest:
    """The request for a place; an error in its key fails the run, not its workflow task."""
    request: AdmissionRequest = as_usage_error(rule.request, workflow_id, args)
    return request


async def admit(rule: Rule, args: Sequence[Any]) -> None:
    """Takes the place of the current run; raises if there is none."""
    info = workflow.info()
    request = replace(admission_request(rule, info.workflow_id, args), chain=info.first_execution_run_id)
    if not await _has_slot(ADMIT, request):
        raise request.refusal()


class Readmission:
    """Asks for the place of a run again after a reset: another may have it. Made by the run's main task."""

    def __init__(self, rule: Rule, args: Sequence[Any]) -> None:
        self._rule = rule
        self._args = args
        self._main = asyncio.current_task()
        self._refusal: WorkflowConcurrencyLimitExceeded | None = None

    async def admit_again(self) -> None:
        """Takes the place again; cancels the run if there is none."""
        try:
            await admit(self._rule, self._args)
        except WorkflowConcurrencyLimitExceeded as refusal:
            self._refusal = refusal
            if self._main is not None:
                self._main.cancel()

    def raise_refusal(self, error: BaseException | None = None) -> None:
        """Raises the refusal, if the run was refused, whatever its code made of the cancellation."""
        if self._refusal is not None:
            raise self._refusal from error


async def start_within(request: AdmissionRequest, start: Callable[[], Any]) -> Any:
    """Takes a place for a child, then starts it; raises if there is none."""
    try:
        if await _has_slot(RESERVE, request):
            return await start()
    except (Exception, asyncio.CancelledError):
        current().background(_cancel_reservation(request))
        raise
    raise request.refusal()


async def _has_slot(how: str, request: AdmissionRequest) -> bool:
    """Takes a place, waiting as long as the answer takes; returns whether there was one."""
    try:
        has_place = await local(how, request, bool)
    except ActivityError:
        has_place = await _call_until_answered(LATER[how], request)
    if has_place or not request.replaces:
        return has_place
    return await _call_until_answered(REPLACING[how], request, timedelta(milliseconds=request.grace_ms))


async def _call_until_answered(name: str, request: AdmissionRequest, grace: timedelta = timedelta(0)) -> bool:
    while True:
        returned: RawValue | None = await ended(
            workflow.start_activity(
                name,
                request,
                result_type=RawValue,
                task_queue=current().task_queue,
                start_to_close_timeout=grace + LOCAL_ATTEMPT_TIMEOUT,
                retry_policy=RETRY_OFTEN,
                summary=f"a place among {request.limit}",
            )
        )
        try:
            return read(returned, bool)
        except ValueError as error:
            workflow.logger.warning("somebody completed %s by hand: %s; asking again", name, error)


async def _cancel_reservation(request: AdmissionRequest) -> None:
    try:
        await local(CANCEL_RESERVATION, request, bool)
    except ActivityError:
        workflow.logger.warning("the place of a child that was not started is free when its lease has ended")
