"""Celery: the page's tasks on two workers, one of which is killed, and what each choice does while others hold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

from redlease import AcquireTimeout, Unavailable

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from redlease import Redlease

    from billing import Billing
    from how_to import Project
    from servers import Server

# Abandoned messages are looked for each second.
FAST = """
from tasks import app

app.conf.broker_transport_options |= {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
"""
WORKER = ("-m", "celery", "-A", "fast", "worker", "--concurrency", "1", "--prefetch-multiplier", "1")
LEASE = 4


@pytest.mark.slow
async def test_one_task_at_a_time_though_a_worker_is_killed(
    load: Callable[..., ModuleType], project: Project, billing: Billing, observer: Redlease
) -> None:
    """A second task for a customer waits on the other worker; a task whose worker was killed is run by the other."""
    tasks = load("celery", "tasks", LEASE=LEASE)
    tasks.app.conf.result_backend = "disabled"  # in this process, which reads the results itself
    (project.directory / "fast.py").write_text(FAST)
    lock = observer.lock("customer:ann", lease=LEASE)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(project.running(*WORKER, "-n", name)) for name in ("one", "two")]
        first = tasks.charge_customer.delay("ann")
        begun = await billing.begun()
        second = tasks.charge_customer.delay("ann")
        await until_waiting(lock, 1, within=40)
        await billing.end("ann")
        later = await billing.begun()
        assert later.fence > begun.fence
        assert await result_of(first, project) == begun.fence
        assert later.pid != begun.pid

        (killed,) = [worker for worker in workers if worker.pid == os.getpgid(later.pid)]
        os.killpg(killed.pid, signal.SIGKILL)
        (left,) = (await lock.inspect()).holders
        await let_visibility_end(project)
        again = await billing.begun()
        assert again.pid == begun.pid
        assert again.fence >= left.expires_at_ms * 1000, "granted before the lease ended: fences count microseconds"
        await billing.end("ann")
        assert await result_of(second, project) == again.fence
    assert await billing.count() == 0
    tasks.app.close()


async def let_visibility_end(project: Project) -> None:
    """Have the broker take what is not acknowledged for older than it is: a short timeout would repeat live tasks."""
    async with redis.asyncio.Redis.from_url(project.url, decode_responses=True) as raw:
        (tag,) = await raw.zrange("unacked_index", 0, -1)
        await raw.zadd("unacked_index", {str(tag): 0})


async def result_of(sent: Any, project: Project) -> Any:
    """Wait until a task has succeeded, and return its result."""
    async with redis.asyncio.Redis.from_url(project.url) as raw:
        stored = json.loads(await eventually(lambda: raw.get(f"celery-task-meta-{sent.id}"), within=40))
        assert stored["status"] == "SUCCESS", stored
        return stored["result"]


async def test_tasks_that_do_not_wait(
    load: Callable[..., ModuleType], observer: Redlease, caplog: pytest.LogCaptureFixture
) -> None:
    """One is skipped while others hold; the other is retried as often as its task says, and then fails."""
    caplog.set_level("INFO", "redlease.integrations")
    tasks = load("celery", "tasks")
    tasks.sync_stock.max_retries = 2
    async with observer.lock("stock"), observer.semaphore("thumbnails", capacity=3).hold(weight=3):
        skipped = await asyncio.to_thread(tasks.draw_thumbnails.apply)
        assert (skipped.state, skipped.result) == ("SUCCESS", None)
        (record,) = [record for record in caplog.records if record.name == "redlease.integrations"]
        assert vars(record)["resource"] == "thumbnails"
        retried = await asyncio.to_thread(tasks.sync_stock.apply)
        assert isinstance(retried.result, AcquireTimeout)
    assert (await asyncio.to_thread(tasks.sync_stock.apply)).result == "synchronised"
    assert (await asyncio.to_thread(tasks.draw_thumbnails.apply)).result == "drawn"
    tasks.client.close()


async def test_a_task_that_raises_frees_the_lock(
    load: Callable[..., ModuleType], billing: Billing, observer: Redlease
) -> None:
    """Its error is its result."""
    tasks = load("celery", "tasks")
    await billing.end("ann", "fail")
    failed = await asyncio.to_thread(tasks.charge_customer.apply, ["ann"])
    assert "the card was refused" in str(failed.result)
    assert not await observer.lock("customer:ann").locked()
    tasks.client.close()


async def test_redis_is_away(load: Callable[..., ModuleType], server: Server) -> None:
    """A task that is to be skipped while others hold is not skipped then, as perhaps nobody holds."""
    tasks = load("celery", "tasks")
    server.kill()
    client = tasks.Redlease.from_url(server.url, call_timeout=0.1)
    skip, retry = (tasks.exclusive(client.lock("stock"), when_held=choice) for choice in ("skip", "retry"))
    skipped, retried = (
        tasks.app.task(name="skip")(skip(print)),
        tasks.app.task(name="retry", max_retries=1)(retry(print)),
    )
    for task in (skipped, retried):
        assert isinstance((await asyncio.to_thread(task.apply)).result, Unavailable)
    client.close()


def test_choices_that_are_wrong(load: Callable[..., ModuleType]) -> None:
    """They are refused where the task is defined."""
    tasks: Any = load("celery", "tasks")
    with pytest.raises(ValueError, match="must be 'wait', 'retry' or 'skip', not 'drop'"):
        tasks.exclusive(tasks.client.lock("customer"), when_held="drop")
    with pytest.raises(ValueError, match="a timeout needs when_held"):
        tasks.exclusive(tasks.client.lock("customer"), when_held="skip", timeout=5)

    async def late() -> None:
        """Go on after the call."""

    with pytest.raises(ValueError, match="decorates functions that are done when they return"):
        tasks.exclusive(tasks.client.lock("customer"))(late)
