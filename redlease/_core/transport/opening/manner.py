"""How a client works with a server, which it finds out on each connect."""

from __future__ import annotations

from typing import NamedTuple


class Manner(NamedTuple):
    """How a client works with a server.

    Attributes:
        protocol: The version of RESP.
        sends_texts: Whether it sends the text of a script with its first call, since the server loads none.
        silence: Why no messages arrive; None if they do.
    """

    protocol: int = 3
    sends_texts: bool = False
    silence: str | None = None

    @property
    def connections(self) -> int:
        """How many connections it has to the server."""
        return 1 if self.protocol == 3 else 2

    @property
    def route(self) -> str:
        """The protocol and the connections in words."""
        return "RESP3 on one connection" if self.protocol == 3 else "RESP2 on two connections"

    def __str__(self) -> str:
        """Returns it in words, as the log and `repr` have it."""
        words = [self.route]
        if self.sends_texts:
            words.append("scripts sent as text")
        if self.silence is not None:
            words.append("no messages, so waiting requests poll")
        return ", ".join(words)
