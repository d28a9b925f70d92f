"""The signals between a run and the workflows that keep resources, handled outside the user's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

from redlease_temporal.payloads.coordinator import Confirmed, Release
from redlease_temporal.payloads.locks import FREE_SIGNAL, Confirm, Granted, Refused
from redlease_temporal.payloads.slots import SlotOffer

from .cancellation import ended

ASKS_WITHIN_S = 1.0  # how long after its grant a run may make a request
ID_BYTES_MAX = 1000  # bytes of a workflow id: the server accepts no more
Key = tuple[str, str, int]  # resource, ticket and fence, which together identify a permit


async def signal(workflow_id: str, name: str, said: object) -> bool:
    """Signals a workflow from workflow code; returns False if no run with that id is open."""
    if not 0 < len(workflow_id.encode()) <= ID_BYTES_MAX:
        return False  # the server would reject the command, and with it the whole workflow task
    try:
        await ended(workflow.get_external_workflow_handle(workflow_id).signal(name, said))
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
        frees: The slots offered to each request.
        homes: The slot in whose line each request waits.
        kept: The permits that this run has.
        slots: The slot of each permit.
        children: The child workflow of each permit whose slot this run started.
        calls: How many named calls the run has made.
    """

    awaited: set[str] = field(default_factory=set)
    answers: dict[str, Granted | Refused] = field(default_factory=dict)
    early: dict[str, Granted] = field(default_factory=dict)
    frees: dict[str, list[SlotOffer]] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)
    kept: set[Key] = field(default_factory=set)
    slots: dict[Key, int] = field(default_factory=dict)
    children: dict[Key, asyncio.Task[Any]] = field(default_factory=dict)
    calls: int = 0
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def call_name(self) -> str:
        """A name for one call of this run, the same in every replay."""
        self.calls += 1
        return f"{workflow.info().run_id}/{self.calls}"

    def on_granted(self, granted: Granted) -> None:
        """Stores a grant for the code that waits for it; releases the permit if nobody does."""
        permit = granted.permit
        if granted.request in self.awaited:
            self.answers.setdefault(granted.request, granted)
        elif (permit.resource, permit.ticket, permit.fence) not in self.kept:
            self.early[granted.request] = granted
            self._say(self._give_back(granted))

    async def _give_back(self, granted: Granted) -> None:
        """Releases a permit, unless the run asks for it: a task that is executed again asks after the grant."""
        try:
            await workflow.wait_condition(lambda: self.early.get(granted.request) is not granted, timeout=ASKS_WITHIN_S)
        except TimeoutError:
            del self.early[granted.request]
            await signal(granted.keeper, "release", Release(granted.permit.ticket, granted.permit.fence))

    def on_refused(self, refused: Refused) -> None:
        """Stores a refusal for the code that waits for it."""
        if refused.request in self.awaited:
            self.answers.setdefault(refused.request, refused)

    def on_free(self, free: SlotOffer) -> None:
        """Stores the offer of a slot for its request; passes it on to the next in the line if no code waits for it."""
        if free.request in self.awaited:
            self.frees.setdefault(free.request, []).append(free)
        else:
            self._say(self.pass_on(free))

    async def pass_on(self, free: SlotOffer) -> None:
        """Offers a slot to the next in the line whose workflow is open."""
        rest = free.rest
        while rest:
            head, *rest = rest
            offer = SlotOffer(free.resource, free.slot, head.requester.request, rest, free.floor)
            if head.requester.workflow_id == workflow.info().workflow_id:  # a workflow cannot signal itself
                self.on_free(offer)
                return
            if await signal(head.requester.workflow_id, FREE_SIGNAL, offer):
                return

    def forget(self, request: str) -> None:
        """Ends the wait for a request; passes on the slots that were offered to it."""
        self.awaited.discard(request)
        self.answers.pop(request, None)
        self.homes.pop(request, None)
        for free in self.frees.pop(request, []):
            self._say(self.pass_on(free))

    def on_confirm(self, confirm: Confirm) -> None:
        """Confirms that this run holds the permit. If it does not, it stays silent, which counts as a no."""
        if (confirm.resource, confirm.ticket, confirm.fence) in self.kept:
            confirmed = Confirmed(confirm.ticket, confirm.fence, workflow.info().run_id)
            self._say(signal(confirm.keeper, "confirm", confirmed))

    def _say(self, saying: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(saying)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
