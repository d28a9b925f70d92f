"""A request that waits takes the place of older ones of its key, as `when_full` asks for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from redlease_temporal._payloads.coordinator import CoordinatorRequest, Requester

from .entries import Holder, Notification


def superseded(by: str, requesters: Iterable[Requester]) -> list[Notification]:
    """The refusals of requests in whose place there is a newer one now; `by`: its ticket."""
    reason = f"a newer request, {by!r}, replaced this one by its `when_full`. It is for the same work: do not ask again"
    return [Notification("refused", each, error="Superseded", reason=reason) for each in requesters]


def replace_holders(
    by: CoordinatorRequest, holders: Iterable[Holder], units_missing: int, now_ms: int
) -> list[Notification]:
    """Ends permits of the request's key, the oldest first, until as many units as it lacks are about to be free.

    Such a permit is not held any more. Its units are free when it is released, after the grace of the request, or when
    its lease ends, whichever is first.
    """
    of_key = [holder for holder in holders if (holder.permit.key or "") == by.spec.key]
    units_missing -= sum(holder.permit.weight for holder in of_key if holder.replaced_by)
    effects = []
    for holder in [holder for holder in of_key if not holder.replaced_by]:
        if units_missing <= 0:
            break
        units_missing -= holder.permit.weight
        if holder.renewed:
            reason = f"the newer request {by.spec.ticket!r} replaced it"
            notified = (holder.requester, *holder.sharers)
            effects += [Notification("lost", each, holder.permit, reason=reason, replaced=True) for each in notified]
        until_ms = min(holder.permit.expires_at_ms, now_ms + by.spec.grace_ms)
        holder.permit = replace(holder.permit, expires_at_ms=until_ms)
        holder.replaced_by, holder.renewed = by.spec.ticket, False
    return effects
