"""Scheduled jobs: of several schedulers one runs the jobs, and of several hosts' cron one runs the command."""

from __future__ import annotations

import asyncio
import re
import shlex
from typing import TYPE_CHECKING

import pytest

from redlease import Redlease

from helpers import cancel, eventually
from how_to import blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from how_to import Project
    from servers import Server

REPORTS = """
import asyncio
sent, cut_short = [], []


async def send_report(term):
    sent.append(term)
    try:
        await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        cut_short.append(term)
        raise
"""


async def test_one_of_several_schedulers_runs_the_jobs(
    load: Callable[..., ModuleType], project: Project, observer: Redlease, server: Server
) -> None:
    """Three processes have the schedule, one runs it; the next one does when its lease is lost, or when it ends."""
    (project.directory / "reports.py").write_text(REPORTS)
    schedule = load("scheduled-jobs", "schedule", EVERY=0.05)
    sent = schedule.send_report.__globals__["sent"]
    async with Redlease.from_url(server.url) as one, Redlease.from_url(server.url) as two:
        schedulers = [asyncio.create_task(schedule.lead(client)) for client in (observer, one, two)]
        terms: list[int] = []
        for _ in range(2):
            await eventually(lambda: len(set(sent) - set(terms)) == 1 and sent.count(sent[-1]) >= 3)
            terms.append(sent[-1])
            await observer.leader("scheduler")._lock.release_all()
        await eventually(lambda: len(set(sent)) == 3)
        assert sent == sorted(sent), "a former leader has run a job after its successor"
        await cancel(*schedulers)
    assert (count := len(sent)) > 6
    await asyncio.sleep(0.15)  # nothing may come, so there is nothing to wait for
    assert len(sent) == count


async def test_redis_goes_away_from_the_leader(
    load: Callable[..., ModuleType], project: Project, server: Server
) -> None:
    """When its lease ends no job runs any more, and one that runs is cancelled; it leads again when Redis is back."""
    (project.directory / "reports.py").write_text(REPORTS.replace("0.02", "30"))
    schedule = load("scheduled-jobs", "schedule", EVERY=0.05)
    reports = schedule.send_report.__globals__
    async with Redlease.from_url(server.url, lease=0.5) as client:
        leading = asyncio.create_task(schedule.lead(client))
        await eventually(lambda: reports["sent"])
        server.pause()
        await eventually(lambda: reports["cut_short"] == reports["sent"])
        server.resume()
        await eventually(lambda: len(set(reports["sent"])) == 2)
        await cancel(leading)


@pytest.mark.slow
async def test_cron_on_several_hosts(project: Project, observer: Redlease) -> None:
    """While another host runs the page's command it is not run, and ends with 75; else it runs under the lock."""
    (project.directory / "report.sh").write_text('#!/bin/sh\necho "fence $REDLEASE_FENCE"\n')
    (project.directory / "report.sh").chmod(0o755)
    (line,) = blocks("scheduled-jobs", "console")
    words = shlex.split(line.removeprefix("$ redlease ").replace("sleep 50", "sleep 0"))
    program = ("-c", "from redlease._cli import main; main()", *words)
    async with observer.lock("nightly-report") as hold, project.running(*program) as process:
        assert await process.wait() == 75
    async with project.running(*program) as process:
        assert await process.wait() == 0
    (fence,) = re.findall(r"^fence (\d+)$", project.log, re.MULTILINE)
    assert int(fence) > hold.fence
