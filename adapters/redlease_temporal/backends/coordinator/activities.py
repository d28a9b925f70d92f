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
from redlease_temporal.common.keeper_calls import ANSWER, Keepers, at_once, gone
from redlease_temporal.common.run_monitor import RunMonitor
from redlease_temporal.payloads import coordinator
from redlease_temporal.payloads.locks import Checking, Inspecting, Placing

from .workflow import Coordinator

COORDINATORS = Keepers("its coordinator")


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
        return [self.ask, self.outcome, self.renew, self.adopt, self.check, self.inspect, self.position]

    @activity.defn(name=coordinator.ASK)
    async def ask(self, request: coordinator.Request) -> None:
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
                rpc_timeout=ANSWER,
            )
        except RPCError as error:
            raise COORDINATORS.unavailable(request.terms.resource, error) from error

    @activity.defn(name=coordinator.OUTCOME)
    async def outcome(self, call: coordinator.Call) -> bool:
        """Whether a release, which the coordinator has, released a permit or withdrew a request."""
        return call.release is not None and bool(await self._query(call.terms.resource, "outcome", call.release.call))

    @activity.defn(name=coordinator.RENEW)
    async def renew(self, call: coordinator.Call) -> Permit:
        """Renews a permit."""
        assert call.renewal is not None
        renewal, resource = call.renewal, call.terms.resource
        await self._signal(call, "renew", renewal)
        found = await self._query(resource, "permit", renewal.ticket, renewal.fence)
        if found is None or found.permit is None:
            raise gone(resource, renewal.ticket, renewal.fence)
        permit: Permit = found.permit
        return permit

    @activity.defn(name=coordinator.ADOPT)
    async def adopt(self, call: coordinator.Call) -> Permit:
        """Takes a permit over for a run."""
        assert call.adoption is not None
        adoption, resource = call.adoption, call.terms.resource
        await self._signal(call, "adopt", adoption)
        found = await self._query(resource, "adopted", adoption.ticket, adoption.requester.request)
        if found is None or found.permit is None:
            raise gone(resource, adoption.ticket, adoption.fence)
        permit: Permit = found.permit
        return permit

    @activity.defn(name=coordinator.CHECK)
    async def check(self, checking: Checking) -> bool:
        """Whether a permit is held now."""
        return await self.has(checking)

    async def are_held(self, resource: str, permits: list[tuple[str, int]]) -> list[bool]:
        """Whether each of these permits, by ticket and fence, is held now, by the coordinator's answer."""
        held: list[bool] | None = await self._query(resource, "are_held", permits)
        return [False] * len(permits) if held is None else held

    async def has(self, checking: Checking) -> bool:
        """Whether a permit is held now, by the coordinator's answer."""
        found = await self._query(checking.terms.resource, "permit", checking.ticket, checking.fence)
        return found is not None and found.permit is not None

    @activity.defn(name=coordinator.INSPECT)
    async def inspect(self, inspecting: Inspecting) -> Snapshot:
        """The state of a resource; one without a coordinator is free."""
        terms = inspecting.terms
        found = await self._query(terms.resource, "snapshot", inspecting.limit)
        return found or Snapshot(terms.resource, terms.capacity, (), (), 0, 0)

    @activity.defn(name=coordinator.POSITION)
    async def position(self, placing: Placing) -> Position | None:
        """Where a ticket stands in the queue; nobody waits at a resource without a coordinator."""
        found: Position | None = await self._query(placing.terms.resource, "position", placing.ticket)
        return found

    def _handle(self, resource: str) -> WorkflowHandle[Any, Any]:
        return self._client.get_workflow_handle(coordinator.workflow_id_of(resource))

    async def _signal(self, call: coordinator.Call, name: str, said: object) -> bool:
        """Signals the coordinator; returns False if there is none."""
        resource = call.terms.resource
        return await COORDINATORS.signal(resource, self._handle(resource), name, said)

    async def _query(self, resource: str, name: str, *args: Any) -> Any:
        """Queries the coordinator; returns None if there is none."""
        return await COORDINATORS.query(resource, self._handle(resource), getattr(Coordinator, name), *args)


class Looking:
    """The local activity by which the library's workflows look at runs, bound to the internal worker's client."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    @activity.defn(name=coordinator.LOOK)
    async def look(self, owners: list[coordinator.Owner]) -> list[coordinator.Seen]:
        """The status of each of these runs."""
        looks = await at_once(self._monitor.look((owner.workflow_id, owner.run_id)) for owner in owners)
        return [coordinator.Seen(look.fate.value, look.open_run_id) for look in looks]
