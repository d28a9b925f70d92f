"""Whether a permit is held, as the workflow that keeps it says."""

from __future__ import annotations

from temporalio.client import Client

from .calls import Checking, Guard, Terms
from .coordinator_activities import CoordinatorActivities
from .coordinator_calls import workflow_id_of
from .slot_activities import SlotActivities


async def keeper_has(client: Client, guard: Guard) -> bool:
    """Whether the permit that guards an activity is held now.

    Raises:
        Unavailable: That was not said in time.
    """
    if guard.kept_by == workflow_id_of(guard.resource):
        checking = Checking(Terms(guard.resource, 1, 0), guard.ticket, guard.fence)
        return await CoordinatorActivities(client, "").has(checking)
    return await SlotActivities(client).has(guard)
