"""How activities call the workflows that keep resources: signals and queries, in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.client import (
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import QueryRejectCondition
from temporalio.service import RPCError, RPCStatusCode

from redlease_temporal._payloads.locks import PermitHeader
from redlease_temporal.errors import LeaseLost, Unavailable, lease_lost

from .descriptions import CLOSED, CONTINUED_AS_NEW, refused_in

T = TypeVar("T")

CONCURRENT_CALLS_MAX = 20  # concurrent calls
CALL_TIMEOUT = timedelta(seconds=3)  # how long the server, or a keeper's worker, may take to answer
# After an error with one of these, the call may have been carried out, or may still be.
UNSURE = {
    RPCStatusCode.CANCELLED,
    RPCStatusCode.UNKNOWN,
    RPCStatusCode.DEADLINE_EXCEEDED,
    RPCStatusCode.ABORTED,
    RPCStatusCode.INTERNAL,
    RPCStatusCode.UNAVAILABLE,
    RPCStatusCode.DATA_LOSS,
}


class ResourceWorkflows:
    """The keepers of one kind: workflows that keep resources. `name` is their name in messages."""

    def __init__(self, name: str) -> None:
        self._name = name

    def unavailable(self, resource: str, error: Exception | str) -> Unavailable:
        """The error for a keeper that did not answer."""
        message = f"resource {resource!r}: {self._name} did not answer ({error}). It is safe to try again"
        return Unavailable(message, resource=resource)

    def paused(self, resource: str, handle: WorkflowHandle[Any, Any]) -> Unavailable:
        """The error for a paused keeper: it accepts signals but answers no query."""
        return self.unavailable(resource, f"the workflow {handle.id!r} is paused: unpause it")

    async def signal(self, resource: str, handle: WorkflowHandle[Any, Any], name: str, message: object) -> bool:
        """Signals a keeper; returns False if none is open."""
        try:
            await handle.signal(name, message, rpc_timeout=CALL_TIMEOUT)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise self.unavailable(resource, error) from error
        return True

    async def query(self, resource: str, handle: WorkflowHandle[Any, Any], query: Any, *args: Any) -> Any:
        """Queries a keeper by a method of its class; returns None if none is open."""
        while True:
            try:
                return await handle.query(
                    query, args=args, reject_condition=QueryRejectCondition.NOT_OPEN, rpc_timeout=CALL_TIMEOUT
                )
            except (WorkflowQueryRejectedError, ValueError) as error:
                state = refused_in(error)
                if state not in CLOSED:
                    raise self.paused(resource, handle) from error
                if state != CONTINUED_AS_NEW:
                    return None  # otherwise ask again: the next run has the answer
            except WorkflowQueryFailedError as error:
                raise self.unavailable(resource, error) from error
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    return None
                raise self.unavailable(resource, error) from error


def permit_gone(resource: str, ticket: str, fence: int) -> LeaseLost:
    """The error for a permit that is no longer held."""
    return lease_lost(PermitHeader(resource, ticket, fence), "it expired, was released, or was adopted by another run")


async def gather_limited(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all calls, at most CONCURRENT_CALLS_MAX of them concurrently; returns their results."""
    limiter = asyncio.Semaphore(CONCURRENT_CALLS_MAX)

    async def one(call: Awaitable[T]) -> T:
        async with limiter:
            return await call

    return await asyncio.gather(*map(one, calls))
