"""What an attempt of an activity leaves to the next one: its place in the queue, or the permit that came meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from redlease import Hold

Key = tuple[str, str]  # resource, ticket


class Turns:
    """Acquire requests that go on while no attempt waits for them."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        self._spawn = spawn
        self._left: dict[Key, asyncio.Future[Hold]] = {}

    def take(self, key: Key) -> asyncio.Future[Hold] | None:
        """The request that an earlier attempt left here."""
        return self._left.pop(key, None)

    def leave(self, key: Key, waiting: asyncio.Future[Hold], seconds: float) -> None:
        """Leaves a request to the next attempt, for so long."""
        self._left[key] = waiting
        asyncio.get_running_loop().call_later(seconds, self._over, key, waiting)

    def _over(self, key: Key, waiting: asyncio.Future[Hold]) -> None:
        if self._left.get(key) is waiting:
            del self._left[key]
            self.give_up(waiting)

    def give_up(self, waiting: asyncio.Future[Hold]) -> None:
        """Ends a request, and gives back what it has got."""
        if not waiting.done():
            waiting.cancel()
        elif not waiting.cancelled() and waiting.exception() is None:
            self._spawn(waiting.result().release())

    def close(self) -> None:
        """Ends all of them."""
        for waiting in self._left.values():
            waiting.cancel()
        self._left.clear()
