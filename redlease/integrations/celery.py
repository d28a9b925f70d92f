"""For Celery: a task that runs once at a time for each key, whichever worker has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn, ParamSpec

from celery import current_task

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
    when_held: Literal["wait", "retry", "skip"] = "wait",
    timeout: Duration | None = None,
    on_lost: OnLost = "exit",
    metadata: dict[str, str] | None = None,
    key: str | Callable[..., str] | None = None,
    share: float = 1,
) -> Callable[[Callable[P, Any]], Callable[P, Any]]:
    """Makes a decorator, to stand below `@app.task`: the task runs while it holds a permit.

    A parameter of the task that is annotated as a `redlease.sync.Hold` gets the hold. Each delivery of a message is a
    request of its own, so one that is delivered again while the first still runs waits for the first.

    Args:
        pool: The lock or semaphore of a client of `redlease.sync`; with `name_for`, what its name begins with.
        name_for: Returns what is added to the name, from the arguments of a call; those of a bound task begin with it.
        when_held: What a task does while others hold the permit. "wait" waits in the queue, and occupies its worker.
            "retry" gives the message back to Celery, also if Redis cannot be reached: it runs again after the
            `default_retry_delay` of the task, at most `max_retries` times. "skip" returns None.
        timeout: Seconds to wait; the task then fails with `AcquireTimeout`. None waits forever.
        on_lost: As for `redlease.sync.Semaphore.hold`.
        metadata: See there.
        key: The fairness key of `hold`, or what returns it from the arguments of a call.
        share: See there.

    Raises:
        ValueError: A parameter is wrong.

    Example:
        >>> @app.task(acks_late=True, reject_on_worker_lost=True)  # doctest: +SKIP
        ... @exclusive(client.lock("customer"), name_for=lambda customer: customer, timeout=60)
        ... def charge(customer: str, hold: Hold | None = None) -> None:
        ...     pay(customer, fence=hold.fence)
    """
    choices: dict[str, jobs.NotGranted] = {"wait": jobs.fail, "retry": _retry, "skip": jobs.skip}
    if when_held not in choices:
        raise ValueError(f"when_held must be 'wait', 'retry' or 'skip', not {when_held!r}")
    otherwise = choices[when_held]
    timeout = jobs.checked_wait(otherwise, timeout)
    options: dict[str, Any] = {"on_lost": on_lost, "metadata": metadata, "key": key, "share": share}
    return jobs.exclusive(pool, not_granted=otherwise, name_for=name_for, timeout=timeout, **options)


def _retry(error: RedleaseError) -> NoReturn:
    raise current_task.retry(exc=error)
