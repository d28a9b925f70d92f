"""What the attempts of an activity share: its request, which is queued or has a permit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from redlease import Hold, Permit, Semaphore
from redlease._core.operations import lease_of
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._payloads.locks import ResourceTerms

Key = tuple[str, str]  # resource and ticket


class Attempt:
    """One attempt's use of an acquire request, which an earlier attempt may have started."""

    def __init__(self, attempts: Attempts, key: Key, request: asyncio.Future[Hold]) -> None:
        self.request = request
        self._attempts = attempts
        self._key = key

    @property
    def is_latest(self) -> bool:
        """Whether no later attempt has taken the request over."""
        return self._attempts.latest.get(self._key) is self

    @property
    def is_spent(self) -> bool:
        """Whether its permit was lost, released or is being released."""
        request = self.request
        if not request.done() or request.cancelled() or request.exception() is not None:
            return False
        return request.result().lost or lease_of(request.result()).ended

    @property
    def is_running(self) -> bool:
        """Whether a body was started under its permit."""
        return lease_of(self.request.result()).task is not None

    def take_over(self) -> Permit:
        """Takes the granted permit from the attempt before; cancels a body that still runs under it.

        Raises:
            LeaseLost: The permit is no longer held.
        """
        hold = self.request.result()
        if not self.is_running:
            return hold.detach()
        hold.check()
        permit = hold.permit
        lease_of(hold).lose("the next attempt of its activity has taken it over", "taken")
        return permit

    def leave_to_next(self, seconds: float) -> None:
        """Keeps the request for the next attempt for so long; ends it at once if there is none to follow (0)."""
        if seconds:
            asyncio.get_running_loop().call_later(seconds, self._end_if_latest)
        else:
            self._end_if_latest()

    def _end_if_latest(self) -> None:
        if self.is_latest:
            self.end()
            self._attempts.release(self.request)

    def end(self) -> None:
        """Forgets the request: its permit was released, or left on the server for the next attempt."""
        if self.is_latest:
            del self._attempts.latest[self._key]


class Attempts:
    """The requests that attempts of this process have, or have left to the next attempt.

    Args:
        relay: Returns the relay of this process; raises if the plugin was given no Redis.
    """

    def __init__(self, relay: Callable[[], Relay]) -> None:
        self.latest: dict[Key, Attempt] = {}
        self._relay = relay

    def semaphore(self, terms: ResourceTerms) -> Semaphore:
        """The resource that an activity needs."""
        return self._relay().semaphore(terms)

    def begin(self, key: Key, acquire: Callable[[], Coroutine[Any, Any, Hold]]) -> Attempt:
        """Starts an attempt: it continues the request of the attempt before it in this process, or makes a new one."""
        before = self.latest.get(key)
        request = asyncio.ensure_future(acquire()) if before is None or before.is_spent else before.request
        attempt = self.latest[key] = Attempt(self, key, request)
        return attempt

    def release(self, request: asyncio.Future[Hold]) -> None:
        """Ends a request, and releases its permit."""
        if not request.done():
            request.cancel()
        elif not request.cancelled() and request.exception() is None:
            self._relay().spawn(request.result().release())

    def close(self) -> None:
        """Cancels all requests."""
        for attempt in self.latest.values():
            attempt.request.cancel()
        self.latest.clear()
