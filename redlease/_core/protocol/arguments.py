"""The arguments of acquire and release calls, and how they are packed."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import NamedTuple

from .encoding import Resource, pack


class Terms(NamedTuple):
    """The settings of a primitive for each acquire.

    `replicas`: how many must have a grant, within `replicas_ms`; `declares`: what it says of the resource counts, not
    only where nobody has declared anything.
    """

    owner: str
    lease_ms: int = 30_000
    capacity: int = 1
    waiter_lease_ms: int = 10_000
    max_waiters: int | None = None
    idle_ttl_ms: int = 86_400_000
    lock_delay_ms: int | None = None
    history: int | None = None
    per_key: int | None = None
    rate: str | None = None
    per_key_rate: str | None = None
    max_waiters_per_key: int | None = None
    replicas: int = 0
    replicas_ms: int = 0
    declares: bool = True


class AcquireRequest(NamedTuple):
    """One acquire request, from its first call until its permit is released.

    `request_id` is a secret id that distinguishes the copies of this request from other requests with the same ticket.
    `arrival` is the sequence that the request had in the queue, to queue again at that position; 0: at the tail.
    `packed_terms` is the result of `pack_terms`, empty if the request is never sent. `packed_ids` is the ticket and the
    request id, if they are packed already. `key` is that of its `Turn`.
    """

    resource: Resource
    terms: Terms
    ticket: str
    request_id: str
    weight: int = 1
    packed_terms: bytes = b""
    arrival: int = 0
    packed_ids: bytes = b""
    key: str = ""

    def subject(self) -> tuple[str, str, int]:
        """Returns what events about it begin with: resource, ticket and weight."""
        return self.resource.name, self.ticket, self.weight


class Turn(NamedTuple):
    """Whose turn a request takes: that of a key, which gets so large a share of the turns. No key is one more key."""

    key: str = ""
    share: float = 1


WITHOUT_KEY = Turn()


def label(owner: str, metadata: dict[str, str], key: str = "") -> str:
    """Returns owner, metadata and key as a record stores them."""
    if not metadata and not key:
        return _plain_label(owner)
    return json.dumps([owner, metadata, *([key] if key else ())], separators=(",", ":"), ensure_ascii=False)


@lru_cache(maxsize=64)
def _plain_label(owner: str) -> str:
    return json.dumps([owner, {}], separators=(",", ":"), ensure_ascii=False)


def pack_ids(ticket: str, request_id: str) -> bytes:
    """Packs ticket and request, the first arguments of an acquire and of a release."""
    first, second = ticket.encode(), request_id.encode()
    return b"$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(first), first, len(second), second)


def acquire_tail(request: AcquireRequest, place: str, *, was_queued: bool = False) -> bytes:
    """Packs the arguments of an acquire from that place; a request that was queued before declares no capacity."""
    ids = request.packed_ids or pack_ids(request.ticket, request.request_id)
    is_known = was_queued or request.arrival > 0 or (request.arrival == 0 and not request.terms.declares)
    arrival = f"+{request.arrival}" if is_known else request.arrival
    return b"%b%b%b" % (ids, _place_and_arrival(place, arrival), request.packed_terms)


@lru_cache(maxsize=256)
def _place_and_arrival(place: str, arrival: int | str) -> bytes:
    return pack(place, arrival)


@lru_cache(maxsize=256)
def pack_terms(
    terms: Terms, weight: int, written: str, *, priority: int = 0, turn: Turn = WITHOUT_KEY, queue: bool = True
) -> bytes:
    """Packs the arguments that many acquires share; `queue`: the request may wait for its grant."""
    waiter_lease_ms = terms.waiter_lease_ms if queue else 0
    most: int | str = -1 if terms.max_waiters is None else terms.max_waiters
    if turn.key and terms.max_waiters_per_key is not None:
        most = f"{most} {terms.max_waiters_per_key}"
    asked: int | str = weight
    given = (terms.lock_delay_ms, terms.history, terms.per_key)
    settings = ["" if setting is None else str(setting) for setting in given]
    if priority or any(settings) or turn.key or terms.rate or terms.per_key_rate:
        rates = (terms.rate or "", terms.per_key_rate or "")
        asked = " ".join((str(weight), str(priority), *settings, f"{turn.share:g}", *rates)).rstrip()
    key = (turn.key,) if turn.key else ()
    return pack(asked, terms.lease_ms, terms.capacity, waiter_lease_ms, most, terms.idle_ttl_ms, written, *key)


def before_label(packed_terms: bytes) -> bytes:
    """Returns what `pack_terms` packed before the label."""
    end = 0
    for _ in range(6):
        first = packed_terms.index(b"\n", end) + 1
        end = first + int(packed_terms[end + 1 : first - 2]) + 2
    return packed_terms[:end]


def release_tail(request: AcquireRequest, fence: int | None, tombstone_ms: int) -> bytes:
    """Packs the arguments of a release by the ticket's own client; without a fence it releases what the request has."""
    ids = request.packed_ids or pack_ids(request.ticket, request.request_id)
    digits = b"" if fence is None else b"%d" % fence
    return b"%b$%d\r\n%b\r\n%b" % (ids, len(digits), digits, _release_tail(tombstone_ms, request.terms.idle_ttl_ms))


@lru_cache(maxsize=256)
def _release_tail(tombstone_ms: int, idle_ttl_ms: int) -> bytes:
    return pack(tombstone_ms, 0, idle_ttl_ms)
