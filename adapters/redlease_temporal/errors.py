"""The core's errors as Temporal failures.

Each derives from the core's error of its name and from `ApplicationError`: `except LeaseLost` works in workflow code as
it does elsewhere, and an uncaught one fails the workflow run instead of its workflow task.
"""

from __future__ import annotations

from typing import Any

from temporalio.exceptions import ActivityError, ApplicationError

import redlease

from ._payloads.locks import PermitHeader


class LockError(ApplicationError, redlease.RedleaseError):
    """Raised when a call cannot be carried out; the base of this package's errors. Temporal never retries them.

    Attributes:
        resource: The name of the resource, or None if it is not about a single one.
        ticket: The ticket of the request, or None.
    """

    def __init__(self, message: str, *, resource: str | None = None, ticket: str | None = None) -> None:
        super().__init__(message, resource, ticket, type=type(self).__name__, non_retryable=True)
        self.resource = resource
        self.ticket = ticket


class AcquireTimeout(LockError, redlease.AcquireTimeout):
    """Raised when `timeout` passed before a grant; the request is out of the queue."""


class LeaseLost(LockError, redlease.LeaseLost):
    """Raised when a permit was held and no longer is."""


class QueueFull(LockError, redlease.QueueFull):
    """Raised when `max_waiters` wait already; the request was not queued."""


class Withdrawn(LockError, redlease.Withdrawn):
    """Raised when somebody took this waiting request out of the queue by its ticket, or ended its activity by hand."""


class Superseded(Withdrawn, redlease.Superseded):
    """Raised when a newer request of the same key replaced this one while it waited."""


class Unavailable(LockError, redlease.Unavailable):
    """Raised when Redis could not be reached by a call that does not wait for it; a retry is safe."""


NAMED: dict[str, type[LockError]] = {
    kind.__name__: kind
    for kind in (LockError, AcquireTimeout, LeaseLost, QueueFull, Withdrawn, Superseded, Unavailable)
}


class UsageError(ApplicationError, ValueError):
    """Raised for a wrong parameter: a ValueError that fails the workflow run, not its workflow task."""

    def __init__(self, message: str) -> None:
        super().__init__(message, type=ValueError.__name__, non_retryable=True)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.message,), self.__dict__


def usage_error(message: str) -> UsageError:
    """The error for a wrong parameter."""
    return UsageError(message)


def without_keys(resource: str, backend: str) -> UsageError:
    """The error for a key, a share or a limit of a key on a backend that has none."""
    message = f"resource {resource!r}: backend={backend!r} has no keys: they need backend='redis' or 'coordinator'"
    return usage_error(message)


def without_rates(resource: str, backend: str) -> UsageError:
    """The error for a rate on a backend that has none."""
    return usage_error(f"resource {resource!r}: backend={backend!r} has no rates: they need backend='redis'")


def without_replacing(resource: str, backend: str, when_full: str) -> UsageError:
    """The error for a request that is to take the place of others, on a backend where none can."""
    return usage_error(
        f"resource {resource!r}: backend={backend!r} has no when_full={when_full!r}: it needs 'redis' or 'coordinator'"
    )


def refused_when_full(resource: str, ticket: str) -> QueueFull:
    """The error for a request that does not wait, by its `when_full`."""
    message = f"resource {resource!r}: no permit without waiting, and when_full is 'refuse'. The request is not queued"
    return QueueFull(message, resource=resource, ticket=ticket)


def as_usage_error(call: Any, *args: Any, **named: Any) -> Any:
    """Returns the result of a check; raises its ValueError so that the workflow run fails, not its workflow task."""
    try:
        return call(*args, **named)
    except ValueError as error:
        raise usage_error(str(error)) from error


def failure(error: Exception, *, retryable: bool = False) -> ApplicationError:
    """One of the core's errors, or a ValueError, as the failure of an activity."""
    if isinstance(error, redlease.NeverFits):  # misuse, whatever the name of its class
        return ApplicationError(str(error), type=ValueError.__name__, non_retryable=not retryable)
    if isinstance(error, redlease.RedleaseError):
        name = type(error).__name__
        details = (error.resource, error.ticket)
        return ApplicationError(
            str(error), *details, type=name if name in NAMED else LockError.__name__, non_retryable=not retryable
        )
    # Misuse is known by the type of its failure, not by the name of its class.
    kind = error.type if isinstance(error, UsageError) else type(error).__name__
    return ApplicationError(str(error), type=kind, non_retryable=not retryable)


def refusal(error: ActivityError) -> Exception | None:
    """The error in the failure of one of the library's activities; None if the request may still succeed."""
    cause = error.cause
    if not isinstance(cause, ApplicationError):
        return None
    if cause.type == "ValueError":
        return usage_error(cause.message)
    if cause.type in NAMED and cause.type != Unavailable.__name__:
        resource, ticket = (*cause.details, None, None)[:2]
        return NAMED[cause.type](cause.message, resource=resource, ticket=ticket)
    return None


def lease_lost(permit: PermitHeader, reason: str) -> LeaseLost:
    """The error for a permit that is no longer held."""
    message = (
        f"resource {permit.resource!r}: permit {permit.ticket!r} (fence {permit.fence}) is no longer held: {reason}. "
        "Stop the work that needs it, or acquire again"
    )
    return LeaseLost(message, resource=permit.resource, ticket=permit.ticket)
