"""Waiting in a task that is cancelled: once, as asyncio does it, or again and again, as anyio does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from temporalio import workflow

T = TypeVar("T")

# When a scope of anyio is cancelled, it cancels its tasks in every turn of the event loop until they have left it. A
# workflow task lasts while there are turns: a task that waited in the scope for what comes later would never end it.
# No other cancellations come in such numbers.
CANCELLATIONS_MAX = 100


async def until_done(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Waits until a future is done, though this task is cancelled meanwhile; returns its last cancellation.

    It gives up when the cancellations do not end: the future may not be done.
    """
    cancelled: asyncio.CancelledError | None = None
    count = 0
    while not future.done() and count < CANCELLATIONS_MAX:
        try:
            await workflow.wait([future])
        except asyncio.CancelledError as error:
            cancelled, count = error, count + 1
    return cancelled


async def ended(operation: Awaitable[T]) -> T:
    """Awaits a call of Temporal. A cancellation is passed on to it, and raised when the call has ended.

    The call itself ends only then, and not at once: in a scope of anyio it must not be awaited without this.
    """
    task = asyncio.ensure_future(operation)
    try:
        await workflow.wait([task])
    except asyncio.CancelledError as error:
        task.cancel()
        cancelled = await until_done(task) or error
        task.add_done_callback(retrieve_exception)
        raise cancelled from None
    return task.result()


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Retrieves the exception of a task that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
