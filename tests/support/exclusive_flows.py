"""Activities of which only so many run at once, and workflows that call them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from temporalio import activity, workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ApplicationError

with workflow.unsafe.imports_passed_through():
    from redlease import Rate
    from redlease_temporal.worker import current_hold, exclusive

    from children import say


@dataclass
class Order:
    """What an activity is to do: take so long at its first attempt, and fail on so many, for good or not."""

    vendor: str = "v"
    seconds: float = 0.0
    failures: int = 0
    final: bool = False


async def serve(order: Order) -> list[int]:
    """Do it; return the attempt and the fence."""
    info = activity.info()
    fence = current_hold().fence
    say("begin", fence=fence, workflow=info.workflow_id, attempt=info.attempt)
    try:
        left = order.seconds if info.attempt == 1 else 0.0
        while left > 0:
            activity.heartbeat("mine")
            await asyncio.sleep(min(0.1, left))
            left -= 0.1
    finally:
        say("end", fence=fence, workflow=info.workflow_id, attempt=info.attempt)
    if info.attempt <= order.failures:
        raise ApplicationError("as asked", non_retryable=order.final)
    return [info.attempt, fence]


@activity.defn
@exclusive("vendor-api", capacity=2)
async def call_vendor(order: Order) -> list[int]:
    """Two at once."""
    return await serve(order)


@activity.defn
@exclusive("vendor-api", key=lambda order: order.vendor, lease=2, slot_wait=0.5, retry_lease=5)
async def call_alone(order: Order) -> list[int]:
    """One at once for each vendor; waits half a second in its slot."""
    return await serve(order)


@activity.defn
@exclusive("vendor-full", max_waiters=1)
async def call_unless_full(order: Order) -> list[int]:
    """One at once, and one that waits."""
    return await serve(order)


@activity.defn
@exclusive("vendor-fair", capacity=3, per_key=1, key=lambda order: order.vendor)
async def call_in_turn(order: Order) -> list[int]:
    """Three at once, and one for each vendor."""
    return await serve(order)


@activity.defn
@exclusive("vendor-rate", capacity=3, rate=Rate(2))
async def call_at_a_rate(order: Order) -> list[int]:
    """Three at once, and two in a second."""
    return await serve(order)


class Vendor:
    """Activities that are methods."""

    @activity.defn
    @exclusive("vendor-method", key=lambda order: order.vendor)
    async def call_method(self, order: Order) -> list[int]:
        """One at once."""
        return await serve(order)


@workflow.defn
class Calling:
    """One call of an activity."""

    @workflow.run
    async def run(self, name: str, order: Order, attempts: int) -> Any:
        """Return what it returns."""
        return await workflow.execute_activity(
            name,
            order,
            start_to_close_timeout=timedelta(seconds=30),
            heartbeat_timeout=timedelta(seconds=2),
            retry_policy=RetryPolicy(
                initial_interval=timedelta(milliseconds=50), backoff_coefficient=1, maximum_attempts=attempts
            ),
        )
