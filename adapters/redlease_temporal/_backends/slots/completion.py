"""Waits for a slot to end, by a long poll of the server."""

from __future__ import annotations

import contextlib
from datetime import timedelta

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType, HistoryEventFilterType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflowservice.v1 import GetWorkflowExecutionHistoryRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from redlease_temporal._payloads.slots import SlotEnd, slot_id

HELD = timedelta(seconds=60)  # timeout of one call; the server ends it sooner, with an empty reply


async def end_of(client: Client, resource: str, slot: int, run_id: str, *, follow: bool = False) -> SlotEnd | None:
    """Waits until a run of a slot has closed; returns its result, or None if it has none.

    `follow`: if the run continued as new, waits for the next one. `WorkflowHandle.result()` would do, but makes a test
    server skip time.

    Raises:
        RPCError: The server did not answer, or does not know the run.
    """
    while True:
        event = await _close_event(client, slot_id(resource, slot), run_id)
        if event.event_type == EventType.EVENT_TYPE_WORKFLOW_EXECUTION_COMPLETED:
            result = event.workflow_execution_completed_event_attributes.result
            with contextlib.suppress(Exception):  # whatever its result is, it has ended
                (ended,) = await client.data_converter.decode(result.payloads, [SlotEnd])
                return ended if isinstance(ended, SlotEnd) else None
            return None
        run_id = event.workflow_execution_continued_as_new_event_attributes.new_execution_run_id
        if not follow or not run_id:
            return None


async def _close_event(client: Client, workflow_id: str, run_id: str) -> HistoryEvent:
    request = GetWorkflowExecutionHistoryRequest(
        namespace=client.namespace,
        execution=WorkflowExecution(workflow_id=workflow_id, run_id=run_id),
        wait_new_event=True,
        history_event_filter_type=HistoryEventFilterType.HISTORY_EVENT_FILTER_TYPE_CLOSE_EVENT,
        skip_archival=True,
    )
    while True:
        try:
            reply = await client.workflow_service.get_workflow_execution_history(request, retry=True, timeout=HELD)
        except RPCError as error:
            if error.status != RPCStatusCode.DEADLINE_EXCEEDED:
                raise
            continue
        if reply.history.events:
            return reply.history.events[0]
        request.next_page_token = reply.next_page_token
