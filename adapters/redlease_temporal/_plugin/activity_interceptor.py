"""Activities under permits: an attempt does not run if its permit is no longer held."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError
from temporalio.worker import (
    ActivityInboundInterceptor,
    ExecuteActivityInput,
)

from redlease import RedleaseError, Unavailable
from redlease._core import clock
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.requests import Requests
from redlease_temporal._exclusive.attempts import Attempts
from redlease_temporal._exclusive.decorator import attempts_here
from redlease_temporal._payloads import locks
from redlease_temporal._workflow_side.run import read_permit_headers
from redlease_temporal.errors import LeaseLost, failure

from .permit_check import PermitChecks

ASKS_FOR_S = 20.0  # how long an attempt asks the workflow that keeps its permit: each question is short
PAUSE_S = 1.0  # between two questions


class PermitCheckInterceptor(ActivityInboundInterceptor):
    """Runs an activity only if the permits that guarded its start are still held."""

    def __init__(
        self,
        next: ActivityInboundInterceptor,  # noqa: A002
        checks: PermitChecks,
        attempts: Attempts,
        relay: Callable[[], Relay],
    ) -> None:
        super().__init__(next)
        self._checks, self._attempts, self._relay = checks, attempts, relay

    async def execute_activity(self, input: ExecuteActivityInput) -> Any:  # noqa: A002
        attempts_here.set(self._attempts)
        permit_headers = read_permit_headers(input.headers)
        if permit_headers:
            await asyncio.gather(*(self._check(permit_header) for permit_header in permit_headers))
        return await self.next.execute_activity(input)

    async def _check(self, permit_header: locks.PermitHeader) -> None:
        try:
            held = await self._held(permit_header)
        except RedleaseError as error:
            raise failure(error, retryable=True) from error
        if not held:
            raise ApplicationError(
                f"resource {permit_header.resource!r}: the permit (fence {permit_header.fence}) that activity "
                f"{activity.info().activity_type!r} was begun under is no longer held, so it did not run",
                *(permit_header.resource, permit_header.ticket),
                type=LeaseLost.__name__,
                non_retryable=True,
            )

    async def _held(self, permit_header: locks.PermitHeader) -> bool:
        if permit_header.resource_workflow:
            return await self._answered(permit_header)
        return await Requests(self._relay()).held(permit_header.resource, permit_header.ticket, permit_header.fence)

    async def _answered(self, permit_header: locks.PermitHeader) -> bool:
        """Asks until there is an answer: a failed attempt would cost one of the user's, and a longer pause each time.

        Raises:
            Unavailable: There was none in time.
        """
        until_ms = clock.now_ms() + _patience_s(activity.info()) * 1000
        while True:
            try:
                return await self._checks.has(permit_header)
            except Unavailable:
                if clock.now_ms() >= until_ms:
                    raise
            await asyncio.sleep(PAUSE_S)


def _patience_s(info: activity.Info) -> float:
    """How long an attempt may ask: half of what the user allows it until it ends, or sends a heartbeat."""
    limits = [limit.total_seconds() / 2 for limit in (info.start_to_close_timeout, info.heartbeat_timeout) if limit]
    return min([ASKS_FOR_S, *limits])
