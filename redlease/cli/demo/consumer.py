"""One consumer process: takes the semaphore some times, and tells each step with the moment at which it took it.

It says that it is ready, is given its job as a line of JSON on standard input, tells its steps as lines of JSON on
standard output, and ends when its input ends: with its parent, however that came to its end. Run as
`python -m redlease.cli.demo.consumer`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from redlease import LeaseLost, Redlease, Semaphore


@dataclass(frozen=True, slots=True)
class Job:
    """What a consumer is to do; times in seconds."""

    name: str
    url: str
    prefix: str
    resource: str
    capacity: int
    rounds: int
    lease: float
    idle_ttl: float
    holds: tuple[float, float]
    rests: tuple[float, float]

    def as_line(self) -> bytes:
        """The job as it is handed over."""
        return json.dumps(asdict(self)).encode() + b"\n"


READY = b"ready\n"


def tell(did: str, ticket: str, **more: Any) -> None:
    """Tells a step, in one write, so that a process killed right after has told it whole."""
    line = json.dumps({"did": did, "ticket": ticket, "at": time.monotonic(), **more})
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


async def work(job: Job) -> None:
    """All rounds."""
    settings: dict[str, Any] = {"lease": job.lease, "waiter_lease": job.lease, "idle_ttl": job.idle_ttl}
    async with Redlease.from_url(job.url, prefix=job.prefix, owner=job.name, **settings) as client:
        pool = client.semaphore(job.resource, capacity=job.capacity)
        for number in range(1, job.rounds + 1):
            await asyncio.sleep(random.uniform(*job.rests))
            await _round(pool, f"{job.name.rpartition(' ')[2]}/{number}", job)


async def _round(pool: Semaphore, ticket: str, job: Job) -> None:
    """One turn inside. It is left, as all others see it, before the permit is given back."""
    tell("ask", ticket)
    lost = True
    try:
        async with pool.hold(ticket=ticket) as hold:
            tell("enter", ticket, fence=hold.fence, granted_at_ms=hold.permit.granted_at_ms)
            try:
                await asyncio.sleep(random.uniform(*job.holds))
                lost = False
            finally:
                tell("leave", ticket, lost=lost)
    except LeaseLost:
        return  # the one who judges has been told


async def main() -> None:
    """Works until it is done, or until its parent wants or has no more of it."""
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    os.write(sys.stdout.fileno(), READY)
    line = await orders.readline()
    if not line:
        return
    job = Job(**json.loads(line))
    working = asyncio.create_task(work(job))
    parent_left = asyncio.create_task(orders.read())
    await asyncio.wait({working, parent_left}, return_when=asyncio.FIRST_COMPLETED)
    parent_left.cancel()
    if not working.done():
        working.cancel()
    await asyncio.gather(working, parent_left, return_exceptions=True)
    if not working.cancelled():
        working.result()


if __name__ == "__main__":
    asyncio.run(main())
