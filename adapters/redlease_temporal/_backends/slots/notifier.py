"""Notifies the line of a slot that the slot is free, once its workflow has ended: it cannot do so after its own end.

If this process dies first, waiters find the free slot on their next retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from datetime import timedelta

from temporalio import activity
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from redlease_temporal._common.resource_workflows import UNSURE
from redlease_temporal._common.retrying import retry_until_done
from redlease_temporal._payloads.locks import OFFER_SIGNAL
from redlease_temporal._payloads.slots import NOTIFY, SlotHandover, SlotOffer, SpareSlot, slot_id

from .completion import end_of

logger = logging.getLogger("redlease.temporal")

ENDS_IN_S = 60.0  # how long a slot may take to end
SIGNAL_TIMEOUT = timedelta(seconds=5)


class SlotNotifier:
    """Waits for slots to end and notifies their lines, in the process of an internal worker."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Works until the block ends."""
        try:
            yield
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @activity.defn(name=NOTIFY)
    async def notify(self, handover: SlotHandover) -> None:
        """Notifies the head of the line when the slot has ended; a later call for the same run replaces this one."""
        before = self._tasks.pop(handover.run_id, None)
        if before is not None:
            before.cancel()
        task = self._tasks[handover.run_id] = asyncio.create_task(self._notify(handover))
        task.add_done_callback(lambda _: self._forget(handover.run_id, task))

    def _forget(self, run_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(run_id) is task:
            del self._tasks[run_id]
        if not task.cancelled() and task.exception() is not None:
            logger.warning("the next in a slot's line was not notified; it finds out by itself: %s", task.exception())

    async def _notify(self, handover: SlotHandover) -> None:
        slot = f"resource {handover.resource!r}: telling the line that slot {handover.slot} is free"
        async with asyncio.timeout(ENDS_IN_S):
            await retry_until_done(slot, lambda: self._notify_when_ended(handover))

    async def _notify_when_ended(self, handover: SlotHandover) -> None:
        await end_of(self._client, handover.resource, handover.slot, handover.run_id)
        rest = handover.waiters
        while rest:
            head, *rest = rest
            offer = SlotOffer(handover.resource, handover.slot, head.requester.request, rest, handover.floor)
            if await self._signal(head.requester.workflow_id, OFFER_SIGNAL, offer):
                return
        hints = handover.hints
        while hints:
            slot, *hints = hints
            spare = SpareSlot(handover.slot, hints, handover.floor)
            if await self._signal(slot_id(handover.resource, slot), "spare", spare):
                return

    async def _signal(self, workflow_id: str, name: str, message: object) -> bool:
        """Signals a workflow; returns False if no run with that id is open."""
        try:
            await self._client.get_workflow_handle(workflow_id).signal(name, message, rpc_timeout=SIGNAL_TIMEOUT)
        except RPCError as error:
            if error.status in UNSURE or error.status == RPCStatusCode.RESOURCE_EXHAUSTED:
                raise  # the caller retries
            if error.status != RPCStatusCode.NOT_FOUND:
                logger.warning("workflow %r cannot be notified of a free slot, the next one is: %s", workflow_id, error)
            return False
        return True
