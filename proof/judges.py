"""Our own judge of histories, beside Porcupine: order, fences, and how late a loss is told.

Each check is sound: what it calls a violation cannot happen while the library keeps its promises, however slow the
machine is. Who stood still while it waited may have lost its place, so its order is not judged.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from records import MS, History, Loss, Operation, Seen

LOSS_SLACK = 300 * MS  # what a busy machine may need to run a callback that is due


@dataclass
class Findings:
    """What was judged, and what is wrong."""

    violations: list[str] = field(default_factory=list)
    judged: Counter[str] = field(default_factory=Counter)
    lateness_ms: list[float] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Add the findings of another history."""
        self.violations += other.violations
        self.judged += other.judged
        self.lateness_ms += other.lateness_ms

    def kinds(self) -> Counter[str]:
        """Return which promises are broken, and how often."""
        return Counter(violation.split(": ")[1] for violation in self.violations)


def judge(history: History, *, kept: bool | None = True) -> Findings:
    """Judge one history; `kept`: whether the server kept its data when the fault struck, None if that is not known."""
    findings = Findings()
    findings.judged.update(op.op for op in history.operations)
    which = order(history, findings) if kept else outlived(history) if kept is False else ()
    for kind, said in itertools.chain(fences(history), which, losses(history, findings)):
        findings.violations.append(f"{history.name}: {kind}: {said}")
    return findings


def grants(history: History) -> dict[str, Operation]:
    """Return the grants by ticket."""
    return {each.ticket: each for each in history.operations if each.op == "acquire"}


def fences(history: History) -> Iterator[tuple[str, str]]:
    """P3: a grant that was asked for after another had returned has the greater fence, and no two have the same."""
    granted = [each for each in history.operations if each.op == "acquire" and each.fence]
    seen: dict[int, Operation] = {}
    for each in granted:
        if (other := seen.setdefault(each.fence, each)) is not each:
            yield "fences", f"{each.ticket} and {other.ticket} have the fence {each.fence}"
    ended = sorted(granted, key=lambda each: each.returned or 0)
    highest, at = None, 0
    for each in sorted(granted, key=lambda each: each.call):
        while at < len(ended) and (ended[at].returned or 0) < each.call:
            highest = max((ended[at], highest or ended[at]), key=lambda other: other.fence)
            at += 1
        if highest is not None and each.fence < highest.fence:
            yield "fences", f"{each.ticket} asked after {highest.ticket} was granted, and has the lower fence"


def order(history: History, findings: Findings) -> Iterator[tuple[str, str]]:
    """P2: who was seen waiting is granted before those behind it, and before those who asked after it was seen."""
    granted = grants(history)
    releases = {each.ticket: each.call for each in history.operations if each.op == "release"}
    for seen in history.seen:
        waiting = [granted[ticket] for ticket in seen.waiters if ticket in granted]
        newcomers = [each for each in granted.values() if each.call > seen.at]
        for place, first in enumerate(waiting):
            if stalled(history, first, seen):
                continue
            for second in waiting[place + 1 :] + newcomers:
                findings.judged["pairs in order"] += 1
                if precedes(second, first, releases):
                    yield "order", f"{second.ticket} passed {first.ticket}, which was seen waiting"


def outlived(history: History) -> Iterator[tuple[str, str]]:
    """Over a loss of data: who was granted before it is told for one lease at most that it holds."""
    before, lost = history.struck
    for each in history.operations:
        if each.op == "check" and each.fence < before // 1000 and each.call > lost + history.lease_ns:
            yield "exclusion", f"{each.ticket} outlived a loss of data by {(each.call - lost) / MS:.0f} ms"


def since_loss(history: History) -> History:
    """Return what happened to permits that were granted after the data was lost: a history of its own, from nothing.

    A fence is the server's time in µs, so it tells when it was granted.
    """
    _, back = history.struck
    kept = [each for each in history.operations if each.fence > back // 1000]
    return History(history.name, history.capacity, kept)


def precedes(second: Operation, first: Operation, releases: dict[str, int]) -> bool:
    """Tell whether a grant came before another: by their fences; without them, whether it was let go before."""
    if first.fence:
        return second.fence < first.fence
    return releases.get(second.ticket, first.returned or 0) < (first.returned or 0)


def stalled(history: History, waiter: Operation, seen: Seen) -> bool:
    """Tell whether the process of a waiter stood still, or had no connection, between the look and the grant."""
    until = waiter.returned or seen.at
    return any(since <= until and at >= seen.since for since, at in history.stalls[waiter.client])


def losses(history: History, findings: Findings) -> Iterator[tuple[str, str]]:
    """P7: a hold is told of its loss when its lease ends, or as soon as its process goes on after that."""
    for loss in history.losses:
        findings.judged["losses"] += 1
        due = awake(history, loss)
        findings.lateness_ms.append((loss.at - due) / MS)
        if loss.at > due + LOSS_SLACK:
            yield "losses", f"{loss.ticket} was told {(loss.at - due) / MS:.0f} ms late"


def awake(history: History, loss: Loss) -> int:
    """Return when a loss could be told at the earliest: the end of the lease, or of the stalls that go on there."""
    due = loss.until
    for since, at in sorted(history.stalls[loss.client]):
        if since <= due <= at:
            due = at
    return due
