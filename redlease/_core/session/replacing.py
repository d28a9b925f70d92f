"""Has a request that waits take the place of older ones of its key, as `when_full` asks for."""

from __future__ import annotations

from redlease._core.limits import WhenFull
from redlease._core.protocol import encoding, scripts
from redlease._core.protocol.error_replies import ErrorReply
from redlease._core.protocol.replies import Queued
from redlease._core.transport.base import Reply

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
        waiting, request = self._waiting, self._waiting.request
        waiter_lease = waiting.waiter_lease.name if waiting.waiter_lease is not None else ""
        self._place = self._place or waiter_lease
        is_newest = waiter_lease == self._place and not waiting.has_been_granted
        if waiting.future.done() or self._is_answered or not is_newest:
            return
        link = waiting.session.connection.endpoint_for(request.resource)
        if not link.ready:
            waiting.resend_after(0)
            return
        lasts_ms = max(request.terms.lease_ms, REFUSED_MS)
        ids = (request.ticket, request.request_id)
        tail = encoding.pack(*ids, self._holders, lasts_ms, self._grace_ms, request.terms.idle_ttl_ms, self._after)
        link.send(request.resource, scripts.SUPERSEDE, tail, self._answered)

    def _answered(self, reply: Reply) -> None:
        waiting = self._waiting
        if reply is None:
            self._after = b""
            waiting.resend_after(0)
        elif isinstance(reply, ErrorReply):
            if reply.is_transient:
                waiting.resend_after(reply.retry_ms)
            else:
                waiting.fail(reply.error(waiting.request.resource.name, waiting.request.ticket))
        elif reply[2] or reply[3]:
            # It stopped at a limit: of requests to replace, of holders to look at, or of grants, perhaps after its own.
            self._after = reply[3]
            if reply[2]:
                waiting.session.manager.follow_up(waiting.request.resource, waiting.request.terms)
            self.queued()
        else:
            self._is_answered = True
