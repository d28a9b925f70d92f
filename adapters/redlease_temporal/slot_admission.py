"""The places of workflows whose number is limited, without Redis: one is taken while the workflow of its ID is open."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

from temporalio import activity
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.exceptions import ApplicationError, ApplicationErrorCategory, WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from .limited import Entry
from .owners import UNTOLD, Fate, Owners
from .place_workflow import OWNER, PLACE

PROVISIONAL = timedelta(seconds=30)  # how long a place is kept for a start of which nothing more is heard


class Taken(NamedTuple):
    """A place that was taken: the ID of its workflow, and the run."""

    place_id: str
    run_id: str


class SlotAdmission:
    """What takes and gives places.

    Args:
        temporal: A client of the namespace that the workflows are in.
        task_queue: Of the internal worker.
        owners: Ask how workflows stand.
    """

    def __init__(self, temporal: Client, task_queue: str, owners: Owners) -> None:
        self._temporal = temporal
        self._task_queue = task_queue
        self._owners = owners

    async def reserve(self, entry: Entry) -> Taken | None:
        """Takes a place for a start that is to follow; None when the workflow runs already, and needs none.

        Raises:
            WorkflowConcurrencyLimitExceeded: There is none.
        """
        if (await self._owners.look((entry.workflow_id, ""))).fate is Fate.OPEN:
            return None
        # The same workflow is likely to have had this one before, and may just have been closed.
        first = next(_places(entry))
        if await self._owner_of(first) == entry.workflow_id:
            await self._end_if_over(first)
        taken = await self._take(entry)
        if taken is None:
            raise entry.refusal()
        return taken

    async def confirm(self, taken: Taken, chain: str) -> None:
        """Nothing: the place finds out by itself whether its workflow was started."""

    async def forgo(self, entry: Entry, taken: Taken | None = None) -> None:
        """The workflow was not started: its place is free, unless there is a run that it belongs to."""
        if (await self._owners.look((entry.workflow_id, ""))).fate is not Fate.CLOSED:
            return
        if taken is not None:
            await self._end(*taken)
            return
        for place_id in _places(entry):
            if await self._owner_of(place_id) == entry.workflow_id:
                await self._end(place_id, None)

    async def admit(self, entry: Entry) -> bool:
        """Takes the place of a run, or finds the one that it has; whether there is one."""
        for place_id in _places(entry):
            # Runs of that ID which are over, as when they were terminated by this start, had a place of their own.
            if await self._owner_of(place_id, entry.chain) == entry.workflow_id:
                return True
        return await self._take(entry) is not None

    @activity.defn(name=OWNER)
    async def owner(self, entry: Entry) -> str:
        """The chain of runs of a workflow once it runs; with that chain, an empty text once that is closed."""
        info = activity.info()
        look = await self._owners.look((entry.workflow_id, ""))
        runs = look.fate is Fate.OPEN and look.workflow_type == entry.workflow_type
        if runs and not entry.chain:
            return look.chain
        gone = look.fate is not Fate.UNKNOWN and not (runs and look.chain in {entry.chain, UNTOLD})
        if gone and (entry.chain or info.current_attempt_scheduled_time - info.scheduled_time > PROVISIONAL):
            return ""
        raise ApplicationError("nothing has changed", type="Unchanged", category=ApplicationErrorCategory.BENIGN)

    # How it is done

    async def _take(self, entry: Entry) -> Taken | None:
        for place_id in _places(entry):
            if (taken := await self._start(entry, place_id)) is not None:
                return taken
        for place_id in _places(entry):
            await self._end_if_over(place_id)
            if (taken := await self._start(entry, place_id)) is not None:
                return taken
        return None

    async def _start(self, entry: Entry, place_id: str) -> Taken | None:
        memo = {"workflow_id": entry.workflow_id, "workflow_type": entry.workflow_type}
        try:
            handle = await self._temporal.start_workflow(
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
        return Taken(place_id, handle.first_execution_run_id or "")

    async def _end_if_over(self, place_id: str) -> None:
        """Ends a place whose workflow is closed. One whose workflow is still to be started is not over."""
        place = await self._open(place_id)
        if place is None:
            return
        memo = await place.memo()
        owner = await self._described(memo.get("workflow_id", ""))
        if owner is None:
            return
        if owner.status == WorkflowExecutionStatus.RUNNING:
            first = owner.raw_description.workflow_execution_info.first_run_id or UNTOLD
            over = owner.workflow_type != memo.get("workflow_type") or memo.get("chain", first) != first
        else:
            # Both times are the server's.
            over = owner.close_time is not None and owner.close_time >= place.start_time
        if over:
            await self._end(place_id, place.run_id)

    async def _owner_of(self, place_id: str, chain: str = "") -> str | None:
        """Who has a place; None when nobody has it, or runs of another chain than the one that is given."""
        place = await self._open(place_id)
        if place is None:
            return None
        memo = await place.memo()
        if chain and memo.get("chain", chain) not in {chain, UNTOLD}:
            return None
        return str(memo.get("workflow_id", ""))

    async def _open(self, place_id: str) -> WorkflowExecutionDescription | None:
        place = await self._described(place_id)
        return place if place is not None and place.status == WorkflowExecutionStatus.RUNNING else None

    async def _described(self, workflow_id: str) -> WorkflowExecutionDescription | None:
        try:
            return await self._temporal.get_workflow_handle(workflow_id).describe()
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise
            return None

    async def _end(self, place_id: str, run_id: str | None) -> None:
        handle = self._temporal.get_workflow_handle(place_id, run_id=run_id)
        try:
            await handle.terminate("its workflow does not run")
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise


def _places(entry: Entry) -> Iterator[str]:
    """The IDs of all places, in an order that is the workflow's own, so that not all begin with the same."""
    first = zlib.crc32(entry.workflow_id.encode())
    for number in range(entry.limit):
        yield f"{entry.resource}:{(first + number) % entry.limit}"
