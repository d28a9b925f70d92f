"""The names, arguments and results of the library's activities and signals in workflow code.

They stand in users' histories: add fields only with defaults, and never change or remove one. All are plain dataclasses
of JSON-native fields, which every data converter can encode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal, Self

from temporalio.common import Priority

from redlease._core.limits import (
    LEASE_MS_MIN,
    NAME_BYTES_MAX,
    SHARE_MAX,
    SHARE_MIN,
    Duration,
    Full,
    Rate,
    WhenFull,
    checked_count,
    checked_text,
    milliseconds,
)
from redlease.models import Permit

OnClose = Literal["release", "lease"]

# Local activities, which the worker of the workflow runs.
ENQUEUE = "redlease.enqueue"
RELEASE = "redlease.release"
RENEW = "redlease.renew"
ADOPT = "redlease.adopt"
CHECK = "redlease.check"
INSPECT = "redlease.inspect"
POSITION = "redlease.position"
# Remote activities, which the plugin's internal worker runs.
WAIT = "redlease.wait"
RELEASE_LATER = "redlease.release_later"
DOWNGRADE = "redlease.downgrade"

LOST_SIGNAL = "redlease.lost"
GRANTED_SIGNAL = "redlease.granted"
REFUSED_SIGNAL = "redlease.refused"
CONFIRM_SIGNAL = "redlease.confirm"
OFFER_SIGNAL = "redlease.offer"
HEADER = "redlease"

# The shapes of the commands of an acquire: workflow code continues with the shape in its history.
SHAPE = 1  # a local activity sends the request, and a remote one waits
BY_SIGNAL = 2  # a local activity sends the request, and the run waits for a signal, which lets a test server skip time


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros(moment: datetime) -> int:
    """A moment in microseconds since the epoch."""
    return (moment - EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True)
class Caller:
    """The run, in whatever namespace of the cluster, for which a lock service makes requests.

    Attributes:
        event_id: The event of its history that scheduled the operation; 0 if that is not known.
    """

    namespace: str
    workflow_id: str
    run_id: str
    event_id: int = 0


@dataclass(frozen=True)
class RateLimit:
    """How many grants there may be: `limit` in `per_ms`, `burst` of them at once after a pause; a limit of 0: any."""

    limit: int
    per_ms: int = 1000
    burst: int = 1

    @classmethod
    def of(cls, parameter: str, rate: Rate | Literal[0] | None) -> Self | None:
        """Returns a rate as payloads contain it; raises ValueError if it is none."""
        if rate is None:
            return None
        if isinstance(rate, Rate):
            return cls(rate.count, milliseconds("per", rate.per), rate.burst)
        if rate != 0 or type(rate) is not int:
            raise ValueError(f"{parameter} must be a Rate, or 0 for none, not {rate!r}")
        return cls(0)

    @property
    def rate(self) -> Rate | Literal[0]:
        """The rate as services declare it; raises ValueError if a caller in another language sent a wrong one."""
        return Rate(self.limit, self.per_ms / 1000, self.burst) if self.limit else 0


def turn_of(priority: Priority) -> tuple[str, float]:
    """The key and the share of who gives none: those of the priority that Temporal schedules its tasks by."""
    if not priority.fairness_key:
        return "", 1
    return priority.fairness_key, min(max(priority.fairness_weight or 1, SHARE_MIN), SHARE_MAX)


@dataclass(frozen=True)
class ResourceTerms:
    """What a primitive declares about its resource.

    Attributes:
        per_key: Units that requests with one key may hold at once; 0 removes the limit, None leaves it as it is.
        rate: How many grants there may be; None leaves it as it is.
        per_key_rate: The same for the requests of one key.
    """

    resource: str
    capacity: int
    lease_ms: int
    max_waiters: int | None = None
    per_key: int | None = None
    rate: RateLimit | None = None
    per_key_rate: RateLimit | None = None
    max_waiters_per_key: int | None = None

    @classmethod
    def checked(
        cls,
        name: str,
        capacity: int,
        lease: Duration,
        max_waiters: int | None = None,
        *,
        per_key: int | None = None,
        rate: Rate | Literal[0] | None = None,
        per_key_rate: Rate | Literal[0] | None = None,
        max_waiters_per_key: int | None = None,
    ) -> Self:
        """The terms that a user gives; raises ValueError for a wrong one."""
        return cls(
            checked_text("resource name", name, NAME_BYTES_MAX),
            checked_count("capacity", capacity),
            milliseconds("lease", lease, LEASE_MS_MIN),
            None if max_waiters is None else checked_count("max_waiters", max_waiters, 0),
            None if per_key is None else checked_count("per_key", per_key, 0),
            RateLimit.of("rate", rate),
            RateLimit.of("per_key_rate", per_key_rate),
            None if max_waiters_per_key is None else checked_count("max_waiters_per_key", max_waiters_per_key, 0),
        )


@dataclass(frozen=True)
class AcquireSpec:
    """What a run asks for, whichever backend grants it.

    Attributes:
        ticket: The id of the request; empty until the run has numbered it.
        weight: In units of the resource.
        owner: The name shown as holder; empty for the id of the workflow.
        renewed: Whether the permit is renewed while the run is open; otherwise it expires with its lease.
        queue: Whether the request may wait.
        max_hold_ms: After this the permit is no longer renewed.
        key: Whose turn the request takes; empty for that of those without a key.
        share: How large a share of the turns the key gets.
        full: What it does if it cannot be granted at once; a holder that it replaces has `grace_ms` to end.
    """

    ticket: str = ""
    weight: int = 1
    owner: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    renewed: bool = True
    queue: bool = True
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    key: str = ""
    share: float = 1
    full: Full = "wait"
    grace_ms: int = 0

    @property
    def replaces(self) -> bool:
        """Whether it takes the place of others, and so counts for none of `max_waiters`."""
        return WhenFull(self.full).replaces


@dataclass(frozen=True)
class AcquireCall:
    """One acquire request.

    Attributes:
        chain: The first run of the requesting run's chain.
        event_id: The history length at the request: an event that records the grant comes later.
        local_id: The id of the local activity whose marker records an immediate grant.
        wait_id: The id of the remote activity whose completion records a later grant.
        caller: The run that is to have the permit, if it is not the one that requests it.
        settles: Whether it is not to be made while a release of its run is still to be carried out.
    """

    terms: ResourceTerms
    spec: AcquireSpec
    chain: str
    event_id: int
    local_id: str
    wait_id: str
    salt: str = ""
    caller: Caller | None = None
    settles: bool = False


@dataclass(frozen=True)
class AcquireStatus:
    """The status of an acquire: granted, or queued with `ahead` tickets before it (None: Redis did not answer).

    `salt`: distinguishes this request from one that an unrecorded execution of the same workflow task made and
    withdrew. `unsettled`: it was not made, since a release of its run is still to be carried out.
    """

    permit: Permit | None = None
    ahead: int | None = None
    shape: int = SHAPE
    salt: str = ""
    unsettled: bool = False


@dataclass(frozen=True)
class GrantedSignal:
    """The signal of a grant.

    Attributes:
        request: The request that was granted.
        resource_workflow: The workflow that granted it; empty if Redis did.
    """

    permit: Permit
    request: str = ""
    resource_workflow: str = ""


@dataclass(frozen=True)
class RefusedSignal:
    """The signal of a refusal."""

    request: str
    error: str
    reason: str


@dataclass(frozen=True)
class ConfirmSignal:
    """Asks a run after a reset whether it holds what the old run held."""

    resource: str
    ticket: str
    fence: int
    resource_workflow: str


@dataclass(frozen=True)
class ReleaseCall:
    """The release of a ticket: with that fence, or what this run requested by the local activity `acquire_id`.

    Attributes:
        administrative: Whoever holds or requested it.
        local_id: The id of the local activity whose marker records the release: it has no effect before that. Empty for
            a release that the history has already.
        event_id: The history length at the release: the marker comes later.
    """

    terms: ResourceTerms
    ticket: str
    fence: int | None = None
    acquire_id: str = ""
    salt: str = ""
    administrative: bool = False
    local_id: str = ""
    event_id: int = 0


@dataclass(frozen=True)
class ReleaseResult:
    """Whether a permit or queue entry was removed. `pending`: Redis did not answer, so a retry must follow."""

    released: bool
    pending: bool = False


@dataclass(frozen=True)
class RenewCall:
    """Renews a permit for a lease of that length."""

    terms: ResourceTerms
    permit: Permit
    lease_ms: int


@dataclass(frozen=True)
class AdoptCall:
    """A run takes a permit over.

    Attributes:
        refence: None: with a new fence unless it comes from the same chain of runs.
        resumes: The run was reset, and its history has the grant.
    """

    terms: ResourceTerms
    permit: Permit
    acquire: AcquireCall
    refence: bool | None = None
    resumes: bool = False


@dataclass(frozen=True)
class DowngradeCall:
    """Gives back all but one unit of a permit."""

    terms: ResourceTerms
    ticket: str
    fence: int


@dataclass(frozen=True)
class CheckCall:
    """Asks whether a permit is held."""

    terms: ResourceTerms
    ticket: str
    fence: int


@dataclass(frozen=True)
class PositionCall:
    """Asks the position of a ticket in the queue."""

    terms: ResourceTerms
    ticket: str


@dataclass(frozen=True)
class InspectCall:
    """Asks for the state of a resource."""

    terms: ResourceTerms
    limit: int


@dataclass(frozen=True)
class LostSignal:
    """The signal of a lost permit. `replaced`: a newer request waits until it is given back, or its grace has ended."""

    resource: str
    ticket: str
    fence: int
    reason: str
    replaced: bool = False


@dataclass(frozen=True)
class PermitHeader:
    """A permit that must be held for an activity to start.

    Attributes:
        resource_workflow: The workflow that keeps it; empty if Redis does.
    """

    resource: str
    ticket: str
    fence: int
    resource_workflow: str = ""

    @property
    def names(self) -> tuple[str, str, int]:
        """Identifies the permit: two slots may have granted one ticket, with different fences."""
        return self.resource, self.ticket, self.fence

    def texts(self) -> list[str | int]:
        """The guard's values for a header."""
        texts: list[str | int] = [self.resource, self.ticket, self.fence]
        return [*texts, self.resource_workflow] if self.resource_workflow else texts
