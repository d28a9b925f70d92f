"""`@exclusive`: a limit on the runs of an activity at once, wherever they run.

The permit belongs to the activity, not to one attempt: an attempt that ends with a retry ahead leaves its permit or its
queue entry to the next one, which takes the permit over with a new fence.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from redlease import Hold, Rate, RedleaseError, Semaphore
from redlease._core import limits
from redlease._core.limits import Duration
from redlease_temporal._backends.redis.registry import digest
from redlease_temporal._payloads.locks import ResourceTerms, turn_of
from redlease_temporal.errors import AcquireTimeout, as_usage_error, failure

from .attempts import Attempt, Attempts

P = ParamSpec("P")
T = TypeVar("T")

HEARTBEATS_PER_TIMEOUT = 3
MARK = "__temporal_activity_definition"


def _completes_later() -> type[BaseException]:
    """The exception that `activity.raise_complete_async` raises; the SDK has no public name for it."""
    try:
        activity.raise_complete_async()
    except BaseException as error:  # noqa: BLE001  to read its type
        return type(error)


COMPLETES_LATER = _completes_later()

attempts_here: ContextVar[Attempts] = ContextVar("redlease_attempts")
_hold: ContextVar[Hold] = ContextVar("redlease_hold")


class _Need(NamedTuple):
    """What one activity needs: the resource, and whose turn it takes there."""

    terms: ResourceTerms
    key: str
    share: float = 1


class _Rule(NamedTuple):
    """The checked parameters of the decorator; `slot_wait_s` in seconds."""

    terms: ResourceTerms
    key: Callable[..., object] | None
    slot_wait_s: float
    retry_lease_ms: int

    @property
    def takes_turns(self) -> bool:
        """Whether the keys of calls share one resource; otherwise each key is a resource of its own."""
        return self.terms.per_key is not None or self.terms.per_key_rate is not None

    def need(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Need:
        """What an activity with these arguments needs."""
        terms, turn = self.terms, turn_of(activity.info().priority)
        if self.key is not None:
            key = str(self.key(*args, **kwargs))
            if self.takes_turns:
                turn = as_usage_error(limits.checked_text, "key", key, limits.KEY_BYTES_MAX), 1
            else:
                name = as_usage_error(
                    limits.checked_text, "resource name", f"{terms.resource}:{key}", limits.NAME_BYTES_MAX
                )
                terms = replace(terms, resource=name)
        return _Need(terms, *turn)


def exclusive(
    name: str,
    *,
    capacity: int = 1,
    key: Callable[..., object] | None = None,
    lease: Duration = 30.0,
    slot_wait: Duration = 10.0,
    retry_lease: Duration = 60.0,
    max_waiters: int | None = None,
    per_key: int | None = None,
    rate: Rate | Literal[0] | None = None,
    per_key_rate: Rate | Literal[0] | None = None,
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Awaitable[T]]]:
    """Runs at most `capacity` calls of an async activity at once, everywhere. Put it below `activity.defn`.

    While it waits it occupies its worker's slot and heartbeats. After `slot_wait` the attempt fails with
    `AcquireTimeout`; the activity's retry policy retries it, and its queue entry is kept. A lost permit cancels the
    activity.

    Args:
        name: Of the resource.
        capacity: How many may run at once.
        key: Called with the activity's arguments; its result is added to the name: one resource for each. With
            `per_key` or `per_key_rate` there is one resource, whose keys take turns; by default the fairness key and
            weight of the activity's priority say whose turn it is.
        lease: How long the permit outlives a worker that died, in seconds or as a timedelta, as all durations.
        slot_wait: How long one attempt waits.
        retry_lease: How long the permit, or the queue entry, is kept for the next attempt.
        max_waiters: The attempt fails with `QueueFull` when that many wait.
        per_key: How many of one key may run at once; 0 for no such limit.
        rate: How many may begin in a time, as a `redlease.Rate`; 0 for no such limit.
        per_key_rate: The same for those of one key.

    Raises:
        ValueError: A parameter is wrong, or the function is not asynchronous.

    Example:
        >>> @activity.defn  # doctest: +SKIP
        ... @exclusive("vendor-api", capacity=3)
        ... async def call_vendor(order: Order) -> Receipt:
        ...     return await vendor.post(order, fence=current_hold().fence)
    """
    terms = ResourceTerms.checked(
        name, capacity, lease, max_waiters, per_key=per_key, rate=rate, per_key_rate=per_key_rate
    )
    slot_wait_s = limits.milliseconds("slot_wait", slot_wait) / 1000
    retry_lease_ms = limits.milliseconds("retry_lease", retry_lease, limits.LEASE_MS_MIN)
    rule = _Rule(terms, key, slot_wait_s, retry_lease_ms)
    return functools.partial(_decorated, rule)


def _decorated(rule: _Rule, function: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    if not inspect.iscoroutinefunction(function):
        raise ValueError(f"{function!r} is not `async def`: a lost permit could not stop it")
    if hasattr(function, MARK):
        raise ValueError(f"{function!r}: put @exclusive below @activity.defn, or it would be bypassed")
    skipped = int(next(iter(inspect.signature(function).parameters), "") == "self")

    @functools.wraps(function)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _failures():
            need = rule.need(args[skipped:], kwargs)
            async with _held(rule, need):
                return await function(*args, **kwargs)

    return run


def current_hold() -> Hold:
    """The hold of the `@exclusive` activity around this code: its `fence`, `check()`, `remaining()`.

    Raises:
        RuntimeError: There is none.
    """
    hold = _hold.get(None)
    if hold is None:
        raise RuntimeError("there is no @exclusive activity around this code")
    return hold


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except RedleaseError as error:
        if isinstance(error, ApplicationError):
            raise
        raise failure(error, retryable=True) from error


@contextlib.asynccontextmanager
async def _held(rule: _Rule, need: _Need) -> AsyncIterator[None]:
    attempts = attempts_here.get(None)
    if attempts is None:
        message = "redlease: this worker does not know of locks. Give RedleasePlugin to its client or worker"
        raise ApplicationError(message, type="RuntimeError", non_retryable=True)
    semaphore, ticket = attempts.semaphore(need.terms), _ticket()
    attempt = attempts.begin((semaphore.name, ticket), lambda: _hold_of(semaphore, ticket, need))
    hold = await _granted(attempt, rule, semaphore, ticket)
    token = _hold.set(hold)
    try:
        async with hold:
            try:
                yield
            except COMPLETES_LATER:
                message = "an @exclusive activity gives its permit back as it returns, so it can not complete later"
                raise ApplicationError(message, type="RuntimeError", non_retryable=True) from None
            except BaseException as error:
                if not hold.lost and _is_retried(error):
                    await _leave_to_next(rule, semaphore, hold)
                raise
    finally:
        attempt.end()
        _hold.reset(token)


async def _granted(attempt: Attempt, rule: _Rule, semaphore: Semaphore, ticket: str) -> Hold:
    """Waits for the permit, at most `slot_wait`; after that the request itself stays queued."""
    lasts = activity.info().start_to_close_timeout
    # A grant would be useless once the server has timed the attempt out.
    wait_s = rule.slot_wait_s if lasts is None else min(rule.slot_wait_s, lasts.total_seconds())
    try:
        hold = await _heartbeating(attempt, wait_s)
        if activity.info().attempt > 1 or attempt.is_running:
            # An earlier attempt, or another activity with that id, may still run somewhere: a new fence refuses it from
            # now on.
            attempt.request = asyncio.ensure_future(semaphore.adopt(attempt.take_over()))
            hold = await _heartbeating(attempt, wait_s)
    except RedleaseError:  # some of them are TimeoutErrors too
        attempt.end()
        raise
    except TimeoutError:
        message = (
            f"resource {semaphore.name!r}: no permit within {wait_s:g} s; the place in the queue is kept for the next "
            "attempt, if there is one"
        )
        error = ApplicationError(message, semaphore.name, ticket, type=AcquireTimeout.__name__)
        attempt.leave_to_next(rule.retry_lease_ms / 1000 if _is_retried(error) else 0)
        raise error from None
    except asyncio.CancelledError as cancelled:
        attempt.leave_to_next(rule.retry_lease_ms / 1000 if _is_retried(cancelled) else 0)
        raise
    except BaseException:
        attempt.end()
        raise
    return hold


async def _hold_of(semaphore: Semaphore, ticket: str, need: _Need) -> Hold:
    return await semaphore.hold(ticket=ticket, owner=_holder_name(), key=need.key or None, share=need.share)


async def _heartbeating(attempt: Attempt, seconds: float) -> Hold:
    """Waits for the attempt's request, heartbeating; raises TimeoutError after so many seconds."""
    info, request = activity.info(), attempt.request
    pause_s = info.heartbeat_timeout.total_seconds() / HEARTBEATS_PER_TIMEOUT if info.heartbeat_timeout else None
    async with asyncio.timeout(seconds):
        while True:
            done, _ = await asyncio.wait({request}, timeout=pause_s)
            if not attempt.is_latest:
                raise ApplicationError("a later attempt of the activity goes on in its place")
            if done:
                return request.result()
            activity.heartbeat(*info.heartbeat_details)


def _is_retried(error: BaseException) -> bool:
    """Whether another attempt follows one that ends with this error, as far as an attempt can know."""
    info = activity.info()
    if isinstance(error, asyncio.CancelledError):
        details = activity.cancellation_details()
        if details is None or not details.timed_out:
            return details is not None and (details.worker_shutdown or details.paused or details.reset)
    if isinstance(error, ApplicationError) and error.non_retryable:
        return False
    policy = info.retry_policy
    if policy is None:
        return True
    kind = error.type if isinstance(error, ApplicationError) else type(error).__name__
    if kind in (policy.non_retryable_error_types or ()):
        return False
    return policy.maximum_attempts == 0 or info.attempt < policy.maximum_attempts


async def _leave_to_next(rule: _Rule, semaphore: Semaphore, hold: Hold) -> None:
    with contextlib.suppress(RedleaseError):
        await semaphore.renew(hold.detach(), lease=rule.retry_lease_ms / 1000)


def _holder_name() -> str:
    info = activity.info()
    return limits.shortened(info.workflow_id or info.activity_id, limits.OWNER_BYTES_MAX)


def _ticket() -> str:
    """The ticket of the activity, which all its attempts share."""
    info = activity.info()
    run = info.workflow_run_id or info.activity_run_id
    ticket = f"{info.namespace}/{info.workflow_id}/{run}/{info.activity_id}"
    return ticket if len(ticket.encode()) <= limits.TICKET_BYTES_MAX else digest(ticket)
