"""Detects tasks that block themselves: a task holds a resource and waits for it again, without capacity for both.

Only its `timeout` ends such a wait, and no error reports it, so the log does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from redlease.log import about
from redlease.protocol.arguments import AcquireRequest

from .leases import Lease, LeaseKeeper

logger = logging.getLogger("redlease")

LOOK_MS = 5000.0  # how often to check while requests wait; a request that also waited at the last check is examined


class Request(Protocol):
    """The attributes of an acquire request that are checked."""

    ask: AcquireRequest
    sequence: int | None
    task: asyncio.Task[object] | None


class Stuck:
    """Finds the requests of a client that wait for a permit of their own task."""

    due_ms: float | None = None

    def __init__(self, keeper: LeaseKeeper, requests: Mapping[str, Request]) -> None:
        self._keeper = keeper
        self._requests = requests
        self._seen: set[str] = set()
        self._told: set[str] = set()

    def begin(self, now_ms: float) -> None:
        """Starts the checks, which go on while requests wait."""
        self._keeper.schedule.at(now_ms + LOOK_MS, self)

    def on_due(self, now_ms: float) -> bool:
        pending = {each.ask.request: each for each in self._requests.values() if each.sequence is not None}
        suspects = [pending[request] for request in pending.keys() & self._seen - self._told]
        if suspects:
            self._look_at(suspects)
        self._seen = set(pending)
        self._told &= self._seen
        if pending:
            self.begin(now_ms)
        return False

    def _look_at(self, suspects: list[Request]) -> None:
        holds: dict[tuple[asyncio.Task[object] | None, bytes], list[Lease]] = defaultdict(list)
        for lease in self._keeper.leases.values():
            holds[lease.task or lease.asker, lease.ask.resource.state_key].append(lease)
        for waiting in suspects:
            own = holds.get((waiting.task, waiting.ask.resource.state_key), [])
            if waiting.task and own and sum(lease.ask.weight for lease in own) + waiting.ask.weight > own[-1].capacity:
                self._told.add(waiting.ask.request)
                logger.warning(
                    "resource %r: the task %r waits for ticket %r and holds permit %s itself, so it waits for itself. "
                    "Release that first, or hand the hold on instead of asking again",
                    *(waiting.ask.resource.name, waiting.task.get_name(), waiting.ask.ticket),
                    ", ".join(repr(lease.ask.ticket) for lease in own),
                    extra=about(waiting.ask.resource.name, waiting.ask.ticket),
                )
