"""Whose turn it is among the waiters of a coordinator. Keys take turns as they do on Redis, with the same tags.

Self-clocked fair queueing (S. J. Golestani, INFOCOM 1994): the first waiter of each key has a tag, the virtual time at
which it became the first plus what its turn costs. The lowest tag is granted next, and the virtual time is that tag
then. Waiters without a key are of one more key of share 1, so that without keys the order is that of arrival.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from redlease._core.limits import CAPACITY_MAX
from redlease_temporal._payloads.coordinator import CoordinatorRequest

from .entries import QueuedTicket

ONE = 1000  # what a unit costs at share 1: tags are whole numbers
COST_MAX = 2**31


def never_fits(request: CoordinatorRequest, capacity: int, per_key: int) -> str:
    """Why a request can never be granted; empty if it can. `per_key`: units that one key may hold; 0 for any number."""
    if request.spec.weight > capacity:
        return f"a weight of {request.spec.weight} can never fit into a capacity of {capacity}"
    if request.spec.key and 0 < per_key < request.spec.weight:
        return f"a weight of {request.spec.weight} can never fit into the {per_key} units of one key"
    return ""


def cost_of(request: CoordinatorRequest) -> int:
    """What a turn of a request costs its key."""
    spec = request.spec
    weight = 1 if spec.weight == CAPACITY_MAX else spec.weight  # a writer's turn costs what a reader's does
    return max(1, min(COST_MAX, int(weight * ONE / spec.share + 0.5)))


def promote(queue: list[QueuedTicket], key: str, first: QueuedTicket | None) -> None:
    """Lets the first waiter of a key go before `first`, whose turn it is: it takes over units of its key."""
    waiter = next((queued for queued in queue if queued.request.spec.key == key), None)
    if waiter is not None and first is not None and waiter is not first and waiter.tag is not None:
        waiter.tag = (first.tag or 0) - 1


def next_in_turn(
    queue: list[QueuedTicket], virtual_time: int, may: Callable[[CoordinatorRequest], bool]
) -> QueuedTicket | None:
    """Who is granted next, of those that `may` be; gives a tag to each waiter that has become the first of its key."""
    firsts: dict[str, QueuedTicket] = {}
    for queued in queue:
        firsts.setdefault(queued.request.spec.key, queued)
    for queued in firsts.values():
        if not may(queued.request):
            queued.tag = None
        elif queued.tag is None:
            queued.tag = virtual_time + cost_of(queued.request)
    turns = [queued for queued in firsts.values() if queued.tag is not None]
    return min(turns, key=lambda queued: queued.tag or 0, default=None)  # of equal tags the one that came first


def in_turn(queue: list[QueuedTicket], virtual_time: int) -> list[QueuedTicket]:
    """All who wait, in the order of their turns if none of them were at a limit."""
    waiting: dict[str, deque[QueuedTicket]] = {}
    for queued in queue:
        waiting.setdefault(queued.request.spec.key, deque()).append(queued)
    turns = [
        (virtual_time + cost_of(each[0].request) if each[0].tag is None else each[0].tag, number, key)
        for number, (key, each) in enumerate(waiting.items())
    ]
    heapq.heapify(turns)
    order = []
    while turns:
        tag, number, key = heapq.heappop(turns)
        order.append(waiting[key].popleft())
        if waiting[key]:
            heapq.heappush(turns, (tag + cost_of(waiting[key][0].request), number, key))
    return order
