"""Workflows whose activities are begun after the permit around them was given back."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from backend_flows import SOON, Actor, Holder, On, guarded
from temporalio import workflow
from temporalio.exceptions import ActivityError


@workflow.defn
class CleansUp:
    """A child that runs an activity when it is cancelled."""

    @workflow.run
    async def run(self) -> str:
        """Return what became of the activity."""
        try:
            await workflow.wait_condition(lambda: False)
        except asyncio.CancelledError:
            try:
                await workflow.execute_activity(guarded, args=[0, 0.0], start_to_close_timeout=SOON)
            except ActivityError as error:
                return f"refused: {error.cause}"
        return "ran"


@workflow.defn
class LeavesAChild:
    """A hold around the start of a child that is cancelled as this run ends."""

    @workflow.run
    async def run(self, on: On, child_id: str) -> None:
        """End with the child still running."""
        async with on.pool().hold():
            await workflow.start_child_workflow(
                CleansUp.run, id=child_id, parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL
            )
        await workflow.sleep(timedelta(seconds=1))  # the next holder has it when this run ends


WORKFLOWS = [Actor, CleansUp, Holder, LeavesAChild]
