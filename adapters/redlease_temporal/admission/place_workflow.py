"""The place of one workflow without Redis: a workflow whose ID names the place, open while that workflow is open.

It checks that workflow seldom. A workflow that finds no place free checks the owners of all places itself, and ends the
places of those that have closed.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy

from redlease_temporal.workflow_side.backend import read

from .rule import Entry

PLACE = "redlease.place"  # the workflow's type
OWNER = "redlease.place_owner"  # its activity, whose attempts fail while nothing has changed
# Retries of an activity add no events to the history.
BEGINNING = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), backoff_coefficient=1.5, maximum_interval=timedelta(seconds=5)
)
RUNNING = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=1.5, maximum_interval=timedelta(minutes=1)
)
ANSWER = timedelta(seconds=10)


@workflow.defn(name=PLACE)
class PlaceWorkflow:
    """A place while it is taken. Its memo names the owner: `workflow_id`, `workflow_type`, and `chain` once it runs."""

    @workflow.run
    async def run(self, entry: Entry) -> None:
        """Runs until the workflow that owns the place has closed, or was not started in time."""
        if not entry.chain:
            entry = replace(entry, chain=await self._owner(entry, BEGINNING))
            workflow.upsert_memo({"chain": entry.chain})
        if entry.chain:
            await self._owner(entry, RUNNING)

    async def _owner(self, entry: Entry, asking: RetryPolicy) -> str:
        while True:
            told: RawValue | None = await workflow.execute_activity(
                OWNER,
                entry,
                result_type=RawValue,
                start_to_close_timeout=ANSWER,
                retry_policy=asking,
                summary=f"until {entry.workflow_id} {'is closed' if entry.chain else 'runs'}",
            )
            try:
                return read(told, str)
            except ValueError as error:
                workflow.logger.warning("somebody completed %s by hand: %s; asking again", OWNER, error)
