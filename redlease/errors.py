"""The errors, one class per reason.

Every error names the resource and the ticket it is about, if there is one, and says what to do next. Misuse that no
retry can fix (an empty name, a capacity below 1) raises `ValueError` instead.
"""

from __future__ import annotations

from typing import Literal

LossReason = Literal["expired", "max_hold", "gone", "taken", "superseded", "closed"]


class RedleaseError(Exception):
    """Raised when a call cannot be carried out; the base of all errors of this library.

    Attributes:
        resource: The name of the resource, or None if the error is not about a single one.
        ticket: The ticket of the request, or None.
    """

    def __init__(self, message: str, *, resource: str | None = None, ticket: str | None = None) -> None:
        super().__init__(message)
        self.resource = resource
        self.ticket = ticket

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[RedleaseError], args: tuple[object, ...]) -> RedleaseError:
    error = kind.__new__(kind)  # not by its constructor: other attributes of a subclass come with `__dict__`
    error.args = args
    return error


class AcquireTimeout(RedleaseError, TimeoutError):
    """Raised when no capacity was free within `timeout`; the request is out of the queue."""


class ClientClosed(RedleaseError):
    """Raised when a closed client is used; make a new one."""

    def __init__(self, message: str = "this client is closed: make a new one") -> None:
        super().__init__(message)


class LeaseLost(RedleaseError):
    """Raised when a permit was held and no longer is, or can no longer be known to be.

    Attributes:
        reason: Why: its lease "expired"; "max_hold" was reached; it is "gone" from the server; it was "taken", which
            means released by its ticket or adopted; "superseded" by a newer request; its client was "closed". None if
            that is not known: it was released or detached here, or the error comes from a workflow.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str | None = None,
        ticket: str | None = None,
        reason: LossReason | None = None,
    ) -> None:
        super().__init__(message, resource=resource, ticket=ticket)
        self.reason = reason


class SequenceFailed(RedleaseError):
    """Raised when an item of a sequence failed for good: those before it are done, those after it were not begun.

    Attributes:
        id: The id of the sequence.
        index: The item's index in the list.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str | None = None,
        id: str = "",  # noqa: A002
        index: int = 0,
    ) -> None:
        super().__init__(message, resource=resource)
        self.id = id
        self.index = index


class StaleFence(RedleaseError):
    """Raised when a guard gets a fence lower than the highest it has seen; nothing was written.

    Attributes:
        fence: The fence that was refused.
        seen: The highest fence that was seen, or None if it is not known.
    """

    def __init__(
        self, message: str, *, resource: str | None = None, fence: int | None = None, seen: int | None = None
    ) -> None:
        super().__init__(message, resource=resource)
        self.fence = fence
        self.seen = seen


class QueueFull(RedleaseError):
    """Raised at once when `max_waiters` requests wait already; the request was not queued."""


class NeverFits(RedleaseError, ValueError):
    """Raised when the weight of a request is above the capacity, or above what its key may have; it is not queued.

    A request that waits gets it too, when a smaller capacity shuts it out.
    """


class Withdrawn(RedleaseError):
    """Raised when a waiting request was removed from the queue by its ticket, or its client was closed."""


class Superseded(Withdrawn):
    """Raised when a newer request of the same key replaced this one while it waited; see `when_full`."""


class NotReplicated(RedleaseError):
    """Raised when fewer replicas than the server or the caller asks for would have a change, or have it.

    With the server's `min-replicas-to-write` nothing was changed; with `durability` the grant was given back.
    """


class Unavailable(RedleaseError, TimeoutError):
    """Raised when the server could not be reached in time.

    The outcome is unknown: redlease releases in the background what the request may have been granted. A retry with the
    same ticket is safe.
    """
