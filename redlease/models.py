"""The plain data that crosses a process boundary: permits, waiters, snapshots.

All are frozen pydantic dataclasses of JSON-native fields, so that `json`, pydantic and Temporal's data converters carry
them as they are. Times are milliseconds of the Redis server's clock since the epoch.
"""

from __future__ import annotations

from dataclasses import field

from pydantic.dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Permit:
    """The right to use `weight` units of a resource until its lease ends.

    It is data, not a live handle: nobody renews it unless somebody does so by hand or adopts it.

    Attributes:
        resource: The name that was contended for.
        ticket: The id of the request, and now of the permit.
        fence: The fencing token, greater than that of every earlier grant on the resource.
        weight: Units held.
        capacity: Units the resource had when this was granted.
        lease_ms: How long the permit stays valid without renewal.
        granted_at_ms: When it was granted.
        expires_at_ms: When its lease ends, as of this copy.
        owner: Who is shown as its holder.
        metadata: What the request said about itself.
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


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request in the queue.

    Attributes:
        ticket: Its id.
        weight: Units it asks for.
        owner: Who is shown as asking.
        metadata: What the request said about itself.
        queued_at_ms: When it was queued.
    """

    ticket: str
    weight: int
    owner: str
    metadata: dict[str, str] = field(hash=False)
    queued_at_ms: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A resource as it was at one moment.

    Attributes:
        resource: Its name.
        capacity: Units that may be held at once.
        holders: The permits held, by the order of their grant.
        waiters: The live waiters, in the order in which they will be granted.
        fence: The last fence granted, 0 when none is remembered.
        server_time_ms: That moment.
    """

    resource: str
    capacity: int
    holders: tuple[Permit, ...]
    waiters: tuple[Waiter, ...]
    fence: int
    server_time_ms: int
