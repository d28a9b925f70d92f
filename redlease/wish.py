"""What one acquire asks for, checked before anything is sent."""

from __future__ import annotations

from typing import Literal, NamedTuple

from . import limits, wire
from .limits import Duration

OnLost = Literal["cancel", "signal"]


class Wish(NamedTuple):
    """The parameters of one acquire, checked; and those that go over the wire with every one like it, packed."""

    ticket: str | None
    weight: int
    terms: wire.Terms
    metadata: dict[str, str]
    timeout_ms: int | None
    packed: bytes

    @classmethod
    def usual(cls, terms: wire.Terms) -> Wish:
        """What a primitive asks for when nothing is said."""
        return cls(None, 1, terms, {}, None, wire.pack_terms(terms, 1, wire.label(terms.owner, {})))

    def changed(
        self,
        timeout: Duration | None,
        ticket: str | None,
        weight: int,
        owner: str | None,
        metadata: dict[str, str] | None,
    ) -> Wish:
        """The usual wish of a primitive with what a caller says; ValueError for what is wrong of that."""
        if weight == 1 and type(weight) is int and (timeout, ticket, owner, metadata) == (None, None, None, None):
            return self
        timeout_ms = None if timeout is None else limits.milliseconds("timeout", timeout)
        if weight != 1 or type(weight) is not int:
            limits.checked_count("weight", weight)
        terms = self.terms
        metadata = limits.checked_metadata(metadata)
        if owner is not None:
            terms = terms._replace(owner=limits.checked_text("owner", owner, limits.OWNER_BYTES_MAX))
        if ticket is not None:
            limits.checked_text("ticket", ticket, limits.TICKET_BYTES_MAX)
        packed = wire.pack_terms(terms, weight, wire.label(terms.owner, metadata), queue=timeout_ms != 0)
        return Wish(ticket, weight, terms, metadata, timeout_ms, packed)


class Fate(NamedTuple):
    """What becomes of a hold: what follows from its loss, and for how long it is renewed."""

    on_lost: OnLost
    max_hold_ms: int | None


USUAL_FATE = Fate("cancel", None)


def checked_fate(on_lost: OnLost, max_hold: Duration | None) -> Fate:
    """The fate in the words of the caller; ValueError for what is none."""
    if on_lost == "cancel" and max_hold is None:
        return USUAL_FATE
    if on_lost not in ("cancel", "signal"):
        raise ValueError(f"on_lost must be 'cancel' or 'signal', not {on_lost!r}")
    return Fate(on_lost, None if max_hold is None else limits.milliseconds("max_hold", max_hold, 1))
