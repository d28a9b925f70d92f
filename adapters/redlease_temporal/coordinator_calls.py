"""What crosses between workflow runs, the local activities of their workers, and a resource's coordinator.

These shapes stand in users' histories: they may get new fields with defaults, and lose or change none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from redlease.models import Permit

from .calls import OnClose, Terms

WORKFLOW = "redlease.Coordinator"

# Local activities of the worker that runs the workflow, and the one that a coordinator runs itself.
ASK = "redlease.coordinator.ask"
RELEASE = "redlease.coordinator.release"
RENEW = "redlease.coordinator.renew"
ADOPT = "redlease.coordinator.adopt"
CHECK = "redlease.coordinator.check"
INSPECT = "redlease.coordinator.inspect"
LOOK = "redlease.look"


def workflow_id_of(resource: str) -> str:
    """The id of the workflow that coordinates a resource."""
    return f"lock:{resource}"


@dataclass(frozen=True)
class Requester:
    """A run that asks. `chain`: the first of its chain of runs; `request`: names what it asks for, in replays too."""

    workflow_id: str
    run_id: str
    chain: str
    request: str


@dataclass(frozen=True)
class Request:
    """One acquire request.

    Attributes:
        keep: Whether the permit is kept while the run is open; if not it lapses with its lease.
        queue: Whether it may wait.
        timeout_ms: For how long it may; None: for ever.
        max_hold_ms: After this it is no longer kept.
    """

    terms: Terms
    ticket: str
    requester: Requester
    weight: int = 1
    owner: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    keep: bool = True
    queue: bool = True
    on_close: OnClose = "release"
    timeout_ms: int | None = None
    max_hold_ms: int | None = None


@dataclass(frozen=True)
class Release:
    """A ticket to be taken out: under that fence, or as that request, or, with neither, by an administrator.

    `call`: names this call, whose outcome can be asked for.
    """

    ticket: str
    fence: int | None = None
    request: str = ""
    call: str = ""


@dataclass(frozen=True)
class Renewal:
    """A permit that is to have a lease of that length from now on."""

    ticket: str
    fence: int
    lease_ms: int


@dataclass(frozen=True)
class Adoption:
    """A permit that a run takes over. `refence` None: with a new fence unless it comes from the same chain of runs."""

    ticket: str
    fence: int
    requester: Requester
    lease_ms: int
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    refence: bool | None = None


@dataclass(frozen=True)
class Confirmed:
    """A run that came out of a reset says that it holds what the run before it held."""

    ticket: str
    fence: int
    run_id: str


@dataclass(frozen=True)
class Owner:
    """A run to be looked at."""

    workflow_id: str
    run_id: str


@dataclass(frozen=True)
class Seen:
    """How a run stands, as `owners.Fate` says it, and the run that is open now."""

    fate: str
    open_run_id: str = ""


@dataclass(frozen=True)
class Call:
    """A signal for the coordinator of a resource, from workflow code."""

    terms: Terms
    release: Release | None = None
    renewal: Renewal | None = None
    adoption: Adoption | None = None


@dataclass(frozen=True)
class Found:
    """What a coordinator has: the permit that was asked for, if it is held."""

    permit: Permit | None = None
