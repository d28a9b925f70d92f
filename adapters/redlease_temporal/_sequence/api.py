"""The items of a resource, handled one at a time: the calls of workflow code, and their payloads.

The workflow `sequence:{resource}` handles them. Only one workflow of an ID can be open, so no lock is needed. The
payloads stand in users' histories: add fields only with defaults, and never change or remove one.
"""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from temporalio import workflow
from temporalio.api.common.v1 import RetryPolicy as ProtoRetryPolicy
from temporalio.common import RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError
from temporalio.workflow import ChildWorkflowCancellationType, ParentClosePolicy

from redlease._core import limits
from redlease._core.limits import Duration
from redlease_temporal._workflow_side.cancellation import retrieve_exception
from redlease_temporal._workflow_side.hold import shielded, until
from redlease_temporal._workflow_side.run import current
from redlease_temporal.errors import LockError, usage_error

from .values import Value, checked_size, payload_of, value_of

SEQUENCE = "redlease.sequence"  # the workflow's type
EXTEND, WITHDRAW, ASK, APPEND, PROGRESS = "extend", "withdraw", "ask", "append", "progress"
UPDATE_ID_BYTES_MAX = 900  # of an appended item's id, which the id of its activity begins with
NAME_BYTES_MAX = 1_000  # of the name of an activity or task queue: the server accepts no more
QUERY_PAUSES_S = (
    10.0,
    600.0,
)  # how long a caller waits before it asks whether its batch is still known: first and longest
ROUNDS = 10  # how often a caller retries when the sequence ends just as it delivers
ACTIVITY = "__temporal_activity_definition"

Item = TypeVar("Item")
Result = TypeVar("Result")
# An activity is a function, or a method of whatever the worker has.
AsyncHandler = Callable[[Item], Awaitable[Result]] | Callable[[Any, Item], Awaitable[Result]]
ThreadedHandler = Callable[[Item], Result] | Callable[[Any, Item], Result]


@dataclass(frozen=True)
class Handling:
    """The activity that handles an item, and its options; durations in ms."""

    activity: str
    task_queue: str
    start_to_close_ms: int
    heartbeat_ms: int | None = None
    initial_interval_ms: int = 1000
    backoff: float = 2.0
    maximum_interval_ms: int | None = None
    maximum_attempts: int = 0
    non_retryable: list[str] = field(default_factory=list)


@dataclass
class Batch:
    """Items that were delivered together.

    Attributes:
        key: Identifies the batch, so that a repeated delivery is ignored.
        reply_to: The workflow to notify of the outcome; empty for none.
        results: Of the items that are done.
    """

    key: str
    items: list[Value]
    handling: Handling
    reply_to: str = ""
    results: list[Value] = field(default_factory=list)


@dataclass
class SequenceState:
    """The input of a sequence's run.

    Attributes:
        handling: For items that are appended without one.
        finished_keys: The keys of the latest batches that have ended.
        handled: Items done by earlier runs.
        outcome: Of the batch that the sequence was started with, if that has ended.
    """

    resource: str
    handling: Handling
    batches: list[Batch] = field(default_factory=list)
    finished_keys: list[str] = field(default_factory=list)
    handled: int = 0
    outcome: BatchOutcome | None = None


@dataclass(frozen=True)
class ItemFailure:
    """Why an item failed for good: the message and type of the activity's failure."""

    message: str
    type: str


@dataclass(frozen=True)
class BatchOutcome:
    """How a batch ended: the results of its done items, and why the next item, if there is one, failed."""

    results: list[Value] = field(default_factory=list)
    failure: ItemFailure | None = None


@dataclass(frozen=True)
class BatchQuery:
    """A caller's question whether its batch is known."""

    key: str
    reply_to: str


@dataclass(frozen=True)
class Progress:
    """How far a sequence is.

    Attributes:
        handled: Items done, by all its runs.
        queued: Items not done, including the current one.
        current: The activity id of the current item, None if there is none.
    """

    resource: str
    handled: int
    queued: int
    current: str | None


class SequenceFailed(LockError):
    """Raised when an item failed for good: those before it are done, those after it were not started.

    Attributes:
        index: The item's index in the given list.
        results: Of the items before it.
    """

    def __init__(self, message: str, *, resource: str | None = None, index: int = 0, results: Iterable[Any] = ()):
        super().__init__(message, resource=resource)
        self.index = index
        self.results = list(results)


@overload
async def sequence(
    resource: str,
    items: Iterable[Item],
    activity: AsyncHandler[Item, Result],
    *,
    start_to_close_timeout: Duration,
    heartbeat_timeout: Duration | None = None,
    retry_policy: RetryPolicy | None = None,
    task_queue: str | None = None,
    result_type: None = None,
) -> list[Result]: ...


@overload
async def sequence(
    resource: str,
    items: Iterable[Item],
    activity: ThreadedHandler[Item, Result],
    *,
    start_to_close_timeout: Duration,
    heartbeat_timeout: Duration | None = None,
    retry_policy: RetryPolicy | None = None,
    task_queue: str | None = None,
    result_type: None = None,
) -> list[Result]: ...


@overload
async def sequence(
    resource: str,
    items: Iterable[Any],
    activity: Callable[..., Any] | str,
    *,
    start_to_close_timeout: Duration,
    heartbeat_timeout: Duration | None = None,
    retry_policy: RetryPolicy | None = None,
    task_queue: str | None = None,
    result_type: type[Result],
) -> list[Result]: ...


@overload
async def sequence(
    resource: str,
    items: Iterable[Any],
    activity: str,
    *,
    start_to_close_timeout: Duration,
    heartbeat_timeout: Duration | None = None,
    retry_policy: RetryPolicy | None = None,
    task_queue: str | None = None,
    result_type: None = None,
) -> list[Any]: ...


async def sequence(
    resource: str,
    items: Iterable[Any],
    activity: Callable[..., Any] | str,
    *,
    start_to_close_timeout: Duration,
    heartbeat_timeout: Duration | None = None,
    retry_policy: RetryPolicy | None = None,
    task_queue: str | None = None,
    result_type: type[Any] | None = None,
) -> list[Any]:
    """Handles items one at a time, in order; no items of other calls for the resource run between or beside them.

    Each item is one activity, whose `activity.info().activity_id` names the item: the same in every attempt. A done
    item is never done again. A failing item is retried by the policy, and no other item of the resource starts
    meanwhile. The workflow `sequence:{resource}` handles the items and continues if this run ends; cancelling this call
    withdraws those that are not done.

    Args:
        resource: The name.
        items: What the activity is called with, one argument each: at most 1 MB in all.
        activity: The function, or the name, of an activity.
        start_to_close_timeout: Of one attempt.
        heartbeat_timeout: Of one attempt.
        retry_policy: By default an item is retried until it succeeds.
        task_queue: Where the activity is served; by default where this workflow is.
        result_type: The type of the results, if the activity is given by name.

    Returns:
        The results, in the order of the items.

    Raises:
        SequenceFailed: An item failed for good, or the sequence was ended from outside.
        ValueError: A parameter is wrong, or the items are too large. It is an `ApplicationError` too, and fails the
            run.

    Example:
        >>> receipts = await sequence("ledger", payments, post, start_to_close_timeout=30)  # doctest: +SKIP
    """
    queue = task_queue or workflow.info().task_queue
    limits_of_attempts = (start_to_close_timeout, heartbeat_timeout, retry_policy)
    batch = _checked_batch(resource, items, lambda: handling_of(activity, queue, *limits_of_attempts))
    if not batch.items:
        return []
    batch.reply_to = workflow.info().workflow_id
    outcome = await _deliver_and_wait(resource, batch)
    kind = result_type or result_type_of(activity)
    return results_of(resource, len(batch.items), outcome, lambda value: _decoded(value, kind))


def _checked_batch(resource: str, items: Iterable[Any], handling: Callable[[], Handling]) -> Batch:
    to_payload = workflow.payload_converter().to_payload
    try:
        handled_by = handling()
        limits.checked_text("resource name", resource, limits.NAME_BYTES_MAX)
        batch = Batch(workflow.uuid4().hex, [value_of(to_payload(item)) for item in items], handled_by)
        checked_size(resource, batch.items)
    except ValueError as error:
        raise usage_error(str(error)) from error
    return batch


async def _deliver_and_wait(resource: str, batch: Batch) -> BatchOutcome:
    """Delivers a batch to the resource's sequence and waits for its outcome."""
    received: asyncio.Future[BatchOutcome] = asyncio.Future()

    def on_outcome(outcome: BatchOutcome) -> None:
        if not received.done():
            received.set_result(outcome)

    # The handler stays: if the outcome is signalled twice, it must not reach a dynamic handler of the user's.
    workflow.set_signal_handler(reply_signal(batch.key), on_outcome)
    delivering = current().background(_deliver(resource, batch))
    try:
        await asyncio.shield(delivering)
        return await _outcome(resource, batch, received)
    except asyncio.CancelledError:
        current().background(_withdraw(resource, batch, delivering))
        raise


async def _withdraw(resource: str, batch: Batch, delivering: asyncio.Task[None]) -> None:
    """Takes the batch back, after the sequence has it."""
    await workflow.wait([delivering])
    await _signal(resource, WITHDRAW, batch.key)


async def _deliver(resource: str, batch: Batch) -> None:
    """Starts the sequence with the batch, or signals the running one; retries if that ends in between."""
    for _ in range(ROUNDS):
        try:
            child = await workflow.start_child_workflow(
                SEQUENCE,
                SequenceState(resource, batch.handling, [batch]),
                id=workflow_id_of(resource),
                task_queue=current().task_queue,
                cancellation_type=ChildWorkflowCancellationType.ABANDON,
                parent_close_policy=ParentClosePolicy.ABANDON,
                id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            )
        except WorkflowAlreadyStartedError:
            if await _signal(resource, EXTEND, batch):
                return
        else:
            child.add_done_callback(retrieve_exception)  # the outcome comes by signal, as it does to other callers
            return
    message = f"resource {resource!r}: its sequence took no items, {ROUNDS} times. None was begun: try again later"
    raise LockError(message, resource=resource)


async def _outcome(resource: str, batch: Batch, received: asyncio.Future[BatchOutcome]) -> BatchOutcome:
    """The outcome of the batch. Asks for it now and then, as a sequence that was ended from outside sends nothing."""
    pause_s, longest_s = QUERY_PAUSES_S
    while True:
        try:
            await until(received.done, pause_s)
        except TimeoutError:
            pause_s = min(2 * pause_s, longest_s)
            query = BatchQuery(batch.key, batch.reply_to)
            if not await shielded(_signal(resource, ASK, query)) and not received.done():
                return BatchOutcome(failure=ItemFailure("the sequence was ended from outside", "SequenceEnded"))
        else:
            return received.result()


async def _signal(resource: str, signal: str, arg: Any) -> bool:
    """Signals the sequence; returns False if none is open."""
    handle = workflow.get_external_workflow_handle(workflow_id_of(resource))
    try:
        await handle.signal(signal, arg)
    except ApplicationError:
        return False
    return True


def _decoded(value: Value, kind: type | None) -> Any:
    hints = None if kind is None else [kind]
    return workflow.payload_converter().from_payloads([payload_of(value)], hints)[0]


# For workflows and clients


def workflow_id_of(resource: str) -> str:
    """The ID of a resource's sequence."""
    return f"sequence:{resource}"


def reply_signal(key: str) -> str:
    """The signal that notifies a caller of its batch's outcome."""
    return f"redlease.sequence:{key}"


def handling_of(
    activity: Callable[..., Any] | str,
    task_queue: str,
    start_to_close_timeout: Duration,
    heartbeat_timeout: Duration | None,
    retry_policy: RetryPolicy | None,
) -> Handling:
    """The options as a payload; raises ValueError if one is wrong."""
    name = activity if isinstance(activity, str) else getattr(getattr(activity, ACTIVITY, None), "name", None)
    if not name:
        raise ValueError(f"{activity!r} is neither an activity (@activity.defn) nor the name of one")
    limits.checked_text("name of the activity", name, NAME_BYTES_MAX)
    limits.checked_text("task queue", task_queue, NAME_BYTES_MAX)
    policy = retry_policy or RetryPolicy()
    _check_policy(policy)
    longest = policy.maximum_interval
    return Handling(
        name,
        task_queue,
        limits.milliseconds("start_to_close_timeout", start_to_close_timeout, 1),
        None if heartbeat_timeout is None else limits.milliseconds("heartbeat_timeout", heartbeat_timeout, 1),
        limits.milliseconds("initial_interval", policy.initial_interval, 1),
        policy.backoff_coefficient,
        None if longest is None else limits.milliseconds("maximum_interval", longest, 1),
        policy.maximum_attempts,
        list(policy.non_retryable_error_types or ()),
    )


def _check_policy(policy: RetryPolicy) -> None:
    """Raises ValueError for a policy that no activity can have: it would block the sequence for every caller."""
    try:
        policy.apply_to_proto(ProtoRetryPolicy())
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the retry policy cannot be used: {error}") from error


def result_type_of(activity: Callable[..., Any] | str) -> type | None:
    """An activity's return type, if its annotations can be resolved."""
    if isinstance(activity, str):
        return None
    try:
        hinted = typing.get_type_hints(inspect.unwrap(activity)).get("return")
    except NameError:  # a name that only type checkers see
        return None
    return typing.cast("type | None", hinted)


def checked_batch(batch: Batch, policy: Callable[[Handling], RetryPolicy]) -> None:
    """Raises ValueError for a batch that cannot be handled.

    `sequence` checks the batches that it delivers. This check is for signals sent by hand, which would otherwise fail
    the workflow task again and again, for every caller.
    """
    handling = batch.handling
    try:
        for value in batch.items:
            payload_of(value)
        limits.checked_text("key", batch.key, UPDATE_ID_BYTES_MAX)
        limits.checked_text("name of the activity", handling.activity, NAME_BYTES_MAX)
        limits.checked_text("task queue", handling.task_queue, NAME_BYTES_MAX)
        for name in ("start_to_close", "heartbeat", "initial_interval", "maximum_interval"):
            span_ms = getattr(handling, f"{name}_ms")
            if span_ms is not None and not 1 <= span_ms <= limits.DURATION_MS_MAX:
                raise ValueError(f"{name}_ms must be from 1 to {limits.DURATION_MS_MAX}, not {span_ms}")
        _check_policy(policy(handling))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"its items cannot be read: {error!r}") from error


def results_of(resource: str, count: int, outcome: BatchOutcome, decoded: Callable[[Value], Any]) -> list[Any]:
    """The results of so many items; raises the error of the one that failed."""
    results = [decoded(value) for value in outcome.results]
    if outcome.failure is None:
        return results
    index = len(results)
    raise SequenceFailed(
        f"resource {resource!r}: item {index} of {count} was not done: {outcome.failure.message} "
        f"({outcome.failure.type}). Those before it are done, with their results in `results`, and those after it were "
        f"not begun: fix it and resubmit the items from {index} on",
        resource=resource,
        index=index,
        results=results,
    )
