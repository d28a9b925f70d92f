"""Resources kept by slots: a run holds a unit while the workflow with the slot's ID is open.

A request tries to start one slot. If that slot is taken, the run waits in its line, unless another slot is free, and is
notified when it is the next. The line travels from holder to holder. If the server ends a slot, nobody notifies its
line: so waiters also retry by themselves, with a back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ApplicationError, WorkflowAlreadyStartedError

from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import locks
from redlease_temporal._payloads import slots as payloads
from redlease_temporal._payloads.coordinator import Release, Renewal
from redlease_temporal._workflow_side.backend import LocalBackend, answered, timed_out, try_once
from redlease_temporal._workflow_side.cancellation import retrieve_exception
from redlease_temporal._workflow_side.hold import until
from redlease_temporal._workflow_side.mailbox import RunMailbox, signal
from redlease_temporal._workflow_side.requests import adoption_of, request_name, requester_of
from redlease_temporal._workflow_side.run import Run, current, shown_as
from redlease_temporal.errors import Unavailable, as_usage_error, usage_error

T = TypeVar("T")
_Slot: Any = int | None  # as a result type

ENDS_IN_S = 3.0  # how long a released slot may take to end
PAUSE_S = 2.0  # between two attempts to learn the permit of a started slot
BACKOFF_S = (5.0, 60.0)  # the first and the longest pause between retries; jitter takes up to a half off


class SlotBackend(LocalBackend):
    """A resource that the workflow runs and clients of one namespace share. `terms`: those of the resource."""

    name = "slots"
    service = "the Temporal server"
    weight_max = 1  # a slot is one unit

    def __init__(self, terms: locks.ResourceTerms) -> None:
        if terms.capacity > payloads.CAPACITY_MAX:
            raise usage_error(f"capacity is at most {payloads.CAPACITY_MAX} on slots, of which each is a workflow")
        if terms.max_waiters is not None:
            raise usage_error("slots do not know how many wait: max_waiters needs backend='coordinator' or 'redis'")
        super().__init__(terms)

    async def acquire(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Takes a slot, or waits in the line of one."""
        if timeout is not None and timeout <= timedelta(0):
            return await try_once(self, run, call, timeout)
        request = request_name(call)
        try:
            async with asyncio.timeout(None if timeout is None else timeout.total_seconds()):
                run.mailbox.awaited.add(request)
                permit = await self._wait_in_line(run, call, request)
        # No other exceptions: an evicted run must not send signals.
        except (TimeoutError, asyncio.CancelledError, ApplicationError) as error:
            leaving = self._leave(run.mailbox, request)
            run.mailbox.forget(request)
            run.releasing(self._terms.resource, leaving)
            if isinstance(error, TimeoutError) and not isinstance(error, ApplicationError):
                raise timed_out(self.service, call, timeout or timedelta(0)) from None
            raise
        run.mailbox.forget(request)
        return permit

    def _leave(self, mailbox: RunMailbox, request: str) -> Coroutine[Any, Any, bool]:
        """Leaves the line."""
        line_slot = mailbox.line_slots.get(request)
        resource_workflow = "" if line_slot is None else payloads.slot_id(self._terms.resource, line_slot)
        return signal(resource_workflow, "leave", request)

    async def try_acquire(self, run: Run, call: locks.AcquireCall) -> Permit | None:
        """Takes a slot if one is free."""
        request = request_name(call)
        first, *others = self._order()
        permit = await self._take(run, call, request, first)
        if permit is None and others:
            idle = await self._call_activity(
                payloads.IDLE, payloads.SlotNumbers(self._terms.resource, others), list[int]
            )
            permit = await self._take_one_of(run, call, request, idle)
        return permit

    async def _wait_in_line(self, run: Run, call: locks.AcquireCall, request: str) -> Permit:
        order = self._order()
        waiter = payloads.SlotWaiter(requester_of(call, request), call.spec.ticket, call.terms.capacity)
        offer: payloads.SlotOffer | None = None
        free, number = order[:1], 0
        while True:
            permit = await self._take_one_of(run, call, request, free, offer)
            if permit is not None:
                return permit
            if offer is not None:  # another run was faster: the line moves to that slot's new run
                order = [offer.slot, *(slot for slot in order if slot != offer.slot)]
            line = [waiter, *(offer.rest if offer else [])]
            free = await self._line_up(run.mailbox, line, order, hint=number == 0 or offer is not None)
            if free[:1] != order[:1]:
                offer = None  # the rest of the line waits there now; otherwise it comes along to the slot that is free
            if not free:
                answer = await self._await_offer(run, request, number)
                if isinstance(answer, locks.GrantedSignal):
                    return self._note_permit(run, answer.permit)
                offer, number = answer, number + 1
                free = [answer.slot] if answer else []

    async def _line_up(
        self, mailbox: RunMailbox, line: list[payloads.SlotWaiter], order: list[int], *, hint: bool
    ) -> list[int]:
        """Joins the line of the first slot, followed by the rest of a line; or returns slots that are free."""
        rest = payloads.SlotOffer(self._terms.resource, order[0], "", line[1:])
        try:
            free = await self._call_activity(
                payloads.LINE_UP, payloads.JoinLine(self._terms.resource, order, line, hint), list[int]
            )
        except Unavailable:
            current().background(mailbox.pass_on(rest))
            return []
        except (ApplicationError, asyncio.CancelledError):
            current().background(mailbox.pass_on(rest))
            raise
        if free[:1] != order[:1]:
            mailbox.line_slots[line[0].requester.request] = order[0]
        return free

    async def _await_offer(
        self, run: Run, request: str, number: int
    ) -> payloads.SlotOffer | locks.GrantedSignal | None:
        """The offer or answer for a request; None when the pause is over."""
        first, longest = BACKOFF_S
        pause_s = workflow.random().uniform(0.5, 1.0) * min(longest, first * 2 ** min(number, 10))
        mailbox, resets = run.mailbox, run.resets
        try:
            await until(
                lambda: bool(mailbox.offers.get(request)) or request in mailbox.answers or run.resets != resets,
                pause_s,
            )
        except TimeoutError:
            return None
        if request in mailbox.answers:
            answer = mailbox.answers.pop(request)
            return answer if isinstance(answer, locks.GrantedSignal) else None
        return mailbox.offers[request].pop(0) if mailbox.offers.get(request) else None  # else it was reset

    async def _take_one_of(
        self,
        run: Run,
        call: locks.AcquireCall,
        request: str,
        slots: Iterable[int],
        offer: payloads.SlotOffer | None = None,
    ) -> Permit | None:
        for slot in slots:
            permit = await self._take(run, call, request, slot, offer)
            if permit is not None:
                return permit
        return None

    async def _take(
        self, run: Run, call: locks.AcquireCall, request: str, slot: int, offer: payloads.SlotOffer | None = None
    ) -> Permit | None:
        """Starts a slot; returns None if it is taken."""
        floor = offer.floor if offer else 0
        spec = call.spec
        owner = spec.owner or shown_as(workflow.info())
        memo = payloads.SlotMemo(call.terms, slot, spec.ticket, floor, owner, spec.metadata)
        slot_input = payloads.SlotInput(
            memo,
            requester_of(call, request),
            renewed=spec.renewed,
            on_close=spec.on_close,
            max_hold_ms=spec.max_hold_ms,
            waiters=offer.rest if offer else [],
        )
        starting = asyncio.ensure_future(self._start(run, slot_input))
        try:
            child = await asyncio.shield(starting)
            if child is None:
                return None
            line_slot = run.mailbox.line_slots.get(request)
            started = payloads.StartedSlot(
                call.terms.resource, slot, child.first_execution_run_id or "", memo, line_slot, request
            )
            permit = await self._claimed(started, retries=call.spec.queue)
        except (ApplicationError, asyncio.CancelledError):
            run.releasing(self._terms.resource, self._undo(run.mailbox, starting, slot_input))
            raise
        child.add_done_callback(lambda ended: _on_end(run, permit, ended))
        run.mailbox.children[permit.resource, permit.ticket, permit.fence] = child
        return self._note_permit(run, permit)

    async def _claimed(self, started: payloads.StartedSlot, *, retries: bool) -> Permit:
        """The permit of a slot that this run started. A request that may wait retries until the server answers."""
        while True:
            try:
                return await self._call_activity(payloads.CLAIM, started, Permit)
            except Unavailable:
                if not retries:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _start(self, run: Run, slot_input: payloads.SlotInput) -> workflow.ChildWorkflowHandle[Any, Any] | None:
        try:
            return await workflow.start_child_workflow(
                payloads.WORKFLOW,
                slot_input,
                id=payloads.slot_id(self._terms.resource, slot_input.memo.slot),
                task_queue=run.task_queue,
                result_type=payloads.SlotEnd,
                # A cancelled slot checks its parent's status: if the parent continued as new, the permit goes along.
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                run_timeout=slot_input.run_timeout(),
                memo={payloads.MEMO: slot_input.memo},
                static_summary=f"held by {slot_input.memo.owner}",
            )
        except WorkflowAlreadyStartedError:
            return None

    async def _undo(self, mailbox: RunMailbox, starting: asyncio.Task[Any], slot_input: payloads.SlotInput) -> None:
        """Releases a slot that was being started when its request ended."""
        child = await starting
        if child is None:
            if slot_input.waiters:
                await mailbox.pass_on(
                    payloads.SlotOffer(
                        self._terms.resource, slot_input.memo.slot, "", slot_input.waiters, slot_input.memo.floor
                    )
                )
            return
        child.add_done_callback(retrieve_exception)
        release = Release(slot_input.memo.ticket, None, slot_input.requester.request)
        await signal(payloads.slot_id(self._terms.resource, slot_input.memo.slot), "release", release)

    def _note_permit(self, run: Run, permit: Permit) -> Permit:
        key = (permit.resource, permit.ticket, permit.fence)
        run.mailbox.held_permits.add(key)
        run.mailbox.slots[key] = payloads.slot_of(permit)
        return permit

    def _order(self) -> list[int]:
        """The slots in random order, the same in every replay."""
        return workflow.random().sample(range(self._terms.capacity), self._terms.capacity)

    # Permits

    async def adopt(self, run: Run, call: locks.AdoptCall) -> Permit:
        """Takes over a permit."""
        slot_call = payloads.SlotCall(
            self._terms, as_usage_error(payloads.slot_of, call.permit), adoption=adoption_of(call)
        )
        return self._note_permit(
            run, await self._call_activity(payloads.ADOPT, slot_call, Permit, call.acquire.local_id)
        )

    async def renew(self, call: locks.RenewCall) -> Permit:
        """Renews a permit."""
        permit = call.permit
        renewal = Renewal(permit.ticket, permit.fence, call.lease_ms)
        slot_call = payloads.SlotCall(self._terms, as_usage_error(payloads.slot_of, permit), renewal=renewal)
        return await self._call_activity(payloads.RENEW, slot_call, Permit)

    async def release(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit and waits until its slot is free."""
        return await self._send_release(call, wait=True)

    async def end(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit; its slot is free a moment later."""
        return await self._send_release(call, wait=False)

    async def _send_release(self, call: locks.ReleaseCall, *, wait: bool) -> bool:
        slot, child = self._own_slot(call)
        release = Release(call.ticket, call.fence, call=current().mailbox.call_name())
        if child is not None and child.done():
            return False
        if slot is None:
            slot = await self._find(payloads.SlotCall(self._terms, release=release))
        if slot is None or not await signal(payloads.slot_id(self._terms.resource, slot), "release", release):
            return False
        if not wait:
            return True
        if child is None:
            with contextlib.suppress(Unavailable):
                await self._call_activity(
                    payloads.RELEASE, payloads.SlotCall(self._terms, slot, release=release, wait=True), bool
                )
            return True
        await workflow.wait([child], timeout=ENDS_IN_S)
        ended = child.result() if child.done() and child.exception() is None else None
        return ended is not None and ended.call == release.call

    async def _find(self, call: payloads.SlotCall) -> int | None:
        """The slot of a permit that this run did not take itself."""
        try:
            return await answered(payloads.FIND, call, _Slot, service=self.service, resource=self._terms.resource)
        except Unavailable:
            return None

    def _own_slot(self, call: locks.ReleaseCall) -> tuple[int | None, asyncio.Task[Any] | None]:
        """The slot of this run's permit, and the child if this run started it. Forgets both if the fence is given."""
        mailbox, resource_and_ticket = current().mailbox, (self._terms.resource, call.ticket)
        ours = [key for key in mailbox.slots if key[:2] == resource_and_ticket and call.fence in {None, key[2]}]
        if not ours:
            return None, None
        slot_input = mailbox.slots[ours[0]], mailbox.children.get(ours[0])
        if call.fence is not None:
            mailbox.held_permits.discard(ours[0])
            del mailbox.slots[ours[0]]
            mailbox.children.pop(ours[0], None)
        return slot_input

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """A permit of a slot has one unit already."""
        return await self.check(locks.CheckCall(self._terms, call.ticket, call.fence))

    async def check(self, call: locks.CheckCall) -> bool:
        """Whether the server still has the permit."""
        return await self._call_activity(payloads.CHECK, call, bool)

    async def position(self, call: locks.PositionCall) -> Position | None:
        """Refuses: each slot has a line of its own, so a request has no place among all."""
        raise usage_error(
            f"resource {call.terms.resource!r}: backend='slots' has a line for each slot and no queue in which a "
            "request has a place: take backend='coordinator' or 'redis'"
        )

    async def inspect(self, call: locks.InspectCall) -> Snapshot:
        """The state of all slots and lines."""
        return await self._call_activity(payloads.INSPECT, call, Snapshot)

    def resource_workflow(self, permit: Permit) -> str:
        """The ID of the permit's slot."""
        return payloads.slot_id(permit.resource, payloads.slot_of(permit))


def _on_end(run: Run, permit: Permit, ended: asyncio.Task[Any]) -> None:
    """Marks the permit as lost if its slot ended without a release."""
    retrieve_exception(ended)
    how = "the server ended its slot"
    if not ended.cancelled() and ended.exception() is None:
        if ended.result().how in {"released", "owner-closed"}:
            return
        how = "its lease ran out" if ended.result().how == "lease-expired" else "its slot was cancelled by hand"
    run.on_lost(locks.LostSignal(permit.resource, permit.ticket, permit.fence, how))
