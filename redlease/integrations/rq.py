"""For RQ: a job that runs once at a time for each key, whichever worker has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, ParamSpec

from rq import Retry, get_current_job

from redlease._core.limits import Duration
from redlease.errors import RedleaseError
from redlease.sync import OnLost, Semaphore

from . import exclusive as jobs

__all__ = ["exclusive"]

P = ParamSpec("P")


def exclusive(
    pool: Semaphore,
    *,
    name_for: Callable[..., str] | None = None,
    when_held: Literal["wait", "skip"] | Retry = "wait",
    timeout: Duration | None = None,
    on_lost: OnLost = "exit",
    metadata: dict[str, str] | None = None,
    key: str | Callable[..., str] | None = None,
    share: float = 1,
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Makes a decorator for the function of a job, which runs while it holds a permit.

    A parameter of the function that is annotated as a `redlease.sync.Hold` gets the hold.

    Args:
        pool: The lock or semaphore of a client of `redlease.sync`; with `name_for`, what its name begins with.
        name_for: Returns what is added to the name, from the arguments of a call.
        when_held: What a job does while others hold the permit. "wait" waits in the queue, and occupies its worker. An
            `rq.Retry(max=..., interval=...)` gives the job back to RQ, also if Redis cannot be reached; a worker with a
            scheduler runs it again after the interval, in seconds. "skip" returns None.
        timeout: Seconds to wait; the job then fails with `AcquireTimeout`. None waits forever.
        on_lost: As for `redlease.sync.Semaphore.hold`.
        metadata: See there.
        key: The fairness key of `hold`, or what returns it from the arguments of a call.
        share: See there.

    Raises:
        ValueError: A parameter is wrong.

    Example:
        >>> @exclusive(client.lock("customer"), name_for=lambda customer: customer, timeout=60)  # doctest: +SKIP
        ... def charge(customer: str, hold: Hold | None = None) -> None:
        ...     pay(customer, fence=hold.fence)
    """
    choices: dict[object, jobs.NotGranted] = {"wait": jobs.fail, "skip": jobs.skip}
    otherwise = _retry(when_held) if isinstance(when_held, Retry) else choices.get(when_held)
    if otherwise is None:
        raise ValueError(f"when_held must be 'wait', 'skip' or an rq.Retry, not {when_held!r}")
    timeout = jobs.checked_wait(otherwise, timeout)
    options: dict[str, Any] = {"on_lost": on_lost, "metadata": metadata, "key": key, "share": share}
    return jobs.exclusive(pool, not_granted=otherwise, name_for=name_for, timeout=timeout, **options)


def _retry(retry: Retry) -> jobs.NotGranted:
    def release(error: RedleaseError) -> Retry:
        if get_current_job() is None:
            raise error  # a plain call, which nobody would repeat
        return retry

    return release
