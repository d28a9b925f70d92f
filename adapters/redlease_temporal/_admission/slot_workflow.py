"""The place of one workflow without Redis: a workflow whose ID names the place, open while that workflow is open.

It checks that workflow seldom. A workflow that finds no place free checks the owners of all places itself, and ends the
places of those that have closed.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy

from redlease_temporal._workflow_side.backend import read

from .rule import AdmissionRequest

ADMISSION_SLOT = "redlease.admission_slot"  # the workflow's type
SLOT_OWNER = "redlease.admission_slot_owner"  # its activity, whose attempts fail while nothing has changed
# Retries of an activity add no events to the history.
UNTIL_STARTED = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), backoff_coefficient=1.5, maximum_interval=timedelta(seconds=5)
)
UNTIL_CLOSED = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=1.5, maximum_interval=timedelta(minutes=1)
)
OWNER_TIMEOUT = timedelta(seconds=10)


@workflow.defn(name=ADMISSION_SLOT)
class AdmissionSlotWorkflow:
    """A place while it is taken. Its memo names the owner: `workflow_id`, `workflow_type`, and `chain` once it runs."""

    @workflow.run
    async def run(self, request: AdmissionRequest) -> None:
        """Runs until the workflow that owns the place has closed, or was not started in time."""
        if not request.chain:
            request = replace(request, chain=await self._await_owner(request, UNTIL_STARTED))
            workflow.upsert_memo({"chain": request.chain})
        if request.chain:
            await self._await_owner(request, UNTIL_CLOSED)

    async def _await_owner(self, request: AdmissionRequest, retry_policy: RetryPolicy) -> str:
        while True:
            returned: RawValue | None = await workflow.execute_activity(
                SLOT_OWNER,
                request,
                result_type=RawValue,
                start_to_close_timeout=OWNER_TIMEOUT,
                retry_policy=retry_policy,
                summary=f"until {request.workflow_id} {'is closed' if request.chain else 'runs'}",
            )
            try:
                return read(returned, str)
            except ValueError as error:
                workflow.logger.warning("somebody completed %s by hand: %s; asking again", SLOT_OWNER, error)
