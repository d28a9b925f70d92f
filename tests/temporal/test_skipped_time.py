"""Every lease and deadline of the backends that need no Redis, an hour in milliseconds."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from awkward_flows import Overtaken, Told, take_time
from backend_flows import WORKFLOWS, On, Timed, guarded
from stranding import STANDS, STRANDED, Stranding
from temporalio.api.enums.v1 import EventType
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from temporalio.client import Client, WorkflowHandle

HOUR = 3600.0
SLACK = 10.0  # seconds of skipped time that pass while messages are on their way


@pytest.fixture
async def skipping(time_skipping: dict[str, Any], task_queue: str, prefix: str) -> AsyncIterator[Client]:
    """A client of a server that skips time, beside a worker."""
    async with (
        await WorkflowEnvironment.start_time_skipping(**time_skipping, plugins=[RedleasePlugin(prefix=prefix)]) as env,
        Worker(env.client, task_queue=task_queue, workflows=WORKFLOWS, activities=[guarded]),
    ):
        yield env.client


@pytest.fixture(params=["slots", "coordinator"])
def on(request: pytest.FixtureRequest, task_queue: str) -> On:
    """A resource on each backend in turn, with a lease of an hour."""
    return On(str(request.param), f"{task_queue}-r", lease=HOUR)


class Skipping:
    """Starts workflows, and lets time skip only when their results are waited for."""

    def __init__(self, client: Client, task_queue: str) -> None:
        self.client = client
        self.queue = task_queue
        self._started = 0

    async def start(self, on: On, what: str = "hold", seconds: float = 0.0) -> WorkflowHandle[Any, list[float]]:
        """Start a workflow, and return when it has asked."""
        self._started += 1
        handle = await self.client.start_workflow(
            Timed.run, args=[on, what, seconds], id=f"{self.queue}-{self._started}", task_queue=self.queue
        )

        async def asked() -> bool:
            return len((await handle.fetch_history()).events) > len(("started", "scheduled", "started", "completed"))

        await eventually(asked)
        return handle


@pytest.fixture
def at(skipping: Client, task_queue: str) -> Skipping:
    """What the tests start workflows with."""
    return Skipping(skipping, task_queue)


def but(on: On, **other: Any) -> On:
    """Return the resource with other options."""
    return On(**(vars(on) | other))


async def test_a_permit_that_nobody_keeps_lapses_after_its_lease(at: Skipping, on: On) -> None:
    """The next has it an hour after the first, to the minute."""
    first = await at.start(on, "acquire")
    second = await at.start(on, "acquire")
    _, granted = await first.result()
    _, after = await second.result()
    assert HOUR - SLACK <= after - granted < HOUR + 60


async def test_a_deadline_passes(at: Skipping, on: On) -> None:
    """Who waits for half an hour gives up then, and who waits for two has the permit when it lapses."""
    await at.start(on, "acquire")
    impatient = await at.start(but(on, timeout=HOUR / 2))
    patient = await at.start(but(on, timeout=2 * HOUR))
    began, over = await impatient.result()
    assert HOUR / 2 <= over - began < HOUR / 2 + SLACK
    began, held, _ = await patient.result()
    assert HOUR - 60 <= held - began < HOUR + 60


async def test_a_hold_is_kept_over_many_leases(at: Skipping, on: On) -> None:
    """A body of five leases has its permit to the end, and the next has it after that."""
    short = but(on, lease=HOUR / 6)  # who waits for a slot tries again each minute
    first = await at.start(short, seconds=5 * HOUR / 6)
    second = await at.start(short)
    _, _, over = await first.result()
    _, held, _ = await second.result()
    assert -SLACK <= held - over < 60


async def test_a_dead_holder_keeps_others_waiting_for_a_lease(at: Skipping, on: On) -> None:
    """The permit of a terminated run is free when the lease has run out at the latest."""
    dead = await at.start(on, seconds=100 * HOUR)

    async def sleeps() -> bool:
        # Terminated in a workflow task, it would keep this server from skipping time ever after.
        last = (await dead.fetch_history()).events[-1].event_type
        return last == EventType.EVENT_TYPE_TIMER_STARTED

    await eventually(sleeps)
    second = await at.start(on)
    await dead.terminate()
    began, held, _ = await second.result()
    assert held - began < HOUR + 60


async def test_max_hold_is_how_long_it_is_kept(at: Skipping, on: On) -> None:
    """A body that hangs is told that its permit is lost, a lease after `max_hold` at the latest."""
    hanging = await at.start(but(on, max_hold=1.5 * HOUR), seconds=100 * HOUR)
    _, held, over, _ = await hanging.result()
    assert 1.5 * HOUR <= over - held < 2.5 * HOUR + 60


async def test_the_server_strands_a_run(time_skipping: dict[str, Any], task_queue: str) -> None:
    """By refusing to cancel a timer, with no part of the library in it: `Stranding` tells that from a mere wait."""
    async with (
        Stranding() as stranding,
        await WorkflowEnvironment.start_time_skipping(**time_skipping) as env,
        Worker(env.client, task_queue=task_queue, workflows=[Overtaken, Told], activities=[take_time]),
        asyncio.timeout(50),
    ):
        handle = await env.client.start_workflow(
            Overtaken.run, id=task_queue, task_queue=task_queue, task_timeout=timedelta(seconds=1)
        )
        assert await stranding.outcome(handle, task_s=1) == STRANDED
        assert stranding.refused == 1
        told = await env.client.start_workflow(Told.run, id=f"{task_queue}-told", task_queue=task_queue)
        assert await stranding.outcome(told, still_s=1) == STANDS
        await told.signal(Told.go_on)
        assert await stranding.outcome(told) == "went on"
