"""Workflows that take locks under all sorts of workers."""

from __future__ import annotations

import gc
import sys
from datetime import timedelta

from temporalio import activity, workflow

from redlease_temporal import Permit, lock


@activity.defn
async def echo(permit: Permit) -> Permit:
    """Return the permit."""
    return permit


@workflow.defn
class RoundTrip:
    """A permit as data, there and back."""

    @workflow.run
    async def run(self, resource: str) -> Permit:
        """Return the permit that came back."""
        pool = lock(resource)
        permit = await pool.acquire(metadata={"why": "test"})
        back = await workflow.execute_activity(echo, permit, start_to_close_timeout=timedelta(seconds=10))
        assert back == permit
        assert await pool.is_held(back)
        assert [holder.fence for holder in (await pool.inspect()).holders] == [permit.fence]
        renewed = await pool.renew(back)
        assert await pool.release(renewed)
        assert await pool.try_acquire(ticket="other") is not None
        assert await pool.release("other")
        return back


@workflow.defn
class Imported:
    """Tells which modules its sandbox has."""

    @workflow.run
    async def run(self, resource: str) -> list[str]:
        """Return those of redis and of the client, after a hold."""
        async with lock(resource).hold():
            pass
        return [name for name in sys.modules if name.split(".")[0] == "redis" or name == "redlease._core.client"]


@workflow.defn
class Collecting:
    """Lets the garbage collector run in its thread, as it may at any moment."""

    @workflow.run
    async def run(self) -> int:
        """Return how much was collected."""
        return gc.collect()
