"""What a coordinator tells of its state."""

from __future__ import annotations

from redlease.models import Position, Snapshot, Waiter

from .queue_state import QueueState
from .turns import in_turn


def position(state: QueueState, ticket: str) -> Position | None:
    """The position of a ticket in the queue, and about how long it will wait."""
    if state.holder(ticket) is not None:
        return Position(0, 0.0)
    order = [queued.request for queued in in_turn(state.queue, state.virtual_time)]
    rank = next((number for number, request in enumerate(order, 1) if request.spec.ticket == ticket), None)
    if rank is None:
        return None
    units = sum(request.spec.weight for request in order[:rank])
    return Position(rank, None if state.mean_hold_ms is None else state.mean_hold_ms * units / state.capacity / 1000)


def snapshot(state: QueueState, limit: int, now_ms: int) -> Snapshot:
    """The resource, with at most `limit` holders and as many waiters, in the order of their turns."""
    waiters = [
        Waiter(
            *(each.request.spec.ticket, each.request.spec.weight, each.request.spec.owner, each.request.spec.metadata),
            *(each.queued_at_ms, each.request.spec.key or None),
        )
        for each in in_turn(state.queue, state.virtual_time)[:limit]
    ]
    permits = tuple(each.permit for each in state.holders[:limit])
    totals = (state.held, len(state.queue))
    return Snapshot(state.resource, state.capacity, permits, tuple(waiters), state.fence, now_ms, *totals)
