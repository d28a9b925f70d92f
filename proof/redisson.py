"""Redisson's fair lock, in a JVM inside the process of the workload: Maven fetches its jars, and JPype calls them."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import maven
from caches import cached
from libraries import Library, Plan
from records import MS, now

VERSION = "3.52.0"
POM = f"""
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>redlease</groupId>
  <artifactId>proof</artifactId>
  <version>1</version>
  <dependencies>
    <dependency><groupId>org.redisson</groupId><artifactId>redisson</artifactId><version>{VERSION}</version></dependency>
  </dependencies>
</project>
"""
JVM = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx128m")


@functools.cache
def jars() -> Path:
    """Return the directory with the jars, which Maven fetches when asked for the first time on this machine."""
    maven.require("Redisson")
    return cached(f"redisson-{VERSION}", _fetch)


def _fetch(directory: Path) -> None:
    pom = directory / "pom.xml"
    pom.write_text(POM)
    maven.fetch(
        "Redisson",
        *(f"--file={pom}", "dependency:copy-dependencies"),
        *(f"-DoutputDirectory={directory}", "-DincludeScope=runtime"),
    )


class OfRedisson(Library):
    """Its fair lock, renewed by its watchdog. A body hears of nothing, and believes to hold until it unlocks."""

    lease = 1.0

    async def open(self) -> None:
        import jpype  # noqa: PLC0415  only what runs Redisson needs it

        jpype.startJVM(*JVM, classpath=[str(jars() / "*")])
        config = jpype.JClass("org.redisson.config.Config")()
        config.setLockWatchdogTimeout(int(self.lease * 1000))
        config.setFairLockWaitTimeout(int(self.lease * 1000))  # for so long a dead waiter holds up who is behind it
        config.useSingleServer().setAddress(self.url.removesuffix("/0"))
        self.client: Any = await asyncio.to_thread(jpype.JClass("org.redisson.Redisson").create, config)
        self.failed = jpype.JException
        self.threads = ThreadPoolExecutor(64)
        self.owners = itertools.count(1)

    async def step(self, plan: Plan, ticket: str, draw: random.Random) -> None:
        lock, owner, began = self.client.getFairLock(plan.name), next(self.owners), now()
        call = self.recorder.call(plan.name, "acquire", ticket)
        waits = asyncio.create_task(self.look(plan, ticket, began))
        await self.run(lambda: lock.lockAsync(owner))
        waits.cancel()
        until = began + int(self.lease * 1000) * MS
        self.recorder.returned(plan.name, call, ok=True, until=until)
        await self.believe(plan, ticket, draw, lambda: {"until": until})
        call = self.recorder.call(plan.name, "release", ticket)
        try:
            await self.run(lambda: lock.unlockAsync(owner))
        except self.failed:  # "attempt to unlock lock, not locked by current thread"
            self.recorder.returned(plan.name, call, ok=False)
        else:
            self.recorder.returned(plan.name, call, ok=True)

    async def run(self, begin: Any) -> None:
        """Await one of its futures."""
        await asyncio.get_running_loop().run_in_executor(self.threads, lambda: begin().toCompletableFuture().get())

    async def look(self, plan: Plan, ticket: str, began: int) -> None:
        """Record that it waits, once it has waited for so long that it is in Redisson's queue."""
        await asyncio.sleep(0.15)
        self.recorder.write("seen", plan.name, since=began, at=now(), waiters=[ticket])
