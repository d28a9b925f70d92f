"""Taking over a permit that exists already, and keeping it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from redlease import events
from redlease._core import clock
from redlease._core.hold import HeldLease, Hold, HoldRequest
from redlease._core.operations import Adopted
from redlease._core.options import HoldOptions
from redlease._core.protocol.arguments import AcquireRequest
from redlease._core.protocol.replies import Granted, Message
from redlease._core.session.queueing import Session


class AdoptRequest(HoldRequest):
    """What `adopt(...)` returns. `adopt`: takes the permit over."""

    _made_by = "adopt()"

    def __init__(self, resource: str, adopt: Callable[[], Coroutine[Any, Any, Hold]]) -> None:
        self._resource = resource
        self._acquire = adopt  # type: ignore[method-assign]
        self._used = False

    async def __aenter__(self) -> Hold:
        if self._entered:
            raise RuntimeError(f"this {self._made_by} is entered already: a permit is adopted once")
        self._used = self._entered = True
        try:
            hold = self._hold = await self._acquire()
        except BaseException:
            self._entered = False
            raise
        return await hold.__aenter__()


def subscribed_keys(
    session: Session,
    request: AcquireRequest,
    adopted: Adopted,
    hold_options: HoldOptions,
    messages: Sequence[Message],
    *,
    forget_ticket: Callable[[], None],
) -> HeldLease:
    """Renews an adopted permit from then on; `messages`: messages about it received since it was asked for."""
    fence, granted_at_ms, expires_at_ms, weight, capacity, sent_ms = adopted
    granted, terms = Granted(fence, granted_at_ms, expires_at_ms, capacity), request.terms
    lease = HeldLease(session.manager, request._replace(weight=weight), forget_ticket)
    if (emit := session.manager.emit) is not None:
        emit(events.Granted(request.resource.name, request.ticket, weight, fence, 0.0, False, request.key or None))
    lease.start(
        granted, sent_ms + terms.lease_ms - clock.SERVER_TICK_MS, hold_options, clock.now_ms(), messages=messages
    )
    if session.closed:  # closed before the reply came: `close` has released all other holds
        lease.lose("its client was closed", "closed")
        session.manager.release(lease)
    return lease
