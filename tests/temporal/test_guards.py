"""No activity begins under a permit that was given back, whatever the run that begins it was told of it before."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from backend_bench import Bench
from backend_flows import Actor, Asking, Holder, Inside, guarded
from guard_flows import WORKFLOWS, LeavesAChild
from temporal_tools import Place, events_of, reset
from temporalio.api.enums.v1 import EventType

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


BACKENDS = ["redis", "slots", "coordinator"]


@pytest.fixture(params=BACKENDS)
async def bench(request: pytest.FixtureRequest, place: Place) -> AsyncIterator[Bench]:
    """A resource of its own on each backend."""
    async with place.serving(WORKFLOWS, [guarded]) as client:
        bench = Bench(client, place.task_queue, request.param)
        bench.on.lease = 30.0  # nobody renews what an actor has acquired
        yield bench


async def test_a_run_that_is_reset_to_inside_its_block(bench: Bench) -> None:
    """What it held was given back and is another's: the activity that it comes to does not begin."""
    holder, actor = await bench.holder("guarded"), await bench.actor()
    fence = await holder.execute_update(Holder.until_held)
    await holder.signal(Holder.proceed)
    assert await holder.result() == f"held {fence}"
    permit = await bench.do(actor, Actor.acquire, Asking())
    kinds = [event.event_type for event in await events_of(holder)]
    before = kinds[: kinds.index(EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED)]
    again = await reset(bench.client, holder, before.count(EventType.EVENT_TYPE_WORKFLOW_TASK_COMPLETED) - 1)
    assert await again.result() == "lost"
    assert await bench.do(actor, Actor.check, permit)
    assert await bench.do(actor, Actor.release, permit)


async def test_a_child_that_outlives_its_parents_hold(bench: Bench) -> None:
    """The clean-up of a child does not begin beside the next holder, though its parent left the hold in good time."""
    bench.on = dataclasses.replace(bench.on, lease=20.0)  # nobody renews what the actor acquires
    child_id = f"{bench.queue}-child"
    parent, actor = await bench.start(LeavesAChild.run, bench.on, child_id), await bench.actor()

    async def holds() -> bool:
        kinds = [event.event_type for event in await events_of(parent)]
        return EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED in kinds

    await eventually(holds)
    permit = await bench.do(actor, Actor.acquire, Asking(timeout=20))
    await parent.result()
    said = await bench.client.get_workflow_handle(child_id).result()
    assert said.startswith("refused"), said
    assert Inside.now == 0
    assert await bench.do(actor, Actor.release, permit)
