"""Reads a snapshot of a resource, in pages if one reply would be too large."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from redlease.models import DamagedEntry, Limit, LimitKind, Permit, Snapshot, Waiter

# The approximate limit of one reply. A server buffers 32 MB for a client that subscribes to channels and disconnects it
# beyond that, which would also lose the renewals and messages of all other tasks.
PAGE_BYTES = 500_000
SNAPSHOT_LIMIT = 1000  # the default limit of holders, and of waiters, in a snapshot
LARGE_READS_AT_ONCE = 8  # pages that one client requests at a time, for the same reason
CHECKED_MOST = 5000  # live waiters that are counted one by one, page by page
MARK = b"\xff"  # what the name of an entry begins with that stands for a lock delay or a limit, not for a permit
LIMIT_WORDS: dict[LimitKind, str] = {
    "limit": "limit",
    "pause": "pause",
    "back_off": "back",
    "per_key": "each",
    "rate": "rate",
}
LIMITS = {word.encode(): kind for kind, word in LIMIT_WORDS.items()}
FOR_GOOD_MS = 315_360_000_000  # how long a limit is kept that has no end of its own
_RECORD = re.compile(r"(\d{1,20}) (\d{1,20}) (\d{1,20}) (\d{1,20}) \S+ \S+ (.*)", re.DOTALL | re.ASCII)
LOSSES_MOST = 2  # lost connections after which a page is not requested again: its size may be the cause


class Record(NamedTuple):
    """What `state` keeps of a ticket or of a limit. `lease_ms`: of a limit, how many units it allows."""

    weight: int
    fence: int
    lease_ms: int
    since_ms: int
    owner: str
    metadata: dict[str, str]
    key: str | None


class Unreadable(ValueError):
    """Raised for an entry that no script of redlease wrote; its text is the reason."""


class Reading:
    """A snapshot being read: the contents of the pages so far, and the arguments of the next call.

    What cannot be read is an entry too: where a part of the state was deleted or overwritten, the rest is shown.
    """

    def __init__(self, resource: str, declared: int, limit: int, counted: int = CHECKED_MOST) -> None:
        self._resource = resource
        self._declared = declared
        self._limit = limit
        self._counted = counted
        self._after: list[bytes] | None = [b"", b"", b""]
        self._head: tuple[int, int, int] = (0, 0, 0)
        self._in_use = self._counted_so_far = 0
        self._holders: dict[bytes, Permit | DamagedEntry] = {}
        self._limits: dict[bytes, Limit | DamagedEntry] = {}
        self._waiters: dict[bytes, Waiter | DamagedEntry] = {}

    @property
    def args(self) -> tuple[int | bytes, ...] | None:
        """The arguments of the next call; None after the last page."""
        if self._after is None:
            return None
        most_holders, most_waiters = self._limit - len(self._holders), self._limit - len(self._waiters)
        most_counted = max(0, self._counted - self._counted_so_far)
        return max(0, most_holders), max(0, most_waiters), PAGE_BYTES, *self._after, most_counted

    def add(self, reply: list[Any]) -> None:
        """Adds a reply of inspect, without its tag. A later page replaces what an earlier one said of a ticket."""
        now, fence, capacity, in_use, waiting, held, queued, after, limits = reply
        self._head = now, fence, capacity
        self._in_use, self._counted_so_far = self._in_use + in_use, self._counted_so_far + waiting
        for name, deadline, text in _triples([*limits, *held]):
            if not name.startswith(MARK):
                self._holders[name] = _holder(self._resource, capacity, name, deadline, text)
            elif _kind_of(name):
                self._limits[name] = _limit(name, deadline, text)
        for name, text in zip(queued[::2], queued[1::2], strict=True):
            self._waiters[name] = _waiter(name, text)
        self._after = after or None

    def snapshot(self) -> Snapshot:
        """Returns the snapshot. A resource without state on the server gets the declared capacity."""
        now, fence, capacity = self._head
        entries = (*self._holders.values(), *self._limits.values(), *self._waiting.values())
        return Snapshot(
            self._resource,
            capacity or self._declared,
            tuple(sorted((each for each in entries if isinstance(each, Permit)), key=lambda permit: permit.fence)),
            tuple(each for each in entries if isinstance(each, Waiter)),
            *(fence, now, max(0, self._in_use), self._counted_so_far),
            tuple(each for each in entries if isinstance(each, Limit)),
            tuple(each for each in entries if isinstance(each, DamagedEntry)),
        )

    @property
    def held(self) -> list[tuple[bytes, int | Literal[""]]]:
        """The holders that were read: ticket and fence, "" if the fence is unknown."""
        return [(name, each.fence if isinstance(each, Permit) else "") for name, each in self._holders.items()]

    @property
    def queued(self) -> list[bytes]:
        """The tickets of the waiters that were read."""
        return list(self._waiting)

    @property
    def _waiting(self) -> dict[bytes, Waiter | DamagedEntry]:
        return {name: waiter for name, waiter in self._waiters.items() if name not in self._holders}


def allowed(limits: Iterable[Limit]) -> int | None:
    """Returns how many units the limits of a resource allow to be held; None without limits."""
    return min((limit.units for limit in limits if limit.kind != "per_key" and limit.key is None), default=None)


def _triples(entries: list[Any]) -> Iterator[tuple[bytes, int, bytes]]:
    return zip(entries[::3], entries[1::3], entries[2::3], strict=True)


def _holder(resource: str, capacity: int, name: bytes, deadline_ms: int, text: bytes) -> Permit | DamagedEntry:
    try:
        ticket, record = _decoded(name), read_record(text)
    except Unreadable as error:
        return DamagedEntry("holder", _shown(name), str(error), deadline_ms)
    weight, fence, lease_ms, since_ms, owner, metadata, key = record
    return Permit(resource, ticket, fence, weight, capacity, lease_ms, since_ms, deadline_ms, owner, metadata, key)


def _waiter(name: bytes, text: bytes) -> Waiter | DamagedEntry:
    try:
        ticket, record = _decoded(name), read_record(text)
    except Unreadable as error:
        return DamagedEntry("waiter", _shown(name), str(error))
    return Waiter(ticket, record.weight, record.owner, record.metadata, record.since_ms, record.key)


def _limit(name: bytes, deadline_ms: int, text: bytes) -> Limit | DamagedEntry:
    _, _, key = name.partition(b" ")
    try:
        its_key, record = _decoded(key), read_record(text)
    except Unreadable as error:
        return DamagedEntry("limit", _shown(name.removeprefix(MARK)), str(error), deadline_ms)
    until_ms = None if deadline_ms - record.since_ms >= FOR_GOOD_MS else deadline_ms
    units, reason = record.lease_ms, record.metadata.get("reason", "")
    return Limit(LIMITS[_kind_of(name)], units, its_key or None, record.since_ms, until_ms, record.owner, reason)


def _kind_of(name: bytes) -> bytes:
    """Returns the word of a limit; empty if the name stands for something else, such as a lock delay."""
    kind = name.removeprefix(MARK).partition(b" ")[0]
    return kind if kind in LIMITS else b""


def _decoded(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise Unreadable("its name is not UTF-8") from None


def _shown(name: bytes) -> str:
    return name.decode(errors="backslashreplace")


def read_record(text: bytes) -> Record:
    """Parses a record; raises `Unreadable` if no script wrote it."""
    if not text:
        raise Unreadable("its record is missing")
    try:
        found = _RECORD.fullmatch(text.decode())
        label: Any = json.loads(found[5]) if found else None
    except (RecursionError, ValueError):
        found, label = None, []
    if found is None or not _is_label(label):
        raise Unreadable("its record is unreadable")
    owner, metadata, *key = label
    return Record(int(found[1]), int(found[2]), int(found[3]), int(found[4]), owner, metadata, key[0] if key else None)


def _is_label(label: Any) -> bool:
    """Returns whether it is owner, metadata and maybe a key, as `arguments.label` writes them."""
    match label:
        case [str(), dict(metadata)] | [str(), dict(metadata), str()]:
            return all(isinstance(value, str) for value in metadata.values())
    return False
