"""A resource's sequence for services: start it, append to it and query it through a Temporal client."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any, Generic, overload

from temporalio.client import (
    Client,
    WithStartWorkflowOperation,
    WorkflowFailureError,
    WorkflowHandle,
    WorkflowQueryRejectedError,
    WorkflowUpdateFailedError,
)
from temporalio.common import RawValue, RetryPolicy, WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError, RPCStatusCode

from redlease._core import limits
from redlease._core.limits import Duration

from ._common.descriptions import refused_in
from ._common.resource_workflows import ResourceWorkflows
from ._sequence.api import (
    APPEND,
    SEQUENCE,
    UPDATE_ID_BYTES_MAX,
    AsyncHandler,
    Batch,
    BatchOutcome,
    Item,
    ItemFailure,
    Progress,
    Result,
    SequenceFailed,
    SequenceState,
    ThreadedHandler,
    handling_of,
    result_type_of,
    results_of,
    workflow_id_of,
)
from ._sequence.values import Value, checked_size, payload_of, value_of
from ._sequence.workflow import CONTINUED, START, SequenceWorkflow
from .worker import RedleasePlugin

SEQUENCES = ResourceWorkflows("its sequence")


class Sequence(Generic[Item, Result]):
    """Items of a resource, handled one at a time by the workflow `sequence:{resource}`.

    Args:
        client: A client with a `RedleasePlugin`; one of its workers must run.
        resource: The name.
        activity: The activity that handles an item, or its name. Its `activity.info().activity_id` names the item.
        task_queue: Where that activity is served.
        start_to_close_timeout: Of one attempt.
        heartbeat_timeout: Of one attempt.
        retry_policy: By default an item is retried until it succeeds; no other item of the resource starts meanwhile.
        result_type: The type of the results, if the activity is given by name.

    Raises:
        ValueError: A parameter is wrong, or the client has no plugin.

    Example:
        >>> ledger = Sequence(client, "ledger", post, task_queue="books", start_to_close_timeout=30)  # doctest: +SKIP
        >>> receipt = await ledger.append(payment)  # doctest: +SKIP
    """

    @overload
    def __init__(
        self,
        client: Client,
        resource: str,
        activity: AsyncHandler[Item, Result],
        *,
        task_queue: str,
        start_to_close_timeout: Duration,
        heartbeat_timeout: Duration | None = None,
        retry_policy: RetryPolicy | None = None,
        result_type: None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        client: Client,
        resource: str,
        activity: ThreadedHandler[Item, Result],
        *,
        task_queue: str,
        start_to_close_timeout: Duration,
        heartbeat_timeout: Duration | None = None,
        retry_policy: RetryPolicy | None = None,
        result_type: None = None,
    ) -> None: ...

    @overload
    def __init__(
        self: Sequence[Any, Result],
        client: Client,
        resource: str,
        activity: Callable[..., Any] | str,
        *,
        task_queue: str,
        start_to_close_timeout: Duration,
        heartbeat_timeout: Duration | None = None,
        retry_policy: RetryPolicy | None = None,
        result_type: type[Result],
    ) -> None: ...

    @overload
    def __init__(
        self: Sequence[Any, Any],
        client: Client,
        resource: str,
        activity: str,
        *,
        task_queue: str,
        start_to_close_timeout: Duration,
        heartbeat_timeout: Duration | None = None,
        retry_policy: RetryPolicy | None = None,
        result_type: None = None,
    ) -> None: ...

    def __init__(
        self,
        client: Client,
        resource: str,
        activity: Callable[..., Any] | str,
        *,
        task_queue: str,
        start_to_close_timeout: Duration,
        heartbeat_timeout: Duration | None = None,
        retry_policy: RetryPolicy | None = None,
        result_type: type[Any] | None = None,
    ) -> None:
        plugin = next((one for one in client.config()["plugins"] if isinstance(one, RedleasePlugin)), None)
        if plugin is None:
            raise ValueError("this client has no RedleasePlugin: Client.connect(..., plugins=[RedleasePlugin(...)])")
        self._client = client
        self._resource = limits.checked_text("resource name", resource, limits.NAME_BYTES_MAX)
        self._handling = handling_of(
            activity,
            task_queue,
            start_to_close_timeout=start_to_close_timeout,
            heartbeat_timeout=heartbeat_timeout,
            retry_policy=retry_policy,
        )
        self._kind = result_type or result_type_of(activity)
        self._queue = plugin.internal_queue(client)

    async def start(self, items: Iterable[Item]) -> WorkflowHandle[Any, Any]:
        """Starts the sequence with these items; `results` waits for their results.

        Raises:
            WorkflowAlreadyStartedError: It runs: append to it.
            ValueError: The items have more than 1 MB.
        """
        values = [value_of(payload) for payload in self._encoded(items)]
        checked_size(self._resource, values)
        batch = Batch(START, values, self._handling)
        state = SequenceState(self._resource, self._handling, [batch] if values else [])
        return await self._client.start_workflow(
            SEQUENCE,
            state,
            id=workflow_id_of(self._resource),
            task_queue=self._queue,
            result_type=BatchOutcome,
        )

    async def results(self) -> list[Result]:
        """Waits until the sequence is idle; returns the results of the items it was started with, in their order.

        Raises:
            SequenceFailed: One of those items failed for good.
            WorkflowFailureError: The sequence was ended from outside.
        """
        handle: WorkflowHandle[Any, BatchOutcome] = self._client.get_workflow_handle(
            workflow_id_of(self._resource), result_type=BatchOutcome
        )
        try:
            outcome = await handle.result()
        except WorkflowFailureError as error:
            if not isinstance(error.cause, ApplicationError) or error.cause.type != SequenceFailed.__name__:
                raise
            details = error.cause.details[0]
            failure = ItemFailure(**details["failure"])
            outcome = BatchOutcome(details["results"], failure)
        count = len(outcome.results) + (outcome.failure is not None)
        return results_of(self._resource, count, outcome, self._decoded)

    async def append(self, item: Item, *, id: str | None = None) -> Result:  # noqa: A002
        """Appends an item to the running sequence, or to one that this call starts; returns the item's result.

        The server accepts at most ten such calls at once per sequence; further ones wait until it accepts them.

        Args:
            item: What the activity is called with.
            id: A call that is repeated with its id is the same item, which is handled once.

        Raises:
            SequenceFailed: The item failed for good, or more than 1 MB waits.
            ValueError: The id is empty or has more than 900 bytes.
        """
        update_id = uuid.uuid4().hex if id is None else limits.checked_text("id", id, UPDATE_ID_BYTES_MAX)
        (payload,) = self._encoded([item])
        while True:
            start: WithStartWorkflowOperation[Any, Any] = WithStartWorkflowOperation(
                SequenceWorkflow.run,
                SequenceState(self._resource, self._handling),
                id=workflow_id_of(self._resource),
                task_queue=self._queue,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            )
            try:
                result = await self._client.execute_update_with_start_workflow(
                    APPEND,
                    args=[RawValue(payload), self._handling],
                    start_workflow_operation=start,
                    id=update_id,
                    result_type=RawValue,
                )
            except WorkflowUpdateFailedError as error:
                cause = error.cause
                if isinstance(cause, ApplicationError) and cause.type == CONTINUED:
                    continue
                failure = ItemFailure(str(cause), getattr(cause, "type", None) or type(cause).__name__)
                results_of(self._resource, 1, BatchOutcome(failure=failure), lambda value: value)
                raise
            decoded: Result = self._decoded(value_of(result.payload))
            return decoded

    async def progress(self) -> Progress:
        """How far the sequence is that runs, or ran last; all zero if the server knows of none.

        Raises:
            Unavailable: It is paused.
        """
        handle = self._client.get_workflow_handle(workflow_id_of(self._resource))
        try:
            return await handle.query(SequenceWorkflow.progress)
        except (WorkflowQueryRejectedError, ValueError) as error:
            refused_in(error)
            raise SEQUENCES.paused(self._resource, handle) from error
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return Progress(self._resource, 0, 0, None)

    # Items are payloads inside the library's own arguments. The codec is applied to those arguments as a whole.

    def _encoded(self, items: Iterable[Any]) -> list[Any]:
        return list(self._client.data_converter.payload_converter.to_payloads(list(items)))

    def _decoded(self, value: Value) -> Any:
        hints = [self._kind] if self._kind is not None else None
        return self._client.data_converter.payload_converter.from_payloads([payload_of(value)], hints)[0]
