"""How a start replaces others, in virtual time: whom it cancels, how long it waits, and when it is refused."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from redlease.testing.simulation.loop import SimulatedLoop
from redlease.testing.simulation.process import Process
from redlease_temporal import WorkflowConcurrencyLimitExceeded
from redlease_temporal._admission.replacing import TakenSlot, replacing
from redlease_temporal._admission.rule import AdmissionRequest

if TYPE_CHECKING:
    from collections.abc import Callable


class Places:
    """The places of a limit, and the Temporal server: a cancelled workflow closes so many seconds later."""

    def __init__(self, limit: int, **closes_after: float) -> None:
        self.entry = AdmissionRequest("Flow", "asker", limit, replaces=True, grace_ms=10_000)
        self.taken_by: list[TakenSlot] = []
        self.cancelled: list[str] = []
        self.on_look: Callable[[], None] = lambda: None
        self.on_free: Callable[[], None] = lambda: None
        self._closes_after = closes_after
        self._closed: set[str] = set()

    def give(self, workflow_id: str, asked: float) -> None:
        """Let a workflow have a place."""
        self.taken_by.append(TakenSlot(workflow_id, workflow_id, asked))

    def start(self) -> str:
        """Start another, which asks at the time 10; return how that ends."""
        loop = SimulatedLoop(Process("nobody", "0"))  # type: ignore[abstract]
        starting: asyncio.Task[str] = loop.create_task(replacing(self, self, self.entry, self._take))  # type: ignore[arg-type]
        loop.run(1000, starting.done)
        try:
            return starting.result()
        except WorkflowConcurrencyLimitExceeded:
            return "refused"

    async def _take(self, entry: AdmissionRequest) -> str:
        if len(self.taken_by) >= entry.limit:
            raise entry.refusal()
        return "started"

    async def taken_slots(self, _: AdmissionRequest) -> tuple[list[TakenSlot], float]:
        """Tell who has a place, and that it is 10."""
        self.on_look()
        return list(self.taken_by), 10

    async def free_if_closed(self, _: AdmissionRequest, taken: TakenSlot) -> bool:
        """Free the place of a workflow that has closed."""
        if taken.workflow_id not in self._closed or taken not in self.taken_by:
            return False
        self.taken_by.remove(taken)
        self.on_free()
        return True

    def get_workflow_handle(self, workflow_id: str, **_: Any) -> Handle:
        """Find a workflow, as Temporal's client does."""
        return Handle(self, workflow_id)

    async def close(self, workflow_id: str) -> None:
        """Wait until a cancelled workflow is closed."""
        await asyncio.sleep(self._closes_after[workflow_id])
        self._closed.add(workflow_id)


class Handle:
    """One of these workflows."""

    def __init__(self, places: Places, workflow_id: str) -> None:
        self._places = places
        self._workflow_id = workflow_id

    async def cancel(self) -> None:
        """Ask it to end."""
        self._places.cancelled.append(self._workflow_id)

    async def result(self) -> None:
        """Wait until it has."""
        await self._places.close(self._workflow_id)


def test_each_that_is_cancelled_has_the_whole_grace() -> None:
    """Another start, which asked before, gets the place first: its workflow has as long to close as the first one had.

    It is cancelled 8 s after this start asked, with a grace of 10 s, and takes 8 s to close.
    """
    places = Places(1, oldest=8, older=8)
    places.give("oldest", 1)

    def faster() -> None:
        if "older" not in places.cancelled:
            places.give("older", 2)

    places.on_free = faster
    assert places.start() == "started"
    assert places.cancelled == ["oldest", "older"]


def test_who_does_not_close_in_time_stays() -> None:
    """A workflow that takes longer than the grace keeps its place, and the start is refused."""
    places = Places(1, oldest=11)
    places.give("oldest", 1)
    assert places.start() == "refused"
    assert [each.workflow_id for each in places.taken_by] == ["oldest"]


def test_newer_workflows_are_left_alone() -> None:
    """A start that finds only workflows whose starts asked after it is refused, and cancels none."""
    places = Places(2)
    places.give("newer", 11)
    places.give("newest", 12)
    assert places.start() == "refused"
    assert places.cancelled == []


def test_a_place_that_becomes_free_before_the_look_is_taken() -> None:
    """The older of two workflows ends between the refusal and the look; the start does not give up."""
    places = Places(2)
    places.give("older", 1)
    places.give("newer", 12)

    def ends() -> None:
        places.taken_by[:] = [each for each in places.taken_by if each.workflow_id != "older"]

    places.on_look = ends
    assert places.start() == "started"
    assert places.cancelled == []
