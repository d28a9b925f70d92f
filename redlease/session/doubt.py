"""A message that a permit was taken is a hint, since anybody who may publish can send it: the server confirms it."""

from __future__ import annotations

from collections.abc import Callable

from redlease.protocol import encoding, scripts
from redlease.protocol.arguments import AcquireRequest
from redlease.transport.base import Reply, Transport


class Doubt:
    """Asks the server whether a permit is still held under its fence, and asks again for what it hears meanwhile.

    Args:
        connection: Leads to the server.
        ask: The request that was granted.
        fence: The fence of the permit.
        on_gone: Called if the server no longer has the permit.
        on_unanswered: Called if the server did not answer, or with an error.
    """

    _asking = _again = False

    def __init__(
        self,
        connection: Transport,
        ask: AcquireRequest,
        fence: int,
        on_gone: Callable[[], None],
        on_unanswered: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._resource = ask.resource
        self._tail = encoding.pack(ask.ticket, fence)
        self._on_gone = on_gone
        self._on_unanswered = on_unanswered

    def raised(self) -> None:
        """Asks the server; after a reconnect there is no need to, because every lease is renewed then."""
        link = self._connection.endpoint_for(self._resource)
        if self._asking:
            self._again = True  # the reply on its way may be older than this message
        elif link.ready:
            self._asking = True
            link.send(self._resource, scripts.CHECK, self._tail, self._answered)

    def _answered(self, reply: Reply) -> None:
        again, self._asking, self._again = self._again, False, False
        if not isinstance(reply, list):
            self._on_unanswered()
        elif not reply[1]:
            self._on_gone()
        elif again:
            self.raised()
