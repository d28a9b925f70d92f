"""The place of one workflow, where there is no Redis: a workflow whose ID is the place, open for as long as that one.

It asks seldom how that one stands. Whoever finds no place free looks for himself, and ends those that are over.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RetryPolicy

from .limited import Entry

PLACE = "redlease.place"  # the workflow's type
OWNER = "redlease.place_owner"  # its activity, whose attempts fail for as long as there is nothing to tell
# A retry stands in no history.
BEGINNING = RetryPolicy(
    initial_interval=timedelta(milliseconds=200), backoff_coefficient=1.5, maximum_interval=timedelta(seconds=5)
)
RUNNING = RetryPolicy(
    initial_interval=timedelta(seconds=1), backoff_coefficient=1.5, maximum_interval=timedelta(minutes=1)
)
ANSWER = timedelta(seconds=10)


@workflow.defn(name=PLACE)
class PlaceWorkflow:
    """A place while it is taken. Its memo says who has it: `workflow_id`, `workflow_type`, and `chain` once it runs."""

    @workflow.run
    async def run(self, entry: Entry) -> None:
        """Runs until the workflow that has the place is closed, or was not started in time."""
        if not entry.chain:
            entry = replace(entry, chain=await self._owner(entry, BEGINNING))
            workflow.upsert_memo({"chain": entry.chain})
        if entry.chain:
            await self._owner(entry, RUNNING)

    async def _owner(self, entry: Entry, asking: RetryPolicy) -> str:
        told: str = await workflow.execute_activity(
            OWNER,
            entry,
            result_type=str,
            start_to_close_timeout=ANSWER,
            retry_policy=asking,
            summary=f"until {entry.workflow_id} {'is closed' if entry.chain else 'runs'}",
        )
        return told
