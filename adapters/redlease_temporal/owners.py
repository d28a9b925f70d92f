"""What the Temporal server says of the workflow runs that permits are held for.

Each look is one call; looks at one run are shared by all its watches, made seldom unless somebody waits for what the
run holds, and never more than so many a second in all.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import count
from typing import NamedTuple

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionRequest,
    DescribeWorkflowExecutionResponse,
    GetClusterInfoRequest,
    GetWorkflowExecutionHistoryReverseRequest,
)
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from redlease import clock

logger = logging.getLogger("redlease.temporal")

SELDOM_MS, OFTEN_MS = 10_000.0, 1_000.0  # how often a run is looked at: while nobody waits for what it holds, and then
UNTOLD = "?"  # the chain of a run, where the server is too old to tell
SOON_MS = 50.0  # after which the end of a run is recorded
PAGE = 200  # events a call
CHAIN_MAX = 20  # successors followed in one look
ANSWER = timedelta(seconds=5)  # how long a call may take: a server that has stopped leaves it without any reply


async def cluster_of(client: Client) -> str:
    """What tells this Temporal cluster from others that use the same Redis."""
    try:
        info = await client.workflow_service.get_cluster_info(GetClusterInfoRequest())
    except RPCError as error:
        if error.status not in {RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED}:
            raise  # a relay that called the cluster by another name would not find the others
        return client.service_client.config.target_host
    return info.cluster_id


class Fate(Enum):
    """How a run stands."""

    OPEN = "open"
    CLOSED = "closed"
    CONTINUED = "continued"  # as a new run, which is open
    RESET = "reset"  # to a new run, which is open
    UNKNOWN = "unknown"


class Look(NamedTuple):
    """What a look found: how the run stands, and the run that is open now."""

    fate: Fate
    open_run_id: str = ""
    chain: str = ""  # the first run of the chain that the open one is of, where the latest run was asked for
    workflow_type: str = ""


Run = tuple[str, str]  # workflow id, run id; an empty one is whichever run is the latest


@dataclass(slots=True)
class _Entry:
    run: Run
    told: set[Callable[[Look], None]] = field(default_factory=set)
    often: bool = False
    looked_ms: float = 0.0
    known_ms: float = 0.0  # when the server last said how it stands
    due_ms: float = 0.0


class Owners:
    """The runs that somebody watches.

    Args:
        client: Of the namespace they are in.
        most_a_second: Looks in all.
    """

    def __init__(self, client: Client, most_a_second: float) -> None:
        self._client = client
        self._pause_s = 1 / most_a_second
        self._entries: dict[Run, _Entry] = {}
        self._heap: list[tuple[float, int, Run]] = []
        self._order = count()
        self._changed = asyncio.Event()
        self.looks = 0

    def watch(self, run: Run, told: Callable[[Look], None]) -> None:
        """Tells of each look at a run from now on."""
        entry = self._entries.get(run)
        if entry is None:
            now_ms = clock.now_ms()
            entry = self._entries[run] = _Entry(run, looked_ms=now_ms, known_ms=now_ms)
            self._plan(entry)
        entry.told.add(told)

    def unwatch(self, run: Run, told: Callable[[Look], None]) -> None:
        """Ends one `watch`."""
        entry = self._entries.get(run)
        if entry is not None:
            entry.told.discard(told)
            if not entry.told:
                del self._entries[run]

    def look_often(self, run: Run, *, often: bool) -> None:
        """Somebody waits for what the run holds, or no longer does."""
        entry = self._entries.get(run)
        if entry is not None and entry.often != often:
            entry.often = often
            self._plan(entry)

    def look_soon(self, run: Run) -> None:
        """The run is about to close."""
        entry = self._entries.get(run)
        if entry is not None:
            entry.due_ms = clock.now_ms() + SOON_MS
            heapq.heappush(self._heap, (entry.due_ms, next(self._order), entry.run))
            self._changed.set()

    def unknown_ms(self, run: Run) -> float:
        """For how long the server has not said how the run stands."""
        entry = self._entries.get(run)
        return 0.0 if entry is None else max(0.0, entry.looked_ms - entry.known_ms)

    def _plan(self, entry: _Entry) -> None:
        entry.due_ms = entry.looked_ms + (OFTEN_MS if entry.often else SELDOM_MS)
        heapq.heappush(self._heap, (entry.due_ms, next(self._order), entry.run))
        self._changed.set()

    async def run(self) -> None:
        """Looks at whatever is due until it is cancelled."""
        async with asyncio.TaskGroup() as looks:
            while True:
                self._changed.clear()
                wait_s = (self._heap[0][0] - clock.now_ms()) / 1000 if self._heap else None
                if wait_s is None or wait_s > 0:
                    await clock.pause(self._changed, wait_s)
                    continue
                due_ms, _, run = heapq.heappop(self._heap)
                entry = self._entries.get(run)
                if entry is not None and entry.due_ms == due_ms:
                    # The looks overlap: their number a second is bounded, not their time. With the server away each
                    # takes long, and of the last run too it is to be known in time that nothing is known.
                    looks.create_task(self.look(run))
                    await asyncio.sleep(self._pause_s)

    async def look(self, run: Run) -> Look:
        """Looks at a run now, and tells everybody who watches it."""
        look = await self._look(run)
        entry = self._entries.get(run)
        if entry is not None:
            entry.looked_ms = clock.now_ms()
            if look.fate is not Fate.UNKNOWN:
                entry.known_ms = entry.looked_ms
            self._plan(entry)
            for told in tuple(entry.told):
                told(look)
        return look

    async def _look(self, run: Run) -> Look:
        workflow_id, run_id = run
        fate = Fate.OPEN
        try:
            if not run_id:
                return await self._latest(workflow_id)
            for _ in range(CHAIN_MAX):
                status, reset_run_id, latest = await self._describe(workflow_id, run_id)
                if status == WorkflowExecutionStatus.RUNNING:
                    return Look(fate, run_id)
                if reset_run_id:
                    fate, run_id = Fate.RESET, reset_run_id
                elif status == WorkflowExecutionStatus.CONTINUED_AS_NEW and latest:
                    fate, run_id = Fate.CONTINUED, latest
                else:
                    return Look(Fate.CLOSED)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return Look(Fate.CLOSED)
            logger.warning("workflow %r: the Temporal server did not say how it stands: %s", workflow_id, error)
        return Look(Fate.UNKNOWN)

    async def _latest(self, workflow_id: str) -> Look:
        """How the latest run of a workflow stands, whatever chain of runs it is of."""
        info = (await self._described(workflow_id, "")).workflow_execution_info
        if WorkflowExecutionStatus(info.status) != WorkflowExecutionStatus.RUNNING:
            return Look(Fate.CLOSED)
        return Look(Fate.OPEN, info.execution.run_id, info.first_run_id or UNTOLD, info.type.name)

    async def _described(self, workflow_id: str, run_id: str) -> DescribeWorkflowExecutionResponse:
        self.looks += 1
        execution = WorkflowExecution(workflow_id=workflow_id, run_id=run_id)
        request = DescribeWorkflowExecutionRequest(namespace=self._client.namespace, execution=execution)
        return await self._client.workflow_service.describe_workflow_execution(request, retry=False, timeout=ANSWER)

    async def _describe(self, workflow_id: str, run_id: str) -> tuple[WorkflowExecutionStatus, str, str]:
        """How one run stands, the run that it was reset to, and the run that it continued as."""
        described = await self._described(workflow_id, run_id)
        status = WorkflowExecutionStatus(described.workflow_execution_info.status)
        reset_run_id = described.workflow_extended_info.reset_run_id
        latest = ""
        if status == WorkflowExecutionStatus.CONTINUED_AS_NEW and not reset_run_id:
            latest = await self._successor(workflow_id, run_id)
        return status, reset_run_id, latest

    async def _successor(self, workflow_id: str, run_id: str) -> str:
        """The run that a run continued as, which its last event names."""
        events = await self._last_events(workflow_id, run_id, b"", 1)
        return events[0][0].workflow_execution_continued_as_new_event_attributes.new_execution_run_id

    async def _last_events(
        self, workflow_id: str, run_id: str, page: bytes, size: int = PAGE
    ) -> tuple[list[HistoryEvent], bytes]:
        request = GetWorkflowExecutionHistoryReverseRequest(
            namespace=self._client.namespace,
            execution=WorkflowExecution(workflow_id=workflow_id, run_id=run_id),
            maximum_page_size=size,
            next_page_token=page,
        )
        reply = await self._client.workflow_service.get_workflow_execution_history_reverse(
            request, retry=False, timeout=ANSWER
        )
        return list(reply.history.events), reply.next_page_token

    async def has_recorded(self, run: Run, event_id: int, local_id: str, wait_id: str) -> bool | None:
        """Whether the history of a run, past an event, has the marker of one activity or the completion of another.

        None: nothing has come after the event yet. The workflow task that asked is still under way, with other local
        activities perhaps, and what it records comes at its end.

        Raises:
            RPCError: The server did not say.
        """
        evidence = _Evidence(local_id, wait_id)
        page = b""
        while True:
            first = not page
            events, page = await self._last_events(*run, page)
            if first and events[0].event_id <= event_id:
                return None
            for event in events:
                if event.event_id <= event_id:
                    return False
                if evidence.is_in(event):
                    return True
            if not page:
                return False


class _Evidence:
    """That a grant is recorded, in events read from the last one back."""

    def __init__(self, local_id: str, wait_id: str) -> None:
        self._said = json.dumps(local_id, ensure_ascii=False).encode()  # as it stands in the marker
        self._wait_id = wait_id
        self._completed: set[int] = set()

    def is_in(self, event: HistoryEvent) -> bool:
        """Whether this event is the marker of the one activity, or the beginning of the other, which was completed."""
        if event.event_type == EventType.EVENT_TYPE_MARKER_RECORDED:
            data = event.marker_recorded_event_attributes.details.get("data")
            return data is not None and any(self._said in part.data for part in data.payloads)
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            self._completed.add(event.activity_task_completed_event_attributes.scheduled_event_id)
        if event.event_type != EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            return False
        scheduled = event.activity_task_scheduled_event_attributes.activity_id
        return scheduled == self._wait_id and event.event_id in self._completed
