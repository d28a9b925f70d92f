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

from redlease import limits
from redlease.models import Permit, Position, Snapshot
from redlease_temporal.errors import NAMED, LockError, Unavailable, misused
from redlease_temporal.payloads import locks
from redlease_temporal.payloads import nexus as calls
from redlease_temporal.workflow_side.backend import timed_out, try_once
from redlease_temporal.workflow_side.cancellation import ended
from redlease_temporal.workflow_side.run import Run, current

T = TypeVar("T")

ANSWER = timedelta(seconds=10)  # how long an operation that does not wait may take
SPARE = timedelta(seconds=10)  # how much longer than its timeout a request may take: the service ends it


class NexusBackend:
    """A resource of a lock service. `terms`: those of the resource; `endpoint`: the Nexus endpoint of the service."""

    name = "nexus"
    away = "the lock service"
    weight_max = limits.CAPACITY_MAX
    has_turns = True
    has_rates = True
    replaces = False

    def __init__(self, terms: locks.Terms, endpoint: str) -> None:
        self._terms = terms
        self._endpoint = endpoint

    async def acquire(self, run: Run, wish: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Requests a permit and waits for it; any end but a grant withdraws the request."""
        if timeout is not None and timeout <= timedelta(0):
            return await try_once(self, run, wish, timeout)
        limit = None if timeout is None else timeout + SPARE
        try:
            return await self._call("acquire", _asked(wish, timeout), Permit, limit)
        except (LockError, ValueError) as error:
            if isinstance(error, Unavailable):
                current().releasing(self._terms.resource, self._withdraw(wish))
                raise timed_out(self.away, wish, timeout or timedelta(0)) from error
            raise
        except (NexusOperationError, asyncio.CancelledError):
            current().releasing(self._terms.resource, self._withdraw(wish))
            raise

    async def _withdraw(self, wish: locks.AcquireCall) -> None:
        with contextlib.suppress(Unavailable):  # it is given back when this run ends
            await self._released(calls.Release(self._terms.resource, wish.ticket))

    async def try_acquire(self, run: Run, wish: locks.AcquireCall) -> Permit | None:
        """Requests a permit without queueing."""
        del run
        try:
            return (await self._call("try_acquire", _asked(wish, None), calls.Tried)).permit
        except asyncio.CancelledError:
            current().releasing(self._terms.resource, self._withdraw(wish))
            raise

    async def adopt(self, run: Run, adopting: locks.AdoptCall) -> Permit:
        """Takes over a permit."""
        del run
        wish = adopting.wish
        call = calls.Adopt(adopting.permit, adopting.refence, wish.on_close, wish.max_hold_ms)
        return await self._call("adopt", call, Permit)

    async def renew(self, renewing: locks.RenewCall) -> Permit:
        """Renews a permit."""
        return await self._call("renew", calls.Renew(renewing.permit, renewing.lease_ms), Permit)

    async def release(self, giving: locks.ReleaseCall) -> bool:
        """Releases a permit; if the service does not answer within the lease, it ends with this run."""
        call = calls.Release(self._terms.resource, giving.ticket, giving.fence)
        try:
            return await self._released(call)
        except Unavailable:
            return False

    async def _released(self, call: calls.Release) -> bool:
        limit = timedelta(milliseconds=self._terms.lease_ms) + ANSWER
        return (await self._call("release", call, calls.Released, limit)).released

    async def end(self, giving: locks.ReleaseCall) -> bool:
        """Releases a permit."""
        return await self.release(giving)

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """The service has no read-write locks."""
        raise misused(f"resource {call.terms.resource!r}: a lock service has no read-write locks")

    async def check(self, checking: locks.Checking) -> bool:
        """Whether the permit is held."""
        call = calls.Check(self._terms.resource, checking.ticket, checking.fence)
        return (await self._call("check", call, calls.Checked)).held

    async def inspect(self, inspecting: locks.Inspecting) -> Snapshot:
        """The current state of the resource."""
        return await self._call("inspect", calls.Inspect(self._terms.resource, inspecting.limit), Snapshot)

    async def position(self, placing: locks.Placing) -> Position | None:
        """The service does not tell."""
        message = f"resource {placing.terms.resource!r}: a lock service tells no positions: `inspect()` lists who waits"
        raise misused(message)

    def kept_by(self, permit: Permit) -> None:
        """The workers of this namespace cannot ask."""

    async def _call(self, name: str, call: Any, result: type[T], limit: timedelta | None = ANSWER) -> T:
        """Calls an operation; raises the error that it reports, or `Unavailable`."""
        client = workflow.create_nexus_client(service=calls.SERVICE, endpoint=self._endpoint)
        try:
            answer: T = await ended(
                client.execute_operation(
                    name,
                    call,
                    output_type=result,
                    schedule_to_close_timeout=limit,
                    summary=f"{name} {self._terms.resource}",
                )
            )
        except NexusOperationError as error:
            told = self._told(error)
            if told is None:
                raise
            raise told from error
        return answer

    def _told(self, error: NexusOperationError) -> BaseException | None:
        """The error of the library in the failure of an operation; None if there is none in it."""
        cause: BaseException | None = error.cause
        while cause is not None:
            if isinstance(cause, ApplicationError) and cause.type == ValueError.__name__:
                return misused(cause.message)
            if isinstance(cause, ApplicationError) and cause.type in NAMED:
                resource, ticket = (*cause.details, None, None)[:2]
                return NAMED[cause.type](cause.message, resource=resource, ticket=ticket)
            if isinstance(cause, TimeoutError):
                message = (
                    f"resource {self._terms.resource!r}: {self.away} did not answer in time. It is safe to try again"
                )
                return Unavailable(message, resource=self._terms.resource)
            cause = cause.__cause__
        return None


def _asked(wish: locks.AcquireCall, timeout: timedelta | None) -> calls.Acquire:
    terms = wish.terms
    return calls.Acquire(
        terms.resource,
        terms.capacity,
        wish.ticket,
        wish.weight,
        terms.lease_ms,
        None if timeout is None else timeout // timedelta(milliseconds=1),
        terms.max_waiters,
        wish.owner or "",
        wish.metadata,
        wish.keep,
        wish.on_close,
        wish.max_hold_ms,
        key=wish.key,
        share=wish.share,
        per_key=terms.per_key,
        rate=terms.rate,
        per_key_rate=terms.per_key_rate,
        max_waiters_per_key=terms.max_waiters_per_key,
    )
