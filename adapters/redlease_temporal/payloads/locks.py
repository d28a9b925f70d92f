"""The names, arguments and results of the library's activities and signals in workflow code.

They stand in users' histories: add fields only with defaults, and never change or remove one. All are plain dataclasses
of JSON-native fields, which every data converter can encode.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Self

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
FREE_SIGNAL = "redlease.free"
HEADER = "redlease"

# The shapes of the commands of an acquire: workflow code continues with the shape in its history.
SHAPE = 1  # a local activity sends the request, and a remote one waits
BY_SIGNAL = 2  # a local activity sends the request, and the run waits for a signal, which lets a test server skip time
# The shape of a release in the workflow task that renewed or adopted its permit.
BY_COMMAND = 2  # a command, which takes effect when the task is recorded


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
class Terms:
    """What a primitive declares about its resource."""

    resource: str
    capacity: int
    lease_ms: int
    max_waiters: int | None = None


@dataclass(frozen=True)
class AcquireCall:
    """One acquire request.

    Attributes:
        chain: The first run of the requesting run's chain.
        event_id: The history length at the request: an event that records the grant comes later.
        local_id: The id of the local activity whose marker records an immediate grant.
        wait_id: The id of the remote activity whose completion records a later grant.
        keep: Whether the permit is renewed while the run is open.
        queue: Whether the request may wait.
        caller: The run that is to have the permit, if it is not the one that requests it.
    """

    terms: Terms
    ticket: str
    chain: str
    event_id: int
    local_id: str
    wait_id: str
    weight: int = 1
    owner: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    keep: bool = True
    queue: bool = True
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    salt: str = ""
    caller: Caller | None = None


@dataclass(frozen=True)
class AcquireStatus:
    """The status of an acquire: granted, or queued with `ahead` tickets before it (None: Redis did not answer).

    `salt`: distinguishes this request from one that an unrecorded execution of the same workflow task made and
    withdrew.
    """

    permit: Permit | None = None
    ahead: int | None = None
    shape: int = SHAPE
    salt: str = ""


@dataclass(frozen=True, slots=True)
class RenewedPermit(Permit):
    """A permit that its run already had: renewed, or adopted. `shape`: of the commands of its release."""

    shape: int = SHAPE

    @classmethod
    def of(cls, permit: Permit) -> Self:
        """The permit with the shape that this version of the library records."""
        return cls(**_fields_of(permit), shape=BY_COMMAND)

    def permit(self) -> Permit:
        """The permit without the shape."""
        return Permit(**_fields_of(self))


def _fields_of(permit: Permit) -> dict[str, Any]:
    return {each.name: getattr(permit, each.name) for each in fields(Permit)}


@dataclass(frozen=True)
class Granted:
    """The signal of a grant.

    Attributes:
        request: The request that was granted.
        keeper: The workflow that granted it; empty if Redis did.
    """

    permit: Permit
    request: str = ""
    keeper: str = ""


@dataclass(frozen=True)
class Refused:
    """The signal of a refusal."""

    request: str
    error: str
    why: str


@dataclass(frozen=True)
class Confirm:
    """Asks a run after a reset whether it holds what the old run held."""

    resource: str
    ticket: str
    fence: int
    keeper: str


@dataclass(frozen=True)
class ReleaseCall:
    """The release of a ticket: with that fence, or what this run requested by the local activity `asked`.

    `administrative`: whoever holds or requested it.
    """

    terms: Terms
    ticket: str
    fence: int | None = None
    asked: str = ""
    salt: str = ""
    administrative: bool = False


@dataclass(frozen=True)
class Released:
    """Whether a permit or queue entry was removed. `pending`: Redis did not answer, so a retry must follow."""

    released: bool
    pending: bool = False


@dataclass(frozen=True)
class RenewCall:
    """Renews a permit for a lease of that length."""

    terms: Terms
    permit: Permit
    lease_ms: int


@dataclass(frozen=True)
class AdoptCall:
    """A run takes a permit over. `refence` None: with a new fence unless it comes from the same chain of runs."""

    terms: Terms
    permit: Permit
    wish: AcquireCall
    refence: bool | None = None


@dataclass(frozen=True)
class DowngradeCall:
    """Gives back all but one unit of a permit."""

    terms: Terms
    ticket: str
    fence: int


@dataclass(frozen=True)
class Checking:
    """Asks whether a permit is held."""

    terms: Terms
    ticket: str
    fence: int


@dataclass(frozen=True)
class Placing:
    """Asks where a ticket stands in the queue."""

    terms: Terms
    ticket: str


@dataclass(frozen=True)
class Inspecting:
    """Asks for the state of a resource."""

    terms: Terms
    limit: int


@dataclass(frozen=True)
class Lost:
    """The signal of a lost permit."""

    resource: str
    ticket: str
    fence: int
    why: str


@dataclass(frozen=True)
class Guard:
    """A permit that must be held for an activity to start.

    Attributes:
        kept_by: The workflow that keeps it; empty if Redis does.
        until_ms: The lease deadline that its holder knows.
    """

    resource: str
    ticket: str
    fence: int
    kept_by: str = ""
    until_ms: int = 0

    @property
    def names(self) -> tuple[str, str, int]:
        """Identifies the permit: two slots may have granted one ticket, with different fences."""
        return self.resource, self.ticket, self.fence

    def texts(self) -> list[str | int]:
        """The guard's values for a header."""
        texts: list[str | int] = [self.resource, self.ticket, self.fence]
        return [*texts, self.kept_by, self.until_ms] if self.kept_by else texts
