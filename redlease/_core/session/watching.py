"""Snapshots of a resource after each change, which the server publishes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from redlease._core import clock
from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource
from redlease.models import Snapshot

from .queueing import Session

WATCH_MS = 30_000  # how long changes are published after one `watch` call


async def snapshots_of(
    session: Session, resource: Resource, inspect: Callable[[], Awaitable[Snapshot]]
) -> AsyncGenerator[Snapshot, None]:
    """Yields the snapshot that `inspect` returns, and another one after each change."""
    changed = asyncio.Event()
    channel = resource.watch_channel

    def notify(_: bytes) -> None:
        changed.set()

    session.watchers.add(changed)
    try:
        await session.connection.subscribe(channel, notify)
        seen = None
        while True:
            changed.clear()
            answer = await session.connection.call(resource, scripts.WATCH, WATCH_MS, limit_ms=None)
            snapshot = await inspect()
            if _shape(snapshot) != seen:
                seen = _shape(snapshot)
                yield snapshot
            next_expiry_ms = answer.values[0]  # until the next expiry that affects waiters; below 0: there is none
            longest_ms = min(WATCH_MS / 3, session.poll_ms)
            wait_ms = min(longest_ms, next_expiry_ms + 2) if next_expiry_ms >= 0 else longest_ms
            await clock.pause(changed, wait_ms / 1000)
    finally:
        session.watchers.discard(changed)
        session.connection.unsubscribe(channel, notify)


def _shape(snapshot: Snapshot) -> tuple[object, ...]:
    """Returns what counts as a change; renewals do not."""
    holders = tuple((permit.ticket, permit.fence) for permit in snapshot.holders)
    damaged = tuple((entry.kind, entry.name) for entry in snapshot.damaged)
    return snapshot.capacity, snapshot.fence, holders, tuple(waiter.ticket for waiter in snapshot.waiters), damaged
