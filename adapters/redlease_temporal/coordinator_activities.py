"""The local activities by which workflow runs reach a resource's coordinator, and by which that looks at runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import QueryRejectCondition, WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from redlease.models import Permit, Snapshot

from . import coordinator_calls as calls
from .calls import Checking, Guard, Inspecting
from .coordinator import Coordinator
from .errors import LeaseLost, Unavailable
from .hold import lease_lost
from .owners import Owners

ANSWER = timedelta(seconds=3)  # how long the server, or the coordinator's worker, may take to answer
LOOKS_AT_ONCE = 20


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
            raise unavailable(request.terms.resource, error) from error

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
    async def renew(self, call: calls.Call) -> Permit:
        """Gives a permit a new lease."""
        assert call.renewal is not None
        renewal, resource = call.renewal, call.terms.resource
        await self._signal(call, "renew", renewal)
        found = await self._query(resource, "permit", renewal.ticket, renewal.fence)
        if found is None or found.permit is None:
            raise _gone(resource, renewal.ticket, renewal.fence)
        permit: Permit = found.permit
        return permit

    @activity.defn(name=calls.ADOPT)
    async def adopt(self, call: calls.Call) -> Permit:
        """Takes a permit over for a run."""
        assert call.adoption is not None
        adoption, resource = call.adoption, call.terms.resource
        await self._signal(call, "adopt", adoption)
        found = await self._query(resource, "adopted", adoption.ticket, adoption.requester.request)
        if found is None or found.permit is None:
            raise _gone(resource, adoption.ticket, adoption.fence)
        permit: Permit = found.permit
        return permit

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
        try:
            await self._handle(resource).signal(name, said, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise unavailable(resource, error) from error
        return True

    async def _query(self, resource: str, name: str, *args: Any) -> Any:
        """Asks the coordinator; None when there is none."""
        while True:
            try:
                return await self._handle(resource).query(
                    getattr(Coordinator, name),
                    args=args,
                    reject_condition=QueryRejectCondition.NOT_OPEN,
                    rpc_timeout=ANSWER,
                )
            except WorkflowQueryRejectedError as error:
                if error.status != WorkflowExecutionStatus.CONTINUED_AS_NEW:
                    return None  # and if it is, the next run has the answer
            except WorkflowQueryFailedError as error:
                raise unavailable(resource, error) from error
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    return None
                raise unavailable(resource, error) from error


class Looking:
    """The local activity by which the library's workflows look at runs, bound to the internal worker's client."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners

    @activity.defn(name=calls.LOOK)
    async def look(self, owners: list[calls.Owner]) -> list[calls.Seen]:
        """How each of these runs stands."""
        turn = asyncio.Semaphore(LOOKS_AT_ONCE)

        async def one(owner: calls.Owner) -> calls.Seen:
            async with turn:
                look = await self._owners.look((owner.workflow_id, owner.run_id))
            return calls.Seen(look.fate.value, look.open_run_id)

        return await asyncio.gather(*(one(owner) for owner in owners))


def unavailable(resource: str, error: Exception) -> Unavailable:
    """The error for a coordinator that could not be reached."""
    message = f"resource {resource!r}: its coordinator did not answer ({error}). It is safe to try again"
    return Unavailable(message, resource=resource)


def _gone(resource: str, ticket: str, fence: int) -> LeaseLost:
    return lease_lost(Guard(resource, ticket, fence), "it lapsed, was released, or was adopted by another run")
