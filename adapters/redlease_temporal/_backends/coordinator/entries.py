"""The entries of a coordinator's state, and its notifications: plain data, times in ms since the epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from redlease.models import Permit
from redlease_temporal._payloads.coordinator import CoordinatorRequest, Requester
from redlease_temporal._payloads.locks import OnClose


@dataclass(frozen=True)
class Notification:
    """A notification for a run.

    Attributes:
        kind: "granted", "refused", "lost", or "confirm", which asks whether the run holds the permit.
        permit: The permit it is about; None for a refusal.
        error: The name of the error of a refusal.
        reason: The reason of a refusal or a loss.
        replaced: Whether a newer request waits until the lost permit is given back.
    """

    kind: Literal["granted", "refused", "lost", "confirm"]
    to: Requester
    permit: Permit | None = None
    error: str = ""
    reason: str = ""
    replaced: bool = False


@dataclass
class Holder:
    """A ticket that holds a permit.

    Attributes:
        until_ms: When renewing ends; None: while its run is open.
        polled_ms: When its run was last known to be open.
        leaving: Its run has ended or was continued: the permit expires unless it is adopted or confirmed.
        unknown_polls: Looks since then without an answer.
        sharers: Other runs that requested this ticket and were notified of the grant.
        downgraded: It was granted to this run with more weight than it has now.
        replaced_by: The ticket of a newer request that has ended the permit: that is not held any more, and its units
            are free when it is released or expires.
    """

    permit: Permit
    requester: Requester
    renewed: bool
    on_close: OnClose
    until_ms: int | None
    polled_ms: int
    leaving: bool = False
    unknown_polls: int = 0
    sharers: list[Requester] = field(default_factory=list)
    downgraded: bool = False
    replaced_by: str = ""

    def pass_to_sharer(self) -> bool:
        """Makes the first sharer the requester; returns False if there is none."""
        if not self.sharers:
            return False
        self.requester, *self.sharers = self.sharers
        return True

    def is_renewed(self, now_ms: int) -> bool:
        """Whether the permit is renewed while its run is open."""
        return self.renewed and not self.leaving and (self.until_ms is None or now_ms < self.until_ms)


@dataclass
class QueuedTicket:
    """A ticket that waits, for one run or several that share it; each with its deadline, None for none.

    `tag`: when its turn comes, if it is the first waiter of its key and that is below its limit.
    """

    request: CoordinatorRequest
    queued_at_ms: int
    requesters: list[Requester]
    deadlines_ms: list[int | None]
    tag: int | None = None

    def without(self, leaves: Callable[[Requester, int | None], bool]) -> QueuedTicket:
        """The ticket without the requesters that leave."""
        pairs = zip(self.requesters, self.deadlines_ms, strict=True)
        stay = [pair for pair in pairs if not leaves(*pair)]
        return replace(self, requesters=[pair[0] for pair in stay], deadlines_ms=[pair[1] for pair in stay])


@dataclass
class ReleaseOutcome:
    """Whether one call of `release` released something."""

    call: str
    released: bool
