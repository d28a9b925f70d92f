"""What tests of held permits do again and again: serve workflows, look at a resource from outside, read histories."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType, ResetReapplyExcludeType, WorkflowTaskFailedCause
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    PauseWorkflowExecutionRequest,
    ResetWorkflowExecutionRequest,
    UnpauseWorkflowExecutionRequest,
)
from temporalio.client import Client, WorkflowExecutionStatus, WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker

from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from temporalio.api.history.v1 import HistoryEvent

    from redlease import Permit, Semaphore

    from temporal_server import TemporalServer


PAUSED = 8  # a status that the SDK has no name for
# The ways in which a workflow of `limited_flows` ends.
ENDINGS = ["completed", "failed", "cancelled", "terminated", "timed out"]
SHORT_S = 5.0  # a lease that a test outlasts: it is renewed though the machine stands still for three seconds
WIDE = {"sticky_queue_schedule_to_start_timeout": 1.0}  # a killed worker's queue times out soon


class Place:
    """Where a test's workflows run, and on which Redis."""

    def __init__(self, server: TemporalServer, task_queue: str, redis_url: str, prefix: str) -> None:
        self.address = server.address
        self.task_queue = task_queue
        self.redis_url = redis_url
        self.prefix = prefix

    def plugin(self, **options: Any) -> RedleasePlugin:
        """Return a plugin."""
        return RedleasePlugin(self.redis_url, prefix=self.prefix, **options)

    async def client(self, **options: Any) -> Client:
        """Return a client, with a plugin of its own unless the options say otherwise."""
        return await Client.connect(self.address, **{"plugins": [self.plugin()]} | options)

    @contextlib.asynccontextmanager
    async def serving(
        self,
        workflows: Sequence[type],
        activities: Sequence[Any],
        *,
        worker: Mapping[str, Any] | None = None,
        **plugin: Any,
    ) -> AsyncIterator[Client]:
        """Run a worker with the plugin in this process; yields its client."""
        client = await self.client(plugins=[self.plugin(**plugin)])
        async with Worker(
            client, task_queue=self.task_queue, workflows=workflows, activities=activities, **(worker or {})
        ):
            yield client


async def holder_of(pool: Semaphore) -> int:
    """Return the fence of the only holder, 0 when there is none."""
    holders = (await pool.inspect()).holders
    assert len(holders) <= 1, holders
    return holders[0].fence if holders else 0


async def until_free(pool: Semaphore) -> None:
    """Wait until nobody holds: a relay releases a permit a moment after the history records its release."""

    async def is_free() -> bool:
        return await holder_of(pool) == 0

    await eventually(is_free)


async def nobody_waits(pool: Semaphore) -> bool:
    """Tell whether the queue is empty: a relay withdraws a request a moment after the history records that."""
    return not (await pool.inspect()).waiters


async def stays_held(pool: Semaphore, fence: int, seconds: float) -> None:
    """Look again and again for so long: the permit with this fence is held at every look."""
    until = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until:
        assert await holder_of(pool) == fence
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def waiting(pool: Semaphore) -> AsyncIterator[asyncio.Task[Permit]]:
    """Wait for a permit as a plain service does; whatever came of it is given back with the block."""
    task = asyncio.create_task(pool.acquire())
    try:
        while not (await pool.inspect()).waiters:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pool.release(await task)


async def events_of(handle: WorkflowHandle[Any, Any]) -> list[HistoryEvent]:
    """Return the events of a run."""
    return list((await handle.fetch_history()).events)


async def names_of(handle: WorkflowHandle[Any, Any]) -> list[str]:
    """Return the types of the events of a run."""
    return [EventType.Name(event.event_type).removeprefix("EVENT_TYPE_") for event in await events_of(handle)]


async def has_event(handle: WorkflowHandle[Any, Any], name: str) -> bool:
    """Tell whether a run has an event of this type."""
    return name in await names_of(handle)


async def tasks_that_failed(handle: WorkflowHandle[Any, Any]) -> list[str]:
    """Return why workflow tasks failed, save those that the server had done anew as a signal came as the run ended."""
    failed = [
        event.workflow_task_failed_event_attributes
        for event in await events_of(handle)
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_TASK_FAILED
    ]
    benign = WorkflowTaskFailedCause.WORKFLOW_TASK_FAILED_CAUSE_UNHANDLED_COMMAND
    return [str(attributes) for attributes in failed if attributes.cause != benign]


async def reset(
    client: Client, handle: WorkflowHandle[Any, Any], task: int, *, reapply: bool = True
) -> WorkflowHandle[Any, Any]:
    """Reset a run to before its so-manieth completed workflow task; returns the new run's handle.

    `reapply`: the new run gets again the signals and updates that came later.
    """
    kind = EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED
    completed = [event.event_id for event in await events_of(handle) if event.event_type == kind]
    return await reset_to(client, handle, completed[task], reapply=reapply)


async def reset_to(
    client: Client, handle: WorkflowHandle[Any, Any], event_id: int, *, reapply: bool = True
) -> WorkflowHandle[Any, Any]:
    """Reset a run to before the workflow task that this event ended, completed or failed; as `reset`."""
    reply = await client.workflow_service.reset_workflow_execution(
        ResetWorkflowExecutionRequest(
            namespace=client.namespace,
            workflow_execution=WorkflowExecution(workflow_id=handle.id, run_id=handle.result_run_id or ""),
            reason="test",
            request_id=str(uuid.uuid4()),
            workflow_task_finish_event_id=event_id,
            reset_reapply_exclude_types=[] if reapply else ResetReapplyExcludeType.values()[1:],
        )
    )
    return client.get_workflow_handle(handle.id, run_id=reply.run_id)


async def pause(client: Client, handle: WorkflowHandle[Any, Any]) -> None:
    """Pause a run, which the SDK has no method for, and see that it is."""
    request = PauseWorkflowExecutionRequest(
        namespace=client.namespace, workflow_id=handle.id, identity="test", reason="test", request_id=str(uuid.uuid4())
    )
    await client.workflow_service.pause_workflow_execution(request)
    asked = DescribeWorkflowExecutionRequest(
        namespace=client.namespace, execution=WorkflowExecution(workflow_id=handle.id)
    )
    described = await client.workflow_service.describe_workflow_execution(asked)
    assert described.workflow_execution_info.status == PAUSED


async def unpause(client: Client, handle: WorkflowHandle[Any, Any]) -> None:
    """Let a paused run go on."""
    request = UnpauseWorkflowExecutionRequest(
        namespace=client.namespace, workflow_id=handle.id, identity="test", reason="test", request_id=str(uuid.uuid4())
    )
    await client.workflow_service.unpause_workflow_execution(request)


def begun_for(ending: str) -> dict[str, Any]:
    """Return the options of a start of a workflow of `limited_flows` that is to end in this way."""
    # The time is long enough for what tests do before, on a busy machine too.
    timeout = timedelta(seconds=5) if ending == "timed out" else None
    return {"how": "fail" if ending == "failed" else "complete", "run_timeout": timeout}


async def ended(handle: WorkflowHandle[Any, str], ending: str) -> None:
    """Let such a workflow end in this way, and return when it is closed."""
    if ending in {"completed", "failed"}:
        await handle.signal("proceed")
    elif ending == "cancelled":
        await handle.cancel()
    elif ending == "terminated":
        await handle.terminate()
    with contextlib.suppress(WorkflowFailureError):
        await handle.result()
    status = (await handle.describe()).status
    assert status is not None
    assert status.name == ending.replace(" ", "_").replace("cancelled", "canceled").upper()


async def end(*handles: WorkflowHandle[Any, Any]) -> None:
    """Let such workflows go on to their end."""
    for handle in handles:
        await handle.signal("proceed")
        await handle.result()


async def after_refusals(
    handles: Sequence[WorkflowHandle[Any, Any]], count: int
) -> tuple[list[WorkflowHandle[Any, Any]], list[ApplicationError]]:
    """Wait until so many starts over a limit have ended as failed runs; returns those that run, and the refusals."""

    async def have_failed() -> bool:
        statuses = [(await handle.describe()).status for handle in handles]
        return statuses.count(WorkflowExecutionStatus.FAILED) == count

    await eventually(have_failed)
    running, refusals = [], []
    for handle in handles:
        if (await handle.describe()).status == WorkflowExecutionStatus.RUNNING:
            running.append(handle)
            continue
        with pytest.raises(WorkflowFailureError) as raised:
            await handle.result()
        assert isinstance(raised.value.cause, ApplicationError)
        assert raised.value.cause.type == "WorkflowConcurrencyLimitExceeded"
        refusals.append(raised.value.cause)
    return running, refusals
