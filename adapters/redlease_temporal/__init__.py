"""Locks and semaphores for Temporal workflows: the API of `redlease`, safe in the workflow sandbox.

Workflow code imports from here; the worker and the client take their plugin from `redlease_temporal.worker`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from redlease._core import limits
from redlease._core.limits import Duration, Rate
from redlease.models import Permit, Position, Snapshot, Waiter

from ._admission.rule import WorkflowConcurrencyLimitExceeded, concurrency
from ._backends.coordinator.backend import CoordinatorBackend
from ._backends.nexus.backend import NexusBackend
from ._backends.redis.backend import RedisBackend
from ._backends.slots.backend import SlotBackend
from ._payloads.locks import ResourceTerms
from ._sequence.api import SequenceFailed, sequence
from ._workflow_side.all_of import AllRequest, Holds, all_of
from ._workflow_side.backend import Backend
from ._workflow_side.hold import Hold
from ._workflow_side.primitives import Lock, Semaphore
from ._workflow_side.rwlock import RWLock
from .errors import (
    AcquireTimeout,
    LeaseLost,
    LockError,
    QueueFull,
    Superseded,
    Unavailable,
    Withdrawn,
    as_usage_error,
    usage_error,
    without_keys,
    without_rates,
)

__all__ = [
    "AcquireTimeout",
    "AllRequest",
    "Hold",
    "Holds",
    "LeaseLost",
    "Lock",
    "LockError",
    "Permit",
    "Position",
    "QueueFull",
    "RWLock",
    "Rate",
    "Semaphore",
    "SequenceFailed",
    "Snapshot",
    "Superseded",
    "Unavailable",
    "Waiter",
    "Withdrawn",
    "WorkflowConcurrencyLimitExceeded",
    "all_of",
    "concurrency",
    "lock",
    "rwlock",
    "semaphore",
    "sequence",
]


BACKENDS: dict[str, Callable[[ResourceTerms], Backend]] = {
    each.name: each for each in (RedisBackend, SlotBackend, CoordinatorBackend)
}


def _backend(name: str, terms: ResourceTerms, endpoint: str | None = None) -> Backend:
    if endpoint is not None:
        return NexusBackend(terms, as_usage_error(limits.checked_text, "endpoint", endpoint, limits.NAME_BYTES_MAX))
    if not isinstance(name, str) or name not in BACKENDS:
        message = f"backend must be one of {', '.join(map(repr, BACKENDS))}, not {name!r}"
        raise usage_error(message)
    return BACKENDS[name](terms)


def lock(
    name: str,
    *,
    lease: Duration = 30.0,
    max_waiters: int | None = None,
    backend: str = "redis",
    endpoint: str | None = None,
) -> Lock:
    """The lock of that name: a semaphore of capacity 1.

    Args:
        name: Of the resource, at most 512 bytes. Services that use `redlease` with the same Redis share it.
        lease: How long a permit stays valid without renewal, in seconds or as a timedelta.
        max_waiters: `QueueFull` is raised at once when that many wait.
        backend: What keeps it: "redis", or without Redis "slots" or "coordinator". Locks of different backends do not
            exclude each other.
        endpoint: The Nexus endpoint of a lock service, perhaps in another namespace, whose lock it is; `backend` does
            not count then.

    Raises:
        ValueError: A parameter is wrong. It is an `ApplicationError` too, and fails the run.
    """
    terms = as_usage_error(ResourceTerms.checked, name, 1, lease, max_waiters)
    return Lock(terms, _backend(backend, terms, endpoint))


def semaphore(
    name: str,
    capacity: int,
    *,
    lease: Duration = 30.0,
    max_waiters: int | None = None,
    per_key: int | None = None,
    rate: Rate | Literal[0] | None = None,
    per_key_rate: Rate | Literal[0] | None = None,
    max_waiters_per_key: int | None = None,
    backend: str = "redis",
    endpoint: str | None = None,
) -> Semaphore:
    """The semaphore of that name.

    Args:
        name: Of the resource, at most 512 bytes. Services that use `redlease` with the same Redis share it.
        capacity: Units that may be held at once. A value that differs from the one last declared replaces it.
        lease: How long a permit stays valid without renewal, in seconds or as a timedelta.
        max_waiters: `QueueFull` is raised at once when that many wait.
        per_key: Units that requests with one `key` may hold at once; 0 for no such limit. A key at its limit does not
            hold up others. None leaves the setting of the resource as it is, here and in the next two.
        rate: How many grants there may be in a time, as a `Rate`; 0 for no such limit.
        per_key_rate: The same for the requests of one key.
        max_waiters_per_key: `QueueFull` is raised at once when that many requests with its `key` wait.
        backend: What keeps it: "redis", or without Redis "slots" or "coordinator", which know no rates; slots know no
            keys either. Semaphores of different backends do not exclude each other.
        endpoint: The Nexus endpoint of a lock service, perhaps in another namespace, whose semaphore it is; `backend`
            does not count then.

    Raises:
        ValueError: A parameter is wrong. It is an `ApplicationError` too, and fails the run.
    """
    rates = {"rate": rate, "per_key_rate": per_key_rate}
    of_keys = {"per_key": per_key, "max_waiters_per_key": max_waiters_per_key}
    terms = as_usage_error(ResourceTerms.checked, name, capacity, lease, max_waiters, **of_keys, **rates)
    implementation = _backend(backend, terms, endpoint)
    if any(each is not None for each in of_keys.values()) and not implementation.has_turns:
        raise without_keys(name, implementation.name)
    if any(each is not None for each in rates.values()) and not implementation.has_rates:
        raise without_rates(name, implementation.name)
    return Semaphore(terms, implementation)


def rwlock(name: str, *, lease: Duration = 30.0, max_waiters: int | None = None, backend: str = "redis") -> RWLock:
    """The read-write lock of that name: any number of readers, or one writer.

    A lock or semaphore of the same name would be the same resource with another capacity: give each its own name.

    Args:
        name: Of the resource, at most 512 bytes. Services that use `client.rwlock` with the same Redis share it.
        lease: How long a permit stays valid without renewal, in seconds or as a timedelta.
        max_waiters: `QueueFull` is raised at once when that many wait, readers and writers together.
        backend: What keeps it: "redis", or without Redis "coordinator", which keeps some 1,200 readers and waiters in
            all. Locks of different backends do not exclude each other.

    Raises:
        ValueError: A parameter is wrong, or the backend is "slots", on which a permit is one unit. It is an
            `ApplicationError` too, and fails the run.
    """
    terms = as_usage_error(ResourceTerms.checked, name, limits.CAPACITY_MAX, lease, max_waiters)
    if backend == SlotBackend.name:
        message = (
            f"resource {name!r}: backend='slots' has no read-write locks, as a slot is one unit and a writer holds "
            "all: take backend='coordinator' or 'redis'"
        )
        raise usage_error(message)
    return RWLock(terms, _backend(backend, terms))
