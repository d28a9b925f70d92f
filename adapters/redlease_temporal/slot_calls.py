"""What crosses between workflow runs, the local activities of their workers, and the slots of a resource.

These shapes stand in users' histories: they may get new fields with defaults, and lose or change none.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from redlease.models import Permit

from .calls import OnClose, Terms
from .coordinator_calls import Adoption, Release, Renewal, Requester

WORKFLOW = "redlease.Slot"
MEMO = "redlease"  # what a slot's memo says of its permit stands under this

# Local activities of the worker that runs the workflow; of a slot, the last two.
CLAIM = "redlease.slots.claim"
LINE_UP = "redlease.slots.line_up"
RELEASE = "redlease.slots.release"
RENEW = "redlease.slots.renew"
ADOPT = "redlease.slots.adopt"
CHECK = "redlease.slots.check"
INSPECT = "redlease.slots.inspect"
IDLE = "redlease.slots.idle"
TELL = "redlease.slots.tell"

# The names in a permit's metadata.
SLOT, RUN = "redlease.slot", "redlease.run"

CAPACITY_MAX = 1_000  # each slot is tried by itself
MARGIN = timedelta(seconds=10)  # for which a slot outlives its lease when no worker ends it
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def slot_id(resource: str, slot: int) -> str:
    """The id of the workflow that is a slot."""
    return f"permit:{resource}:{slot}"


def slot_of(permit: Permit) -> int:
    """The number of the slot that a permit is of; ValueError for one that another backend has granted."""
    number = permit.metadata.get(SLOT, "")
    if not number.isdecimal():
        raise ValueError(
            f"resource {permit.resource!r}: permit {permit.ticket!r} (fence {permit.fence}) was not granted by slots. "
            "Use it with the backend that has granted it"
        )
    return int(number)


def micros(moment: datetime) -> int:
    """A moment in microseconds since the epoch."""
    return (moment - EPOCH) // timedelta(microseconds=1)


@dataclass(frozen=True)
class Kept:
    """What a slot's memo says: who asked for its permit, and on what terms.

    `floor`: the fence is above this one; `permit`: it, where more is known than when the slot was started.
    """

    terms: Terms
    slot: int
    ticket: str
    floor: int = 0
    owner: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    permit: Permit | None = None

    def permit_since(self, started_us: int, run_id: str) -> Permit:
        """The permit of a slot whose first run was started then: the server's time is its fence."""
        if self.permit is not None:
            return self.permit
        granted_ms, lease_ms = started_us // 1000, self.terms.lease_ms
        return Permit(
            *(self.terms.resource, self.ticket, max(started_us, self.floor + 1), 1, self.terms.capacity, lease_ms),
            *(granted_ms, granted_ms + lease_ms, self.owner),
            {**self.metadata, SLOT: str(self.slot), RUN: run_id},
        )


@dataclass(frozen=True)
class SlotWaiter:
    """A run that stands in the line of a slot. `capacity`: that it has declared, 0 where it has not said so."""

    requester: Requester
    ticket: str
    capacity: int = 0

    def may_have(self, slot: int) -> bool:
        """Whether a slot is one of those that it has declared."""
        return not self.capacity or slot < self.capacity


@dataclass(frozen=True)
class Taken:
    """The input of a slot.

    Attributes:
        waiters: Its line.
        hints: Slots in whose lines others stand, who have found this one busy too.
        until_ms: When it is no longer kept; None: as long as the run is open.
        leaving: The run is gone or has moved on: it ends with its lease unless it is adopted or confirmed.
        unknown: Looks in a row that found nothing out.
    """

    kept: Kept
    requester: Requester
    keep: bool = True
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    waiters: list[SlotWaiter] = field(default_factory=list)
    hints: list[int] = field(default_factory=list)
    until_ms: int | None = None
    leaving: bool = False
    unknown: int = 0

    def run_timeout(self) -> timedelta:
        """After which the server itself ends a run of the slot."""
        lease_ms = self.kept.terms.lease_ms if self.kept.permit is None else self.kept.permit.lease_ms
        return timedelta(milliseconds=lease_ms) + MARGIN

    def with_permit(self, permit: Permit) -> Taken:
        """The same with a permit that more is known of."""
        return replace(self, kept=replace(self.kept, permit=permit))


@dataclass(frozen=True)
class Line:
    """Runs that come to stand in a slot's line, in this order."""

    waiters: list[SlotWaiter]


@dataclass(frozen=True)
class Free:
    """Tells the head of a line that a slot is free for it; the rest of the line travels with it."""

    resource: str
    slot: int
    request: str
    rest: list[SlotWaiter] = field(default_factory=list)
    floor: int = 0


@dataclass(frozen=True)
class Spare:
    """A slot that ends with nobody in its line; `others`: the slots to ask next."""

    slot: int
    others: list[int]
    floor: int


@dataclass(frozen=True)
class HandOn:
    """What is to be told when a run of a slot has ended: to its line, or with nobody there to the hinted slots."""

    resource: str
    slot: int
    run_id: str
    waiters: list[SlotWaiter]
    hints: list[int]
    floor: int


@dataclass(frozen=True)
class Ended:
    """What came of a slot. `call`: the call that released it."""

    how: str
    call: str = ""


@dataclass(frozen=True)
class LineUp:
    """A run wants to stand in the line of the first of these slots, should none of them be free.

    `hint`: whether the others are told; if not they are only looked at.
    """

    resource: str
    order: list[int]
    waiters: list[SlotWaiter]
    hint: bool = True


@dataclass(frozen=True)
class Slots:
    """Slots to be looked at."""

    resource: str
    numbers: list[int]


@dataclass(frozen=True)
class Started:
    """A slot that has been started; whoever did so stood in the line of the slot `left`, as this request."""

    resource: str
    slot: int
    run_id: str
    kept: Kept
    left: int | None = None
    request: str = ""


@dataclass(frozen=True)
class SlotCall:
    """Something that is asked of the slot that has a ticket; `slot` None: it is looked for."""

    terms: Terms
    slot: int | None = None
    release: Release | None = None
    renewal: Renewal | None = None
    adoption: Adoption | None = None
    wait: bool = False
