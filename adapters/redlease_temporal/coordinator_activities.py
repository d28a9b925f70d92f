"""The local activities by which workflow runs reach a resource's coordinator, and by which that looks at runs."""

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

from redlease.models import Snapshot

from . import coordinator_calls as calls
from .calls import Checking, Inspecting, Prolonged
from .coordinator import Coordinator
from .owners import Owners
from .telling import ANSWER, Keepers, at_once, gone

COORDINATORS = Keepers("its coordinator")


class CoordinatorActivities:
    """What workflow code calls, bound to the client of the worker that runs it.

    `task_queue`: of the internal worker, on which coordinators run.
    """

    def __init__(self, client: Client, task_queue: str) -> None:
        self._client = client
        self._task_queue = task_queue

    @property
    def local(self) -> list[Callable[..., Any]]:
        """For workers that run workflows."""
        return [self.ask, self.release, self.renew, self.adopt, self.check, self.inspect]

    @activity.defn(name=calls.ASK)
    async def ask(self, request: calls.Request) -> None:
        """Asks the coordinator for a permit, and starts it if it does not run."""
        try:
            await self._client.start_workflow(
                Coordinator.run,
                id=calls.workflow_id_of(request.terms.resource),
                task_queue=self._task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
                start_signal="request",
                start_signal_args=[request],
                static_summary=f"coordinator of {request.terms.resource}",
                rpc_timeout=ANSWER,
            )
        except RPCError as error:
            raise COORDINATORS.unavailable(request.terms.resource, error) from error

    @activity.defn(name=calls.RELEASE)
    async def release(self, call: calls.Call) -> bool:
        """Takes a ticket out; whether it held or waited."""
        release = call.release
        if release is None or not await self._signal(call, "release", release):
            return False
        if not release.call:
            return True
        return bool(await self._query(call.terms.resource, "outcome", release.call))

    @activity.defn(name=calls.RENEW)
    async def renew(self, call: calls.Call) -> Prolonged:
        """Gives a permit a new lease."""
        assert call.renewal is not None
        renewal, resource = call.renewal, call.terms.resource
        await self._signal(call, "renew", renewal)
        found = await self._query(resource, "permit", renewal.ticket, renewal.fence)
        if found is None or found.permit is None:
            raise gone(resource, renewal.ticket, renewal.fence)
        return Prolonged.of(found.permit)

    @activity.defn(name=calls.ADOPT)
    async def adopt(self, call: calls.Call) -> Prolonged:
        """Takes a permit over for a run."""
        assert call.adoption is not None
        adoption, resource = call.adoption, call.terms.resource
        await self._signal(call, "adopt", adoption)
        found = await self._query(resource, "adopted", adoption.ticket, adoption.requester.request)
        if found is None or found.permit is None:
            raise gone(resource, adoption.ticket, adoption.fence)
        return Prolonged.of(found.permit)

    @activity.defn(name=calls.CHECK)
    async def check(self, checking: Checking) -> bool:
        """Whether a permit is held now."""
        return await self.has(checking)

    async def has(self, checking: Checking) -> bool:
        """Whether a permit is held now, as the coordinator says."""
        found = await self._query(checking.terms.resource, "permit", checking.ticket, checking.fence)
        return found is not None and found.permit is not None

    @activity.defn(name=calls.INSPECT)
    async def inspect(self, inspecting: Inspecting) -> Snapshot:
        """Looks at a resource; one without a coordinator is free."""
        terms = inspecting.terms
        found = await self._query(terms.resource, "snapshot", inspecting.limit)
        return found or Snapshot(terms.resource, terms.capacity, (), (), 0, 0)

    def _handle(self, resource: str) -> WorkflowHandle[Any, Any]:
        return self._client.get_workflow_handle(calls.workflow_id_of(resource))

    async def _signal(self, call: calls.Call, name: str, said: object) -> bool:
        """Signals the coordinator; False when there is none."""
        resource = call.terms.resource
        return await COORDINATORS.signal(resource, self._handle(resource), name, said)

    async def _query(self, resource: str, name: str, *args: Any) -> Any:
        """Asks the coordinator; None when there is none."""
        return await COORDINATORS.query(resource, self._handle(resource), getattr(Coordinator, name), *args)


class Looking:
    """The local activity by which the library's workflows look at runs, bound to the internal worker's client."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    @activity.defn(name=calls.LOOK)
    async def look(self, owners: list[calls.Owner]) -> list[calls.Seen]:
        """How each of these runs stands."""
        looks = await at_once(self._owners.look((owner.workflow_id, owner.run_id)) for owner in owners)
        return [calls.Seen(look.fate.value, look.open_run_id) for look in looks]
