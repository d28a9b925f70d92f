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

from redlease_temporal.common.keeper_calls import UNSURE
from redlease_temporal.common.lasting import lasting
from redlease_temporal.payloads.locks import FREE_SIGNAL
from redlease_temporal.payloads.slots import TELL, SlotHandover, SlotOffer, SpareSlot, slot_id

from .completion import end_of

logger = logging.getLogger("redlease.temporal")

ENDS_IN_S = 60.0  # how long a slot may take to end
ANSWER = timedelta(seconds=5)


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

    @activity.defn(name=TELL)
    async def tell(self, hand_on: SlotHandover) -> None:
        """Notifies the head of the line when the slot has ended; a later call for the same run replaces this one."""
        before = self._tasks.pop(hand_on.run_id, None)
        if before is not None:
            before.cancel()
        task = self._tasks[hand_on.run_id] = asyncio.create_task(self._tell(hand_on))
        task.add_done_callback(lambda _: self._forget(hand_on.run_id, task))

    def _forget(self, run_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(run_id) is task:
            del self._tasks[run_id]
        if not task.cancelled() and task.exception() is not None:
            logger.warning("the next in a slot's line was not told; it finds out by itself: %s", task.exception())

    async def _tell(self, hand_on: SlotHandover) -> None:
        slot = f"resource {hand_on.resource!r}: telling the line that slot {hand_on.slot} is free"
        async with asyncio.timeout(ENDS_IN_S):
            await lasting(slot, lambda: self._tell_when_ended(hand_on))

    async def _tell_when_ended(self, hand_on: SlotHandover) -> None:
        await end_of(self._client, hand_on.resource, hand_on.slot, hand_on.run_id)
        rest = hand_on.waiters
        while rest:
            head, *rest = rest
            free = SlotOffer(hand_on.resource, hand_on.slot, head.requester.request, rest, hand_on.floor)
            if await self._signal(head.requester.workflow_id, FREE_SIGNAL, free):
                return
        hints = hand_on.hints
        while hints:
            asked, *hints = hints
            spare = SpareSlot(hand_on.slot, hints, hand_on.floor)
            if await self._signal(slot_id(hand_on.resource, asked), "spare", spare):
                return

    async def _signal(self, workflow_id: str, name: str, said: object) -> bool:
        """Signals a workflow; returns False if no run with that id is open."""
        try:
            await self._client.get_workflow_handle(workflow_id).signal(name, said, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status in UNSURE or error.status == RPCStatusCode.RESOURCE_EXHAUSTED:
                raise  # the caller retries
            if error.status != RPCStatusCode.NOT_FOUND:
                logger.warning("workflow %r cannot be told of a free slot, the next one is: %s", workflow_id, error)
            return False
        return True
