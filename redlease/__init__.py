"""Durable locks and counting semaphores on Redis for async services."""

from .client import Redlease
from .errors import (
    AcquireTimeout,
    LeaseLost,
    NotReplicated,
    QueueFull,
    RedleaseError,
    StaleFence,
    Unavailable,
    Withdrawn,
)
from .hold import Hold
from .models import Permit, Snapshot, Waiter
from .semaphore import Lock, Semaphore

__all__ = [
    "AcquireTimeout",
    "Hold",
    "LeaseLost",
    "Lock",
    "NotReplicated",
    "Permit",
    "QueueFull",
    "Redlease",
    "RedleaseError",
    "Semaphore",
    "Snapshot",
    "StaleFence",
    "Unavailable",
    "Waiter",
    "Withdrawn",
]
