"""Drives two RESP2 connections, one for calls and one for messages, for servers on which RESP3 does not work."""

from __future__ import annotations

import asyncio
from typing import Any

from redlease._core.protocol import encoding

from .driver import Receiver, ReplyError, SocketDriver

PING_S = 3.0  # how often the connection for messages is checked, on which nothing else is awaited
PING = encoding.plain("PING")


class SocketPair:
    """Two connections that redis-py opened, as one driver."""

    inline_push = False
    protocol = 2

    def __init__(self, calls: Any, messages: Any, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver
        self._calls = SocketDriver(calls, _Half(self, receiver.on_reply, receiver.on_read))
        self._messages = SocketDriver(messages, _Half(self, self._on_message, lambda: None))
        self._has_heard = True  # whether anything came since the last PING
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def write(self, data: bytes) -> None:
        self._calls.write(data)

    def subscribe(self, data: bytes) -> None:
        self._messages.write(data)

    def _on_message(self, message: Any) -> None:
        self._has_heard = True
        receiver = self._receiver
        if receiver is None:
            return
        if type(message) is ReplyError:
            if "'ping'" not in str(message):  # a user without that right is answered as well
                receiver.on_subscription_refused(message)
        elif type(message) is list and message[0] != b"pong":
            receiver.on_push(message)

    def _ping(self) -> None:
        """Loses the connections if nothing came since the last PING: a half-open connection reports no error."""
        if not self._has_heard:
            self.lost(f"no answer for {PING_S:g} s on the connection for messages")
            return
        self._has_heard = False
        self._messages.write(PING)
        self._timer = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def lost(self, why: str) -> None:
        """Handles the loss of either connection: the other is of no use alone."""
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.on_lost(why)

    def abort(self) -> None:
        """Closes both at once and discards data that was not sent yet."""
        self._receiver = None
        self._timer.cancel()
        self._calls.abort()
        self._messages.abort()

    async def wait_closed(self) -> None:
        """Returns at once: `abort` has closed both."""


class _Half:
    """The receiver of one of the two connections."""

    def __init__(self, pair: SocketPair, on_reply: Any, on_read: Any) -> None:
        self.on_reply = self.on_push = on_reply
        self.on_read = on_read
        self.on_lost = pair.lost
