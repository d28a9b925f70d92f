"""What crosses between workflow code and the library's activities: their names, arguments and results.

These shapes stand in users' histories: they may get new fields with defaults, and lose or change none. All are plain
dataclasses of JSON-native fields, which every data converter carries.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from pydantic.dataclasses import dataclass as pydantic_dataclass

from redlease.models import Permit

OnClose = Literal["release", "lease"]

# Local activities, run by the worker that runs the workflow.
ENQUEUE = "redlease.enqueue"
RELEASE = "redlease.release"
RENEW = "redlease.renew"
ADOPT = "redlease.adopt"
CHECK = "redlease.check"
INSPECT = "redlease.inspect"
# Remote ones, run by the plugin's internal worker.
WAIT = "redlease.wait"
RELEASE_LATER = "redlease.release_later"

LOST_SIGNAL = "redlease.lost"
GRANTED_SIGNAL = "redlease.granted"
REFUSED_SIGNAL = "redlease.refused"
CONFIRM_SIGNAL = "redlease.confirm"
FREE_SIGNAL = "redlease.free"
HEADER = "redlease"

# The shapes of the commands that an acquire makes; workflow code branches on the one that its history began with.
SHAPE = 1  # a local activity asks, and a remote one waits
BY_SIGNAL = 2  # a local activity asks, and the run waits for a signal, which lets a test server skip time
# The shape of the commands that a release makes in the workflow task in which its permit was renewed or adopted.
BY_COMMAND = 2  # a command, which is carried out when the task is recorded


@dataclass(frozen=True)
class Terms:
    """What a primitive says of its resource."""

    resource: str
    capacity: int
    lease_ms: int
    max_waiters: int | None = None


@dataclass(frozen=True)
class Wish:
    """One acquire request.

    Attributes:
        chain: The first run of the chain of runs that asks.
        event_id: How long the history was when it was asked: what records the grant comes later.
        local_id: The id of the local activity whose marker records a grant that came at once.
        wait_id: The id of the remote activity whose completion records a grant that had to be waited for.
        keep: Whether the permit is renewed while the run is open.
        queue: Whether it may wait.
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


@dataclass(frozen=True)
class Standing:
    """How an acquire stands: granted, or queued with so many ahead (None: Redis did not answer in time).

    `salt`: tells this request from one that an unrecorded run of the same workflow task made and gave back.
    """

    permit: Permit | None = None
    ahead: int | None = None
    shape: int = SHAPE
    salt: str = ""


@pydantic_dataclass(frozen=True, slots=True)
class Prolonged(Permit):
    """A permit that its run has had before: renewed, or adopted. `shape`: of the commands of its release."""

    shape: int = SHAPE

    @classmethod
    def of(cls, permit: Permit) -> Self:
        """The permit as this release has it recorded."""
        return cls(**_fields_of(permit), shape=BY_COMMAND)

    def permit(self) -> Permit:
        """The permit alone."""
        return Permit(**_fields_of(self))


def _fields_of(permit: Permit) -> dict[str, Any]:
    return {each.name: getattr(permit, each.name) for each in fields(Permit)}


@dataclass(frozen=True)
class Granted:
    """What the signal of a grant says.

    `request`: what was asked for, and `keeper`: the workflow that has granted it; empty where Redis did.
    """

    permit: Permit
    request: str = ""
    keeper: str = ""


@dataclass(frozen=True)
class Refused:
    """What the signal of a refusal says."""

    request: str
    error: str
    why: str


@dataclass(frozen=True)
class Confirm:
    """Asks a run that came out of a reset whether it holds what the run before it held."""

    resource: str
    ticket: str
    fence: int
    keeper: str


@dataclass(frozen=True)
class Giving:
    """A ticket to be taken out: the holder with that fence, or what this run asked for by the local activity `asked`.

    `administrative`: whoever's it is.
    """

    terms: Terms
    ticket: str
    fence: int | None = None
    asked: str = ""
    salt: str = ""
    administrative: bool = False


@dataclass(frozen=True)
class Released:
    """Whether a live permit or place was taken out. `pending`: Redis was away, and it is still to be done."""

    released: bool
    pending: bool = False


@dataclass(frozen=True)
class Renewing:
    """A permit that is to have a lease of that length from now on."""

    terms: Terms
    permit: Permit
    lease_ms: int


@dataclass(frozen=True)
class Adopting:
    """A permit that a run takes over. `refence` None: a new fence unless it comes from the same chain of runs."""

    terms: Terms
    permit: Permit
    wish: Wish
    refence: bool | None = None


@dataclass(frozen=True)
class Checking:
    """A permit that is looked up."""

    terms: Terms
    ticket: str
    fence: int


@dataclass(frozen=True)
class Inspecting:
    """A look at a resource."""

    terms: Terms
    limit: int


@dataclass(frozen=True)
class Lost:
    """What the signal of a lost permit says."""

    resource: str
    ticket: str
    fence: int
    why: str


@dataclass(frozen=True)
class Guard:
    """A permit without which an activity must not begin.

    `kept_by`: the workflow that keeps it; empty: Redis does. `until_ms`: the end of the lease that its holder knows of.
    """

    resource: str
    ticket: str
    fence: int
    kept_by: str = ""
    until_ms: int = 0

    @property
    def names(self) -> tuple[str, str, int]:
        """What tells the permit from all others: two slots may have been granted under one ticket."""
        return self.resource, self.ticket, self.fence

    def texts(self) -> list[str | int]:
        """The guard as it stands in a header."""
        texts: list[str | int] = [self.resource, self.ticket, self.fence]
        return [*texts, self.kept_by, self.until_ms] if self.kept_by else texts
