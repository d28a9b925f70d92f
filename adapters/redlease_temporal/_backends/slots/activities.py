"""The local activities through which workflow runs use the slots of a resource, and slots find other slots."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from temporalio import activity
from temporalio.client import (
    Client,
    WorkflowHandle,
)
from temporalio.service import RPCError, RPCStatusCode

from redlease.models import Permit, Snapshot, Waiter
from redlease_temporal._common.descriptions import Description, describe
from redlease_temporal._common.resource_workflows import CALL_TIMEOUT, ResourceWorkflows, gather_limited, permit_gone
from redlease_temporal._payloads import slots as calls
from redlease_temporal._payloads.locks import CheckCall, InspectCall, PermitHeader, micros

from .completion import end_of
from .workflow import Slot

SLOTS = ResourceWorkflows("its slots")
ENDS_IN_S = 3.0  # how long a released slot may take to end
HINTED_MAX = 8  # slots that are informed of a waiter in another line


class HeldSlot(NamedTuple):
    """A slot that is held."""

    slot: int
    run_id: str
    permit: Permit


class SlotActivities:
    """The activities, bound to the client of the worker that runs the workflow."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @property
    def local(self) -> list[Callable[..., Any]]:
        """For workers that run workflows."""
        return [
            *(self.claim, self.line_up, self.idle, self.find_ticket, self.release),
            *(self.renew, self.adopt, self.check, self.inspect),
        ]

    # Taking a slot

    @activity.defn(name=calls.CLAIM)
    async def claim(self, started: calls.StartedSlot) -> Permit:
        """The permit of a slot that was just started: its fence is the server's start time."""
        try:
            described = await self._described(started.resource, started.slot, started.run_id)
            if started.left not in {None, started.slot}:
                await self._signal(started.resource, started.left or 0, "leave", started.request)
        except RPCError as error:
            raise SLOTS.unavailable(started.resource, error) from error
        return started.memo.permit_since(micros(described.started), started.run_id)

    @activity.defn(name=calls.LINE_UP)
    async def line_up(self, line_up: calls.JoinLine) -> list[int]:
        """Joins the line of the first slot; returns the slots that turned out to be free."""
        resource, (line_slot, *others) = line_up.resource, line_up.order
        if not await self._signal(resource, line_slot, "wait", calls.SlotLine(line_up.waiters)):
            return [line_slot]
        hinted_max = HINTED_MAX if line_up.hint else 0
        hinted, unhinted = others[:hinted_max], others[hinted_max:]
        busy = await gather_limited(self._signal(resource, slot, "hint", line_slot) for slot in hinted)
        free = [slot for slot, is_busy in zip(hinted, busy, strict=True) if not is_busy]
        return free or await self.idle(calls.SlotNumbers(resource, unhinted))

    @activity.defn(name=calls.IDLE)
    async def idle(self, slots: calls.SlotNumbers) -> list[int]:
        """Those of the given slots that are free."""
        states = await gather_limited(self.read_slot(slots.resource, slot) for slot in slots.numbers)
        return [slot for slot, each in zip(slots.numbers, states, strict=True) if each is None]

    # With a permit

    @activity.defn(name=calls.FIND)
    async def find_ticket(self, call: calls.SlotCall) -> int | None:
        """The slot that a ticket holds, which a release names; None if it holds none."""
        assert call.release is not None
        held_slot = await self.find(call, call.release.ticket, call.release.fence)
        return None if held_slot is None else held_slot.slot

    @activity.defn(name=calls.RELEASE)
    async def release(self, call: calls.SlotCall) -> bool:
        """Releases a ticket; returns whether it was held. With `wait`, returns once the slot is free."""
        assert call.release is not None
        resource, release, slot = call.terms.resource, call.release, call.slot
        held_slot = None
        if slot is None or call.wait:
            held_slot = await self.find(call, release.ticket, release.fence)
            if held_slot is None:
                return False
            slot = held_slot.slot
        if not await self._signal(resource, slot, "release", release) or held_slot is None:
            return held_slot is None
        try:
            async with asyncio.timeout(ENDS_IN_S):
                ended = await end_of(self._client, resource, slot, held_slot.run_id)
        except (TimeoutError, RPCError):
            return False
        return ended is not None and ended.call == release.call

    @activity.defn(name=calls.RENEW)
    async def renew(self, call: calls.SlotCall) -> Permit:
        """Renews a permit."""
        assert call.renewal is not None
        renewal = call.renewal
        held_slot = await self.find(call, renewal.ticket, renewal.fence)
        if held_slot is not None:
            await self._signal(call.terms.resource, held_slot.slot, "renew", renewal)
            reply = await self._query(call.terms.resource, held_slot.slot, "permit", renewal.ticket, renewal.fence)
            if reply is not None and reply.permit is not None:
                permit: Permit = reply.permit
                return permit
        raise permit_gone(call.terms.resource, renewal.ticket, renewal.fence)

    @activity.defn(name=calls.ADOPT)
    async def adopt(self, call: calls.SlotCall) -> Permit:
        """Takes a permit over for a run."""
        assert call.adoption is not None
        adoption = call.adoption
        held_slot = await self.find(call, adoption.ticket, None)
        if held_slot is not None:
            await self._signal(call.terms.resource, held_slot.slot, "adopt", adoption)
            asked = (adoption.ticket, adoption.requester.request)
            reply = await self._query(call.terms.resource, held_slot.slot, "adopted", *asked)
            if reply is not None and reply.permit is not None:
                permit: Permit = reply.permit
                return permit
        raise permit_gone(call.terms.resource, adoption.ticket, adoption.fence)

    @activity.defn(name=calls.CHECK)
    async def check(self, call: CheckCall) -> bool:
        """Whether a permit is held now."""
        slot_call = calls.SlotCall(call.terms)
        return await self.find(slot_call, call.ticket, call.fence) is not None

    async def has(self, permit_header: PermitHeader) -> bool:
        """Whether the permit that guards an activity is held now."""
        slot = int(permit_header.resource_workflow.rsplit(":", 1)[1])
        held_slot = await self.read_slot(permit_header.resource, slot)
        return held_slot is not None and (held_slot.permit.ticket, held_slot.permit.fence) == (
            permit_header.ticket,
            permit_header.fence,
        )

    @activity.defn(name=calls.INSPECT)
    async def inspect(self, call: InspectCall) -> Snapshot:
        """The state of a resource: its slots and their lines."""
        terms, limit = call.terms, call.limit
        states = await gather_limited(self.read_slot(terms.resource, slot) for slot in range(terms.capacity))
        held = [held_slot for held_slot in states if held_slot is not None]
        lines = await gather_limited(self._query(terms.resource, held_slot.slot, "line") for held_slot in held)
        waiters = {each.requester.request: each for line in lines for each in line or []}
        return Snapshot(
            terms.resource,
            terms.capacity,
            tuple(sorted((held_slot.permit for held_slot in held), key=lambda permit: permit.granted_at_ms)[:limit]),
            tuple(Waiter(each.ticket, 1, each.requester.workflow_id, {}, 0) for each in waiters.values())[:limit],
            max((held_slot.permit.fence for held_slot in held), default=0),
            0,
            len(held),
            len(waiters),
        )

    # Implementation

    async def find(self, call: calls.SlotCall, ticket: str, fence: int | None) -> HeldSlot | None:
        """The slot that a ticket holds, with that fence if one is given."""
        slots = range(call.terms.capacity) if call.slot is None else [call.slot]
        states: list[HeldSlot | None] = await gather_limited(
            self.read_slot(call.terms.resource, slot) for slot in slots
        )
        for held_slot in states:
            if held_slot is not None and held_slot.permit.ticket == ticket and fence in {None, held_slot.permit.fence}:
                return held_slot
        return None

    async def read_slot(self, resource: str, slot: int) -> HeldSlot | None:
        """The permit of a slot, None if it is free. Reads the server's records; no worker needs to be alive."""
        try:
            described = await self._described(resource, slot)
            if not described.is_open:
                return None
            memo = await described.memo(calls.MEMO, calls.SlotMemo)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return None
            raise SLOTS.unavailable(resource, error) from error
        return HeldSlot(slot, described.run_id, memo.permit_since(micros(described.started), described.run_id))

    async def _described(self, resource: str, slot: int, run_id: str = "") -> Description:
        return await describe(self._client, calls.slot_id(resource, slot), run_id, timeout=CALL_TIMEOUT)

    def _handle(self, resource: str, slot: int) -> WorkflowHandle[Any, Any]:
        return self._client.get_workflow_handle(calls.slot_id(resource, slot))

    async def _signal(self, resource: str, slot: int, name: str, message: object) -> bool:
        """Signals a slot; returns False if it is free."""
        return await SLOTS.signal(resource, self._handle(resource, slot), name, message)

    async def _query(self, resource: str, slot: int, name: str, *args: Any) -> Any:
        """Queries a slot; returns None if it is free."""
        return await SLOTS.query(resource, self._handle(resource, slot), getattr(Slot, name), *args)
