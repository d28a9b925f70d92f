"""Has a request that waits take the place of older ones of its key, as `when_full` asks for."""

from __future__ import annotations

from redlease.limits import WhenFull
from redlease.protocol import encoding, scripts
from redlease.protocol.faults import ErrorReply
from redlease.protocol.replies import Queued
from redlease.transport.base import Reply

from .queueing import PendingAcquire

REFUSED_MS = 60_000  # how long a request that was replaced is refused, should its client not have heard of that


class Replacing:
    """Sends `supersede` once the request is queued, until the server has answered.

    The server goes by the order of arrival, so it does not matter which of several requests is the first to send it.
    A request that has lost its place, or the grant that it got, is no longer the newest: it queues again, and replaces
    nobody.
    """

    _is_answered = False
    _after = b""  # up to which holder the server has looked at them
    _place = ""  # where the request was queued first

    def __init__(self, waiting: PendingAcquire, when_full: WhenFull) -> None:
        self._waiting = waiting
        self._holders = int(when_full.mode == "replace-holder")
        self._grace_ms = when_full.grace_ms

    def queued(self, _: Queued | None = None) -> None:
        """Sends it now; a request whose connection is lost is sent again, and so is this."""
        waiting, ask = self._waiting, self._waiting.ask
        place = waiting.place.name if waiting.place is not None else ""
        self._place = self._place or place
        is_newest = place == self._place and not waiting.has_been_granted
        if waiting.future.done() or self._is_answered or not is_newest:
            return
        link = waiting.session.connection.endpoint_for(ask.resource)
        if not link.ready:
            waiting.ask_again(0)
            return
        lasts_ms = max(ask.terms.lease_ms, REFUSED_MS)
        ids = (ask.ticket, ask.request)
        tail = encoding.pack(*ids, self._holders, lasts_ms, self._grace_ms, ask.terms.idle_ttl_ms, self._after)
        link.send(ask.resource, scripts.SUPERSEDE, tail, self._answered)

    def _answered(self, reply: Reply) -> None:
        waiting = self._waiting
        if reply is None:
            self._after = b""
            waiting.ask_again(0)
        elif isinstance(reply, ErrorReply):
            if reply.is_transient:
                waiting.ask_again(reply.retry_ms)
            else:
                waiting.fail(reply.error(waiting.ask.resource.name, waiting.ask.ticket))
        elif reply[2] or reply[3]:
            # It stopped at a limit: of requests to replace, of holders to look at, or of grants, perhaps after its own.
            self._after = reply[3]
            if reply[2]:
                waiting.session.keeper.follow_up(waiting.ask.resource, waiting.ask.terms)
            self.queued()
        else:
            self._is_answered = True
