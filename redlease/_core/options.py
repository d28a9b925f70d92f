"""The options of an acquire and of a hold, checked before anything is sent."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from redlease._core.protocol.arguments import WITHOUT_KEY, Terms, Turn

from . import limits
from .limits import GRACE_S, WAITS, Duration, Full, Rate, WhenFull
from .protocol import arguments


@dataclass(frozen=True, slots=True)
class Durability:
    """How many replicas must have a grant before its caller gets it.

    A primary that fails takes with it the writes that no replica has yet. With this, a grant outlives the failure of a
    primary if one of those replicas is promoted, so that nobody else is granted the same units at once. It is no
    consensus: a failover may choose another replica, and renewals and releases are not waited for. Fences and the lease
    bound what is left.

    Attributes:
        replicas: How many.
        timeout: Seconds to wait for them, after the grant; then the permit is given back, and `NotReplicated` raised.
    """

    replicas: int = 1
    timeout: Duration = 0.5

    def __post_init__(self) -> None:
        limits.checked_count("replicas", self.replicas)
        limits.milliseconds("timeout of Durability", self.timeout, 1)


OnLost = Literal["cancel", "signal"]
# Timeout, ticket, owner, metadata, priority, key, share, `when_full` and grace of most requests.
DEFAULTS: tuple[object, ...] = (None, None, None, None, 0, None, 1, "wait", GRACE_S)


def own_name() -> str:
    """Returns the default owner: the host and the id of the current process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def _packed(parameter: str, rate: Rate | Literal[0]) -> str:
    """Returns how acquire takes a rate, or 0 for none."""
    if isinstance(rate, Rate):
        return rate.packed
    if rate != 0 or type(rate) is not int:
        raise ValueError(f"{parameter} must be a Rate, or 0 for none, not {rate!r}")
    return "0"


def changed_terms(
    terms: Terms,
    *,
    owner: str | None = None,
    lease: Duration | None = None,
    capacity: int | None = None,
    waiter_lease: Duration | None = None,
    max_waiters: int | None = None,
    max_waiters_per_key: int | None = None,
    idle_ttl: Duration | None = None,
    lock_delay: Duration | None = None,
    history: int | None = None,
    per_key: int | None = None,
    durability: Durability | None = None,
    rate: Rate | Literal[0] | None = None,
    per_key_rate: Rate | Literal[0] | None = None,
) -> Terms:
    """Returns the terms, changed by the parameters that are given; raises ValueError for a wrong one."""
    counts = {
        "capacity": (capacity, 1, limits.CAPACITY_MAX),
        "max_waiters": (max_waiters, 0, limits.CAPACITY_MAX),
        "max_waiters_per_key": (max_waiters_per_key, 0, limits.CAPACITY_MAX),
        "history": (history, 0, limits.HISTORY_MAX),
        "per_key": (per_key, 0, limits.CAPACITY_MAX),
    }
    changes: dict[str, Any] = {
        name: limits.checked_count(name, count, low, high)
        for name, (count, low, high) in counts.items()
        if count is not None
    }
    if owner is not None:
        changes["owner"] = limits.checked_text("owner", owner, limits.OWNER_BYTES_MAX)
    if lease is not None:
        changes["lease_ms"] = limits.milliseconds("lease", lease, limits.LEASE_MS_MIN)
    if waiter_lease is not None:
        changes["waiter_lease_ms"] = limits.milliseconds("waiter_lease", waiter_lease, limits.LEASE_MS_MIN)
    if idle_ttl is not None:
        changes["idle_ttl_ms"] = limits.milliseconds("idle_ttl", idle_ttl, 1)
    if lock_delay is not None:
        changes["lock_delay_ms"] = limits.checked_lock_delay(lock_delay, changes.get("idle_ttl_ms", terms.idle_ttl_ms))
    rates = {"rate": rate, "per_key_rate": per_key_rate}
    changes |= {parameter: _packed(parameter, given) for parameter, given in rates.items() if given is not None}
    if durability is not None:
        if not isinstance(durability, Durability):
            raise ValueError(f"durability must be a Durability, not {durability!r}")
        changes["replicas"] = durability.replicas
        changes["replicas_ms"] = limits.milliseconds("timeout", durability.timeout, 1)
    return terms._replace(**changes) if changes else terms


class AcquireSpec(NamedTuple):
    """The parameters of one acquire, checked; `packed` has those that are the same for every acquire like it.

    Unless given, the owner is empty until the first request: a primitive may be made before a fork.
    """

    ticket: str | None
    weight: int
    terms: Terms
    metadata: dict[str, str]
    timeout_ms: int | None
    packed: bytes
    priority: int = 0
    turn: Turn = WITHOUT_KEY
    full: WhenFull = WAITS

    @classmethod
    def default(cls, terms: Terms, weight: int = 1) -> AcquireSpec:
        """Returns the default options of a primitive; `weight`: what one unit of it weighs."""
        return cls(None, weight, terms, {}, None, arguments.pack_terms(terms, weight, arguments.label(terms.owner, {})))

    def changed(  # noqa: PLR0917  as many as an acquire has, in its order
        self,
        timeout: Duration | None,
        ticket: str | None,
        weight: int,
        owner: str | None,
        metadata: dict[str, str] | None,
        priority: int = 0,
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
    ) -> AcquireSpec:
        """Returns the options with the caller's parameters; raises ValueError for a wrong one."""
        given = (timeout, ticket, owner, metadata, priority, key, share, when_full, grace)
        if weight == 1 and type(weight) is int and given == DEFAULTS:
            return self
        timeout_ms = None if timeout is None else limits.milliseconds("timeout", timeout)
        if weight != 1 or type(weight) is not int:
            limits.checked_count("weight", weight)
            limits.checked_count("weight", weight * self.weight)
        terms = self.terms
        metadata = limits.checked_metadata(metadata)
        if owner is not None:
            terms = terms._replace(owner=limits.checked_text("owner", owner, limits.OWNER_BYTES_MAX))
        if ticket is not None:
            limits.checked_text("ticket", ticket, limits.TICKET_BYTES_MAX)
        limits.checked_priority(priority)
        limits.checked_share(share, key)
        turn = WITHOUT_KEY if key is None else Turn(limits.checked_text("key", key, limits.KEY_BYTES_MAX), share)
        full = WhenFull.checked(
            when_full, grace, capacity=terms.capacity, never_waits=timeout_ms == 0, priority=priority
        )
        if full.refuses:
            timeout_ms = 0  # the server grants or refuses at once
        elif full.replaces:  # of those that it takes the place of there may be as many as may wait
            terms = terms._replace(max_waiters=None, max_waiters_per_key=None)
        changed = AcquireSpec(ticket, weight * self.weight, terms, metadata, timeout_ms, b"", priority, turn, full)
        return changed.packed_for(terms.owner)

    def packed_for(self, owner: str) -> AcquireSpec:
        """Returns the options with that owner."""
        label = arguments.label(owner, self.metadata, self.turn.key)
        terms = self.terms._replace(owner=owner)
        queue = self.timeout_ms != 0
        packed = arguments.pack_terms(terms, self.weight, label, priority=self.priority, turn=self.turn, queue=queue)
        return self._replace(terms=terms, packed=packed)


class HoldOptions(NamedTuple):
    """What happens when a hold is lost, and how long it is renewed."""

    on_lost: OnLost
    max_hold_ms: int | None


DEFAULT_HOLD_OPTIONS = HoldOptions("cancel", None)


def checked_hold_options(on_lost: OnLost, max_hold: Duration | None) -> HoldOptions:
    """Returns the caller's options of a hold; raises ValueError for a wrong one."""
    if on_lost == "cancel" and max_hold is None:
        return DEFAULT_HOLD_OPTIONS
    if on_lost not in ("cancel", "signal"):
        raise ValueError(f"on_lost must be 'cancel' or 'signal', not {on_lost!r}")
    return HoldOptions(on_lost, None if max_hold is None else limits.milliseconds("max_hold", max_hold, 1))
