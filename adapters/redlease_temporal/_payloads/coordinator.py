"""The payloads between workflow runs, the local activities of their workers, and a resource's coordinator.

They stand in users' histories: add fields only with defaults, and never change or remove one.
"""

from __future__ import annotations

from dataclasses import dataclass

from redlease._core import limits
from redlease.models import Permit

from .locks import AcquireSpec, OnClose, ResourceTerms

WORKFLOW = "redlease.Coordinator"

# Local activities of the worker that runs the workflow; LOOK is one that coordinators and slots run.
REQUEST = "redlease.coordinator.request"
OUTCOME = "redlease.coordinator.outcome"
RENEW = "redlease.coordinator.renew"
ADOPT = "redlease.coordinator.adopt"
CHECK = "redlease.coordinator.check"
INSPECT = "redlease.coordinator.inspect"
POSITION = "redlease.coordinator.position"
POLL = "redlease.poll_status"


def workflow_id_of(resource: str) -> str:
    """The id of the workflow that coordinates a resource."""
    return f"lock:{resource}"


@dataclass(frozen=True)
class Requester:
    """A run that makes a request. `chain`: the first run of its chain; `request`: its name, the same in replays."""

    workflow_id: str
    run_id: str
    chain: str
    request: str

    def is_reset_as(self, other: Requester) -> bool:
        """Whether the other run makes the same request again, after a reset."""
        return self.request == other.request and self.run_id != other.run_id


@dataclass(frozen=True)
class CoordinatorRequest:
    """One acquire request. `timeout_ms`: how long it may wait; None: without limit."""

    terms: ResourceTerms
    spec: AcquireSpec
    requester: Requester
    timeout_ms: int | None = None


@dataclass(frozen=True)
class Release:
    """The release of a ticket: with that fence, or of that request; with neither, by an administrator.

    `call`: names this call, so that its outcome can be queried. `run_id`: the run that has closed, if that is why.
    """

    ticket: str
    fence: int | None = None
    request: str = ""
    call: str = ""
    run_id: str = ""


@dataclass(frozen=True)
class Renewal:
    """Renews a permit for a lease of that length."""

    ticket: str
    fence: int
    lease_ms: int


@dataclass(frozen=True)
class Downgrade:
    """Gives back all but one unit of a permit."""

    ticket: str
    fence: int


@dataclass(frozen=True)
class Adoption:
    """A run takes a permit over. `refence` None: with a new fence unless it comes from the same chain of runs."""

    ticket: str
    fence: int
    requester: Requester
    lease_ms: int
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    refence: bool | None = None


def invalid_reason(message: CoordinatorRequest | Renewal | Adoption) -> str:
    """An error message for invalid content of a signal; empty if it is valid.

    The library checks its own calls where they are made. This check is for signals sent by hand: a lease that ends in a
    thousand years would otherwise fail the workflow task again and again, for every user of the resource.
    """
    try:
        if isinstance(message, CoordinatorRequest):
            limits.checked_count("capacity", message.terms.capacity)
            limits.checked_count("weight", message.spec.weight)
            limits.checked_share(message.spec.share, message.spec.key or None)
            if message.terms.per_key is not None:
                limits.checked_count("per_key", message.terms.per_key, 0)
        spans = {
            "lease_ms": message.terms.lease_ms if isinstance(message, CoordinatorRequest) else message.lease_ms,
            "max_hold_ms": _max_hold_ms(message),
            "timeout_ms": message.timeout_ms if isinstance(message, CoordinatorRequest) else None,
            "grace_ms": message.spec.grace_ms if isinstance(message, CoordinatorRequest) else None,
        }
        for name, span_ms in spans.items():
            least_ms = limits.LEASE_MS_MIN if name == "lease_ms" else 0
            if span_ms is not None and not least_ms <= span_ms <= limits.DURATION_MS_MAX:
                raise ValueError(f"{name} must be from {least_ms} to {limits.DURATION_MS_MAX}, not {span_ms}")
    except ValueError as error:
        return str(error)
    return ""


def _max_hold_ms(message: CoordinatorRequest | Renewal | Adoption) -> int | None:
    if isinstance(message, Renewal):
        return None
    return message.spec.max_hold_ms if isinstance(message, CoordinatorRequest) else message.max_hold_ms


@dataclass(frozen=True)
class Confirmed:
    """After a reset, the new run confirms that it holds what the old one held."""

    ticket: str
    fence: int
    run_id: str


@dataclass(frozen=True)
class RunToPoll:
    """A run to look at."""

    workflow_id: str
    run_id: str


@dataclass(frozen=True)
class RunStatusReply:
    """The status of a run, a value of `RunStatus`, and the run that is open now."""

    status: str
    open_run_id: str = ""


@dataclass(frozen=True)
class CoordinatorCall:
    """A signal for the coordinator of a resource, from workflow code."""

    terms: ResourceTerms
    release: Release | None = None
    renewal: Renewal | None = None
    adoption: Adoption | None = None


@dataclass(frozen=True)
class PermitReply:
    """The answer to a query: the permit, if it is held."""

    permit: Permit | None = None
