"""Judges a run from its evidence only: pure functions, so that tests can check that broken promises are found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from .evidence import Evidence, Kill, KillKind, Turn, steps

# A lease starts with the last renewal, which may be as late as the kill. A message and a timer add to it, on a machine
# that runs ten processes and may have neighbours. The promise is one heartbeat, a third of a waiter lease: 0.67 s.
ALLOWANCE = 0.5


@dataclass(frozen=True, slots=True)
class Recovery:
    """The recovery from a kill; `seconds_lost`: until all the capacity that it had blocked was in use again."""

    what: KillKind
    consumer: str
    ticket: str
    lease: float
    seconds_lost: float | None
    recovered_within_lease: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether each promise was kept, with the figures."""

    resource: str
    capacity: int
    consumers: int
    grants: int
    most_inside: int
    most_permits: int
    in_arrival_order: bool
    fences_increasing: bool
    kills: tuple[Recovery, ...]
    all_served: bool
    leases_lost: int
    failures: tuple[str, ...]
    seconds: float

    @property
    def promises_kept(self) -> bool:
        """Whether every promise was kept and both kills took place: without them the run shows no recovery."""
        return (
            max(self.most_inside, self.most_permits) <= self.capacity
            and self.in_arrival_order
            and self.fences_increasing
            and {kill.what for kill in self.kills} == {"holder", "waiter"}
            and all(kill.recovered_within_lease for kill in self.kills)
            and self.all_served
            and not self.failures
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the verdict for JSON."""
        return asdict(self) | {"promises_kept": self.promises_kept}


def judge(evidence: Evidence) -> Verdict:
    """Returns the verdict on a run."""
    turns = list(evidence.turns.values())
    granted = [turn for turn in turns if turn.fence is not None]
    inside = steps(evidence.inside())
    return Verdict(
        resource=evidence.resource,
        capacity=evidence.capacity,
        consumers=len({turn.consumer for turn in turns}),
        grants=len(granted),
        most_inside=max((count for _, count in inside), default=0),
        most_permits=max((len(sighting.holders) for sighting in evidence.sightings), default=0),
        in_arrival_order=_in_arrival_order(evidence, granted),
        fences_increasing=_fences_increasing(granted),
        kills=tuple(_recovery(evidence, kill) for kill in evidence.kills),
        all_served=all(_served(evidence, consumer) for consumer in {turn.consumer for turn in turns}),
        leases_lost=sum(turn.lost for turn in turns),
        failures=tuple(evidence.failures),
        seconds=round(evidence.ended_at, 3),
    )


def _in_arrival_order(evidence: Evidence, granted: list[Turn]) -> bool:
    """Whether grants followed arrival: waiters were granted in the order of the queue, and before later requests.

    The order is that of the server's snapshots. A request made after a snapshot arrived after all waiters in it.
    """
    fences = {turn.ticket: turn.fence or 0 for turn in granted}
    for sighting in evidence.sightings:
        queued = [fences[ticket] for ticket in sighting.waiters if ticket in fences]
        newcomers = [turn.fence or 0 for turn in granted if turn.asked_at > sighting.at]
        if not _ascending(queued) or not _ascending(sighting.queued_at_ms):
            return False
        if queued and newcomers and min(newcomers) < max(queued):
            return False
    return True


def _fences_increasing(granted: list[Turn]) -> bool:
    """Whether no fence occurs twice, and each is greater than that of every grant that was certainly earlier."""
    fences = {turn.fence for turn in granted}
    return len(fences) == len(granted) and all(
        (one.fence or 0) < (other.fence or 0)
        for one in granted
        for other in granted
        if one.granted_at_ms < other.granted_at_ms or (one.entered_at or 0.0) < other.asked_at
    )


def _recovery(evidence: Evidence, kill: Kill) -> Recovery:
    """Returns the recovery from a kill: the ticket is gone from the server, and all the capacity is in use again.

    A unit that another killed consumer still holds counts as in use: its kill accounts for it.
    """
    others = [other for other in evidence.kills if other is not kill]
    stays = evidence.living() + [stay for other in others if (stay := other.holds) is not None]
    recovered_at = None if kill.gone_at is None else _all_used(evidence, kill.gone_at, stays)
    lost = None if recovered_at is None else round(recovered_at - kill.at, 3)
    in_time = lost is not None and lost <= kill.lease + ALLOWANCE
    return Recovery(kill.kind, kill.consumer, kill.ticket, kill.lease, lost, in_time)


def _all_used(evidence: Evidence, since: float, stays: list[tuple[float, float]]) -> float | None:
    """Returns the first moment from `since` on at which all the capacity is in use or the queue is empty."""
    counts = [(since, sum(start <= since < end for start, end in stays)), *steps(stays)]
    full = [at for at, count in counts if at >= since and count >= evidence.capacity]
    idle = [sighting.at for sighting in evidence.sightings if sighting.at >= since and not sighting.waiters]
    return min(full + idle, default=None)


def _served(evidence: Evidence, consumer: str) -> bool:
    """Whether a consumer was killed, or was granted and released in every one of its rounds."""
    if evidence.killed(consumer) is not None:
        return True
    own = [turn for turn in evidence.turns.values() if turn.consumer == consumer]
    return len(own) == evidence.rounds and all(turn.left_at is not None for turn in own)


def _ascending(numbers: list[int]) -> bool:
    return all(one <= other for one, other in pairwise(numbers))
