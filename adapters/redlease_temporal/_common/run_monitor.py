"""Asks the Temporal server for the status of the workflow runs that hold permits.

Each look is one call, and serves all trackers of a run. A run is looked at as often as the most frequent of its
trackers asks for: seldom, unless somebody waits for what the run holds. The looks per second are bounded in total, and
those at runs that nobody waits for take at most half of them: the more such runs there are, the more seldom.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import count
from typing import Literal, NamedTuple

from temporalio.api.common.v1 import Payloads, WorkflowExecution
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent
from temporalio.api.workflowservice.v1 import (
    GetClusterInfoRequest,
    GetWorkflowExecutionHistoryReverseRequest,
)
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from redlease._core import clock

from .descriptions import CONTINUED_AS_NEW, Description, describe
from .retrying import LogOnce, retry_until_done

IDLE_POLL_MS = 10_000.0  # how often a run is checked while nobody waits for what it holds
BUSY_POLL_MS = 500.0  # how often while somebody waits, so that its end is known within a second
CHAIN_UNKNOWN = "?"  # the chain of a run, if the server is too old to report it
POLL_SOON_MS = 50.0  # how long the server may take to record the end of a run
PAGE = 200  # events per call
CHAIN_MAX = 20  # successors followed in one look
OVERDUE_MS = 10_000.0  # a look that takes longer counts as one without an answer
OPERATION_ENDED = {
    f"nexus_operation_{how}_event_attributes" for how in ("completed", "failed", "canceled", "timed_out")
}
RPC_TIMEOUT = timedelta(seconds=5)  # how long a call may take: a suspended server never replies


async def cluster_of(client: Client) -> str:
    """Distinguishes this Temporal cluster from others that use the same Redis."""
    try:
        info = await client.workflow_service.get_cluster_info(GetClusterInfoRequest())
    except RPCError as error:
        if error.status not in {RPCStatusCode.PERMISSION_DENIED, RPCStatusCode.UNIMPLEMENTED}:
            raise  # with another name for the cluster, this relay would not find the others
        return client.service_client.config.target_host
    return info.cluster_id


class RunStatus(Enum):
    """The status of a run."""

    OPEN = "open"  # also while paused: the run keeps its permits until it closes
    CLOSED = "closed"
    CONTINUED = "continued"  # as a new run, which is open
    RESET = "reset"  # to a new run, which is open
    UNKNOWN = "unknown"


class RunState(NamedTuple):
    """The result of a look: the run's status, and the run that is open now."""

    status: RunStatus
    open_run_id: str = ""
    chain: str = ""  # the first run of the open run's chain, if the look was at the latest run
    workflow_type: str = ""


RunKey = tuple[str, str]  # workflow id and run id; an empty run id means the latest run


@dataclass(slots=True)
class _WatchedRun:
    run: RunKey
    callbacks: dict[Callable[[RunState], None], float] = field(default_factory=dict)  # how often each wants a look, ms
    sent_ms: float = 0.0  # when the look under way began, 0 if there is none
    polled_ms: float = 0.0
    unknown_ms: float = 0.0  # when the first look began that the server did not answer since it last did, 0 for none
    due_ms: float = 0.0

    @property
    def every_ms(self) -> float:
        """How often the run is checked: as often as the most frequent callback asks for."""
        return min(self.callbacks.values(), default=IDLE_POLL_MS)


class RunMonitor:
    """Watches the status of runs and notifies callbacks.

    Args:
        client: The client of the runs' namespace.
        polls_per_second: The most looks per second, for all runs together.
    """

    def __init__(self, client: Client, polls_per_second: float) -> None:
        self._client = client
        self._pause_s = 1 / polls_per_second
        self._watched_runs: dict[RunKey, _WatchedRun] = {}
        self._heap: list[tuple[float, int, RunKey]] = []
        self._order = count()
        self._changed = asyncio.Event()
        self._log_once = LogOnce()
        self.polls = 0

    def watch(self, run: RunKey, callback: Callable[[RunState], None], every_ms: float | None = None) -> None:
        """Calls `callback` after each look that begins from now on. `every_ms`: how often to look; None for seldom."""
        watched = self._watched_runs.get(run)
        if watched is None:
            now_ms = clock.now_ms()
            watched = self._watched_runs[run] = _WatchedRun(run, polled_ms=now_ms)
            self._schedule_next(watched)
        watched.callbacks.setdefault(callback, IDLE_POLL_MS)
        if every_ms is not None:
            self._poll_every(watched, callback, every_ms)

    def unwatch(self, run: RunKey, callback: Callable[[RunState], None]) -> None:
        """Removes a callback of `watch`."""
        watched = self._watched_runs.get(run)
        if watched is not None:
            watched.callbacks.pop(callback, None)
            if not watched.callbacks:
                del self._watched_runs[run]

    def poll_often(self, run: RunKey, callback: Callable[[RunState], None], *, often: bool) -> None:
        """Looks at the run often while somebody waits for what it holds, else seldom."""
        watched = self._watched_runs.get(run)
        if watched is not None and callback in watched.callbacks:
            self._poll_every(watched, callback, BUSY_POLL_MS if often else IDLE_POLL_MS)

    def _poll_every(self, watched: _WatchedRun, callback: Callable[[RunState], None], every_ms: float) -> None:
        before_ms = watched.every_ms
        watched.callbacks[callback] = every_ms
        if watched.every_ms != before_ms:
            self._schedule_next(watched)

    def poll_soon(self, run: RunKey) -> None:
        """The run is about to close: look at it soon."""
        watched = self._watched_runs.get(run)
        if watched is not None:
            self._schedule(watched, clock.now_ms() + POLL_SOON_MS)

    def unknown_ms(self, run: RunKey) -> float:
        """For how many ms the server has left looks at the run without an answer."""
        watched, now_ms = self._watched_runs.get(run), clock.now_ms()
        if watched is None:
            return 0.0
        is_overdue = 0.0 < watched.sent_ms < now_ms - OVERDUE_MS
        since_ms = watched.unknown_ms or (watched.sent_ms if is_overdue else 0.0)
        return max(0.0, (now_ms if is_overdue else watched.polled_ms) - since_ms) if since_ms else 0.0

    def _schedule_next(self, watched: _WatchedRun) -> None:
        every_ms = watched.every_ms
        if every_ms >= IDLE_POLL_MS:  # half of the looks are for runs that somebody waits for
            every_ms = max(every_ms, 2 * len(self._watched_runs) * self._pause_s * 1000)
        self._schedule(watched, watched.polled_ms + every_ms)

    def _schedule(self, watched: _WatchedRun, due_ms: float) -> None:
        watched.due_ms = due_ms
        heapq.heappush(self._heap, (due_ms, next(self._order), watched.run))
        self._changed.set()

    async def run(self) -> None:
        """Looks at each run when it is due, until cancelled."""
        polls: set[asyncio.Task[RunState]] = set()
        try:
            await retry_until_done("looking at workflow runs", lambda: self._poll_when_due(polls), once=self._log_once)
        finally:
            for task in polls:
                task.cancel()
            await asyncio.gather(*polls, return_exceptions=True)

    async def _poll_when_due(self, polls: set[asyncio.Task[RunState]]) -> None:
        # After an exception this restarts and rebuilds the heap, so that no run is missing from it.
        self._heap = [(watched.due_ms, next(self._order), run) for run, watched in self._watched_runs.items()]
        heapq.heapify(self._heap)
        while True:
            self._changed.clear()
            now_ms = clock.now_ms()
            wait_s = (self._heap[0][0] - now_ms) / 1000 if self._heap else None
            if wait_s is None or wait_s > 0:
                await clock.pause(self._changed, wait_s)
                continue
            due_ms, _, run = heapq.heappop(self._heap)
            watched = self._watched_runs.get(run)
            if watched is not None and watched.due_ms == due_ms:
                self._schedule(watched, now_ms + max(IDLE_POLL_MS, OVERDUE_MS))  # unless this look plans an earlier one
                watched.sent_ms = watched.sent_ms or now_ms
                # Looks overlap: their rate is bounded, not their duration. While the server is away each takes long,
                # and every run needs one in time to show that its status is unknown.
                task = asyncio.create_task(self.poll(run))
                polls.add(task)
                task.add_done_callback(polls.discard)
                await asyncio.sleep(self._pause_s)

    async def poll(self, run: RunKey) -> RunState:
        """Looks at a run now, and calls those of its callbacks that are there when the look begins.

        One that comes later may be for another workflow of that ID, which the look knows nothing of.
        """
        watched, began_ms = self._watched_runs.get(run), clock.now_ms()
        callbacks = () if watched is None else tuple(watched.callbacks)
        what = f"workflow {run[0]!r}: polling its status"
        try:
            state = await self._poll_server(run)
        except Exception as error:  # noqa: BLE001  logged; the run is looked at again
            self._log_once.warn(what, error)
            state = RunState(RunStatus.UNKNOWN)
        if state.status is not RunStatus.UNKNOWN:
            self._log_once.succeeded(what)
        if watched is not None and watched is self._watched_runs.get(run):
            watched.sent_ms, watched.polled_ms = 0.0, clock.now_ms()
            watched.unknown_ms = (watched.unknown_ms or began_ms) if state.status is RunStatus.UNKNOWN else 0.0
            self._schedule_next(watched)
            for callback in (each for each in callbacks if each in watched.callbacks):
                try:
                    callback(state)
                except Exception as error:  # noqa: BLE001  logged; the next look calls it again
                    self._log_once.warn(f"workflow {run[0]!r}: what a look found", error)
        return state

    async def is_closed(self, workflow_id: str, chain: str) -> bool:
        """Looks whether the last run of a chain has closed; another chain of that ID may run by now."""
        state = await self.poll((workflow_id, ""))
        is_other = state.status is RunStatus.OPEN and state.chain not in {chain, CHAIN_UNKNOWN}
        return state.status is RunStatus.CLOSED or is_other

    async def _poll_server(self, run: RunKey) -> RunState:
        """The status of a run; UNKNOWN if the server does not report it."""
        workflow_id, run_id = run
        status = RunStatus.OPEN
        try:
            if not run_id:
                return await self._poll_latest(workflow_id)
            for _ in range(CHAIN_MAX):
                described = await self._described(workflow_id, run_id)
                if described.is_open:
                    return RunState(status, run_id)
                if described.reset_run_id:
                    status, run_id = RunStatus.RESET, described.reset_run_id
                elif described.info.status == CONTINUED_AS_NEW:
                    status, run_id = RunStatus.CONTINUED, await self._successor(workflow_id, run_id)
                else:
                    return RunState(RunStatus.CLOSED)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return RunState(RunStatus.CLOSED)
            self._log_once.warn(f"workflow {workflow_id!r}: polling its status", error)
        return RunState(RunStatus.UNKNOWN)

    async def _poll_latest(self, workflow_id: str) -> RunState:
        """The status of the latest run of a workflow, of whatever chain."""
        described = await self._described(workflow_id, "")
        if not described.is_open:
            return RunState(RunStatus.CLOSED)
        info = described.info
        return RunState(RunStatus.OPEN, described.run_id, info.first_run_id or CHAIN_UNKNOWN, info.type.name)

    async def _described(self, workflow_id: str, run_id: str) -> Description:
        self.polls += 1
        return await describe(self._client, workflow_id, run_id, timeout=RPC_TIMEOUT, retry=False)

    async def _successor(self, workflow_id: str, run_id: str) -> str:
        """The run that continued this one: its last event names it."""
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
            request, retry=False, timeout=RPC_TIMEOUT
        )
        return list(reply.history.events), reply.next_page_token

    async def has_recorded(self, run: RunKey, event_id: int, local_id: str, wait_id: str, fence: int) -> bool | None:
        """Whether the history of a run, after an event, has this grant: the result of one activity or of another.

        An earlier execution of the same activity may have recorded another grant, so the fence decides.

        Returns None if nothing follows the event yet: the workflow task that asked is still under way, perhaps with
        other local activities, and records their markers at its end.

        Raises:
            RPCError: The server did not return the history.
        """
        result, _ = await self._find_after(run, event_id, _GrantFinder(local_id, wait_id), PAGE)
        return await self._has_fence(result, fence) if isinstance(result, Payloads) else result

    async def has_marker(
        self, run: RunKey, event_id: int, local_id: str, *, page_events: int
    ) -> tuple[bool | None, int]:
        """Whether the history of a run, after an event, has the marker of a local activity; and its last event.

        None if nothing follows the event yet; False does not mean that the marker can not come any more.

        Raises:
            RPCError: The server did not return the history.
        """
        result, last = await self._find_after(run, event_id, _GrantFinder(local_id, ""), page_events)
        return isinstance(result, Payloads) or result, max(last, event_id)

    async def _find_after(
        self, run: RunKey, event_id: int, finder: _GrantFinder, page_events: int
    ) -> tuple[Payloads | Literal[False] | None, int]:
        """What the evidence finds after an event, or False; None if nothing follows the event. And the last event."""
        page, last = b"", 0
        while True:
            first = not page
            events, page = await self._last_events(*run, page, page_events)
            last = events[0].event_id if first else last
            if first and last <= event_id:
                return None, last
            for event in events:
                if event.event_id <= event_id:
                    return False, last
                if (result := finder.find_in(event)) is not None:
                    return result, last
            if not page:
                return False, last

    async def has_received(self, run: RunKey, event_id: int, fence: int) -> bool | None:
        """Whether the Nexus operation that an event of the run scheduled has returned this grant to it.

        Returns None while the operation is under way.

        Raises:
            RPCError: The server did not return the history.
        """
        page, continued = b"", False
        while True:
            events, page = await self._last_events(*run, page)
            for event in events:
                kind = event.WhichOneof("attributes")
                continued = continued or kind == "workflow_execution_continued_as_new_event_attributes"
                if event.event_id <= event_id:
                    return False if continued else None
                if kind in OPERATION_ENDED and getattr(event, kind).scheduled_event_id == event_id:
                    completed = event.nexus_operation_completed_event_attributes
                    returned = completed.scheduled_event_id == event_id
                    return returned and await self._has_fence(Payloads(payloads=[completed.result]), fence)
            if not page:
                return None

    async def _has_fence(self, result: Payloads, fence: int) -> bool:
        """Whether an activity's result is a permit with that fence; True if the result cannot be read."""
        try:
            (decoded,) = await self._client.data_converter.decode(result.payloads)
            permit = decoded.get("permit", decoded)
            return permit is not None and permit.get("fence", fence) == fence
        except Exception as error:  # noqa: BLE001  written by another version, or with another key
            self._log_once.warn("the grant in the history of a run could not be read", error)
            return True


class _GrantFinder:
    """Finds in events, read from the last one back, the result of the activity that may have recorded a grant."""

    def __init__(self, local_id: str, wait_id: str) -> None:
        self._local_id_json = json.dumps(local_id, ensure_ascii=False).encode()  # as it stands in the marker
        self._wait_id = wait_id
        self._completed: dict[int, Payloads] = {}  # results, by the event that scheduled the activity

    def find_in(self, event: HistoryEvent) -> Payloads | None:
        """The result, if this is the local activity's marker, or the scheduling of the remote one, which completed."""
        if event.event_type == EventType.EVENT_TYPE_MARKER_RECORDED:
            details = event.marker_recorded_event_attributes.details
            ours = "data" in details and any(self._local_id_json in part.data for part in details["data"].payloads)
            return details.get("result", Payloads()) if ours else None
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_COMPLETED:
            completed = event.activity_task_completed_event_attributes
            self._completed[completed.scheduled_event_id] = completed.result
        if event.event_type != EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            return None
        scheduled = event.activity_task_scheduled_event_attributes.activity_id
        return self._completed.get(event.event_id) if scheduled == self._wait_id else None
