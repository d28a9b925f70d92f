"""What a run and the workflows that keep resources say to each other by signals, outside the user's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from temporalio import workflow
from temporalio.exceptions import FailureError

from .calls import FREE_SIGNAL, Confirm, Granted, Refused
from .coordinator_calls import Confirmed, Release
from .slot_calls import Free

Key = tuple[str, str, int]  # resource, ticket, fence: what tells a permit from all others


async def signal(workflow_id: str, name: str, said: object) -> bool:
    """Signals a workflow from workflow code; False when there is none open by that id."""
    try:
        await workflow.get_external_workflow_handle(workflow_id).signal(name, said)
    except FailureError:
        return False
    return True


@dataclass
class Post:
    """One run's part of it.

    Attributes:
        awaited: The requests that somebody here waits for.
        answers: What came for them.
        frees: The slots that were offered for them.
        homes: In the lines of which slots they stand.
        kept: The permits that this run has.
        slots: In which slots they are.
        children: Those slots, where this run has started them itself.
        calls: How many calls it has made that have a name.
    """

    awaited: set[str] = field(default_factory=set)
    answers: dict[str, Granted | Refused] = field(default_factory=dict)
    frees: dict[str, list[Free]] = field(default_factory=dict)
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
        """A grant; one that nobody here waits for goes back, so that it is not held by nobody."""
        permit = granted.permit
        if granted.request in self.awaited:
            self.answers.setdefault(granted.request, granted)
        elif (permit.resource, permit.ticket, permit.fence) not in self.kept:
            self._say(signal(granted.keeper, "release", Release(permit.ticket, permit.fence)))

    def on_refused(self, refused: Refused) -> None:
        """A refusal."""
        if refused.request in self.awaited:
            self.answers.setdefault(refused.request, refused)

    def on_free(self, free: Free) -> None:
        """A slot is free for a request; where nobody waits for it any more the offer goes to the next in the line."""
        if free.request in self.awaited:
            self.frees.setdefault(free.request, []).append(free)
        else:
            self._say(self.pass_on(free))

    async def pass_on(self, free: Free) -> None:
        """Offers a slot to the next in the line, and so on as long as the next is not there."""
        rest = free.rest
        while rest:
            head, *rest = rest
            offer = Free(free.resource, free.slot, head.requester.request, rest, free.floor)
            if head.requester.workflow_id == workflow.info().workflow_id:  # a workflow cannot signal itself
                self.on_free(offer)
                return
            if await signal(head.requester.workflow_id, FREE_SIGNAL, offer):
                return

    def forget(self, request: str) -> None:
        """Nobody waits for a request any more: what was offered to it goes on."""
        self.awaited.discard(request)
        self.answers.pop(request, None)
        self.homes.pop(request, None)
        for free in self.frees.pop(request, []):
            self._say(self.pass_on(free))

    def on_confirm(self, confirm: Confirm) -> None:
        """Says that this run holds it, if it does; no answer is one too."""
        if (confirm.resource, confirm.ticket, confirm.fence) in self.kept:
            confirmed = Confirmed(confirm.ticket, confirm.fence, workflow.info().run_id)
            self._say(signal(confirm.keeper, "confirm", confirmed))

    def _say(self, saying: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(saying)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
