"""Asks the workflow that keeps a permit whether it is still held.

A server answers one query of a workflow at a time, and makes others retry a second later. So the checks of one process
that come while a query of a coordinator is under way are joined, and the next query asks for all of them.
"""

from __future__ import annotations

import asyncio

from temporalio.client import Client

from redlease_temporal._backends.coordinator.activities import CoordinatorActivities
from redlease_temporal._backends.slots.activities import SlotActivities
from redlease_temporal._payloads.coordinator import workflow_id_of
from redlease_temporal._payloads.locks import PermitHeader

Names = tuple[str, int]  # ticket and fence


class PermitChecks:
    """The checks of the workers of one client, which run in one event loop."""

    def __init__(self, client: Client) -> None:
        self._coordinators = CoordinatorActivities(client, "")
        self._slots = SlotActivities(client)
        self._waiting: dict[str, dict[Names, asyncio.Future[bool]]] = {}  # the checks for the next query, by resource
        self._asking: dict[str, asyncio.Task[None]] = {}

    async def has(self, permit_header: PermitHeader) -> bool:
        """Whether the permit that guards an activity is held now, as known after the call.

        Raises:
            Unavailable: The server did not answer in time.
        """
        resource = permit_header.resource
        if permit_header.resource_workflow != workflow_id_of(resource):
            return await self._slots.has(permit_header)
        waiting = self._waiting.setdefault(resource, {})
        answer = waiting.setdefault(
            (permit_header.ticket, permit_header.fence), asyncio.get_running_loop().create_future()
        )
        if resource not in self._asking:
            self._asking[resource] = asyncio.create_task(self._ask(resource))
        return await asyncio.shield(answer)

    async def _ask(self, resource: str) -> None:
        try:
            while waiting := self._waiting.pop(resource, None):
                try:
                    held = await self._coordinators.are_held(resource, list(waiting))
                except Exception as error:  # noqa: BLE001  whatever it is, those who wait raise it
                    for answer in waiting.values():
                        answer.set_exception(error)
                        answer.exception()  # whoever waited may have been cancelled
                else:
                    for answer, is_held in zip(waiting.values(), held, strict=True):
                        answer.set_result(is_held)
        finally:
            del self._asking[resource]
