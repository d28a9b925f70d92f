"""The workflow that is one unit of a resource, ID `permit:{resource}:{slot}`: while it is open, its permit is held.

It ends when the permit is released, when its lease expires, or when the run that holds it ends; then a local activity
notifies the head of its line, the runs that wait for this slot. At each renewal it continues as new, which restarts its
run timeout: so the server itself ends a slot whose workers are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import FailureError

from redlease_temporal._common.status_polls import POLL_TIMEOUT, is_renewed_after
from redlease_temporal._payloads import locks
from redlease_temporal._payloads.coordinator import (
    POLL,
    Adoption,
    Confirmed,
    PermitReply,
    Release,
    Renewal,
    RunStatusReply,
    RunToPoll,
    invalid_reason,
)
from redlease_temporal._payloads.locks import micros
from redlease_temporal._payloads.slots import (
    IDLE,
    MEMO,
    NOTIFY,
    WORKFLOW,
    SlotEnd,
    SlotHandover,
    SlotInput,
    SlotLine,
    SlotNumbers,
    SlotOffer,
    SlotWaiter,
    SpareSlot,
    slot_id,
)
from redlease_temporal._workflow_side.backend import RETRY_OFTEN
from redlease_temporal._workflow_side.mailbox import signal

T = TypeVar("T")

EVENTS_MAX = 500  # history length after which a run continues as new
SPARES_MAX = 8  # other slots that one slot remembers or checks
UNKNOWN_MAX = 3  # consecutive looks without an answer for which a permit is kept
POLL_SCHEDULE_TIMEOUT = timedelta(seconds=7)  # retries included: it must end before the server ends the slot


@workflow.defn(name=WORKFLOW)
class Slot:
    """One unit of the resource, held by the run that started it or adopted its permit."""

    @workflow.init
    def __init__(self, slot_input: SlotInput) -> None:
        info = workflow.info()
        permit = slot_input.memo.permit_since(micros(info.workflow_start_time), info.run_id)
        if slot_input.memo.permit is None and slot_input.max_hold_ms is not None:
            slot_input = replace(slot_input, until_ms=permit.granted_at_ms + slot_input.max_hold_ms)
        self._input = slot_input
        self._permit = permit
        self._waiters = list(slot_input.waiters)
        self._hints = list(slot_input.hints)
        self._resource = slot_input.memo.terms.resource
        self._slot = slot_input.memo.slot
        self._ended: SlotEnd | None = None
        self._cancelled = False
        self._renewed = False
        self._sending = 0

    @workflow.run
    async def run(self, slot_input: SlotInput) -> SlotEnd:
        """Holds the permit until it ends; returns how it ended."""
        del slot_input
        serving = asyncio.ensure_future(self._serve())
        while not serving.done():
            try:
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                # Its parent closed, or somebody cancelled it: _serve finds out which, and that takes time.
                self._cancelled = True
        return serving.result()

    async def _serve(self) -> SlotEnd:
        await self._spread_waiters()
        while self._ended is None:
            left = timedelta(milliseconds=max(1, self._permit.expires_at_ms - _now_ms()))
            try:
                await workflow.wait_condition(self._has_to_act, timeout=left)
            except TimeoutError:
                await self._on_lease_end()
                continue
            if self._ended is None and self._cancelled:
                await self._poll(ending=True)
            elif self._ended is None and self._may_continue():
                self._continue_as_new()
        await self._notify_line()
        return self._ended

    def _has_to_act(self) -> bool:
        return self._ended is not None or self._cancelled or self._may_continue()

    def _may_continue(self) -> bool:
        long = workflow.info().get_current_history_length() >= EVENTS_MAX
        return (self._renewed or long) and not self._sending

    def _continue_as_new(self) -> None:
        """Continues as new, with a new run timeout."""
        slot_input = replace(self._input.with_permit(self._permit), waiters=self._waiters, hints=self._hints)
        workflow.continue_as_new(slot_input, run_timeout=slot_input.run_timeout(), memo={MEMO: slot_input.memo})

    # Leases

    async def _on_lease_end(self) -> None:
        slot_input = self._input
        is_renewed = (
            slot_input.renewed
            and not slot_input.leaving
            and (slot_input.until_ms is None or _now_ms() < slot_input.until_ms)
        )
        if is_renewed:
            await self._poll(ending=False)
        elif self._permit.expires_at_ms <= _now_ms():
            await self._lose("its lease ran out", "lease-expired")

    async def _poll(self, *, ending: bool) -> None:
        """Asks the server for the status of the run that holds the permit. `ending`: the parent may have closed."""
        requester = self._input.requester
        self._cancelled = False
        status = "closed"
        if requester.workflow_id:
            status = await self._poll_status(RunToPoll(requester.workflow_id, requester.run_id))
        if self._ended is not None:
            return
        if self._input.requester != requester:  # another run has it by now, and this says nothing of that
            self._cancelled = self._cancelled or ending
        elif status == "open" and ending and not await self._parent_has_closed():
            await self._lose("its slot was cancelled by hand", "cancelled")
        elif status == "closed" and self._input.on_close == "release":
            self._ended = SlotEnd("owner-closed")
        elif status in {"continued", "reset"}:
            # The next run has one lease to adopt the permit, or to confirm that it holds it.
            self._extend(self._permit.lease_ms, leaving=True)
            if status == "reset":
                name = slot_id(self._resource, self._slot)
                confirm = locks.ConfirmSignal(self._resource, self._permit.ticket, self._permit.fence, name)
                await signal(requester.workflow_id, locks.CONFIRM_SIGNAL, confirm)
        elif is_renewed_after(status, self._input.unknown_polls, UNKNOWN_MAX):
            self._extend(
                self._permit.lease_ms, unknown_polls=self._input.unknown_polls + 1 if status == "unknown" else 0
            )
        else:
            self._input = replace(self._input, leaving=True)

    async def _parent_has_closed(self) -> bool:
        """Whether the run that started the slot has closed, though another one has the permit by now.

        Then the server has cancelled the slot, and nobody by hand: the new run of a reset one asked before the slot
        knew of the end, or the next run of its chain adopted the permit.
        """
        parent = workflow.info().parent
        if parent is None or parent.run_id == self._input.requester.run_id:
            return False
        return await self._poll_status(RunToPoll(parent.workflow_id, parent.run_id)) != "open"

    async def _poll_status(self, run: RunToPoll) -> str:
        try:
            replies = await self._activity(POLL, [run], list[RunStatusReply], POLL_SCHEDULE_TIMEOUT)
        except FailureError as error:  # failing the slot would free it
            workflow.logger.warning("the status of %r is unknown: %s", run.workflow_id, error.cause or error)
            return "unknown"
        return replies[0].status if replies else "unknown"

    def _extend(self, lease_ms: int, *, leaving: bool = False, unknown_polls: int = 0) -> None:
        self._permit = replace(self._permit, lease_ms=lease_ms, expires_at_ms=_now_ms() + lease_ms)
        self._input = replace(self._input, leaving=leaving, unknown_polls=unknown_polls)
        self._renewed = True

    async def _lose(self, reason: str, how: str) -> None:
        self._ended = SlotEnd(how)
        await self._notify_lost(reason)

    async def _notify_lost(self, reason: str) -> None:
        workflow_id = self._input.requester.workflow_id
        if workflow_id and self._input.renewed:  # nobody waits for the loss of a permit that is plain data
            lost = locks.LostSignal(self._resource, self._permit.ticket, self._permit.fence, reason)
            await signal(workflow_id, locks.LOST_SIGNAL, lost)

    # The line

    async def _notify_line(self) -> None:
        """Has the line notified when this workflow has ended. The server repeats the task if a waiter arrives now."""
        await workflow.wait_condition(lambda: not self._sending)
        if self._waiters or self._hints:
            run_id, fence = workflow.info().run_id, self._permit.fence
            handover = SlotHandover(self._resource, self._slot, run_id, self._waiters, self._hints, fence)
            try:
                await self._activity(NOTIFY, handover, type(None))
            except FailureError as error:  # the release succeeded; waiters find the slot on their next retry
                workflow.logger.warning("the line is not notified that the slot is free: %s", error.cause or error)

    async def _send_offer(self, head: SlotWaiter, slot: int, rest: list[SlotWaiter]) -> bool:
        free = SlotOffer(self._resource, slot, head.requester.request, rest, self._permit.fence)
        return await signal(head.requester.workflow_id, locks.OFFER_SIGNAL, free)

    async def _spread_waiters(self) -> None:
        """Sends waiters of the line to slots that became free while the line was on its way here."""
        others = [number for number in range(self._input.memo.terms.capacity) if number != self._slot]
        if not self._waiters or not others:
            return
        sample = workflow.random().sample(others, min(SPARES_MAX, len(others)))
        try:
            idle = await self._activity(IDLE, SlotNumbers(self._resource, sample), list[int])
        except FailureError:
            return  # the server did not answer; waiters find free slots on their next retry
        for number in idle:
            await self._send_to(number)

    async def _send_to(self, slot: int) -> bool:
        """Sends the first waiter that may use another slot there; returns False if no such waiter is open."""
        while (first := next((each for each in self._waiters if each.may_have(slot)), None)) is not None:
            self._waiters.remove(first)
            if await self._send_offer(first, slot, []):
                return True
        return False

    async def _activity(self, name: str, arg: object, result: type[T], schedule_timeout: timedelta | None = None) -> T:
        returned: T = await workflow.execute_local_activity(
            name,
            arg,
            result_type=result,
            start_to_close_timeout=POLL_TIMEOUT,
            schedule_to_close_timeout=schedule_timeout,
            retry_policy=RETRY_OFTEN,
        )
        return returned

    # Signals from runs and from other slots

    @workflow.signal
    async def wait(self, line: SlotLine) -> None:
        """Adds runs to the line. One that holds the slot, and requests again after a reset, gets its grant again."""
        waiting = {each.requester.request for each in self._waiters}
        repeated = [
            each
            for each in line.waiters
            if each.requester.request == self._input.requester.request and self._ended is None
        ]
        self._waiters += [
            each for each in line.waiters if each not in repeated and each.requester.request not in waiting
        ]
        for each in repeated:
            self._input = replace(self._input, requester=each.requester, leaving=False)
            granted = locks.GrantedSignal(self._permit, each.requester.request, slot_id(self._resource, self._slot))
            await self._send(signal(each.requester.workflow_id, locks.GRANTED_SIGNAL, granted))

    @workflow.signal
    def leave(self, request: str) -> None:
        """A run no longer waits, or found another slot."""
        self._waiters = [each for each in self._waiters if each.requester.request != request]

    @workflow.signal
    def hint(self, slot: int) -> None:
        """A run in the line of the other slot found this one busy too: remember to offer this slot there."""
        if not isinstance(slot, int) or slot < 0:
            return  # sent by hand; it would make the handover undecodable
        self._hints = [slot, *(each for each in self._hints if each != slot)][:SPARES_MAX]

    @workflow.signal
    async def spare(self, spare: SpareSlot) -> None:
        """Another slot is free: offers it to the first waiter here that may use it, else forwards the offer."""
        if any(each.may_have(spare.slot) for each in self._waiters):
            await self._send(self._send_to(spare.slot))
        elif spare.others:
            next_slot, *others = spare.others
            forward = SpareSlot(spare.slot, others, spare.floor)
            await self._send(signal(slot_id(self._resource, next_slot), "spare", forward))

    async def _send(self, sending: Awaitable[Any]) -> None:
        self._sending += 1
        try:
            await sending
        finally:
            self._sending -= 1

    @workflow.signal
    async def release(self, release: Release) -> None:
        """Releases the permit: by its fence, by its request or, with the ticket alone, by an administrator."""
        if self._ended is not None or release.ticket != self._permit.ticket:
            return
        by_admin = release.fence is None and not release.request
        if not by_admin and release.fence != self._permit.fence and release.request != self._input.requester.request:
            return
        self._ended = SlotEnd("released", release.call)
        if by_admin:
            await self._send(self._notify_lost("it was released by its ticket"))

    @workflow.signal
    def renew(self, renewal: Renewal) -> None:
        """Renews the permit for a full lease."""
        if self._is_held(renewal.ticket, renewal.fence) and not invalid_reason(renewal):
            self._extend(renewal.lease_ms, leaving=self._input.leaving)

    @workflow.signal
    def adopt(self, adoption: Adoption) -> None:
        """A run takes the permit over; of two that adopt it the first wins."""
        if not self._is_held(adoption.ticket, adoption.fence) or invalid_reason(adoption):
            return
        before, after = self._input.requester, adoption.requester
        same = (before.workflow_id, before.chain) == (after.workflow_id, after.chain)
        if adoption.refence if adoption.refence is not None else not same:
            self._permit = replace(self._permit, fence=max(self._permit.fence + 1, micros(workflow.now())))
        until_ms = None if adoption.max_hold_ms is None else _now_ms() + adoption.max_hold_ms
        self._input = replace(self._input, requester=after, renewed=True, on_close=adoption.on_close, until_ms=until_ms)
        self._extend(adoption.lease_ms)

    @workflow.signal
    def confirm(self, confirmed: Confirmed) -> None:
        """After a reset: the new run holds what the old one held."""
        if self._is_held(confirmed.ticket, confirmed.fence):
            requester = replace(self._input.requester, run_id=confirmed.run_id)
            self._input = replace(self._input, requester=requester)
            self._extend(self._permit.lease_ms)

    def _is_held(self, ticket: str, fence: int) -> bool:
        return self._ended is None and (self._permit.ticket, self._permit.fence) == (ticket, fence)

    # Queries

    @workflow.query
    def permit(self, ticket: str, fence: int) -> PermitReply:
        """The permit, if it is held with that fence."""
        return PermitReply(self._permit if self._is_held(ticket, fence) else None)

    @workflow.query
    def adopted(self, ticket: str, request: str) -> PermitReply:
        """The permit, if a run adopted it by that request."""
        held = self._ended is None and self._permit.ticket == ticket and self._input.requester.request == request
        return PermitReply(self._permit if held else None)

    @workflow.query
    def line(self) -> list[SlotWaiter]:
        """The runs in the line."""
        return self._waiters


def _now_ms() -> int:
    return micros(workflow.now()) // 1000
