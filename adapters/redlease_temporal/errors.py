"""The core's errors as Temporal knows them.

Each derives from the core's error of its name and from `ApplicationError`: `except LeaseLost` works in workflow code as
it does elsewhere, and one that nobody catches fails the workflow run instead of its workflow task.
"""

from __future__ import annotations

from typing import Any

from temporalio.exceptions import ActivityError, ApplicationError

import redlease


class LockError(ApplicationError, redlease.RedleaseError):
    """Raised when a call cannot be carried out; the base of the errors of this package, never retried by Temporal.

    Attributes:
        resource: The name of the resource, or None where no single one is meant.
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
    """Raised when somebody took this waiting request out of the queue by its ticket."""


class Unavailable(LockError, redlease.Unavailable):
    """Raised when Redis could not be reached by a call that does not wait for it; a retry is safe."""


NAMED: dict[str, type[LockError]] = {
    kind.__name__: kind for kind in (LockError, AcquireTimeout, LeaseLost, QueueFull, Withdrawn, Unavailable)
}


def misused(message: str) -> ApplicationError:
    """The error for a wrong parameter: it fails the workflow run, not its workflow task."""
    return ApplicationError(message, type="ValueError", non_retryable=True)


def misuse(call: Any, *args: Any, **named: Any) -> Any:
    """What a check returns; its ValueError as one that fails the workflow run, not its workflow task."""
    try:
        return call(*args, **named)
    except ValueError as error:
        raise misused(str(error)) from error


def failure(error: Exception, *, retryable: bool = False) -> ApplicationError:
    """The failure of an activity that tells the workflow of one of the core's errors, or of a ValueError."""
    if isinstance(error, redlease.RedleaseError):
        name = type(error).__name__
        details = (error.resource, error.ticket)
        return ApplicationError(
            str(error), *details, type=name if name in NAMED else LockError.__name__, non_retryable=not retryable
        )
    return ApplicationError(str(error), type=type(error).__name__, non_retryable=not retryable)


def refusal(error: ActivityError) -> Exception | None:
    """What the failure of one of the library's activities says of the request; None when that has no answer yet."""
    cause = error.cause
    if not isinstance(cause, ApplicationError):
        return None
    if cause.type == "ValueError":
        return misused(cause.message)
    if cause.type in NAMED and cause.type != Unavailable.__name__:
        resource, ticket = (*cause.details, None, None)[:2]
        return NAMED[cause.type](cause.message, resource=resource, ticket=ticket)
    return None
