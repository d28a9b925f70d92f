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

from redlease_temporal.common.descriptions import Description, describe
from redlease_temporal.common.run_monitor import UNTOLD, RunMonitor, RunStatus

from .place_workflow import OWNER, PLACE
from .replacing import Taken
from .rule import Entry

PROVISIONAL = timedelta(seconds=30)  # how long a reserved place is kept if nothing confirms the start


class Reserved(NamedTuple):
    """A place that was taken: the ID of its workflow, and the run."""

    place_id: str
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

    async def reserve(self, entry: Entry) -> Reserved | None:
        """Takes a place for a start that is to follow; None if the workflow runs already, and needs none.

        Raises:
            WorkflowConcurrencyLimitExceeded: No place is free.
        """
        if (await self.monitor.look((entry.workflow_id, ""))).fate is RunStatus.OPEN:
            return None
        # The same workflow probably had this place before, and may just have closed.
        first = next(_places(entry))
        if await self._owner_of(first) == entry.workflow_id:
            await self._end_if_over(first)
        taken = await self._take(entry)
        if taken is None:
            raise entry.refusal()
        return taken

    async def confirm(self, taken: Taken, chain: str) -> None:
        """Does nothing: the place itself finds out whether its workflow was started."""

    async def forgo(self, entry: Entry, taken: Reserved | None = None) -> None:
        """The workflow was not started: frees its place, unless the ID has an open run that it belongs to."""
        if (await self.monitor.look((entry.workflow_id, ""))).fate is not RunStatus.CLOSED:
            return
        if taken is not None:
            await self._end(*taken)
            return
        for place_id in _places(entry):
            if await self._owner_of(place_id) == entry.workflow_id:
                await self._end(place_id, None)

    async def admit(self, entry: Entry) -> bool:
        """Takes the place of a run, or finds the one that it has; returns whether there is one."""
        for place_id in _places(entry):
            # Closed runs of that ID, such as one that this start terminated, may still have a place of their own.
            if await self._owner_of(place_id, entry.chain) == entry.workflow_id:
                return True
        return await self._take(entry) is not None

    @activity.defn(name=OWNER)
    async def owner(self, entry: Entry) -> str:
        """The workflow's chain once it runs; if `entry` has that chain, an empty text once it has closed."""
        info = activity.info()
        look = await self.monitor.look((entry.workflow_id, ""))
        runs = look.fate is RunStatus.OPEN and look.workflow_type == entry.workflow_type
        if runs and not entry.chain:
            return look.chain
        gone = look.fate is not RunStatus.UNKNOWN and not (runs and look.chain in {entry.chain, UNTOLD})
        if gone and (entry.chain or info.current_attempt_scheduled_time - info.scheduled_time > PROVISIONAL):
            return ""
        raise ApplicationError("nothing has changed", type="Unchanged", category=ApplicationErrorCategory.BENIGN)

    async def taken(self, entry: Entry) -> tuple[list[Taken], float]:
        """The places that other workflows have, and when the last of them was taken, in s.

        Temporal does not say what time it is. So starts that wait for one place stand in no order: any one may get it.
        """
        found = []
        for place_id in _places(entry):
            place = await self._open(place_id)
            owner = "" if place is None else await place.memo("workflow_id", str, "")
            if place is not None and owner and owner != entry.workflow_id:
                found.append(Taken(owner, place_id, place.started.timestamp()))
        return found, max((each.asked for each in found), default=0)

    async def free_if_over(self, entry: Entry, taken: Taken) -> bool:
        """Frees a place whose workflow has closed, should nobody else have done so yet; returns whether it has."""
        del entry
        return await self._end_if_over(taken.place)

    # Implementation

    async def _take(self, entry: Entry) -> Reserved | None:
        for place_id in _places(entry):
            if (taken := await self._start(entry, place_id)) is not None:
                return taken
        for place_id in _places(entry):
            await self._end_if_over(place_id)
            if (taken := await self._start(entry, place_id)) is not None:
                return taken
        return None

    async def _start(self, entry: Entry, place_id: str) -> Reserved | None:
        memo = {"workflow_id": entry.workflow_id, "workflow_type": entry.workflow_type}
        try:
            handle = await self.temporal.start_workflow(
                PLACE,
                entry,
                id=place_id,
                task_queue=self._task_queue,
                id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
                memo=memo | {"chain": entry.chain} if entry.chain else memo,
                static_summary=f"place of {entry.workflow_id}"[:200],
            )
        except WorkflowAlreadyStartedError:
            return None
        return Reserved(place_id, handle.first_execution_run_id or "")

    async def _end_if_over(self, place_id: str) -> bool:
        """Ends a place whose workflow has closed, but none whose workflow is to start; returns whether it has."""
        place = await self._open(place_id)
        if place is None:
            return False
        owner = await self._described(await place.memo("workflow_id", str, ""))
        if owner is None:
            return False
        if owner.is_open:
            first = owner.info.first_run_id or UNTOLD
            same_type = owner.info.type.name == await place.memo("workflow_type", str, "")
            over = not same_type or await place.memo("chain", str, first) != first
        else:
            # Both times are the server's.
            over = owner.closed is not None and owner.closed >= place.started
        if over:
            await self._end(place_id, place.run_id)
        return over

    async def _owner_of(self, place_id: str, chain: str = "") -> str | None:
        """The owner of a place; None if it is free, or if runs of another chain than the given one have it."""
        place = await self._open(place_id)
        if place is None:
            return None
        if chain and await place.memo("chain", str, chain) not in {chain, UNTOLD}:
            return None
        return await place.memo("workflow_id", str, "")

    async def _open(self, place_id: str) -> Description | None:
        place = await self._described(place_id)
        return place if place is not None and place.is_open else None

    async def _described(self, workflow_id: str) -> Description | None:
        try:
            return await describe(self.temporal, workflow_id)
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return None

    async def _end(self, place_id: str, run_id: str | None) -> None:
        handle = self.temporal.get_workflow_handle(place_id, run_id=run_id)
        try:
            await handle.terminate("its workflow does not run")
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise


def _places(entry: Entry) -> Iterator[str]:
    """The IDs of all places, in an order that depends on the workflow, so that not all try the same one first."""
    first = zlib.crc32(entry.workflow_id.encode())
    for number in range(entry.limit):
        yield f"{entry.resource}:{(first + number) % entry.limit}"
