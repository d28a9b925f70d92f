"""Eight workflows share three GPUs: at most three train at once, in the order in which they asked.

    make example-temporal

An activity of 200 ms is what each does with its GPU. Eight of them on three GPUs take three turns: 0.6 s at best.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from datetime import timedelta

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.worker import Worker

from redlease_temporal import semaphore

with workflow.unsafe.imports_passed_through():
    from redlease import Redlease

    from local import run, servers
    from show import Turn, arrivals, console, in_order, makespan, most_inside, timeline, verdict

JOBS, GPUS, SECONDS = 8, 3, 0.2
IDEAL = -(-JOBS // GPUS) * SECONDS


@activity.defn
async def train(seconds: float) -> tuple[float, float]:
    """Trains; says when it began and when it ended."""
    began = time.time()
    await asyncio.sleep(seconds)
    return began, time.time()


@workflow.defn
class Training:
    """Holds a GPU while it trains."""

    @workflow.run
    async def run(self, pool: str, job: str, seconds: float) -> tuple[float, float, int]:
        """Returns when it trained, and under which fence."""
        gpu = semaphore(pool, capacity=GPUS, lease=timedelta(seconds=30))
        async with gpu.hold(timeout=timedelta(minutes=10), owner=job) as hold:
            began, ended = await workflow.execute_activity(train, seconds, start_to_close_timeout=timedelta(minutes=1))
        return began, ended, hold.fence


async def train_all(client: Client, task_queue: str, pool: str, seconds: float) -> list[Turn]:
    """Starts all jobs at once, and returns how they fared."""

    async def job(number: int) -> Turn:
        name, asked_at = f"job {number}", time.time()
        began, ended, fence = await client.execute_workflow(
            Training.run, args=[pool, name, seconds], id=f"{pool}-{number}", task_queue=task_queue
        )
        return Turn(name, asked_at, began, ended, fence)

    return await asyncio.gather(*(job(number) for number in range(1, JOBS + 1)))


async def main() -> bool:
    """Whether the promises were kept."""
    pool = f"gpu-{secrets.token_hex(2)}"
    async with (
        servers() as (client, redis_url),
        Redlease.from_url(redis_url) as redlease,
        Worker(client, task_queue=pool, workflows=[Training], activities=[train]),
    ):
        console.print(f"{JOBS} workflows, {GPUS} GPUs, {SECONDS * 1000:g} ms each\n")
        await train_all(client, pool, f"{pool}-warm", 0.01)
        async with arrivals(redlease.semaphore(pool, capacity=GPUS), JOBS) as seen:
            turns = await train_all(client, pool, pool, SECONDS)
    took = makespan(turns)
    console.print(timeline(turns, seen))
    return verdict(
        (most_inside(turns) <= GPUS, f"at most {GPUS} inside at any moment", f"{most_inside(turns)} at the most"),
        (in_order(turns, seen), "granted in the order of arrival", f"{len(turns)} grants"),
        (len(turns) == JOBS, "everybody was served", f"in {took:.2f} s, {took / IDEAL:.2f} of the ideal {IDEAL:g} s"),
    )


if __name__ == "__main__":
    run(main)
