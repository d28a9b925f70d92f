"""What a coordinator tells of its state."""

from __future__ import annotations

from redlease.models import Position, Snapshot, Waiter

from .queue_state import QueueState
from .turns import in_turn


def position(books: QueueState, ticket: str) -> Position | None:
    """Where a ticket stands in the queue, and about how long it will wait."""
    if books.holder(ticket) is not None:
        return Position(0, 0.0)
    order = [place.request for place in in_turn(books.queue, books.virtual)]
    place = next((number for number, asked in enumerate(order, 1) if asked.ticket == ticket), None)
    if place is None:
        return None
    units = sum(asked.weight for asked in order[:place])
    return Position(place, None if books.lasted_ms is None else books.lasted_ms * units / books.capacity / 1000)


def snapshot(books: QueueState, limit: int, now_ms: int) -> Snapshot:
    """The resource, with at most `limit` holders and as many waiters, in the order of their turns."""
    waiters = [
        Waiter(
            *(each.request.ticket, each.request.weight, each.request.owner, each.request.metadata),
            *(each.queued_at_ms, each.request.key or None),
        )
        for each in in_turn(books.queue, books.virtual)[:limit]
    ]
    permits = tuple(each.permit for each in books.holders[:limit])
    totals = (books.held, len(books.queue))
    return Snapshot(books.resource, books.capacity, permits, tuple(waiters), books.fence, now_ms, *totals)
