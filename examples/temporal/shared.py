"""An asyncio service and workflows share a vendor's API in one queue: at most two calls at once, whoever makes them.

make example-temporal
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
    from redlease import Redlease, Semaphore

    from local import run, servers
    from show import Turn, arrivals, console, in_order, most_inside, timeline, verdict

PAIRS, CALLS, SECONDS = 5, 2, 0.2
REST = 0.03  # between those who ask


async def call_vendor() -> tuple[float, float]:
    """Calls the API; when that began and when it ended."""
    began = time.time()
    await asyncio.sleep(SECONDS)
    return began, time.time()


async def serve(vendor: Semaphore, name: str) -> Turn:
    """A request to the service."""
    asked_at = time.time()
    async with vendor.hold(owner=name) as hold:
        began, ended = await call_vendor()
    return Turn(name, asked_at, began, ended, hold.fence)


@activity.defn
async def call() -> tuple[float, float]:
    """Calls the API for a workflow."""
    return await call_vendor()


@workflow.defn
class Order:
    """Calls the API once, as one of those who share it."""

    @workflow.run
    async def run(self, resource: str, name: str) -> tuple[float, float, int]:
        """Returns when it called, and under which fence."""
        async with semaphore(resource, capacity=CALLS).hold(owner=name) as hold:
            began, ended = await workflow.execute_activity(call, start_to_close_timeout=timedelta(seconds=30))
        return began, ended, hold.fence


async def order(client: Client, resource: str, name: str) -> Turn:
    """Runs a workflow to its end."""
    asked_at = time.time()
    workflow_id = f"{resource}-{name.replace(' ', '-')}"
    began, ended, fence = await client.execute_workflow(
        Order.run, args=[resource, name], id=workflow_id, task_queue=resource
    )
    return Turn(name, asked_at, began, ended, fence)


async def main() -> bool:
    """Whether the promises were kept."""
    resource = f"vendor-{secrets.token_hex(2)}"
    async with (
        servers() as (client, redis_url),
        Redlease.from_url(redis_url) as redlease,
        Worker(client, task_queue=resource, workflows=[Order], activities=[call]),
    ):
        vendor = redlease.semaphore(resource, capacity=CALLS)
        console.print(f"{PAIRS} requests to a service and {PAIRS} workflows, {CALLS} calls at once\n")
        async with arrivals(vendor, 2 * PAIRS) as seen:
            asking = []
            for number in range(1, PAIRS + 1):
                asking.append(asyncio.create_task(order(client, resource, f"workflow {number}")))
                await asyncio.sleep(REST)
                asking.append(asyncio.create_task(serve(vendor, f"service {number}")))
                await asyncio.sleep(REST)
            turns = await asyncio.gather(*asking)
    console.print(timeline(turns, seen))
    return verdict(
        (most_inside(turns) <= CALLS, f"at most {CALLS} inside at any moment", f"{most_inside(turns)} at the most"),
        (in_order(turns, seen), "granted in the order of arrival, in one queue", f"{len(turns)} grants"),
        (len(turns) == 2 * PAIRS, "everybody was served", ""),
    )


if __name__ == "__main__":
    run(main)
