"""Finds out on each connect whether the messages that scripts publish reach this client.

Without them nothing fails, but a waiting request learns of its grant only by a heartbeat. So a script publishes to a
channel of the client, which awaits the message. No call is any slower for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

ARRIVES_S = 1.0  # how long a message may take


class DeliveryProbe:
    """One probe on one connection.

    Args:
        on_result: Called once with None if the message has arrived, or with the reason why it did not.
    """

    def __init__(self, on_result: Callable[[str | None], None]) -> None:
        self._on_result: Callable[[str | None], None] | None = on_result
        self._timer = asyncio.get_running_loop().call_later(ARRIVES_S, self._late)

    @property
    def is_open(self) -> bool:
        """Whether it has no result yet."""
        return self._on_result is not None

    def refused(self, text: str) -> None:
        """The server refused to publish, or to subscribe."""
        self._end(text.rstrip(". "))

    def arrived(self, _payload: bytes = b"") -> None:
        """The message is there, or any other: a listener of the channel."""
        self._end(None)

    def cancel(self) -> None:
        """Ends without a result, since the connection was lost."""
        self._on_result = None
        self._timer.cancel()

    def _late(self) -> None:
        self._end(f"none arrived within {ARRIVES_S:g} s")

    def _end(self, reason: str | None) -> None:
        on_result: Any = self._on_result
        if on_result is not None:
            self.cancel()
            on_result(reason)
