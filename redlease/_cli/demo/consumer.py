"""One consumer process: acquires the semaphore several times, and reports each step with its time.

It reports that it is ready, reads its job as a line of JSON from standard input, writes its steps as lines of JSON to
standard output, and exits when its input ends, which it does when the parent exits, however that happens. Run it as
`python -m redlease._cli.demo.consumer`.
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
    """The settings of a consumer; times in seconds."""

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
        """Returns the job as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"


READY = b"ready\n"


def print_error(did: str, ticket: str, **more: Any) -> None:
    """Reports a step in one write, so that the line is complete even if the process is killed right after."""
    line = json.dumps({"did": did, "ticket": ticket, "at": time.monotonic(), **more})
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


async def work(job: Job) -> None:
    """Runs all rounds."""
    settings: dict[str, Any] = {"lease": job.lease, "waiter_lease": job.lease, "idle_ttl": job.idle_ttl}
    async with Redlease.from_url(job.url, prefix=job.prefix, owner=job.name, **settings) as client:
        pool = client.semaphore(job.resource, capacity=job.capacity)
        for number in range(1, job.rounds + 1):
            await asyncio.sleep(random.uniform(*job.rests))
            await _round(pool, f"{job.name.rpartition(' ')[2]}/{number}", job)


async def _round(pool: Semaphore, ticket: str, job: Job) -> None:
    """Holds the permit once. Reports "leave" before the permit is released."""
    print_error("ask", ticket)
    lost = True
    try:
        async with pool.hold(ticket=ticket) as hold:
            print_error("enter", ticket, fence=hold.fence, granted_at_ms=hold.permit.granted_at_ms)
            try:
                await asyncio.sleep(random.uniform(*job.holds))
                lost = False
            finally:
                print_error("leave", ticket, lost=lost)
    except LeaseLost:
        return  # "leave" has reported it


async def main() -> None:
    """Works until all rounds are done or its input ends."""
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
