"""Detects tasks that block themselves: a task holds a resource and waits for it again, without capacity for both.

Only its `timeout` ends such a wait, and no error reports it, so the log does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

from redlease._core.log import about
from redlease._core.protocol.arguments import AcquireRequest

from .leases import Lease, LeaseManager

logger = logging.getLogger("redlease")

CHECK_MS = 5000.0  # how often to check while requests wait; a request that also waited at the last check is examined


class Request(Protocol):
    """The attributes of an acquire request that are checked."""

    request: AcquireRequest
    sequence: int | None
    task: asyncio.Task[object] | None


class SelfDeadlockDetector:
    """Finds the requests of a client that wait for a permit of their own task."""

    due_ms: float | None = None

    def __init__(self, manager: LeaseManager, request_ids: Mapping[str, Request]) -> None:
        self._manager = manager
        self._requests = request_ids
        self._seen: set[str] = set()
        self._reported: set[str] = set()

    def begin(self, now_ms: float) -> None:
        """Starts the checks, which go on while requests wait."""
        self._manager.schedule.at(now_ms + CHECK_MS, self)

    def on_due(self, now_ms: float) -> bool:
        pending = {each.request.request_id: each for each in self._requests.values() if each.sequence is not None}
        suspects = [pending[request_id] for request_id in pending.keys() & self._seen - self._reported]
        if suspects:
            self._warn_of(suspects)
        self._seen = set(pending)
        self._reported &= self._seen
        if pending:
            self.begin(now_ms)
        return False

    def _warn_of(self, suspects: list[Request]) -> None:
        holds: dict[tuple[asyncio.Task[object] | None, bytes], list[Lease]] = defaultdict(list)
        for lease in self._manager.leases.values():
            holds[lease.task or lease.requester, lease.request.resource.state_key].append(lease)
        for waiting in suspects:
            own = holds.get((waiting.task, waiting.request.resource.state_key), [])
            if (
                waiting.task
                and own
                and sum(lease.request.weight for lease in own) + waiting.request.weight > own[-1].capacity
            ):
                self._reported.add(waiting.request.request_id)
                logger.warning(
                    "resource %r: the task %r waits for ticket %r and holds permit %s itself, so it waits for itself. "
                    "Release that first, or hand the hold on instead of asking again",
                    *(waiting.request.resource.name, waiting.task.get_name(), waiting.request.ticket),
                    ", ".join(repr(lease.request.ticket) for lease in own),
                    extra=about(waiting.request.resource.name, waiting.request.ticket),
                )
