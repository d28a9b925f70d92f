"""The service `redlease`: its operations, and what they take and return, as callers in any language send it.

Each is a JSON object with the names of these fields; times and durations are in ms. Callers' histories contain them:
add fields only with defaults, and never change or remove one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import nexusrpc

from redlease.models import Permit, Snapshot

from .locks import Caller, OnClose, RateLimit

SERVICE = "redlease"
# The workflow of the lock service that waits for a grant.
ACQUIRE_WORKFLOW = "redlease.acquire"


@dataclass(frozen=True)
class AcquireInput:
    """Asks for a permit.

    Attributes:
        resource: The name of the resource.
        capacity: Units of it that may be held at once.
        ticket: The id of the request: with the same ticket it gets the same permit; by default a new one.
        weight: Units to hold.
        lease_ms: How long the permit stays valid without renewal.
        timeout_ms: How long to wait; null waits without limit.
        max_waiters: Refused with `QueueFull` when that many wait; null for no limit.
        owner: Who is shown as holder; by default the caller's workflow id.
        metadata: Shown by `inspect`.
        renewed: Whether the permit is renewed while the caller's run is open; otherwise it ends with its lease.
        on_close: What happens when that run closes without a release: "release", or "lease" lets the permit expire.
        max_hold_ms: After this it is no longer renewed.
        caller: The run that is to have the permit; by default the one that calls, which the server names.
        key: Whose turn the request takes: requests of different keys take turns; empty for none.
        share: How large a share of the turns the key gets beside keys of share 1.
        per_key: Units that requests with one key may hold at once; 0 for no such limit, null leaves it as it is.
        rate: How many grants there may be in a time; with a limit of 0 as many as want, null leaves it as it is.
        per_key_rate: The same for the requests of one key.
        max_waiters_per_key: Refused with `QueueFull` when that many requests of its key wait; null for no limit.
    """

    resource: str
    capacity: int = 1
    ticket: str = ""
    weight: int = 1
    lease_ms: int = 30_000
    timeout_ms: int | None = None
    max_waiters: int | None = None
    owner: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    renewed: bool = True
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    caller: Caller | None = None
    key: str = ""
    share: float = 1
    per_key: int | None = None
    rate: RateLimit | None = None
    per_key_rate: RateLimit | None = None
    max_waiters_per_key: int | None = None


@dataclass(frozen=True)
class TryAcquireResult:
    """The outcome of `try_acquire`: a permit, or null if none is free."""

    permit: Permit | None = None


@dataclass(frozen=True)
class RenewInput:
    """Renews a permit for a lease of that length; null for the length that it has."""

    permit: Permit
    lease_ms: int | None = None


@dataclass(frozen=True)
class ReleaseInput:
    """Releases a permit; without a fence, whatever the ticket holds or waits for."""

    resource: str
    ticket: str
    fence: int | None = None


@dataclass(frozen=True)
class ReleaseResult:
    """Whether it was held, or queued, until now."""

    released: bool


@dataclass(frozen=True)
class AdoptInput:
    """Takes a permit over for the caller's run.

    Attributes:
        refence: Whether it gets a new fence, so that its former holder is refused; null for a new one unless an earlier
            run of the same workflow had it.
    """

    permit: Permit
    refence: bool | None = None
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    caller: Caller | None = None


@dataclass(frozen=True)
class CheckInput:
    """Asks whether a permit is held, under its fence."""

    resource: str
    ticket: str
    fence: int


@dataclass(frozen=True)
class CheckResult:
    """Whether it is held now."""

    held: bool


@dataclass(frozen=True)
class InspectInput:
    """Asks for the state of a resource, with at most `limit` holders and as many waiters."""

    resource: str
    limit: int = 100


@nexusrpc.service(name=SERVICE)
class LockService:
    """The operations of the service."""

    acquire: nexusrpc.Operation[AcquireInput, Permit]
    try_acquire: nexusrpc.Operation[AcquireInput, TryAcquireResult]
    renew: nexusrpc.Operation[RenewInput, Permit]
    release: nexusrpc.Operation[ReleaseInput, ReleaseResult]
    adopt: nexusrpc.Operation[AdoptInput, Permit]
    check: nexusrpc.Operation[CheckInput, CheckResult]
    inspect: nexusrpc.Operation[InspectInput, Snapshot]
