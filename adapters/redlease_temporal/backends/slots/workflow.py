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

from redlease_temporal.common.owner_looks import LOOK_LIMIT, is_kept
from redlease_temporal.payloads import locks
from redlease_temporal.payloads.coordinator import (
    LOOK,
    Adoption,
    Confirmed,
    Found,
    Owner,
    Release,
    Renewal,
    Seen,
    fault_of,
)
from redlease_temporal.payloads.locks import micros
from redlease_temporal.payloads.slots import (
    IDLE,
    MEMO,
    TELL,
    WORKFLOW,
    Ended,
    Line,
    SlotHandover,
    SlotInput,
    SlotOffer,
    Slots,
    SlotWaiter,
    SpareSlot,
    slot_id,
)
from redlease_temporal.workflow_side.backend import OFTEN
from redlease_temporal.workflow_side.mailbox import signal

T = TypeVar("T")

EVENTS_MAX = 500  # history length after which a run continues as new
SPARES_MAX = 8  # other slots that one slot remembers or checks
UNKNOWN_MAX = 3  # consecutive looks without an answer for which a permit is kept
LOOK_IN_ALL = timedelta(seconds=7)  # retries included: it must end before the server ends the slot


@workflow.defn(name=WORKFLOW)
class Slot:
    """One unit of the resource, held by the run that started it or adopted its permit."""

    @workflow.init
    def __init__(self, taken: SlotInput) -> None:
        info = workflow.info()
        permit = taken.kept.permit_since(micros(info.workflow_start_time), info.run_id)
        if taken.kept.permit is None and taken.max_hold_ms is not None:
            taken = replace(taken, until_ms=permit.granted_at_ms + taken.max_hold_ms)
        self._taken = taken
        self._permit = permit
        self._waiters = list(taken.waiters)
        self._hints = list(taken.hints)
        self._resource = taken.kept.terms.resource
        self._slot = taken.kept.slot
        self._ended: Ended | None = None
        self._cancelled = False
        self._renewed = False
        self._telling = 0

    @workflow.run
    async def run(self, taken: SlotInput) -> Ended:
        """Holds the permit until it ends; returns how it ended."""
        del taken
        serving = asyncio.ensure_future(self._serve())
        while not serving.done():
            try:
                await asyncio.shield(serving)
            except asyncio.CancelledError:
                # Its parent closed, or somebody cancelled it: _serve finds out which, and that takes time.
                self._cancelled = True
        return serving.result()

    async def _serve(self) -> Ended:
        await self._share()
        while self._ended is None:
            left = timedelta(milliseconds=max(1, self._permit.expires_at_ms - _now_ms()))
            try:
                await workflow.wait_condition(self._has_to_act, timeout=left)
            except TimeoutError:
                await self._at_the_end_of_the_lease()
                continue
            if self._ended is None and self._cancelled:
                await self._look(ending=True)
            elif self._ended is None and self._may_go_on():
                self._go_on()
        await self._hand_on()
        return self._ended

    def _has_to_act(self) -> bool:
        return self._ended is not None or self._cancelled or self._may_go_on()

    def _may_go_on(self) -> bool:
        long = workflow.info().get_current_history_length() >= EVENTS_MAX
        return (self._renewed or long) and not self._telling

    def _go_on(self) -> None:
        """Continues as new, with a new run timeout."""
        taken = replace(self._taken.with_permit(self._permit), waiters=self._waiters, hints=self._hints)
        workflow.continue_as_new(taken, run_timeout=taken.run_timeout(), memo={MEMO: taken.kept})

    # Leases

    async def _at_the_end_of_the_lease(self) -> None:
        taken = self._taken
        kept = taken.keep and not taken.leaving and (taken.until_ms is None or _now_ms() < taken.until_ms)
        if kept:
            await self._look(ending=False)
        elif self._permit.expires_at_ms <= _now_ms():
            await self._lose("its lease ran out", "lease-expired")

    async def _look(self, *, ending: bool) -> None:
        """Asks the server for the status of the run that holds the permit. `ending`: the parent may have closed."""
        requester = self._taken.requester
        self._cancelled = False
        fate = "closed"
        if requester.workflow_id:
            fate = await self._fate(Owner(requester.workflow_id, requester.run_id))
        if self._ended is not None:
            return
        if fate == "open" and ending:
            await self._lose("its slot was cancelled by hand", "cancelled")
        elif fate == "closed" and self._taken.on_close == "release":
            self._ended = Ended("owner-closed")
        elif fate in {"continued", "reset"}:
            # The next run has one lease to adopt the permit, or to confirm that it holds it.
            self._extend(self._permit.lease_ms, leaving=True)
            if fate == "reset":
                name = slot_id(self._resource, self._slot)
                confirm = locks.Confirm(self._resource, self._permit.ticket, self._permit.fence, name)
                await signal(requester.workflow_id, locks.CONFIRM_SIGNAL, confirm)
        elif is_kept(fate, self._taken.unknown, UNKNOWN_MAX):
            self._extend(self._permit.lease_ms, unknown=self._taken.unknown + 1 if fate == "unknown" else 0)
        else:
            self._taken = replace(self._taken, leaving=True)

    async def _fate(self, owner: Owner) -> str:
        try:
            seen = await self._activity(LOOK, [owner], list[Seen], LOOK_IN_ALL)
        except FailureError as error:  # failing the slot would free it
            workflow.logger.warning("how %r stands was not found out: %s", owner.workflow_id, error.cause or error)
            return "unknown"
        return seen[0].fate if seen else "unknown"

    def _extend(self, lease_ms: int, *, leaving: bool = False, unknown: int = 0) -> None:
        self._permit = replace(self._permit, lease_ms=lease_ms, expires_at_ms=_now_ms() + lease_ms)
        self._taken = replace(self._taken, leaving=leaving, unknown=unknown)
        self._renewed = True

    async def _lose(self, why: str, how: str) -> None:
        self._ended = Ended(how)
        await self._say_lost(why)

    async def _say_lost(self, why: str) -> None:
        owner = self._taken.requester.workflow_id
        if owner and self._taken.keep:  # nobody waits for the loss of a permit that is plain data
            lost = locks.Lost(self._resource, self._permit.ticket, self._permit.fence, why)
            await signal(owner, locks.LOST_SIGNAL, lost)

    # The line

    async def _hand_on(self) -> None:
        """Has the line notified when this workflow has ended. The server repeats the task if a waiter arrives now."""
        await workflow.wait_condition(lambda: not self._telling)
        if self._waiters or self._hints:
            run_id, fence = workflow.info().run_id, self._permit.fence
            hand_on = SlotHandover(self._resource, self._slot, run_id, self._waiters, self._hints, fence)
            try:
                await self._activity(TELL, hand_on, type(None))
            except FailureError as error:  # the release succeeded; waiters find the slot on their next retry
                workflow.logger.warning("the line is not told that the slot is free: %s", error.cause or error)

    async def _tell_free(self, head: SlotWaiter, slot: int, rest: list[SlotWaiter]) -> bool:
        free = SlotOffer(self._resource, slot, head.requester.request, rest, self._permit.fence)
        return await signal(head.requester.workflow_id, locks.FREE_SIGNAL, free)

    async def _share(self) -> None:
        """Sends waiters of the line to slots that became free while the line was on its way here."""
        others = [number for number in range(self._taken.kept.terms.capacity) if number != self._slot]
        if not self._waiters or not others:
            return
        some = workflow.random().sample(others, min(SPARES_MAX, len(others)))
        try:
            idle = await self._activity(IDLE, Slots(self._resource, some), list[int])
        except FailureError:
            return  # the server did not answer; waiters find free slots on their next retry
        for number in idle:
            await self._send_to(number)

    async def _send_to(self, slot: int) -> bool:
        """Sends the first waiter that may use another slot there; returns False if no such waiter is open."""
        while (first := next((each for each in self._waiters if each.may_have(slot)), None)) is not None:
            self._waiters.remove(first)
            if await self._tell_free(first, slot, []):
                return True
        return False

    async def _activity(self, name: str, arg: object, result: type[T], in_all: timedelta | None = None) -> T:
        returned: T = await workflow.execute_local_activity(
            name,
            arg,
            result_type=result,
            start_to_close_timeout=LOOK_LIMIT,
            schedule_to_close_timeout=in_all,
            retry_policy=OFTEN,
        )
        return returned

    # Signals from runs and from other slots

    @workflow.signal
    async def wait(self, line: Line) -> None:
        """Adds runs to the line. One that holds the slot, and requests again after a reset, gets its grant again."""
        known = {each.requester.request for each in self._waiters}
        mine = [each for each in line.waiters if each.requester.request == self._taken.requester.request]
        self._waiters += [each for each in line.waiters if each not in mine and each.requester.request not in known]
        for each in mine:
            self._taken = replace(self._taken, requester=each.requester, leaving=False)
            granted = locks.Granted(self._permit, each.requester.request, slot_id(self._resource, self._slot))
            await self._saying(signal(each.requester.workflow_id, locks.GRANTED_SIGNAL, granted))

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
            await self._saying(self._send_to(spare.slot))
        elif spare.others:
            asked, *others = spare.others
            forward = SpareSlot(spare.slot, others, spare.floor)
            await self._saying(signal(slot_id(self._resource, asked), "spare", forward))

    async def _saying(self, saying: Awaitable[Any]) -> None:
        self._telling += 1
        try:
            await saying
        finally:
            self._telling -= 1

    @workflow.signal
    async def release(self, release: Release) -> None:
        """Releases the permit: by its fence, by its request or, with the ticket alone, by an administrator."""
        if self._ended is not None or release.ticket != self._permit.ticket:
            return
        by_admin = release.fence is None and not release.request
        if not by_admin and release.fence != self._permit.fence and release.request != self._taken.requester.request:
            return
        self._ended = Ended("released", release.call)
        if by_admin:
            await self._saying(self._say_lost("it was released by its ticket"))

    @workflow.signal
    def renew(self, renewal: Renewal) -> None:
        """Renews the permit for a full lease."""
        if self._is_held(renewal.ticket, renewal.fence) and not fault_of(renewal):
            self._extend(renewal.lease_ms, leaving=self._taken.leaving)

    @workflow.signal
    def adopt(self, adoption: Adoption) -> None:
        """A run takes the permit over; of two that adopt it the first wins."""
        if not self._is_held(adoption.ticket, adoption.fence) or fault_of(adoption):
            return
        before, after = self._taken.requester, adoption.requester
        same = (before.workflow_id, before.chain) == (after.workflow_id, after.chain)
        if adoption.refence if adoption.refence is not None else not same:
            self._permit = replace(self._permit, fence=max(self._permit.fence + 1, micros(workflow.now())))
        until_ms = None if adoption.max_hold_ms is None else _now_ms() + adoption.max_hold_ms
        self._taken = replace(self._taken, requester=after, keep=True, on_close=adoption.on_close, until_ms=until_ms)
        self._extend(adoption.lease_ms)

    @workflow.signal
    def confirm(self, confirmed: Confirmed) -> None:
        """After a reset: the new run holds what the old one held."""
        if self._is_held(confirmed.ticket, confirmed.fence):
            requester = replace(self._taken.requester, run_id=confirmed.run_id)
            self._taken = replace(self._taken, requester=requester)
            self._extend(self._permit.lease_ms)

    def _is_held(self, ticket: str, fence: int) -> bool:
        return self._ended is None and (self._permit.ticket, self._permit.fence) == (ticket, fence)

    # Queries

    @workflow.query
    def permit(self, ticket: str, fence: int) -> Found:
        """The permit, if it is held with that fence."""
        return Found(self._permit if self._is_held(ticket, fence) else None)

    @workflow.query
    def adopted(self, ticket: str, request: str) -> Found:
        """The permit, if a run adopted it by that request."""
        held = self._ended is None and self._permit.ticket == ticket and self._taken.requester.request == request
        return Found(self._permit if held else None)

    @workflow.query
    def line(self) -> list[SlotWaiter]:
        """The runs in the line."""
        return self._waiters


def _now_ms() -> int:
    return micros(workflow.now()) // 1000
