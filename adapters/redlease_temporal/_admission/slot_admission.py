"""Places of workflows with `@concurrency`, without Redis: a place is taken while the workflow of its ID is open."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

from temporalio import activity
from temporalio.client import Client
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from redlease_temporal._common.descriptions import Description, describe
from redlease_temporal._common.run_monitor import CHAIN_UNKNOWN, RunMonitor, RunStatus

from .replacing import TakenSlot
from .rule import AdmissionRequest
from .slot_workflow import ADMISSION_SLOT, SLOT_OWNER

PROVISIONAL = timedelta(seconds=30)  # how long a reserved place is kept if nothing confirms the start


class ReservedSlot(NamedTuple):
    """A place that was taken: the ID of its workflow, and the run."""

    slot_id: str
    run_id: str


class SlotAdmission:
    """Takes and frees places.

    Args:
        temporal: A client of the workflows' namespace.
        task_queue: Of the internal worker.
        monitor: Asks for the status of workflows.
    """

    def __init__(self, temporal: Client, task_queue: str, monitor: RunMonitor) -> None:
        self.temporal = temporal
        self._task_queue = task_queue
        self.monitor = monitor

    async def reserve(self, request: AdmissionRequest) -> ReservedSlot | None:
        """Takes a place for a start that is to follow; None if the workflow runs already, and needs none.

        Raises:
            WorkflowConcurrencyLimitExceeded: No place is free.
        """
        if (await self.monitor.poll((request.workflow_id, ""))).status is RunStatus.OPEN:
            return None
        # The same workflow probably had this place before, and may just have closed.
        first = next(_slot_ids(request))
        if await self._owner_of(first) == request.workflow_id:
            await self._end_if_closed(first)
        taken = await self._take(request)
        if taken is None:
            raise request.refusal()
        return taken

    async def confirm(self, taken: TakenSlot, chain: str) -> None:
        """Does nothing: the place itself finds out whether its workflow was started."""

    async def cancel_reservation(self, request: AdmissionRequest, taken: ReservedSlot | None = None) -> None:
        """The workflow was not started: frees its place, unless the ID has an open run that it belongs to."""
        if (await self.monitor.poll((request.workflow_id, ""))).status is not RunStatus.CLOSED:
            return
        if taken is not None:
            await self._end(*taken)
            return
        for slot_id in _slot_ids(request):
            if await self._owner_of(slot_id) == request.workflow_id:
                await self._end(slot_id, None)

    async def admit(self, request: AdmissionRequest) -> bool:
        """Takes the place of a run, or finds the one that it has; returns whether there is one."""
        for slot_id in _slot_ids(request):
            # Closed runs of that ID, such as one that this start terminated, may still have a place of their own.
            if await self._owner_of(slot_id, request.chain) == request.workflow_id:
                return True
        return await self._take(request) is not None

    @activity.defn(name=SLOT_OWNER)
    async def owner(self, request: AdmissionRequest) -> str:
        """The workflow's chain once it runs; if `request` has that chain, an empty text once it has closed."""
        info = activity.info()
        state = await self.monitor.poll((request.workflow_id, ""))
        runs = state.status is RunStatus.OPEN and state.workflow_type == request.workflow_type
        if runs and not request.chain:
            return state.chain
        gone = state.status is not RunStatus.UNKNOWN and not (runs and state.chain in {request.chain, CHAIN_UNKNOWN})
        if gone and (request.chain or info.current_attempt_scheduled_time - info.scheduled_time > PROVISIONAL):
            return ""
        raise ApplicationError("nothing has changed", type="Unchanged", category=ApplicationErrorCategory.BENIGN)

    async def taken_slots(self, request: AdmissionRequest) -> tuple[list[TakenSlot], float]:
        """The places that other workflows have, and when the last of them was taken, in s.

        Temporal does not say what time it is. So starts that wait for one place stand in no order: any one may get it.
        """
        taken = []
        for slot_id in _slot_ids(request):
            slot = await self._open(slot_id)
            owner = "" if slot is None else await slot.memo("workflow_id", str, "")
            if slot is not None and owner and owner != request.workflow_id:
                taken.append(TakenSlot(owner, slot_id, slot.started.timestamp()))
        return taken, max((each.requested_at for each in taken), default=0)

    async def free_if_closed(self, request: AdmissionRequest, taken: TakenSlot) -> bool:
        """Frees a place whose workflow has closed, should nobody else have done so yet; returns whether it has."""
        del request
        return await self._end_if_closed(taken.slot_id)

    # Implementation

    async def _take(self, request: AdmissionRequest) -> ReservedSlot | None:
        for slot_id in _slot_ids(request):
            if (taken := await self._start(request, slot_id)) is not None:
                return taken
        for slot_id in _slot_ids(request):
            await self._end_if_closed(slot_id)
            if (taken := await self._start(request, slot_id)) is not None:
                return taken
        return None

    async def _start(self, request: AdmissionRequest, slot_id: str) -> ReservedSlot | None:
        memo = {"workflow_id": request.workflow_id, "workflow_type": request.workflow_type}
        try:
            handle = await self.temporal.start_workflow(
                ADMISSION_SLOT,
                request,
                id=slot_id,
                task_queue=self._task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                memo=memo | {"chain": request.chain} if request.chain else memo,
                static_summary=f"place of {request.workflow_id}"[:200],
            )
        except WorkflowAlreadyStartedError:
            return None
        return ReservedSlot(slot_id, handle.first_execution_run_id or "")

    async def _end_if_closed(self, slot_id: str) -> bool:
        """Ends a place whose workflow has closed, but none whose workflow is to start; returns whether it has."""
        slot = await self._open(slot_id)
        if slot is None:
            return False
        owner = await self._described(await slot.memo("workflow_id", str, ""))
        if owner is None:
            return False
        if owner.is_open:
            first = owner.info.first_run_id or CHAIN_UNKNOWN
            same_type = owner.info.type.name == await slot.memo("workflow_type", str, "")
            is_over = not same_type or await slot.memo("chain", str, first) != first
        else:
            # Both times are the server's.
            is_over = owner.closed is not None and owner.closed >= slot.started
        if is_over:
            await self._end(slot_id, slot.run_id)
        return is_over

    async def _owner_of(self, slot_id: str, chain: str = "") -> str | None:
        """The owner of a place; None if it is free, or if runs of another chain than the given one have it."""
        slot = await self._open(slot_id)
        if slot is None:
            return None
        if chain and await slot.memo("chain", str, chain) not in {chain, CHAIN_UNKNOWN}:
            return None
        return await slot.memo("workflow_id", str, "")

    async def _open(self, slot_id: str) -> Description | None:
        slot = await self._described(slot_id)
        return slot if slot is not None and slot.is_open else None

    async def _described(self, workflow_id: str) -> Description | None:
        try:
            return await describe(self.temporal, workflow_id)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return None

    async def _end(self, slot_id: str, run_id: str | None) -> None:
        handle = self.temporal.get_workflow_handle(slot_id, run_id=run_id)
        try:
            await handle.terminate("its workflow does not run")
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise


def _slot_ids(request: AdmissionRequest) -> Iterator[str]:
    """The IDs of all places, in an order that depends on the workflow, so that not all try the same one first."""
    first = zlib.crc32(request.workflow_id.encode())
    for number in range(request.limit):
        yield f"{request.resource}:{(first + number) % request.limit}"
