"""Requests of one client that find a queue full: one at a time asks the server, for all that wait for its answer.

A refusal says that the queue was full at some moment after its call was sent. So it answers every alike request that
was made before that, and tasks that ask again and again cost the server one call at a time, however many they are.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from redlease import clock
from redlease.protocol.arguments import AcquireRequest, before_label
from redlease.protocol.replies import Status

from . import refusals

KEPT_MS = 1000.0  # how long after a refusal alike requests still ask one at a time

Alike = tuple[bytes, str, bytes]


class Asking(Protocol):
    """A request; `found_full`: the last refusal that it has heard of."""

    ask: AcquireRequest
    found_full: list[int] | None
    crowd: Crowd | None

    def on_due(self, now_ms: float) -> bool: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True)
class Crowd:
    """Alike requests; `others`: when each was made that waits for the answer to the one that `asks`."""

    alike: Alike
    values: list[int]
    until_ms: float
    asks: Asking | None = None
    others: dict[Asking, float] = field(default_factory=dict)


class Crowds:
    """All queues that this client found full of late."""

    def __init__(self) -> None:
        self.known: OrderedDict[Alike, Crowd] = OrderedDict()  # the one that was full last comes last

    def joins(self, waiting: Asking, now_ms: float) -> bool:
        """Returns whether a new request waits for the answer to another; else it may be the one that asks.

        A ticket that the user chose may have a place or a permit already, and so may one that was queued before.
        """
        if not waiting.ask.packed_ids or waiting.ask.arrival:
            return False
        crowd = self.known.get(_alike(waiting.ask))
        if crowd is None or (now_ms >= crowd.until_ms and crowd.asks is None):
            return False
        waiting.crowd = crowd
        if crowd.asks is None:
            crowd.asks = waiting
            return False
        crowd.others[waiting] = now_ms
        waiting.found_full = crowd.values
        return True

    def refused(self, waiting: Asking, values: list[int], sent_ms: float) -> None:
        """Refuses a request, and those that were made before its call was sent; the next of the others asks."""
        now_ms, alike = clock.now_ms(), _alike(waiting.ask)
        crowd = waiting.crowd or self.known.get(alike)
        if crowd is None:
            crowd = self.known[alike] = Crowd(alike, values, 0.0)
            while (oldest := next(iter(self.known.values()))).until_ms < now_ms and oldest is not crowd:
                self.known.popitem(last=False)
        crowd.values, crowd.until_ms = values, now_ms + KEPT_MS
        self.known[alike] = crowd
        self.known.move_to_end(alike)
        for other in [waiting, *(other for other, made_ms in crowd.others.items() if made_ms < sent_ms)]:
            crowd.others.pop(other, None)
            other.fail(refusals.refused(other.ask, Status.FULL, values))
        self._next(crowd, waiting, now_ms)

    def left(self, waiting: Asking) -> None:
        """Takes out a request that waits no more; if it was the one that asks, the next of the others does."""
        crowd, waiting.crowd = waiting.crowd, None
        if crowd is not None:
            crowd.others.pop(waiting, None)
            self._next(crowd, waiting, clock.now_ms())

    def entered(self, waiting: Asking) -> None:
        """Notes that the queue was not full: all the others ask."""
        crowd, waiting.crowd = waiting.crowd, None
        if crowd is None:
            return
        others, crowd.others, crowd.asks = list(crowd.others), {}, None
        if self.known.get(crowd.alike) is crowd:
            del self.known[crowd.alike]
        now_ms = clock.now_ms()
        for other in others:
            other.crowd = None
            other.on_due(now_ms)

    def _next(self, crowd: Crowd, waiting: Asking, now_ms: float) -> None:
        if crowd.asks is waiting:
            crowd.asks = next(iter(crowd.others), None)
            if crowd.asks is not None:
                del crowd.others[crowd.asks]
                crowd.asks.on_due(now_ms)


def _alike(ask: AcquireRequest) -> Alike:
    """Returns what two requests have in common that find the same room: all that is sent but ticket and label."""
    return ask.resource.state_key, ask.key, before_label(ask.packed_terms)
