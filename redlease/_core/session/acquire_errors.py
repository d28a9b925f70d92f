"""The errors of requests that are not granted; each says what to do next."""

from __future__ import annotations

from redlease._core.protocol.arguments import AcquireRequest
from redlease._core.protocol.replies import Status
from redlease.errors import AcquireTimeout, NeverFits, NotReplicated, QueueFull, Superseded, Withdrawn


def refused(request: AcquireRequest, status: int, values: list[int]) -> Exception:
    """Returns the error for a request that the server refused."""
    name, ticket = request.resource.name, request.ticket
    if status == Status.FULL:
        who, limit, most = "requests", "max_waiters", request.terms.max_waiters
        if any(values[2:3]):
            who, limit, most = (
                f"requests of key {request.key!r}",
                "max_waiters_per_key",
                request.terms.max_waiters_per_key,
            )
        message = (
            f"resource {name!r}: {values[0]} {who} wait already and {limit} is {most}; this one was not queued. "
            "Try again later"
        )
        return QueueFull(message, resource=name, ticket=ticket)
    if status == Status.MISFIT:
        return weight_never_fits(request, values[0], of_key=len(values) > 1)
    if status == Status.OTHER_WEIGHT and values[1:]:
        return ValueError(
            f"resource {name!r}: ticket {ticket!r} is known with another key than {request.key or None!r}. "
            "Ask with the same key, or release it first"
        )
    if status == Status.OTHER_WEIGHT:
        return ValueError(
            f"resource {name!r}: ticket {ticket!r} is known with weight {values[0]}, not {request.weight}. "
            "Ask with the same weight, or release it first"
        )
    if values:
        message = (
            f"resource {name!r}: a newer request replaced ticket {ticket!r}, by its `when_full`. The newer one is for "
            "the same work; if that was abandoned, use a new ticket"
        )
        return Superseded(message, resource=name, ticket=ticket)
    message = f"resource {name!r}: ticket {ticket!r} was removed from the queue by its ticket. Retry to requeue"
    return Withdrawn(message, resource=name, ticket=ticket)


def weight_never_fits(request: AcquireRequest, most: int, *, of_key: bool = False) -> NeverFits:
    """Returns the error for a weight above the capacity, or above what one key may have."""
    name, ticket = request.resource.name, request.ticket
    bound = f"a key may have at most {most}" if of_key else f"the capacity is {most}"
    message = (
        f"resource {name!r}: weight {request.weight} can never fit, {bound} (ticket {ticket!r}). "
        "It is out of the queue: ask for less, or after a greater capacity was set"
    )
    return NeverFits(message, resource=name, ticket=ticket)


def timed_out(request: AcquireRequest, timeout_ms: float, *, is_queued: bool) -> AcquireTimeout:
    """Returns the error for a request that was not granted within its timeout, perhaps not even answered."""
    name = request.resource.name
    why = "the server had not answered the request by then. It is given up"
    if is_queued:
        why = "others hold it or are ahead in the queue; `inspect()` shows them. The request is out of the queue"
    message = f"resource {name!r}: no permit within {timeout_ms / 1000:g} s: {why}"
    return AcquireTimeout(message, resource=name, ticket=request.ticket)


def refused_without_waiting(name: str, ticket: str | None, *, refuses: bool) -> QueueFull | AcquireTimeout:
    """Returns the error for a request that may not wait and found no free capacity."""
    if refuses:
        message = f"resource {name!r}: no permit is free, and when_full is 'refuse'. The request was not queued"
        return QueueFull(message, resource=name, ticket=ticket)
    message = f"resource {name!r}: no permit without waiting, and timeout is 0. The request was not queued"
    return AcquireTimeout(message, resource=name, ticket=ticket)


def not_replicated(request: AcquireRequest, replicas: int) -> NotReplicated:
    """Returns the error for a grant that too few replicas had in time."""
    name, ticket, terms = request.resource.name, request.ticket, request.terms
    message = (
        f"resource {name!r}: {replicas} of {terms.replicas} replicas had the grant of ticket {ticket!r} within "
        f"{terms.replicas_ms / 1000:g} s; it is given back. Try again when they are back"
    )
    return NotReplicated(message, resource=name, ticket=ticket)
