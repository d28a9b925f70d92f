"""Resources of a lock service in any namespace. Each call is a Nexus operation."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import (
    ApplicationError,
    NexusOperationError,
    TimeoutError,  # noqa: A004
)

from redlease._core import limits
from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import locks
from redlease_temporal._payloads import nexus as calls
from redlease_temporal._workflow_side.backend import timed_out, try_once
from redlease_temporal._workflow_side.cancellation import ended
from redlease_temporal._workflow_side.run import Run, current
from redlease_temporal.errors import NAMED, LockError, Unavailable, usage_error

T = TypeVar("T")

OPERATION_TIMEOUT = timedelta(seconds=10)  # how long an operation that does not wait may take
SPARE = timedelta(seconds=10)  # how much longer than its timeout a request may take: the service ends it


class NexusBackend:
    """A resource of a lock service. `terms`: those of the resource; `endpoint`: the Nexus endpoint of the service."""

    name = "nexus"
    service = "the lock service"
    weight_max = limits.CAPACITY_MAX
    has_turns = True
    has_rates = True
    replaces = False

    def __init__(self, terms: locks.ResourceTerms, endpoint: str) -> None:
        self._terms = terms
        self._endpoint = endpoint

    async def acquire(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Requests a permit and waits for it; any end but a grant withdraws the request."""
        if timeout is not None and timeout <= timedelta(0):
            return await try_once(self, run, call, timeout)
        limit = None if timeout is None else timeout + SPARE
        try:
            return await self._call("acquire", _acquire_input(call, timeout), Permit, limit)
        except (LockError, ValueError) as error:
            if isinstance(error, Unavailable):
                current().releasing(self._terms.resource, self._withdraw(call))
                raise timed_out(self.service, call, timeout or timedelta(0)) from error
            raise
        except (NexusOperationError, asyncio.CancelledError):
            current().releasing(self._terms.resource, self._withdraw(call))
            raise

    async def _withdraw(self, call: locks.AcquireCall) -> None:
        with contextlib.suppress(Unavailable):  # it is given back when this run ends
            await self._released(calls.ReleaseInput(self._terms.resource, call.spec.ticket))

    async def try_acquire(self, run: Run, call: locks.AcquireCall) -> Permit | None:
        """Requests a permit without queueing."""
        del run
        try:
            return (await self._call("try_acquire", _acquire_input(call, None), calls.TryAcquireResult)).permit
        except asyncio.CancelledError:
            current().releasing(self._terms.resource, self._withdraw(call))
            raise

    async def adopt(self, run: Run, call: locks.AdoptCall) -> Permit:
        """Takes over a permit."""
        del run
        spec = call.acquire.spec
        adopt_input = calls.AdoptInput(call.permit, call.refence, spec.on_close, spec.max_hold_ms)
        return await self._call("adopt", adopt_input, Permit)

    async def renew(self, call: locks.RenewCall) -> Permit:
        """Renews a permit."""
        return await self._call("renew", calls.RenewInput(call.permit, call.lease_ms), Permit)

    async def release(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit; if the service does not answer within the lease, it ends with this run."""
        operation_input = calls.ReleaseInput(self._terms.resource, call.ticket, call.fence)
        try:
            return await self._released(operation_input)
        except Unavailable:
            return False

    async def _released(self, operation_input: calls.ReleaseInput) -> bool:
        limit = timedelta(milliseconds=self._terms.lease_ms) + OPERATION_TIMEOUT
        return (await self._call("release", operation_input, calls.ReleaseResult, limit)).released

    async def end(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit."""
        return await self.release(call)

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """The service has no read-write locks."""
        raise usage_error(f"resource {call.terms.resource!r}: a lock service has no read-write locks")

    async def check(self, call: locks.CheckCall) -> bool:
        """Whether the permit is held."""
        operation_input = calls.CheckInput(self._terms.resource, call.ticket, call.fence)
        return (await self._call("check", operation_input, calls.CheckResult)).held

    async def inspect(self, call: locks.InspectCall) -> Snapshot:
        """The current state of the resource."""
        return await self._call("inspect", calls.InspectInput(self._terms.resource, call.limit), Snapshot)

    async def position(self, call: locks.PositionCall) -> Position | None:
        """The service does not tell."""
        message = f"resource {call.terms.resource!r}: a lock service has no position(): `inspect()` lists the waiters"
        raise usage_error(message)

    def resource_workflow(self, permit: Permit) -> None:
        """The workers of this namespace cannot ask."""

    async def _call(
        self, name: str, operation_input: Any, result: type[T], limit: timedelta | None = OPERATION_TIMEOUT
    ) -> T:
        """Calls an operation; raises the error that it reports, or `Unavailable`."""
        client = workflow.create_nexus_client(service=calls.SERVICE, endpoint=self._endpoint)
        try:
            answer: T = await ended(
                client.execute_operation(
                    name,
                    operation_input,
                    output_type=result,
                    schedule_to_close_timeout=limit,
                    summary=f"{name} {self._terms.resource}",
                )
            )
        except NexusOperationError as error:
            reported = self._error_in(error)
            if reported is None:
                raise
            raise reported from error
        return answer

    def _error_in(self, error: NexusOperationError) -> BaseException | None:
        """The error of the library in the failure of an operation; None if there is none in it."""
        cause: BaseException | None = error.cause
        while cause is not None:
            if isinstance(cause, ApplicationError) and cause.type == ValueError.__name__:
                return usage_error(cause.message)
            if isinstance(cause, ApplicationError) and cause.type in NAMED:
                resource, ticket = (*cause.details, None, None)[:2]
                return NAMED[cause.type](cause.message, resource=resource, ticket=ticket)
            if isinstance(cause, TimeoutError):
                message = (
                    f"resource {self._terms.resource!r}: {self.service} did not answer in time. It is safe to try again"
                )
                return Unavailable(message, resource=self._terms.resource)
            cause = cause.__cause__
        return None


def _acquire_input(call: locks.AcquireCall, timeout: timedelta | None) -> calls.AcquireInput:
    terms, spec = call.terms, call.spec
    return calls.AcquireInput(
        terms.resource,
        terms.capacity,
        spec.ticket,
        spec.weight,
        terms.lease_ms,
        None if timeout is None else timeout // timedelta(milliseconds=1),
        terms.max_waiters,
        spec.owner,
        spec.metadata,
        spec.renewed,
        spec.on_close,
        spec.max_hold_ms,
        key=spec.key,
        share=spec.share,
        per_key=terms.per_key,
        rate=terms.rate,
        per_key_rate=terms.per_key_rate,
        max_waiters_per_key=terms.max_waiters_per_key,
    )
