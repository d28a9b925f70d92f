"""A local activity that is executed late: its task was executed again elsewhere, and its run has gone on or ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
from backend_bench import Bench
from backend_flows import Holder
from temporal_tools import holder_of
from temporalio import activity
from temporalio.testing import ActivityEnvironment

from redlease_temporal._backends.redis.requests import Requests

from helpers import eventually

if TYPE_CHECKING:
    from temporal_tools import Place

    from redlease import Semaphore
    from redlease_temporal._payloads import locks

LEASE_S = 3.0


class Execution(NamedTuple):
    """One execution of `redlease.enqueue`, which can be made once more."""

    requests: Requests
    call: locks.AcquireCall
    info: activity.Info

    async def again(self) -> locks.AcquireStatus:
        """Execute it, late."""
        environment = ActivityEnvironment()
        environment.info = self.info
        return await environment.run(self.requests.enqueue, self.call)

    async def is_over(self) -> bool:
        """Tell whether the relay looks after nothing of its run any more."""
        return all(each.record.run_id != self.info.workflow_run_id for each in self.requests._relay.trackers.values())


@pytest.fixture
def executions(monkeypatch: pytest.MonkeyPatch) -> list[Execution]:
    """All executions of `redlease.enqueue`."""
    made: list[Execution] = []
    enqueue = Requests.enqueue

    async def recorded(requests: Requests, call: locks.AcquireCall) -> locks.AcquireStatus:
        made.append(Execution(requests, call, activity.info()))
        return await enqueue(requests, call)

    monkeypatch.setattr(Requests, "enqueue", recorded)
    return made


async def test_after_its_run_has_let_go(place: Place, pool: Semaphore, executions: list[Execution]) -> None:
    """What it is granted, its run does not know of: it expires with its lease, though the run goes on."""
    async with place.serving([Holder], []) as client:
        run = await Bench(client, place.task_queue, "redis").holder("let go", resource="r", lease=LEASE_S)
        await run.execute_update(Holder.until_held)
        await run.signal(Holder.proceed)
        await eventually(lambda: is_free(pool))
        status = await executions[0].again()
        assert status.permit is not None
        await eventually(lambda: is_free(pool), 2 * LEASE_S + 4)
        await run.signal(Holder.proceed)
        assert await run.result() == "let go"


async def test_after_another_workflow_has_adopted_its_permit(
    place: Place, pool: Semaphore, executions: list[Execution]
) -> None:
    """It joins the permit of its ticket, and gives back no more than its part when its run is found to be closed."""
    async with place.serving([Holder], []) as client:
        bench = Bench(client, place.task_queue, "redis")
        first = await bench.holder(resource="r")
        await first.execute_update(Holder.until_held)
        (permit,) = (await pool.inspect()).holders
        heir = await bench.holder(permit=permit, resource="r")
        fence = await heir.execute_update(Holder.until_held)
        assert fence > permit.fence
        assert await first.result() == "lost"
        late = executions[0]
        status = await late.again()
        assert status.permit is not None
        assert status.permit.fence == fence
        await eventually(late.is_over, 15)  # a look of the relay
        assert await holder_of(pool) == fence
        await heir.signal(Holder.proceed)
        assert await heir.result() == f"adopted {fence}"


async def is_free(pool: Semaphore) -> bool:
    """Tell whether nobody holds."""
    return await holder_of(pool) == 0
