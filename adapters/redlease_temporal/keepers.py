"""Whether a permit is held, as the workflow that keeps it says."""

from __future__ import annotations

from temporalio.client import Client

from .calls import Checking, Guard, Terms
from .coordinator_activities import CoordinatorActivities


async def keeper_has(client: Client, guard: Guard) -> bool:
    """Whether the permit that guards an activity is held now.

    Raises:
        Unavailable: That was not said in time.
    """
    checking = Checking(Terms(guard.resource, 1, 0), guard.ticket, guard.fence)
    return await CoordinatorActivities(client, "").has(checking)
