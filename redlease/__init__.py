"""Durable locks and counting semaphores on Redis for async services."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from .models import Permit, Snapshot, Waiter

if TYPE_CHECKING:
    from .client import Redlease
    from .hold import Hold
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

# What needs the client is imported when it is first asked for: the errors and the plain data are of use where the
# client has no place, in the sandbox of a Temporal workflow for one.
_LATER = {"Redlease": "client", "Hold": "hold", "Lock": "semaphore", "Semaphore": "semaphore"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
