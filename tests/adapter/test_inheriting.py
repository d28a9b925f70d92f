"""What a relay does with the permits of one that was killed; without Temporal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fake_temporal import FakeTemporal
from relay_stage import Stage, quick

from redlease_temporal._common import run_monitor

from helpers import eventually

__all__ = ["quick"]

if TYPE_CHECKING:
    import pytest

    from conftest import Servers

IDLE_POLL_MS = 60_000.0
SOON_S = 10.0


async def test_a_run_that_ended_unseen(servers: Servers, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heir looks at once at the runs whose permits it takes over: nobody saw them since the other was killed."""
    monkeypatch.setattr(run_monitor, "IDLE_POLL_MS", IDLE_POLL_MS)
    temporal = FakeTemporal()
    stages = [Stage(servers.url("valkey9"), prefix, temporal) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(stages[0].running())
        workflow_id = await one.ask("r")
        (tracker,) = one.relay.trackers.values()
        await eventually(lambda: tracker.record.recorded)
        for task in list(one.relay._tasks):  # it is killed, and renews nothing any more
            task.cancel()
        temporal.close(workflow_id)
        heir = await stack.enter_async_context(stages[1].running())
        assert await heir.held("r") == {workflow_id}

        async def is_free() -> bool:
            return not await heir.held("r")

        await eventually(is_free, SOON_S)
