"""Resources kept by slots: the workflow that runs under a slot's ID is what holds a unit.

A request tries to start one slot. If that runs already it stands in the line of that slot, unless another one is free,
and is told when its turn has come. The line travels from holder to holder. A back-off is the net for what a slot that
the server has ended could not say.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, WorkflowAlreadyStartedError

from redlease.models import Permit, Snapshot

from . import calls
from . import slot_calls as to
from .backend import answered, local, prolonged, timed_out
from .coordinator_calls import Release, Renewal
from .errors import Unavailable, misuse, misused
from .hold import seen, to_its_end, until
from .post import Post, signal
from .run import Run, current, shown_as
from .wishes import adoption_of, request_name, requester_of

T = TypeVar("T")

ENDS_IN_S = 3.0  # how long a released slot may take to end
PAUSE_S = 2.0  # between one try to learn of a permit and the next
BACKOFF_S = (5.0, 60.0)  # the first and the longest pause of the net; jittered down to a half


class SlotBackend:
    """A resource that the workflow runs and clients of one namespace share. `terms`: of the resource."""

    away = "the Temporal server"

    def __init__(self, terms: calls.Terms) -> None:
        if terms.capacity > to.CAPACITY_MAX:
            raise misused(f"capacity is at most {to.CAPACITY_MAX} on slots, of which each is a workflow")
        if terms.max_waiters is not None:
            raise misused("slots do not know how many wait: max_waiters needs backend='coordinator' or 'redis'")
        self._terms = terms

    async def acquire(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        """Takes a slot, or stands in line for one."""
        if timeout is not None and timeout <= timedelta(0):
            permit = await self.try_acquire(run, dataclasses.replace(wish, queue=False))
            if permit is None:
                raise timed_out(self.away, wish, timeout)
            return permit
        request = self._checked(wish)
        try:
            async with asyncio.timeout(None if timeout is None else timeout.total_seconds()):
                run.post.awaited.add(request)
                permit = await self._stand_in_line(run, wish, request)
        # Not whatever comes: a run that is taken out of memory has nothing to say.
        except (TimeoutError, asyncio.CancelledError, ApplicationError) as error:
            await to_its_end(self._leave(run.post, request))
            run.post.forget(request)
            if isinstance(error, TimeoutError) and not isinstance(error, ApplicationError):
                raise timed_out(self.away, wish, timeout or timedelta(0)) from None
            raise
        run.post.forget(request)
        return permit

    async def _leave(self, post: Post, request: str) -> None:
        """Leaves the line."""
        home = post.homes.get(request)
        if home is not None:
            await signal(to.slot_id(self._terms.resource, home), "leave", request)

    async def try_acquire(self, run: Run, wish: calls.Wish) -> Permit | None:
        """Takes a slot if one is free."""
        request = self._checked(wish)
        first, *others = self._order()
        permit = await self._take(run, wish, request, first)
        if permit is None and others:
            idle = await self._ask(to.IDLE, to.Slots(self._terms.resource, others), list[int])
            permit = await self._take_one_of(run, wish, request, idle)
        return permit

    async def _stand_in_line(self, run: Run, wish: calls.Wish, request: str) -> Permit:
        order = self._order()
        me = to.SlotWaiter(requester_of(wish, request), wish.ticket, wish.terms.capacity)
        offer: to.Free | None = None
        free, number = order[:1], 0
        while True:
            permit = await self._take_one_of(run, wish, request, free, offer)
            if permit is not None:
                return permit
            if offer is not None:  # somebody else was faster: the line goes on in that slot's next run
                order = [offer.slot, *(slot for slot in order if slot != offer.slot)]
            line = [me, *(offer.rest if offer else [])]
            free = await self._line_up(run.post, line, order, hint=number == 0 or offer is not None)
            if free[:1] != order[:1]:
                offer = None  # it stands there now; if not, the rest comes along to the slot that is free after all
            if not free:
                answer = await self._turn(run, request, number)
                if isinstance(answer, calls.Granted):
                    return self._own(run, answer.permit)
                offer, number = answer, number + 1
                free = [answer.slot] if answer else []

    async def _line_up(self, post: Post, line: list[to.SlotWaiter], order: list[int], *, hint: bool) -> list[int]:
        """Stands in the line of the first slot, the rest of a line behind; or finds slots that are free."""
        rest = to.Free(self._terms.resource, order[0], "", line[1:])
        try:
            free = await self._ask(to.LINE_UP, to.LineUp(self._terms.resource, order, line, hint), list[int])
        except Unavailable:
            await to_its_end(post.pass_on(rest))
            return []
        except (ApplicationError, asyncio.CancelledError):
            await to_its_end(post.pass_on(rest))
            raise
        if free[:1] != order[:1]:
            post.homes[line[0].requester.request] = order[0]
        return free

    async def _turn(self, run: Run, request: str, number: int) -> to.Free | calls.Granted | None:
        """What comes for a request; None when the pause is over."""
        first, longest = BACKOFF_S
        pause_s = workflow.random().uniform(0.5, 1.0) * min(longest, first * 2 ** min(number, 10))
        post = run.post
        try:
            await until(lambda: bool(post.frees.get(request)) or request in post.answers, pause_s)
        except TimeoutError:
            return None
        if request in post.answers:
            answer = post.answers.pop(request)
            return answer if isinstance(answer, calls.Granted) else None
        return post.frees[request].pop(0)

    async def _take_one_of(
        self, run: Run, wish: calls.Wish, request: str, slots: Iterable[int], offer: to.Free | None = None
    ) -> Permit | None:
        for slot in slots:
            permit = await self._take(run, wish, request, slot, offer)
            if permit is not None:
                return permit
        return None

    async def _take(
        self, run: Run, wish: calls.Wish, request: str, slot: int, offer: to.Free | None = None
    ) -> Permit | None:
        """Starts a slot; None when it runs already."""
        floor = offer.floor if offer else 0
        owner = wish.owner or shown_as(workflow.info())
        kept = to.Kept(wish.terms, slot, wish.ticket, floor, owner, wish.metadata)
        taken = to.Taken(
            kept,
            requester_of(wish, request),
            keep=wish.keep,
            on_close=wish.on_close,
            max_hold_ms=wish.max_hold_ms,
            waiters=offer.rest if offer else [],
        )
        starting = asyncio.ensure_future(self._start(run, taken))
        try:
            child = await asyncio.shield(starting)
            if child is None:
                return None
            home = run.post.homes.get(request)
            started = to.Started(wish.terms.resource, slot, child.first_execution_run_id or "", kept, home, request)
            permit = await self._claimed(started, patient=wish.queue)
        except (ApplicationError, asyncio.CancelledError):
            await to_its_end(self._undo(run.post, starting, taken))
            raise
        child.add_done_callback(lambda ended: _on_end(run, permit, ended))
        run.post.children[permit.resource, permit.ticket, permit.fence] = child
        return self._own(run, permit)

    async def _claimed(self, started: to.Started, *, patient: bool) -> Permit:
        """The permit of a slot that was started; who may wait for a grant waits for the server to tell it, too."""
        while True:
            try:
                return await self._ask(to.CLAIM, started, Permit)
            except Unavailable:
                if not patient:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _start(self, run: Run, taken: to.Taken) -> workflow.ChildWorkflowHandle[Any, Any] | None:
        try:
            return await workflow.start_child_workflow(
                to.WORKFLOW,
                taken,
                id=to.slot_id(self._terms.resource, taken.kept.slot),
                task_queue=run.task_queue,
                result_type=to.Ended,
                # A cancelled slot looks how its parent stands: one that was continued as new takes its permit along.
                parent_close_policy=workflow.ParentClosePolicy.REQUEST_CANCEL,
                cancellation_type=workflow.ChildWorkflowCancellationType.ABANDON,
                run_timeout=taken.run_timeout(),
                memo={to.MEMO: taken.kept},
                static_summary=f"held by {taken.kept.owner}",
            )
        except WorkflowAlreadyStartedError:
            return None

    async def _undo(self, post: Post, starting: asyncio.Task[Any], taken: to.Taken) -> None:
        """Gives back a slot whose start was on its way when its request ended."""
        child = await starting
        if child is None:
            if taken.waiters:
                await post.pass_on(to.Free(self._terms.resource, taken.kept.slot, "", taken.waiters, taken.kept.floor))
            return
        child.add_done_callback(seen)
        release = Release(taken.kept.ticket, None, taken.requester.request)
        await self._send(to.SlotCall(self._terms, taken.kept.slot, release=release))

    def _own(self, run: Run, permit: Permit) -> Permit:
        key = (permit.resource, permit.ticket, permit.fence)
        run.post.kept.add(key)
        run.post.slots[key] = to.slot_of(permit)
        return permit

    def _order(self) -> list[int]:
        """The slots in an order that is random, and the same in every replay."""
        return workflow.random().sample(range(self._terms.capacity), self._terms.capacity)

    def _checked(self, wish: calls.Wish) -> str:
        if wish.weight != 1:
            raise misused("a slot is one unit: a weight needs backend='coordinator' or 'redis'")
        return request_name(wish)

    # Permits

    async def adopt(self, run: Run, adopting: calls.Adopting) -> Permit:
        """Takes over a permit."""
        call = to.SlotCall(self._terms, misuse(to.slot_of, adopting.permit), adoption=adoption_of(adopting))
        name = adopting.wish.local_id
        return self._own(run, await prolonged(to.ADOPT, call, name, away=self.away, resource=self._terms.resource))

    async def renew(self, renewing: calls.Renewing) -> Permit:
        """Gives a permit a new lease."""
        permit = renewing.permit
        renewal = Renewal(permit.ticket, permit.fence, renewing.lease_ms)
        call = to.SlotCall(self._terms, misuse(to.slot_of, permit), renewal=renewal)
        return await prolonged(to.RENEW, call, away=self.away, resource=self._terms.resource)

    async def release(self, giving: calls.Giving) -> bool:
        """Takes a ticket out, and waits until its slot is free."""
        return await self._give(giving, wait=True)

    async def end(self, giving: calls.Giving) -> bool:
        """Takes a permit out; its slot is free a moment later."""
        return await self._give(giving, wait=False)

    async def _give(self, giving: calls.Giving, *, wait: bool) -> bool:
        slot, child = self._taken_here(giving)
        release = Release(giving.ticket, giving.fence, call=current().post.call_name())
        call = to.SlotCall(self._terms, slot, release=release, wait=wait)
        if child is None:
            if slot is None or not current().is_needed_again(self._terms.resource, giving.ticket):
                return await self._send(call)
            delivered = await signal(to.slot_id(self._terms.resource, slot), "release", release)
            if delivered and wait:
                await self._send(call)
            return delivered
        if child.done() or slot is None:
            return False
        # The end of a child is an event. Were it to come in a task that ends the run, the server would have that task
        # done anew, with all that was done locally in it. So the slot is told by a command, and not from such a task.
        delivered = await signal(to.slot_id(self._terms.resource, slot), "release", release)
        if not delivered or not wait:
            return delivered
        await workflow.wait([child], timeout=ENDS_IN_S)
        ended = child.result() if child.done() and child.exception() is None else None
        return ended is not None and ended.call == release.call

    def _taken_here(self, giving: calls.Giving) -> tuple[int | None, asyncio.Task[Any] | None]:
        """In which slot this run has the permit, and that slot where it has started it; no longer, if it is given."""
        post, names = current().post, (self._terms.resource, giving.ticket)
        ours = [key for key in post.slots if key[:2] == names and giving.fence in {None, key[2]}]
        if not ours:
            return None, None
        taken = post.slots[ours[0]], post.children.get(ours[0])
        if giving.fence is not None:
            post.kept.discard(ours[0])
            del post.slots[ours[0]]
            post.children.pop(ours[0], None)
        return taken

    async def _send(self, call: to.SlotCall) -> bool:
        """A release; where the local activity fails the server is left to deliver it."""
        try:
            return await local(to.RELEASE, call, bool)
        except ActivityError:
            if call.slot is not None:
                await signal(to.slot_id(self._terms.resource, call.slot), "release", call.release)
            return False

    async def check(self, checking: calls.Checking) -> bool:
        """Asks the server."""
        return await self._ask(to.CHECK, checking, bool)

    async def inspect(self, inspecting: calls.Inspecting) -> Snapshot:
        """Looks at each slot."""
        return await self._ask(to.INSPECT, inspecting, Snapshot)

    def kept_by(self, permit: Permit) -> str:
        """The slot."""
        return to.slot_id(permit.resource, to.slot_of(permit))

    async def _ask(self, name: str, arg: Any, result: type[T], activity_id: str | None = None) -> T:
        return await answered(name, arg, result, activity_id, away=self.away, resource=self._terms.resource)


def _on_end(run: Run, permit: Permit, ended: asyncio.Task[Any]) -> None:
    """A slot has ended; if it was not released, whoever holds its permit is told."""
    seen(ended)
    how = "the server ended its slot"
    if not ended.cancelled() and ended.exception() is None:
        if ended.result().how in {"released", "owner-closed"}:
            return
        how = "its lease ran out" if ended.result().how == "lease-expired" else "its slot was cancelled by hand"
    run.on_lost(calls.Lost(permit.resource, permit.ticket, permit.fence, how))
