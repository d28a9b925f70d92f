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

from redlease_temporal.errors import LeaseLost, Unavailable, lease_lost
from redlease_temporal.payloads.locks import Guard

from .descriptions import CLOSED, CONTINUED_AS_NEW, refused_in

T = TypeVar("T")

AT_ONCE = 20  # concurrent calls
ANSWER = timedelta(seconds=3)  # how long the server, or a keeper's worker, may take to answer
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


class Keepers:
    """The keepers of one kind: workflows that keep resources. `named` is their name in messages."""

    def __init__(self, named: str) -> None:
        self._named = named

    def unavailable(self, resource: str, error: Exception | str) -> Unavailable:
        """The error for a keeper that did not answer."""
        message = f"resource {resource!r}: {self._named} did not answer ({error}). It is safe to try again"
        return Unavailable(message, resource=resource)

    def paused(self, resource: str, handle: WorkflowHandle[Any, Any]) -> Unavailable:
        """The error for a paused keeper: it accepts signals but answers no query."""
        return self.unavailable(resource, f"the workflow {handle.id!r} is paused: unpause it")

    async def signal(self, resource: str, handle: WorkflowHandle[Any, Any], name: str, said: object) -> bool:
        """Signals a keeper; returns False if none is open."""
        try:
            await handle.signal(name, said, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise self.unavailable(resource, error) from error
        return True

    async def query(self, resource: str, handle: WorkflowHandle[Any, Any], asked: Any, *args: Any) -> Any:
        """Queries a keeper by a method of its class; returns None if none is open."""
        while True:
            try:
                return await handle.query(
                    asked, args=args, reject_condition=QueryRejectCondition.NOT_OPEN, rpc_timeout=ANSWER
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


def gone(resource: str, ticket: str, fence: int) -> LeaseLost:
    """The error for a permit that is no longer held."""
    return lease_lost(Guard(resource, ticket, fence), "it lapsed, was released, or was adopted by another run")


async def at_once(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Awaits all calls, at most AT_ONCE of them concurrently; returns their results."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[T]) -> T:
        async with turn:
            return await call

    return await asyncio.gather(*map(one, calls))
