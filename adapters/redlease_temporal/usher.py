"""Tells the next in a slot's line that it is free, once it is: a workflow can say nothing after its own end.

What a process that dies has not told, the back-off of those who wait makes good.
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

from .calls import FREE_SIGNAL
from .endings import end_of
from .slot_calls import TELL, Free, HandOn, Spare, slot_id

logger = logging.getLogger("redlease.temporal")

ENDS_IN_S = 60.0  # how long a slot that ends may take to
ANSWER = timedelta(seconds=5)


class Usher:
    """Waits for the ends of slots on behalf of their lines, in the process of an internal worker."""

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
    async def tell(self, hand_on: HandOn) -> None:
        """Will tell the head of the line when the slot has ended; a later call for the same run replaces this one."""
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

    async def _tell(self, hand_on: HandOn) -> None:
        async with asyncio.timeout(ENDS_IN_S):
            await end_of(self._client, hand_on.resource, hand_on.slot, hand_on.run_id)
        rest = hand_on.waiters
        while rest:
            head, *rest = rest
            free = Free(hand_on.resource, hand_on.slot, head.requester.request, rest, hand_on.floor)
            if await self._signal(head.requester.workflow_id, FREE_SIGNAL, free):
                return
        hints = hand_on.hints
        while hints:
            asked, *hints = hints
            spare = Spare(hand_on.slot, hints, hand_on.floor)
            if await self._signal(slot_id(hand_on.resource, asked), "spare", spare):
                return

    async def _signal(self, workflow_id: str, name: str, said: object) -> bool:
        """Signals a workflow; False when there is none open by that id."""
        try:
            await self._client.get_workflow_handle(workflow_id).signal(name, said, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise
        return True
