"""Reads a snapshot of a resource, in pages if one reply would be too large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from redlease.models import Limit, LimitKind, Permit, Snapshot, Waiter

# The approximate limit of one reply. A server buffers 32 MB for a client that subscribes to channels and disconnects it
# beyond that, which would also lose the renewals and messages of all other tasks.
PAGE_BYTES = 500_000
SNAPSHOT_LIMIT = 1000  # the default limit of holders, and of waiters, in a snapshot
LOOKS_AT_ONCE = 8  # pages that one client requests at a time, for the same reason
CHECKED_MOST = 5000  # waiters that one call checks to count the live ones
MARK = b"\xff"  # what the name of an entry begins with that stands for a lock delay or a limit, not for a permit
LIMIT_WORDS: dict[LimitKind, str] = {
    "limit": "limit",
    "pause": "pause",
    "hold_back": "back",
    "per_key": "each",
    "rate": "rate",
}
LIMITS = {word.encode(): kind for kind, word in LIMIT_WORDS.items()}
FOR_GOOD_MS = 315_360_000_000  # how long a limit is kept that has no end of its own
LOSSES_MOST = 2  # lost connections after which a page is not requested again: its size may be the cause


class Reading:
    """A snapshot being read: the contents of the pages so far, and the arguments of the next call."""

    def __init__(self, resource: str, declared: int, limit: int, counted: int = CHECKED_MOST) -> None:
        self._resource = resource
        self._declared = declared
        self._limit = limit
        self._counted = counted
        self._after: list[bytes] | None = [b"", b"", b""]
        self._head: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
        self._holders: dict[str, Permit] = {}
        self._limits: dict[tuple[LimitKind, str | None], Limit] = {}
        self._waiters: dict[str, Waiter] = {}

    @property
    def args(self) -> tuple[int | bytes, ...] | None:
        """The arguments of the next call; None after the last page."""
        if self._after is None:
            return None
        most_holders, most_waiters = self._limit - len(self._holders), self._limit - len(self._waiters)
        return most_holders, most_waiters, PAGE_BYTES, *self._after, self._counted

    def add(self, reply: list[Any]) -> None:
        """Adds a reply of inspect, without its tag. A later page replaces what an earlier one said of a ticket."""
        now, fence, capacity, in_use, waiting, held, queued, after, limits = reply
        self._head = now, fence, capacity, in_use, waiting
        self._limits |= {(limit.kind, limit.key): limit for limit in (*_read_limits(limits), *_read_limits(held))}
        self._holders |= {permit.ticket: permit for permit in _read_holders(self._resource, capacity, held)}
        self._waiters |= {waiter.ticket: waiter for waiter in _read_waiters(queued)}
        self._after = after or None

    def snapshot(self) -> Snapshot:
        """Returns the snapshot. A resource without state on the server gets the declared capacity."""
        now, fence, capacity, in_use, waiting = self._head
        holders = tuple(sorted(self._holders.values(), key=lambda permit: permit.fence))
        waiters = tuple(waiter for waiter in self._waiters.values() if waiter.ticket not in self._holders)
        limits = tuple(self._limits.values())
        return Snapshot(
            self._resource, capacity or self._declared, holders, waiters, fence, now, in_use, waiting, limits
        )


def read_record(text: bytes) -> tuple[list[str], str, dict[str, str], str]:
    """Parses a record into its first six fields, the owner, the metadata, and the key, empty if there is none."""
    *fields, written = text.decode().split(" ", 6)
    owner, metadata, *key = json.loads(written)
    return fields, owner, metadata, key[0] if key else ""


def _read_holders(resource: str, capacity: int, held: list[Any]) -> Iterator[Permit]:
    for ticket, deadline, text in zip(held[::3], held[1::3], held[2::3], strict=True):
        if ticket.startswith(MARK):
            continue
        (weight, fence, lease, since, _, _), owner, metadata, key = read_record(text)
        yield Permit(
            *(resource, ticket.decode(), int(fence), int(weight), capacity, int(lease), int(since)),
            *(deadline, owner, metadata, key or None),
        )


def _read_waiters(queued: list[Any]) -> Iterator[Waiter]:
    for ticket, text in zip(queued[::2], queued[1::2], strict=True):
        (weight, _, _, since, _, _), owner, metadata, key = read_record(text)
        yield Waiter(ticket.decode(), int(weight), owner, metadata, int(since), key or None)


def allowed(limits: list[Any]) -> int | None:
    """Returns how many units the limits of a resource, as inspect tells them, allow to be held; None without limits."""
    found = [limit.units for limit in _read_limits(limits) if limit.kind != "per_key"]
    return min(found, default=None)


def _read_limits(held: list[Any]) -> Iterator[Limit]:
    for name, deadline, text in zip(held[::3], held[1::3], held[2::3], strict=True):
        kind, _, key = name.removeprefix(MARK).partition(b" ")
        if not name.startswith(MARK) or kind not in LIMITS:
            continue
        (_, _, units, since, _, _), owner, metadata, _ = read_record(text)
        until_ms = None if deadline - int(since) >= FOR_GOOD_MS else deadline
        yield Limit(
            *(LIMITS[kind], int(units), key.decode() or None, int(since), until_ms),
            *(owner, metadata.get("reason", "")),
        )
