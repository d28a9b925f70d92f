"""How activities speak with the workflows that keep resources: by signals and queries, in bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from temporalio.client import (
    WorkflowExecutionStatus,
    WorkflowHandle,
    WorkflowQueryFailedError,
    WorkflowQueryRejectedError,
)
from temporalio.common import QueryRejectCondition
from temporalio.service import RPCError, RPCStatusCode

from .calls import Guard
from .errors import LeaseLost, Unavailable
from .hold import lease_lost

T = TypeVar("T")

AT_ONCE = 20  # calls
ANSWER = timedelta(seconds=3)  # how long the server, or the worker of a keeper, may take to answer
# After these a call may have been carried out, or may yet be.
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
    """The workflows that keep resources in one way; `named` is how messages speak of them."""

    def __init__(self, named: str) -> None:
        self._named = named

    def unavailable(self, resource: str, error: Exception) -> Unavailable:
        """The error for one that could not be reached."""
        message = f"resource {resource!r}: {self._named} did not answer ({error}). It is safe to try again"
        return Unavailable(message, resource=resource)

    async def signal(self, resource: str, handle: WorkflowHandle[Any, Any], name: str, said: object) -> bool:
        """Signals one; False when none is open."""
        try:
            await handle.signal(name, said, rpc_timeout=ANSWER)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return False
            raise self.unavailable(resource, error) from error
        return True

    async def query(self, resource: str, handle: WorkflowHandle[Any, Any], asked: Any, *args: Any) -> Any:
        """Asks one, by a method of its class; None when none is open."""
        while True:
            try:
                return await handle.query(
                    asked, args=args, reject_condition=QueryRejectCondition.NOT_OPEN, rpc_timeout=ANSWER
                )
            except WorkflowQueryRejectedError as error:
                if error.status != WorkflowExecutionStatus.CONTINUED_AS_NEW:
                    return None  # and if it is, the next run has the answer
            except WorkflowQueryFailedError as error:
                raise self.unavailable(resource, error) from error
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    return None
                raise self.unavailable(resource, error) from error


def gone(resource: str, ticket: str, fence: int) -> LeaseLost:
    """The error for a permit that is not held any more."""
    return lease_lost(Guard(resource, ticket, fence), "it lapsed, was released, or was adopted by another run")


async def at_once(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What many calls return, of which so many are under way at one time."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[T]) -> T:
        async with turn:
            return await call

    return await asyncio.gather(*map(one, calls))
