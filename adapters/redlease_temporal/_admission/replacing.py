"""A start that takes the place of the oldest workflow, which is cancelled, when that has closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.common import RawValue
from temporalio.service import RPCError, RPCStatusCode

from .rule import AdmissionRequest, WorkflowConcurrencyLimitExceeded

T = TypeVar("T")

PAUSE_S = 0.2  # a place is reserved for a workflow that has yet to start: when to look again


class TakenSlot(NamedTuple):
    """A place that a workflow has.

    Attributes:
        requested_at: When its start first asked for a place, by the clock of whoever keeps the places.
        fence: Of the place, if it has one.
        is_reserved: Whether the place is kept for a workflow that has perhaps yet to start.
    """

    workflow_id: str
    slot_id: str
    requested_at: float
    fence: int = 0
    is_reserved: bool = False


class AdmissionBackend(Protocol):
    """What keeps the places of a limit."""

    async def taken_slots(self, request: AdmissionRequest) -> tuple[list[TakenSlot], float]:
        """The places that other workflows have, in any order; and the time now."""

    async def free_if_closed(self, request: AdmissionRequest, taken: TakenSlot) -> bool:
        """Frees a place whose workflow has closed, should nobody else have done so yet; returns whether it has."""


async def replacing(
    temporal: Client,
    admission: AdmissionBackend,
    request: AdmissionRequest,
    take: Callable[[AdmissionRequest], Awaitable[T]],
) -> T:
    """Takes a place; if none is free, cancels the oldest of the workflows that have one, and waits until it is closed.

    Of several starts at one time each replaces only workflows whose starts asked before it did, so that the one that
    asked last runs in the end, and no two cancel each other in turns.

    Raises:
        WorkflowConcurrencyLimitExceeded: A workflow that was cancelled has not closed within the entry's grace, or
            newer workflows have all places.
    """
    loop = asyncio.get_running_loop()
    until, cancelled = loop.time() + request.grace_ms / 1000, set[str]()
    while True:
        try:
            return await take(request)
        except WorkflowConcurrencyLimitExceeded:
            taken, now = await admission.taken_slots(request)
            request = replace(request, requested_at=request.requested_at or now)
            older = sorted(
                (each for each in taken if each.requested_at <= request.requested_at),
                key=lambda each: each.requested_at,
            )
            # More than one where the limit was greater before; none if a place has become free since.
            oldest = older[: max(0, len(taken) - request.limit + 1)]
            if not cancelled.issuperset(each.workflow_id for each in oldest):
                # Each has the whole grace: if this start were refused soon after it cancelled one, neither would run.
                cancelled.update(each.workflow_id for each in oldest)
                until = loop.time() + request.grace_ms / 1000
            left_s = until - loop.time()
            if left_s <= 0:
                raise
            if len(taken) >= request.limit and not older:
                # A run that was cancelled while it began may have taken a place after it closed.
                if not any([await admission.free_if_closed(request, each) for each in taken]):
                    raise
                continue
            await _make_room(temporal, admission, request, oldest, left_s)


async def _make_room(
    temporal: Client, admission: AdmissionBackend, request: AdmissionRequest, older: list[TakenSlot], limit_s: float
) -> None:
    """Cancels workflows and waits until all of them are closed, for so long at the most."""
    ends = [asyncio.create_task(_end(temporal, each)) for each in older]
    try:
        async with asyncio.timeout(limit_s):
            were_open = await asyncio.gather(*ends)
            for each in older:
                await admission.free_if_closed(request, each)
            if not any(were_open):
                await asyncio.sleep(PAUSE_S)
    except TimeoutError:
        return
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def _end(temporal: Client, taken: TakenSlot) -> bool:
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
