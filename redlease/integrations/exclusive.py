"""A decorator for the jobs of a queue: each call runs under a permit, or is skipped or given back to the queue."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec

from redlease._core.limits import Duration
from redlease._core.log import about
from redlease._core.primitives.decorator import parameter_for_hold, passed
from redlease.errors import AcquireTimeout, RedleaseError, Unavailable
from redlease.sync import Hold, Semaphore
from redlease.sync.decorator import checked_function, checked_result

P = ParamSpec("P")
NotGranted = Callable[[RedleaseError], Any]

logger = logging.getLogger("redlease.integrations")


def fail(error: RedleaseError) -> NoReturn:
    """Has the call raise why it got no permit."""
    raise error


def skip(error: RedleaseError) -> None:
    """Has the call return None if others hold the permit; raises `Unavailable`, as then perhaps nobody does."""
    if not isinstance(error, AcquireTimeout):
        raise error
    logger.info("skipped, since others hold the permit: %s", error, extra=about(error.resource, error.ticket))


def checked_wait(not_granted: NotGranted, timeout: Duration | None) -> Duration | None:
    """Returns how long a call waits: jobs that are skipped or given back are not queued.

    Raises:
        ValueError: It is not to wait, and has a timeout.
    """
    if not_granted is fail:
        return timeout
    if timeout is not None:
        raise ValueError('a timeout needs when_held="wait": other calls do not wait')
    return 0


def exclusive(
    pool: Semaphore, *, not_granted: NotGranted, name_for: Callable[..., str] | None, **options: Any
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Makes a decorator as `Semaphore.holding` does, for functions that may get no permit.

    Args:
        pool: The lock or semaphore; with `name_for`, what its name begins with.
        not_granted: Gets the `AcquireTimeout` or `Unavailable` of a call that gets no permit, and raises, or returns
            the result of that call. Errors of the function itself do not come here.
        name_for: Returns what is added to the name, from the arguments of a call.
        **options: As for `redlease.sync.Semaphore.holding`.
    """
    decorator = pool.holding(name_for=name_for, **options)

    def decorate(function: Callable[P, Any]) -> Callable[P, Any]:
        parameter = parameter_for_hold(checked_function(function), Hold)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            request, is_entered = decorator.request_for(function, *args, **kwargs), False
            try:
                with request as hold:
                    is_entered = True
                    if parameter is not None and parameter not in passed(function, *args, **kwargs):
                        kwargs[parameter] = hold
                    return checked_result(function, function(*args, **kwargs))
            except (AcquireTimeout, Unavailable) as error:
                if is_entered:
                    raise
                return not_granted(error)

        return call

    return decorate
