"""Requests of one client that find a queue full: one at a time asks the server, for all that wait for its answer.

A refusal says that the queue was full at some moment after its call was sent. So it answers every alike request that
was made before that, and tasks that ask again and again cost the server one call at a time, however many they are.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from redlease._core import clock
from redlease._core.protocol.arguments import AcquireRequest, before_label
from redlease._core.protocol.replies import Status

from . import acquire_errors

KEPT_MS = 1000.0  # how long after a refusal alike requests still ask one at a time

Alike = tuple[bytes, str, bytes]


class Refusable(Protocol):
    """A request; `last_full`: the last refusal that it has heard of."""

    request: AcquireRequest
    last_full: list[int] | None
    batch: RefusalBatch | None

    def on_due(self, now_ms: float) -> bool: ...

    def fail(self, error: Exception) -> None: ...


@dataclass(slots=True)
class RefusalBatch:
    """Alike requests; `others`: when each was made that waits for the answer to the one that `probe`."""

    alike: Alike
    values: list[int]
    until_ms: float
    probe: Refusable | None = None
    others: dict[Refusable, float] = field(default_factory=dict)


class RefusalBatches:
    """All queues that this client found full recently."""

    def __init__(self) -> None:
        self.known: OrderedDict[Alike, RefusalBatch] = OrderedDict()  # the one that was full last comes last

    def joins(self, waiting: Refusable, now_ms: float) -> bool:
        """Returns whether a new request waits for the answer to another; else it may be the one that asks.

        A ticket that the user chose may have a place or a permit already, and so may one that was queued before.
        """
        if not waiting.request.packed_ids or waiting.request.arrival:
            return False
        batch = self.known.get(_alike(waiting.request))
        if batch is None or (now_ms >= batch.until_ms and batch.probe is None):
            return False
        waiting.batch = batch
        if batch.probe is None:
            batch.probe = waiting
            return False
        batch.others[waiting] = now_ms
        waiting.last_full = batch.values
        return True

    def refused(self, waiting: Refusable, values: list[int], sent_ms: float) -> None:
        """Refuses a request, and those that were made before its call was sent; the next of the others asks."""
        now_ms, alike = clock.now_ms(), _alike(waiting.request)
        batch = waiting.batch or self.known.get(alike)
        if batch is None:
            batch = self.known[alike] = RefusalBatch(alike, values, 0.0)
            while (oldest := next(iter(self.known.values()))).until_ms < now_ms and oldest is not batch:
                self.known.popitem(last=False)
        batch.values, batch.until_ms = values, now_ms + KEPT_MS
        self.known[alike] = batch
        self.known.move_to_end(alike)
        for other in [waiting, *(other for other, made_ms in batch.others.items() if made_ms < sent_ms)]:
            batch.others.pop(other, None)
            other.fail(acquire_errors.refused(other.request, Status.FULL, values))
        self._next(batch, waiting, now_ms)

    def left(self, waiting: Refusable) -> None:
        """Takes out a request that waits no more; if it was the one that asks, the next of the others does."""
        batch, waiting.batch = waiting.batch, None
        if batch is not None:
            batch.others.pop(waiting, None)
            self._next(batch, waiting, clock.now_ms())

    def entered(self, waiting: Refusable) -> None:
        """Notes that the queue was not full: all the others ask."""
        batch, waiting.batch = waiting.batch, None
        if batch is None:
            return
        others, batch.others, batch.probe = list(batch.others), {}, None
        if self.known.get(batch.alike) is batch:
            del self.known[batch.alike]
        now_ms = clock.now_ms()
        for other in others:
            other.batch = None
            other.on_due(now_ms)

    def _next(self, batch: RefusalBatch, waiting: Refusable, now_ms: float) -> None:
        if batch.probe is waiting:
            batch.probe = next(iter(batch.others), None)
            if batch.probe is not None:
                del batch.others[batch.probe]
                batch.probe.on_due(now_ms)


def _alike(request: AcquireRequest) -> Alike:
    """Returns what two requests have in common that find the same room: all that is sent but ticket and label."""
    return request.resource.state_key, request.key, before_label(request.packed_terms)
