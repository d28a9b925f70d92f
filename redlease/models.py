"""The plain data that crosses a process boundary: permits, waiters, snapshots.

All are frozen dataclasses of JSON-native fields, so that `json`, pydantic and Temporal's data converters carry them
unchanged, and programs without pydantic do not have to import it. The fields of a permit are checked when it is used,
and by pydantic if that parses it. Times are milliseconds of the Redis server's clock since the epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

UNCOUNTED = -1


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to use `weight` units of a resource until its lease ends.

    It is data, not a live handle: redlease does not renew it. Renew it with `renew`, or `adopt` it.

    Attributes:
        resource: The name of the resource.
        ticket: The id of the request and of its permit.
        fence: The fencing token, greater than that of every earlier grant on the resource.
        weight: Units held.
        capacity: The capacity of the resource, as of this copy.
        lease_ms: How long the permit stays valid without renewal.
        granted_at_ms: When it was granted.
        expires_at_ms: When its lease ends, as of this copy.
        owner: The name shown as its holder.
        metadata: The metadata of the request.
        key: The key of the request, if it has one.
    """

    resource: str
    ticket: str
    fence: int
    weight: int
    capacity: int
    lease_ms: int
    granted_at_ms: int
    expires_at_ms: int
    owner: str = ""
    metadata: dict[str, str] = field(default_factory=dict, hash=False)
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request in the queue.

    Attributes:
        ticket: Its id.
        weight: Units requested.
        owner: The name shown as waiting.
        metadata: The metadata of the request.
        queued_at_ms: When it was queued.
        key: The key of the request, if it has one.
    """

    ticket: str
    weight: int
    owner: str
    metadata: dict[str, str] = field(hash=False)
    queued_at_ms: int
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a request in the queue.

    Attributes:
        rank: 1 if it is granted next, 2 after one other, and so on; 0 if it holds a permit.
        estimated_wait: About how many seconds it will wait; None if that is not known, as while a pause has no end. It
            assumes that holds last as long as those did, on average, whose release others waited for last, and is no
            less than limits and rates allow. With a key it is a guess, from the shares of some of the others.
    """

    rank: int
    estimated_wait: float | None


LimitKind = Literal["limit", "per_key", "pause", "back_off", "rate"]


@dataclass(frozen=True, slots=True)
class Limit:
    """How many units may be held until it ends or is lifted, whatever processes declare.

    Attributes:
        kind: The method that set it; "per_key" if that was `set_limit(per_key=...)`, and "rate" if the rate of the
            resource allows the next grant only when this ends.
        units: How many; 0 for a pause, and while something is held back.
        key: Of the key that it is for; None for the whole resource, and for each key.
        since_ms: When it was set.
        until_ms: When it ends; None if it has to be lifted.
        owner: Who set it.
        reason: Why.
    """

    kind: LimitKind
    units: int
    key: str | None
    since_ms: int
    until_ms: int | None
    owner: str
    reason: str


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    r"""A holder, waiter or limit that cannot be read, since a part of the state was deleted or overwritten.

    A damaged holder keeps one unit in use until its lease ends; `release` with its name as the ticket, and
    `release_all`, remove it at once. Damaged waiters and limits are removed, or put in order, by the next call that
    changes the resource; the client of such a waiter queues again.

    Attributes:
        kind: What it is.
        name: The ticket, or the name of the limit; bytes that are not UTF-8 stand as `\xff`: only `release_all`
            removes such a holder.
        reason: What is wrong with it, such as "its record is missing".
        until_ms: When the lease or the limit ends; None for a waiter.
    """

    kind: Literal["holder", "waiter", "limit"]
    name: str
    reason: str
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A resource as it was at one moment.

    Attributes:
        resource: Its name.
        capacity: Units that may be held at once.
        holders: The permits held, in the order of their grants.
        waiters: The live waiters, in the order in which they will be granted. Where requests have keys, those of one
            key are in that order, and the first of each key stands before the others.
        fence: The last fence granted, 0 if none is known.
        server_time_ms: When the snapshot was taken.
        in_use: Units in use in all, however many holders are listed.
        waiting: How many requests wait in all, however many are listed. Past the first 5,000 live ones, those that died
            are counted until the queue reaches them.
        limits: What `set_limit`, `pause` and `back_off` have set. Those of single keys are listed with the holders:
            where more than `max_items` hold, some may be missing.
        damaged: Entries that cannot be read, and are in none of the other lists. Empty unless something else than
            redlease has changed its keys, or the server has evicted one.
    """

    resource: str
    capacity: int
    holders: tuple[Permit, ...]
    waiters: tuple[Waiter, ...]
    fence: int
    server_time_ms: int
    # Computed where they are not given: histories of workflows contain snapshots of releases that had no totals.
    in_use: int = UNCOUNTED
    waiting: int = UNCOUNTED
    limits: tuple[Limit, ...] = ()
    damaged: tuple[DamagedEntry, ...] = ()

    @property
    def allowed(self) -> int:
        """How many units may be held in all: the capacity, unless a limit allows fewer."""
        units = [limit.units for limit in self.limits if limit.key is None and limit.kind not in {"per_key", "rate"}]
        return min([self.capacity, *units])

    def __post_init__(self) -> None:
        if self.in_use == UNCOUNTED:
            object.__setattr__(self, "in_use", sum(permit.weight for permit in self.holders))
        if self.waiting == UNCOUNTED:
            object.__setattr__(self, "waiting", len(self.waiters))


Event = Literal[
    "granted", "released", "lost", "forced", "superseded", "adopted", "reduced", "resized", "limited", "lifted"
]


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """Something that happened to a resource, as the server wrote it down together with the change itself.

    Attributes:
        id: Its id in the history of the resource: a later entry has a greater one, by its two numbers.
        at_ms: When.
        event: What: "granted"; "released" by its holder; "lost", since the lease ended, noted by the next acquire or by
            its own client; "forced": an operator released it, or took it out of the queue, by its ticket; "superseded":
            a newer request replaced it, as a waiter, or as a holder whose end follows; "adopted" under a new owner;
            "reduced" to a smaller weight, as by `downgrade()`; "resized": the capacity changed;
            "limited": somebody set a limit, or "lifted" one.
        ticket: Of the permit or waiter; empty for "resized"; the key of a limit, empty if it is not of one key.
        owner: The name of its holder; for "adopted", of the new one; for "limited" and "lifted", of who did it.
        fence: The fencing token of the permit; 0 where there is none, and for a waiter taken out of the queue.
        weight: Units held or asked for; for "reduced", those that are left; 0 where it is about no permit.
        waited_ms: How long the request had waited in the queue; None where it does not say.
        held_ms: How long the permit had been held, for "lost" until its lease ended; None where it does not say.
        capacity: The new capacity, for "resized"; how many units may be held, for "limited"; else None.
        key: Of the request, or of the limit; None without one, and in entries of earlier releases.
    """

    id: str
    at_ms: int
    event: Event
    ticket: str
    owner: str
    fence: int
    weight: int
    waited_ms: int | None = None
    held_ms: int | None = None
    capacity: int | None = None
    key: str | None = None
