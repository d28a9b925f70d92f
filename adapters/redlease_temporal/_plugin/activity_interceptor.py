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

from redlease import RedleaseError
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.requests import Requests
from redlease_temporal._exclusive.attempts import Attempts
from redlease_temporal._exclusive.decorator import attempts_here
from redlease_temporal._payloads import locks
from redlease_temporal._workflow_side.run import read_permit_headers
from redlease_temporal.errors import LeaseLost, failure

from .permit_check import PermitChecks


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
            return await self._checks.has(permit_header)
        return await Requests(self._relay()).held(permit_header.resource, permit_header.ticket, permit_header.fence)
