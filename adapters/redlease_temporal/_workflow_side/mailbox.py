"""The signals between a run and the workflows that keep resources, handled outside the user's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

from redlease_temporal._payloads.coordinator import Confirmed, Release
from redlease_temporal._payloads.locks import OFFER_SIGNAL, ConfirmSignal, GrantedSignal, RefusedSignal
from redlease_temporal._payloads.slots import SlotOffer

from .cancellation import ended

ASKS_WITHIN_S = 1.0  # how long after its grant a run may make a request
ID_BYTES_MAX = 1000  # bytes of a workflow id: the server accepts no more
PermitId = tuple[str, str, int]  # resource, ticket and fence, which together identify a permit


async def signal(workflow_id: str, name: str, message: object) -> bool:
    """Signals a workflow from workflow code; returns False if no run with that id is open."""
    if not 0 < len(workflow_id.encode()) <= ID_BYTES_MAX:
        return False  # the server would reject the command, and with it the whole workflow task
    try:
        await ended(workflow.get_external_workflow_handle(workflow_id).signal(name, message))
    except FailureError:
        return False
    return True


@dataclass
class RunMailbox:
    """The answers and offers that one run has received, and the permits that it has.

    Attributes:
        awaited: Requests that code in this run waits for.
        answers: The answer to each request.
        early: The grants of requests that nobody waits for; yet, if the workflow task is executed again.
        returns: The tasks that give early grants back.
        offers: The slots offered to each request.
        line_slots: The slot in whose line each request waits.
        held_permits: The permits that this run has.
        slots: The slot of each permit.
        children: The child workflow of each permit whose slot this run started.
        calls: How many named calls the run has made.
    """

    awaited: set[str] = field(default_factory=set)
    answers: dict[str, GrantedSignal | RefusedSignal] = field(default_factory=dict)
    early: dict[str, GrantedSignal] = field(default_factory=dict)
    returns: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    offers: dict[str, list[SlotOffer]] = field(default_factory=dict)
    line_slots: dict[str, int] = field(default_factory=dict)
    held_permits: set[PermitId] = field(default_factory=set)
    slots: dict[PermitId, int] = field(default_factory=dict)
    children: dict[PermitId, asyncio.Task[Any]] = field(default_factory=dict)
    calls: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def call_name(self) -> str:
        """A name for one call of this run, the same in every replay."""
        self.calls += 1
        return f"{workflow.info().run_id}/{self.calls}"

    def on_granted(self, granted: GrantedSignal) -> None:
        """Stores a grant for the code that waits for it; releases the permit if nobody does."""
        permit = granted.permit
        if granted.request in self.awaited:
            self.answers.setdefault(granted.request, granted)
        elif (permit.resource, permit.ticket, permit.fence) not in self.held_permits:
            self.early[granted.request] = granted
            self.returns[granted.request] = self._send(self._give_back(granted))

    async def _give_back(self, granted: GrantedSignal) -> None:
        """Releases a permit, unless the run asks for it: a task that is executed again asks after the grant."""
        try:
            await workflow.wait_condition(lambda: self.early.get(granted.request) is not granted, timeout=ASKS_WITHIN_S)
        except TimeoutError:
            if self.early.get(granted.request) is granted:
                del self.early[granted.request]
                await signal(granted.resource_workflow, "release", Release(granted.permit.ticket, granted.permit.fence))

    async def take_early(self, request: str) -> GrantedSignal | None:
        """The grant of a request that came before the run made it.

        One that is given back already is given back first: the resource would grant it to the request again, and
        release it then.
        """
        early, returning = self.early.pop(request, None), self.returns.pop(request, None)
        if early is None and returning is not None:
            await workflow.wait([returning])
        return early

    def on_refused(self, refused: RefusedSignal) -> None:
        """Stores a refusal for the code that waits for it."""
        if refused.request in self.awaited:
            self.answers.setdefault(refused.request, refused)

    def on_offer(self, offer: SlotOffer) -> None:
        """Stores the offer of a slot for its request; passes it on to the next in the line if no code waits for it."""
        if offer.request in self.awaited:
            self.offers.setdefault(offer.request, []).append(offer)
        else:
            self._send(self.pass_on(offer))

    async def pass_on(self, offer: SlotOffer) -> None:
        """Offers a slot to the next in the line whose workflow is open."""
        rest = offer.rest
        while rest:
            head, *rest = rest
            next_offer = SlotOffer(offer.resource, offer.slot, head.requester.request, rest, offer.floor)
            if head.requester.workflow_id == workflow.info().workflow_id:  # a workflow cannot signal itself
                self.on_offer(next_offer)
                return
            if await signal(head.requester.workflow_id, OFFER_SIGNAL, next_offer):
                return

    def forget(self, request: str) -> None:
        """Ends the wait for a request; passes on the slots that were offered to it."""
        self.awaited.discard(request)
        self.answers.pop(request, None)
        self.line_slots.pop(request, None)
        for offer in self.offers.pop(request, []):
            self._send(self.pass_on(offer))

    def on_confirm(self, confirm: ConfirmSignal) -> None:
        """Confirms that this run holds the permit. If it does not, it stays silent, which counts as a no."""
        if (confirm.resource, confirm.ticket, confirm.fence) in self.held_permits:
            confirmed = Confirmed(confirm.ticket, confirm.fence, workflow.info().run_id)
            self._send(signal(confirm.resource_workflow, "confirm", confirmed))

    def _send(self, sending: Coroutine[Any, Any, object]) -> asyncio.Task[Any]:
        task = asyncio.create_task(sending)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
