"""Requests as a relay makes them, with all that they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redlease._core.protocol import arguments
from redlease._core.protocol.arguments import AcquireRequest, Terms

if TYPE_CHECKING:
    from redlease import Redlease, Semaphore
    from redlease._core.session.queueing import PendingAcquire


def ask(
    client: Redlease,
    pool: Semaphore,
    ticket: str,
    arrival: int = 0,
    weight: int = 1,
    capacity: int = 1,
    most: int | None = None,
) -> PendingAcquire:
    """Begin a request with a given arrival, as a relay does."""
    terms = Terms("o", capacity=capacity, max_waiters=most)
    packed_terms = arguments.pack_terms(terms, weight, arguments.label("o", {}))
    request = f"request-of-{ticket}-{arrival}"
    wanted = AcquireRequest(pool._resource, terms, ticket, request, weight, packed_terms, arrival)
    return client._session.enter(wanted, needs_full_lease=True)
