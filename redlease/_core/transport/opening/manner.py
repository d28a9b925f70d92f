"""How a client works with a server, which it finds out on each connect."""

from __future__ import annotations

from typing import NamedTuple


class Manner(NamedTuple):
    """How a client works with a server.

    Attributes:
        protocol: The version of RESP.
        connections: How many connections it has to the server.
        sends_texts: Whether it sends the text of a script with its first call, since the server loads none.
        silence: Why no messages arrive; None if they do.
    """

    protocol: int = 3
    connections: int = 1
    sends_texts: bool = False
    silence: str | None = None

    def __str__(self) -> str:
        """Returns it in words, as the log and `repr` have it."""
        words = ["RESP3 on one connection" if self.protocol == 3 else "RESP2 on two connections"]
        if self.sends_texts:
            words.append("scripts sent as text")
        if self.silence is not None:
            words.append("no messages, so waiting requests poll")
        return ", ".join(words)
