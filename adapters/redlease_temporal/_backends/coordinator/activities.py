"""The local activities through which runs use a resource's coordinator, and the library's workflows look at runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowHandle,
)
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError

from redlease.models import Permit, Position, Snapshot
from redlease_temporal._common.resource_workflows import CALL_TIMEOUT, ResourceWorkflows, gather_limited, permit_gone
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal._payloads import coordinator
from redlease_temporal._payloads.locks import CheckCall, InspectCall, PositionCall

from .workflow import Coordinator

COORDINATORS = ResourceWorkflows("its coordinator")


class CoordinatorActivities:
    """The activities, bound to the client of the worker that runs the workflow.

    `task_queue`: of the internal worker, which runs coordinators.
    """

    def __init__(self, client: Client, task_queue: str) -> None:
        self._client = client
        self._task_queue = task_queue

    @property
    def local(self) -> list[Callable[..., Any]]:
        """For workers that run workflows."""
        return [self.send_request, self.outcome, self.renew, self.adopt, self.check, self.inspect, self.position]

    @activity.defn(name=coordinator.REQUEST)
    async def send_request(self, request: coordinator.CoordinatorRequest) -> None:
        """Sends a request to the coordinator; starts it if it is not open."""
        try:
            await self._client.start_workflow(
                Coordinator.run,
                id=coordinator.workflow_id_of(request.terms.resource),
                task_queue=self._task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                start_signal="request",
                start_signal_args=[request],
                static_summary=f"coordinator of {request.terms.resource}",
                rpc_timeout=CALL_TIMEOUT,
            )
        except RPCError as error:
            raise COORDINATORS.unavailable(request.terms.resource, error) from error

    @activity.defn(name=coordinator.OUTCOME)
    async def outcome(self, call: coordinator.CoordinatorCall) -> bool:
        """Whether a release, which the coordinator has, released a permit or withdrew a request."""
        return call.release is not None and bool(await self._query(call.terms.resource, "outcome", call.release.call))

    @activity.defn(name=coordinator.RENEW)
    async def renew(self, call: coordinator.CoordinatorCall) -> Permit:
        """Renews a permit."""
        assert call.renewal is not None
        renewal, resource = call.renewal, call.terms.resource
        await self._signal(call, "renew", renewal)
        reply = await self._query(resource, "permit", renewal.ticket, renewal.fence)
        if reply is None or reply.permit is None:
            raise permit_gone(resource, renewal.ticket, renewal.fence)
        permit: Permit = reply.permit
        return permit

    @activity.defn(name=coordinator.ADOPT)
    async def adopt(self, call: coordinator.CoordinatorCall) -> Permit:
        """Takes a permit over for a run."""
        assert call.adoption is not None
        adoption, resource = call.adoption, call.terms.resource
        await self._signal(call, "adopt", adoption)
        reply = await self._query(resource, "adopted", adoption.ticket, adoption.requester.request)
        if reply is None or reply.permit is None:
            raise permit_gone(resource, adoption.ticket, adoption.fence)
        permit: Permit = reply.permit
        return permit

    @activity.defn(name=coordinator.CHECK)
    async def check(self, call: CheckCall) -> bool:
        """Whether a permit is held now."""
        return await self.has(call)

    async def are_held(self, resource: str, permits: list[tuple[str, int]]) -> list[bool]:
        """Whether each of these permits, by ticket and fence, is held now, by the coordinator's answer."""
        held: list[bool] | None = await self._query(resource, "are_held", permits)
        return [False] * len(permits) if held is None else held

    async def has(self, call: CheckCall) -> bool:
        """Whether a permit is held now, by the coordinator's answer."""
        reply = await self._query(call.terms.resource, "permit", call.ticket, call.fence)
        return reply is not None and reply.permit is not None

    @activity.defn(name=coordinator.INSPECT)
    async def inspect(self, call: InspectCall) -> Snapshot:
        """The state of a resource; one without a coordinator is free."""
        terms = call.terms
        reply = await self._query(terms.resource, "snapshot", call.limit)
        return reply or Snapshot(terms.resource, terms.capacity, (), (), 0, 0)

    @activity.defn(name=coordinator.POSITION)
    async def position(self, call: PositionCall) -> Position | None:
        """The position of a ticket in the queue; nobody waits at a resource without a coordinator."""
        reply: Position | None = await self._query(call.terms.resource, "position", call.ticket)
        return reply

    def _handle(self, resource: str) -> WorkflowHandle[Any, Any]:
        return self._client.get_workflow_handle(coordinator.workflow_id_of(resource))

    async def _signal(self, call: coordinator.CoordinatorCall, name: str, message: object) -> bool:
        """Signals the coordinator; returns False if there is none."""
        resource = call.terms.resource
        return await COORDINATORS.signal(resource, self._handle(resource), name, message)

    async def _query(self, resource: str, name: str, *args: Any) -> Any:
        """Queries the coordinator; returns None if there is none."""
        return await COORDINATORS.query(resource, self._handle(resource), getattr(Coordinator, name), *args)


class StatusActivities:
    """The local activity by which the library's workflows look at runs, bound to the internal worker's client."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    @activity.defn(name=coordinator.POLL)
    async def poll(self, runs: list[coordinator.RunToPoll]) -> list[coordinator.RunStatusReply]:
        """The status of each of these runs."""
        states = await gather_limited(self._monitor.poll((owner.workflow_id, owner.run_id)) for owner in runs)
        return [coordinator.RunStatusReply(state.status.value, state.open_run_id) for state in states]
