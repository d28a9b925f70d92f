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
    key: Callable[..., str] | None = None,
    when_held: Literal["wait", "skip"] | Retry = "wait",
    timeout: Duration | None = None,
    on_lost: OnLost = "exit",
    metadata: dict[str, str] | None = None,
    turn_key: str | Callable[..., str] | None = None,
    share: float = 1,
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Makes a decorator for the function of a job, which runs while it holds a permit.

    A parameter of the function that is annotated as a `redlease.sync.Hold` gets the hold.

    Args:
        pool: The lock or semaphore of a client of `redlease.sync`; with `key`, what its name begins with.
        key: Returns the key of a call from its arguments.
        when_held: What a job does while others hold the permit. "wait" waits in the queue, and occupies its worker. An
            `rq.Retry(max=..., interval=...)` gives the job back to RQ, also if Redis cannot be reached; a worker with a
            scheduler runs it again after the interval, in seconds. "skip" returns None.
        timeout: Seconds to wait; the job then fails with `AcquireTimeout`. None waits for ever.
        on_lost: As for `redlease.sync.Semaphore.hold`.
        metadata: See there.
        turn_key: Whose turn a call takes, or what returns it from the arguments; as for `Semaphore.guarded`.
        share: See there.

    Raises:
        ValueError: A parameter is wrong.

    Example:
        >>> @exclusive(client.lock("customer"), key=lambda customer: customer, timeout=60)  # doctest: +SKIP
        ... def charge(customer: str, hold: Hold | None = None) -> None:
        ...     pay(customer, fence=hold.fence)
    """
    choices: dict[object, jobs.NotGranted] = {"wait": jobs.fail, "skip": jobs.skip}
    otherwise = _retry(when_held) if isinstance(when_held, Retry) else choices.get(when_held)
    if otherwise is None:
        raise ValueError(f"when_held must be 'wait', 'skip' or an rq.Retry, not {when_held!r}")
    timeout = jobs.checked_wait(otherwise, timeout)
    options: dict[str, Any] = {"on_lost": on_lost, "metadata": metadata, "turn_key": turn_key, "share": share}
    return jobs.exclusive(pool, not_granted=otherwise, key=key, timeout=timeout, **options)


def _retry(retry: Retry) -> jobs.NotGranted:
    def release(error: RedleaseError) -> Retry:
        if get_current_job() is None:
            raise error  # a plain call, which nobody would repeat
        return retry

    return release
