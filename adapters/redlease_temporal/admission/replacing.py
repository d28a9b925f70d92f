"""A start that takes the place of the oldest workflow, which is cancelled, when that has closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RawValue
from temporalio.service import RPCError, RPCStatusCode

from .rule import Entry, WorkflowConcurrencyLimitExceeded

T = TypeVar("T")

PAUSE_S = 0.2  # a place is reserved for a workflow that has yet to start: when to look again


class Taken(NamedTuple):
    """A place that a workflow has. `order`: a place that was taken later has a greater one."""

    workflow_id: str
    place: str
    order: float


class Places(Protocol):
    """What keeps the places of a limit."""

    async def taken(self, entry: Entry) -> list[Taken]:
        """The places that other workflows have, in the order in which they were taken."""

    async def free_if_over(self, entry: Entry, taken: Taken) -> None:
        """Frees a place whose workflow has closed, should nobody else have done so yet."""


async def replacing(temporal: Client, places: Places, entry: Entry, take: Callable[[], Awaitable[T]]) -> T:
    """Takes a place; if none is free, cancels the oldest of the workflows that have one, and waits until it is closed.

    Of several starts at one time each replaces only workflows that had their places before it began, so that no two
    cancel each other in turns.

    Raises:
        WorkflowConcurrencyLimitExceeded: None was free within the entry's grace, or newer workflows have them all.
    """
    until = asyncio.get_running_loop().time() + entry.grace_ms / 1000
    newest: float | None = None
    while True:
        try:
            return await take()
        except WorkflowConcurrencyLimitExceeded:
            taken = await places.taken(entry)
            if newest is None:
                newest = max((each.order for each in taken), default=0)
            older = [each for each in taken if each.order <= newest]
            left_s = until - asyncio.get_running_loop().time()
            if (taken and not older) or left_s <= 0:
                raise
            # More than one where the limit was greater before.
            await _make_room(temporal, places, entry, older[: max(0, len(taken) - entry.limit + 1)], left_s)


async def _make_room(temporal: Client, places: Places, entry: Entry, older: list[Taken], limit_s: float) -> None:
    """Cancels workflows and waits until all of them are closed, for so long at the most."""
    ends = [asyncio.create_task(_end(temporal, each)) for each in older]
    try:
        async with asyncio.timeout(limit_s):
            were_open = await asyncio.gather(*ends)
            for each in older:
                await places.free_if_over(entry, each)
            if not any(were_open):
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        return
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _end(temporal: Client, taken: Taken) -> bool:
    """Cancels a workflow and waits until its last run is closed; returns False if it is not open."""
    handle: WorkflowHandle[object, RawValue] = temporal.get_workflow_handle(taken.workflow_id, result_type=RawValue)
    try:
        await handle.cancel()
        await handle.result()
    except WorkflowFailureError:
        return True
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return False
    return True
