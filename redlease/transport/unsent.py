"""The calls of a connection that wait until the server has answered others.

A server runs what it has read of one connection in one go, and everybody else waits for that. So a client leaves only
so many calls unanswered, and keeps the others back. Those go first that keep alive or give back what the client has:
no flood of its own requests and looks costs it a permit. What nobody waits for any more is not sent at all.
"""

from __future__ import annotations

from collections import deque

from redlease.protocol.encoding import Resource
from redlease.protocol.scripts import Script

from .base import Departs, OnReply

# What `Connection.send` was called with. A plain tuple, for speed.
UnsentCall = tuple[Resource, Script, bytes, OnReply, Departs | None]


class Unsent:
    """The calls of one connection that wait, in the order in which they are sent."""

    def __init__(self) -> None:
        self._first: deque[UnsentCall] = deque()
        self._others: deque[UnsentCall] = deque()

    def __bool__(self) -> bool:
        return bool(self._first or self._others)

    def add(self, call: UnsentCall) -> None:
        """Adds a call, behind those of its kind."""
        (self._first if call[1].goes_first else self._others).append(call)

    def next(self) -> UnsentCall | None:
        """Takes out the next call that is still wanted."""
        while queue := self._first or self._others:
            call = queue.popleft()
            if (departs := call[-1]) is None or departs():
                return call
        return None

    def clear(self) -> list[OnReply]:
        """Takes all calls out; returns their callbacks."""
        callbacks = [call[3] for call in (*self._first, *self._others)]
        self._first.clear()
        self._others.clear()
        return callbacks
