"""What can go wrong, one class a reason.

Every error names the resource and the ticket it is about, where there is one, and says what to do next. Misuse that no
retry can mend (an empty name, a capacity below 1, a weight that can never fit) is `ValueError` instead.
"""

from __future__ import annotations


class RedleaseError(Exception):
    """Raised when a call cannot be carried out; the base of all errors of this library.

    Attributes:
        resource: The name of the resource, or None where no single one is meant.
        ticket: The ticket of the request, or None.
    """

    def __init__(self, message: str, *, resource: str | None = None, ticket: str | None = None) -> None:
        super().__init__(message)
        self.resource = resource
        self.ticket = ticket

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[RedleaseError], args: tuple[object, ...]) -> RedleaseError:
    error = kind.__new__(kind)  # whatever else a subclass is made with is in what comes after
    error.args = args
    return error


class AcquireTimeout(RedleaseError, TimeoutError):
    """Raised when `timeout` passed before a grant; the request is out of the queue."""


class LeaseLost(RedleaseError):
    """Raised when a permit was held and no longer is, or can no longer be known to be."""


class StaleFence(RedleaseError):
    """Raised when a guard is shown a fence older than one it has already seen."""


class QueueFull(RedleaseError):
    """Raised at once when `max_waiters` wait already; the request was not queued."""


class Withdrawn(RedleaseError):
    """Raised when somebody took this waiting request out of the queue by its ticket, or closed its client."""


class NotReplicated(RedleaseError):
    """Raised when the server wants replicas (`min-replicas-to-write`) and has too few; nothing was changed."""


class Unavailable(RedleaseError):
    """Raised when the server could not be reached in time.

    The outcome is unknown: what the request may have taken is given back in the background. A retry with the same
    ticket is safe.
    """
