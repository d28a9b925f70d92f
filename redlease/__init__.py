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
    from .hold import Hold, HoldRequest
    from .limits import Duration
    from .options import OnLost
    from .semaphore import Lock, Semaphore

__version__ = "0.1.0"  # the build reads it for the wheel

__all__ = [
    "AcquireTimeout",
    "Duration",
    "Hold",
    "HoldRequest",
    "LeaseLost",
    "Lock",
    "NotReplicated",
    "OnLost",
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

# Names that need the client are imported on first access: errors and plain data are also used where the client must
# not be loaded, for example in the sandbox of a Temporal workflow.
_LATER = {
    "Duration": "limits",
    "Hold": "hold",
    "HoldRequest": "hold",
    "Lock": "semaphore",
    "OnLost": "options",
    "Redlease": "client",
    "Semaphore": "semaphore",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
