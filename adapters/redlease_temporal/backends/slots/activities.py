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
from redlease_temporal.common.descriptions import Description, describe
from redlease_temporal.common.keeper_calls import ANSWER, Keepers, at_once, gone
from redlease_temporal.payloads import slots as calls
from redlease_temporal.payloads.locks import Checking, Guard, Inspecting, micros

from .completion import end_of
from .workflow import Slot

SLOTS = Keepers("its slots")
ENDS_IN_S = 3.0  # how long a released slot may take to end
HINTED_MAX = 8  # slots that are informed of a waiter in another line


class Seen(NamedTuple):
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
    async def claim(self, started: calls.Started) -> Permit:
        """The permit of a slot that was just started: its fence is the server's start time."""
        try:
            described = await self._described(started.resource, started.slot, started.run_id)
            if started.left not in {None, started.slot}:
                await self._signal(started.resource, started.left or 0, "leave", started.request)
        except RPCError as error:
            raise SLOTS.unavailable(started.resource, error) from error
        return started.kept.permit_since(micros(described.started), started.run_id)

    @activity.defn(name=calls.LINE_UP)
    async def line_up(self, line_up: calls.LineUp) -> list[int]:
        """Joins the line of the first slot; returns the slots that turned out to be free."""
        resource, (home, *others) = line_up.resource, line_up.order
        if not await self._signal(resource, home, "wait", calls.Line(line_up.waiters)):
            return [home]
        hinted_max = HINTED_MAX if line_up.hint else 0
        hinted, looked_at = others[:hinted_max], others[hinted_max:]
        busy = await at_once(self._signal(resource, slot, "hint", home) for slot in hinted)
        free = [slot for slot, is_busy in zip(hinted, busy, strict=True) if not is_busy]
        return free or await self.idle(calls.Slots(resource, looked_at))

    @activity.defn(name=calls.IDLE)
    async def idle(self, slots: calls.Slots) -> list[int]:
        """Those of the given slots that are free."""
        seen = await at_once(self.look(slots.resource, slot) for slot in slots.numbers)
        return [slot for slot, each in zip(slots.numbers, seen, strict=True) if each is None]

    # With a permit

    @activity.defn(name=calls.FIND)
    async def find_ticket(self, call: calls.SlotCall) -> int | None:
        """The slot that a ticket holds, which a release names; None if it holds none."""
        assert call.release is not None
        seen = await self.find(call, call.release.ticket, call.release.fence)
        return None if seen is None else seen.slot

    @activity.defn(name=calls.RELEASE)
    async def release(self, call: calls.SlotCall) -> bool:
        """Releases a ticket; returns whether it was held. With `wait`, returns once the slot is free."""
        assert call.release is not None
        resource, release, slot = call.terms.resource, call.release, call.slot
        seen = None
        if slot is None or call.wait:
            seen = await self.find(call, release.ticket, release.fence)
            if seen is None:
                return False
            slot = seen.slot
        if not await self._signal(resource, slot, "release", release) or seen is None:
            return seen is None
        try:
            async with asyncio.timeout(ENDS_IN_S):
                ended = await end_of(self._client, resource, slot, seen.run_id)
        except (TimeoutError, RPCError):
            return False
        return ended is not None and ended.call == release.call

    @activity.defn(name=calls.RENEW)
    async def renew(self, call: calls.SlotCall) -> Permit:
        """Renews a permit."""
        assert call.renewal is not None
        renewal = call.renewal
        seen = await self.find(call, renewal.ticket, renewal.fence)
        if seen is not None:
            await self._signal(call.terms.resource, seen.slot, "renew", renewal)
            found = await self._query(call.terms.resource, seen.slot, "permit", renewal.ticket, renewal.fence)
            if found is not None and found.permit is not None:
                permit: Permit = found.permit
                return permit
        raise gone(call.terms.resource, renewal.ticket, renewal.fence)

    @activity.defn(name=calls.ADOPT)
    async def adopt(self, call: calls.SlotCall) -> Permit:
        """Takes a permit over for a run."""
        assert call.adoption is not None
        adoption = call.adoption
        seen = await self.find(call, adoption.ticket, None)
        if seen is not None:
            await self._signal(call.terms.resource, seen.slot, "adopt", adoption)
            asked = (adoption.ticket, adoption.requester.request)
            found = await self._query(call.terms.resource, seen.slot, "adopted", *asked)
            if found is not None and found.permit is not None:
                permit: Permit = found.permit
                return permit
        raise gone(call.terms.resource, adoption.ticket, adoption.fence)

    @activity.defn(name=calls.CHECK)
    async def check(self, checking: Checking) -> bool:
        """Whether a permit is held now."""
        call = calls.SlotCall(checking.terms)
        return await self.find(call, checking.ticket, checking.fence) is not None

    async def has(self, guard: Guard) -> bool:
        """Whether the permit that guards an activity is held now."""
        slot = int(guard.kept_by.rsplit(":", 1)[1])
        seen = await self.look(guard.resource, slot)
        return seen is not None and (seen.permit.ticket, seen.permit.fence) == (guard.ticket, guard.fence)

    @activity.defn(name=calls.INSPECT)
    async def inspect(self, inspecting: Inspecting) -> Snapshot:
        """The state of a resource: its slots and their lines."""
        terms, limit = inspecting.terms, inspecting.limit
        found = await at_once(self.look(terms.resource, slot) for slot in range(terms.capacity))
        held = [seen for seen in found if seen is not None]
        lines = await at_once(self._query(terms.resource, seen.slot, "line") for seen in held)
        waiters = {each.requester.request: each for line in lines for each in line or []}
        return Snapshot(
            terms.resource,
            terms.capacity,
            tuple(sorted((seen.permit for seen in held), key=lambda permit: permit.granted_at_ms)[:limit]),
            tuple(Waiter(each.ticket, 1, each.requester.workflow_id, {}, 0) for each in waiters.values())[:limit],
            max((seen.permit.fence for seen in held), default=0),
            0,
            len(held),
            len(waiters),
        )

    # Implementation

    async def find(self, call: calls.SlotCall, ticket: str, fence: int | None) -> Seen | None:
        """The slot that a ticket holds, with that fence if one is given."""
        slots = range(call.terms.capacity) if call.slot is None else [call.slot]
        found: list[Seen | None] = await at_once(self.look(call.terms.resource, slot) for slot in slots)
        for seen in found:
            if seen is not None and seen.permit.ticket == ticket and fence in {None, seen.permit.fence}:
                return seen
        return None

    async def look(self, resource: str, slot: int) -> Seen | None:
        """The permit of a slot, None if it is free. Reads the server's records; no worker needs to be alive."""
        try:
            described = await self._described(resource, slot)
            if not described.is_open:
                return None
            kept = await described.memo(calls.MEMO, calls.SlotMemo)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return None
            raise SLOTS.unavailable(resource, error) from error
        return Seen(slot, described.run_id, kept.permit_since(micros(described.started), described.run_id))

    async def _described(self, resource: str, slot: int, run_id: str = "") -> Description:
        return await describe(self._client, calls.slot_id(resource, slot), run_id, timeout=ANSWER)

    def _handle(self, resource: str, slot: int) -> WorkflowHandle[Any, Any]:
        return self._client.get_workflow_handle(calls.slot_id(resource, slot))

    async def _signal(self, resource: str, slot: int, name: str, said: object) -> bool:
        """Signals a slot; returns False if it is free."""
        return await SLOTS.signal(resource, self._handle(resource, slot), name, said)

    async def _query(self, resource: str, slot: int, name: str, *args: Any) -> Any:
        """Queries a slot; returns None if it is free."""
        return await SLOTS.query(resource, self._handle(resource, slot), getattr(Slot, name), *args)
