"""Small things that many tests want."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from redlease.events import Connected

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    import redis.asyncio

    from redlease import Permit, Semaphore, Snapshot


async def eventually(condition: asyncio.Event | Callable[[], Any | Awaitable[Any]], within: float = 20.0) -> Any:
    """Wait until the event is set, or until the condition, plain or async, returns something true; return that.

    An event is awaited; anything else is asked every few milliseconds, and less often the longer it takes, since
    whoever waits takes from the tests beside it. An assertion that fails inside the condition counts as "not yet", and
    is the error that is raised when the time is over.
    """
    if isinstance(condition, asyncio.Event):
        return await asyncio.wait_for(condition.wait(), within)
    clock = asyncio.get_running_loop().time
    began = clock()
    while True:
        failure: AssertionError | None = None
        try:
            answer = condition()
            if inspect.isawaitable(answer):
                answer = await answer
        except AssertionError as error:
            answer, failure = None, error
        if answer:
            return answer
        waited = clock() - began
        if waited > within:
            if failure is not None:
                raise failure
            source = inspect.getsource(getattr(condition, "func", condition)).strip()
            raise AssertionError(f"still {answer!r} after {within:g} s: {source}")
        await asyncio.sleep(min(max(waited / 20, 0.005), 0.025))


async def until_waiting(pool: Semaphore, count: int, within: float = 20.0) -> list[str]:
    """Wait until so many requests are queued, and return their tickets in order."""

    async def when_so_many() -> Snapshot | None:
        snapshot = await pool.inspect()
        return snapshot if len(snapshot.waiters) == count else None

    snapshot = await eventually(when_so_many, within)
    return [waiter.ticket for waiter in snapshot.waiters]


async def queue_up(pool: Semaphore, count: int, **options: Any) -> list[asyncio.Task[Permit]]:
    """Start acquires one after the other, so that they stand in the queue in the order of the list."""
    already = len((await pool.inspect()).waiters)
    tasks = []
    for number in range(1, count + 1):
        tasks.append(asyncio.create_task(pool.acquire(**options)))
        await until_waiting(pool, already + number)
    return tasks


async def keys_of(raw: redis.asyncio.Redis, pattern: str) -> list[str]:
    """Name every key that fits a pattern, on every node of a cluster."""
    return [str(key) async for key in raw.scan_iter(match=pattern, count=1000)]


async def left_over(raw: redis.asyncio.Redis, prefix: str) -> list[str]:
    """Name every live permit and every queue entry under a prefix, from the keys themselves."""
    seconds, micros = await raw.time()
    now_ms = seconds * 1000 + micros // 1000
    found = []
    async for key in raw.scan_iter(match=f"{prefix}:*", count=1000):
        if key.endswith(":holders"):
            found += [f"{key} {ticket!s}" for ticket in await raw.zrangebyscore(key, f"({now_ms}", "+inf")]
        elif key.endswith(":queue"):
            found += [f"{key} {ticket!s}" for ticket in await raw.zrange(key, 0, -1)]
    return found


async def watches_of(raw: redis.asyncio.Redis, prefix: str) -> list[str]:
    """Return what the relays of workflows watch under a prefix; the mark "!" of their registry's life is none."""
    keys = [key async for key in raw.scan_iter(match=f"{prefix}:*:watches", count=1000)]
    return [str(text) for key in keys for watch_id, text in (await raw.hgetall(key)).items() if watch_id != "!"]


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever their outcome."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventsOfRequests(list[Any]):
    """A list of events without those of how the client works with its server, which come when it connects."""

    def append(self, event: Any) -> None:
        """Take an event."""
        if not isinstance(event, Connected):
            super().append(event)
