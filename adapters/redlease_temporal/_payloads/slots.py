"""The payloads between workflow runs, the local activities of their workers, and the slots of a resource.

They stand in users' histories: add fields only with defaults, and never change or remove one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

from redlease.models import Permit

from .coordinator import Adoption, Release, Renewal, Requester
from .locks import OnClose, ResourceTerms

WORKFLOW = "redlease.Slot"
MEMO = "redlease"  # the key of a `SlotMemo` in a slot's memo

# Local activities: of the worker that runs the workflow; the last two also of a slot.
CLAIM = "redlease.slots.claim"
LINE_UP = "redlease.slots.line_up"
FIND = "redlease.slots.find"
RELEASE = "redlease.slots.release"
RENEW = "redlease.slots.renew"
ADOPT = "redlease.slots.adopt"
CHECK = "redlease.slots.check"
INSPECT = "redlease.slots.inspect"
IDLE = "redlease.slots.idle"
NOTIFY = "redlease.slots.notify"

# Keys in a permit's metadata.
SLOT, RUN = "redlease.slot", "redlease.run"

CAPACITY_MAX = 1_000  # each slot is tried one by one
MARGIN = timedelta(seconds=10)  # how long a slot outlives its lease if no worker ends it


def slot_id(resource: str, slot: int) -> str:
    """The workflow id of a slot."""
    return f"permit:{resource}:{slot}"


def slot_of(permit: Permit) -> int:
    """The slot number of a permit; raises ValueError if another backend granted it."""
    number = permit.metadata.get(SLOT, "")
    if not number.isdecimal():
        raise ValueError(
            f"resource {permit.resource!r}: permit {permit.ticket!r} (fence {permit.fence}) was not granted by slots. "
            "Use it with the backend that has granted it"
        )
    return int(number)


@dataclass(frozen=True)
class SlotMemo:
    """The memo of a slot: who requested its permit, and on what terms.

    Attributes:
        floor: The permit's fence is above this one.
        permit: The permit, if it has changed since the slot was started.
    """

    terms: ResourceTerms
    slot: int
    ticket: str
    floor: int = 0
    owner: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    permit: Permit | None = None

    def permit_since(self, started_us: int, run_id: str) -> Permit:
        """The permit of a slot whose first run started at that time: the server's time is its fence."""
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
    """A run in the line of a slot. `capacity`: the one it declared, 0 if unknown."""

    requester: Requester
    ticket: str
    capacity: int = 0

    def may_have(self, slot: int) -> bool:
        """Whether the slot is within the capacity that the run declared."""
        return not self.capacity or slot < self.capacity


@dataclass(frozen=True)
class SlotInput:
    """The input of a slot.

    Attributes:
        waiters: Its line.
        hints: Slots with waiters that found this one busy too.
        until_ms: When renewing ends; None: while the run is open.
        leaving: The run has ended or was continued: the permit expires unless it is adopted or confirmed.
        unknown_polls: Consecutive looks without an answer.
    """

    memo: SlotMemo
    requester: Requester
    renewed: bool = True
    on_close: OnClose = "release"
    max_hold_ms: int | None = None
    waiters: list[SlotWaiter] = field(default_factory=list)
    hints: list[int] = field(default_factory=list)
    until_ms: int | None = None
    leaving: bool = False
    unknown_polls: int = 0

    def run_timeout(self) -> timedelta:
        """The time after which the server ends a run of the slot."""
        lease_ms = self.memo.terms.lease_ms if self.memo.permit is None else self.memo.permit.lease_ms
        return timedelta(milliseconds=lease_ms) + MARGIN

    def with_permit(self, permit: Permit) -> SlotInput:
        """The same input with the permit as it is now."""
        return replace(self, memo=replace(self.memo, permit=permit))


@dataclass(frozen=True)
class SlotLine:
    """Runs that join the line of a slot, in this order."""

    waiters: list[SlotWaiter]


@dataclass(frozen=True)
class SlotOffer:
    """Notifies the head of a line that a slot is free for it; carries the rest of the line."""

    resource: str
    slot: int
    request: str
    rest: list[SlotWaiter] = field(default_factory=list)
    floor: int = 0


@dataclass(frozen=True)
class SpareSlot:
    """A slot that ends with an empty line; `others`: the slots to ask next."""

    slot: int
    others: list[int]
    floor: int


@dataclass(frozen=True)
class SlotHandover:
    """Whom to notify when a run of a slot has ended: its line or, if no run there is open, the hinted slots."""

    resource: str
    slot: int
    run_id: str
    waiters: list[SlotWaiter]
    hints: list[int]
    floor: int


@dataclass(frozen=True)
class SlotEnd:
    """How a slot ended. `call`: the call that released it."""

    how: str
    call: str = ""


@dataclass(frozen=True)
class JoinLine:
    """A run asks to join the line of the first of these slots, unless one of them is free.

    `hint`: whether to inform the other slots, or only to check them.
    """

    resource: str
    order: list[int]
    waiters: list[SlotWaiter]
    hint: bool = True


@dataclass(frozen=True)
class SlotNumbers:
    """Slots to check."""

    resource: str
    numbers: list[int]


@dataclass(frozen=True)
class StartedSlot:
    """A slot that was started by a run which, for this request, waited in the line of the slot `left`."""

    resource: str
    slot: int
    run_id: str
    memo: SlotMemo
    left: int | None = None
    request: str = ""


@dataclass(frozen=True)
class SlotCall:
    """A call to the slot that has a ticket; `slot` None: find it."""

    terms: ResourceTerms
    slot: int | None = None
    release: Release | None = None
    renewal: Renewal | None = None
    adoption: Adoption | None = None
    wait: bool = False
