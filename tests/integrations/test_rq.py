"""RQ: the page's jobs on two workers, a work-horse of which is killed, and what each choice does while others hold."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any, cast

import pytest
from rq import Retry
from rq.job import JobStatus

from redlease import AcquireTimeout, Unavailable
from redlease.integrations.rq import exclusive
from redlease.sync import Redlease as BlockingRedlease

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from redlease import Redlease

    from billing import Billing
    from how_to import Project
    from servers import Server

WORKER = ("-m", "rq.cli", "worker")
LEASE = 4


@pytest.mark.slow
async def test_one_job_at_a_time_though_a_work_horse_is_killed(
    load: Callable[..., ModuleType], project: Project, billing: Billing, observer: Redlease
) -> None:
    """A second job for a customer waits on the other worker; a job whose process was killed runs after the lease."""
    shop: Any = load("rq", "shop", LEASE=LEASE)
    lock = observer.lock("customer:ann", lease=LEASE)
    async with project.running(*WORKER), project.running(*WORKER):
        first = shop.bill("ann")
        begun = await billing.begun()
        second = shop.bill("ann")
        await until_waiting(lock, 1, within=40)
        await billing.end("ann")
        later = await billing.begun()
        assert later.fence > begun.fence
        await eventually(lambda: first.get_status() is JobStatus.FINISHED, within=40)
        assert first.return_value() == begun.fence

        os.kill(later.pid, signal.SIGKILL)
        (left,) = (await lock.inspect()).holders
        again = await billing.begun()
        assert again.fence >= left.expires_at_ms * 1000, "granted before the lease ended: fences count microseconds"
        await billing.end("ann")
        await eventually(lambda: second.get_status() is JobStatus.FINISHED, within=40)
        assert second.return_value() == again.fence
    assert await billing.count() == 0
    shop.queue.connection.close()


@pytest.mark.slow
async def test_jobs_that_do_not_wait(
    load: Callable[..., ModuleType], project: Project, billing: Billing, observer: Redlease
) -> None:
    """One is skipped while others hold, one is scheduled for later; one that raises frees its lock."""
    shop: Any = load("rq", "shop")
    queue, names = shop.queue, ("sync_stock", "draw_thumbnails")
    await billing.end("ann", "fail")
    async with observer.lock("stock"), observer.semaphore("thumbnails", capacity=3).hold(weight=3):
        later, skipped = [queue.enqueue(f"jobs.{name}") for name in names]
        failed = queue.enqueue("jobs.charge_customer", "ann")
        async with project.running(*WORKER, "--burst") as worker:
            assert await worker.wait() == 0
    assert (later.get_status(), queue.scheduled_job_registry.count) == (JobStatus.SCHEDULED, 1)
    assert (skipped.get_status(), skipped.return_value()) == (JobStatus.FINISHED, None)
    assert failed.get_status() is JobStatus.FAILED
    assert "the card was refused" in failed.latest_result().exc_string
    assert not await observer.lock("customer:ann").locked()
    queue.connection.close()


async def test_a_plain_call(server: Server) -> None:
    """Outside of a worker nobody would repeat the job, so it raises; so does one that cannot know whether to skip."""
    with BlockingRedlease.from_url(server.url, call_timeout=0.1) as client:
        lock, retry = client.lock("stock"), Retry(max=1)
        repeated, skipped = (exclusive(lock, when_held=choice)(lambda: "done") for choice in (retry, "skip"))
        assert await asyncio.to_thread(repeated) == "done"
        permit = await asyncio.to_thread(lock.acquire)
        assert await asyncio.to_thread(skipped) is None
        with pytest.raises(AcquireTimeout):
            await asyncio.to_thread(repeated)
        await asyncio.to_thread(lock.release, permit)
        server.kill()
        with pytest.raises(Unavailable):
            await asyncio.to_thread(skipped)
        with pytest.raises(ValueError, match=r"must be 'wait', 'skip' or an rq\.Retry, not 'retry'"):
            exclusive(lock, when_held=cast("Any", "retry"))


async def test_a_job_takes_the_turn_of_its_tenant(server: Server) -> None:
    """`per_key` counts for the jobs of one tenant, and not for those of others."""

    def run() -> None:
        with BlockingRedlease.from_url(server.url, prefix="turns-of-jobs") as client:
            pool = client.semaphore("pool", capacity=5, per_key=1)

            @exclusive(pool, when_held="skip", key=lambda tenant, further="": tenant)
            def job(tenant: str, further: str = "") -> str | None:
                return f"{tenant}, {job(further) if further else None}"

            assert job("a", "a") == "a, None"  # the inner one is skipped
            assert job("a", "b") == "a, b, None"

    await asyncio.to_thread(run)
