"""What the attempts of an activity have in common: its place in the queue, or the permit that came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from redlease import Hold, Permit

Key = tuple[str, str]  # resource, ticket


class Turn:
    """One attempt's part in an acquire request, which may have begun in an earlier attempt."""

    def __init__(self, turns: Turns, key: Key, request: asyncio.Future[Hold]) -> None:
        self.request = request
        self._turns = turns
        self._key = key

    @property
    def is_latest(self) -> bool:
        """Whether no later attempt has taken the request over."""
        return self._turns.latest.get(self._key) is self

    @property
    def is_spent(self) -> bool:
        """Whether its permit is on the way back, or gone."""
        request = self.request
        if not request.done() or request.cancelled() or request.exception() is not None:
            return False
        return request.result().lost or request.result().ended

    def take_over(self) -> Permit:
        """The permit that was granted to the request; a body that an earlier attempt still runs under it is cancelled.

        Raises:
            LeaseLost: It is no longer held.
        """
        hold = self.request.result()
        if hold.task is None:
            return hold.detach()
        hold.check()
        permit = hold.permit
        hold.lose("the next attempt of its activity has taken it over")
        return permit

    def part(self, seconds: float) -> None:
        """Leaves the request to the next attempt, for so long; gives it up where there is to be none (0)."""
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._give_up)
        else:
            self._give_up()

    def _give_up(self) -> None:
        if self.is_latest:
            self.end()
            self._turns.give_back(self.request)

    def end(self) -> None:
        """What was granted has been given back, or left on the server."""
        if self.is_latest:
            del self._turns.latest[self._key]


class Turns:
    """The requests that attempts of this process have, or have left to the next."""

    def __init__(self, spawn: Callable[[Coroutine[Any, Any, Any]], object]) -> None:
        self.latest: dict[Key, Turn] = {}
        self._spawn = spawn

    def begin(self, key: Key, ask: Callable[[], Coroutine[Any, Any, Hold]]) -> Turn:
        """An attempt begins: with what the one before it has or has left here, or by asking."""
        before = self.latest.get(key)
        request = asyncio.ensure_future(ask()) if before is None or before.is_spent else before.request
        turn = self.latest[key] = Turn(self, key, request)
        return turn

    def give_back(self, request: asyncio.Future[Hold]) -> None:
        """Ends a request, and gives back what it has got."""
        if not request.done():
            request.cancel()
        elif not request.cancelled() and request.exception() is None:
            self._spawn(request.result().release())

    def close(self) -> None:
        """Ends all of them."""
        for turn in self.latest.values():
            turn.request.cancel()
        self.latest.clear()
