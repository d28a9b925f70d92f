"""Asks the workflow that keeps a permit whether it is still held."""

from __future__ import annotations

from temporalio.client import Client

from redlease_temporal.backends.coordinator.activities import CoordinatorActivities
from redlease_temporal.backends.slots.activities import SlotActivities
from redlease_temporal.payloads.coordinator import workflow_id_of
from redlease_temporal.payloads.locks import Checking, Guard, Terms


async def keeper_has(client: Client, guard: Guard) -> bool:
    """Whether the permit that guards an activity is held now.

    Raises:
        Unavailable: The server did not answer in time.
    """
    if guard.kept_by == workflow_id_of(guard.resource):
        checking = Checking(Terms(guard.resource, 1, 0), guard.ticket, guard.fence)
        return await CoordinatorActivities(client, "").has(checking)
    return await SlotActivities(client).has(guard)
