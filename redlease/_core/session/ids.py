"""The ids of requests: a public ticket, and a secret request id."""

from __future__ import annotations

import secrets

from redlease._core.transport.base import Transport

REQUEST_BYTES, DRAWN = 10, 64  # the random bytes of a request id, and how many ids are drawn at once
Ids = tuple[str, str, bytes]


class RequestIds:
    """Draws the ids of a client's requests.

    Ids are drawn when the first request is made, not before: two forked children would draw the same ones.

    Args:
        connection: The transport of the client.
        mark: The prefix of request ids and of ticket numbers: "h" for requests of holds, which release.lua checks.
    """

    def __init__(self, connection: Transport, mark: str = "") -> None:
        self._connection = connection
        self._mark = mark
        self._spare: list[Ids] = []
        self._drawn = 0

    def draw(self) -> Ids:
        """Returns a ticket, for callers that choose none, a request id, and both packed.

        The ticket is public. The request id is unique, and only this client and the server know it: that is why a
        grant in a message can be trusted.
        """
        if not self._spare:
            self._spare = self._draw_batch()
        return self._spare.pop()

    def _draw_batch(self) -> list[Ids]:
        self._connection.start()  # makes `client_id`
        size, drawn = 2 * REQUEST_BYTES, secrets.token_hex(REQUEST_BYTES * DRAWN)
        first = f"{self._connection.client_id}-{self._mark}"
        self._drawn += DRAWN
        named = [
            (f"{first}{self._drawn - number:x}", self._mark + drawn[number * size : (number + 1) * size])
            for number in range(DRAWN)
        ]
        return [
            (ticket, request_id, f"${len(ticket)}\r\n{ticket}\r\n${len(request_id)}\r\n{request_id}\r\n".encode())
            for ticket, request_id in named
        ]
