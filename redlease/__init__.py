"""Durable locks and counting semaphores on Redis for async services."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AcquireTimeout,
    LeaseLost,
    NeverFits,
    NotReplicated,
    QueueFull,
    RedleaseError,
    SequenceFailed,
    StaleFence,
    Superseded,
    Unavailable,
    Withdrawn,
)

if TYPE_CHECKING:
    from .client import Redlease
    from .guards.redis import Guard
    from .hold import Hold, HoldRequest
    from .limits import Duration, Rate
    from .models import DamagedEntry, HistoryEntry, Limit, Permit, Position, Snapshot, Waiter
    from .options import Durability, OnLost
    from .primitives.all_of import AllRequest, Holds
    from .primitives.checkpoints import SequenceProgress
    from .primitives.leader import Leader, Term
    from .primitives.rwlock import RWLock
    from .primitives.semaphore import Lock, Semaphore
    from .primitives.sequence import Retry, SequenceRun

__version__ = "0.1.0"  # the build reads it for the wheel

__all__ = [
    "AcquireTimeout",
    "AllRequest",
    "DamagedEntry",
    "Durability",
    "Duration",
    "Guard",
    "HistoryEntry",
    "Hold",
    "HoldRequest",
    "Holds",
    "Leader",
    "LeaseLost",
    "Limit",
    "Lock",
    "NeverFits",
    "NotReplicated",
    "OnLost",
    "Permit",
    "Position",
    "QueueFull",
    "RWLock",
    "Rate",
    "Redlease",
    "RedleaseError",
    "Retry",
    "Semaphore",
    "SequenceFailed",
    "SequenceProgress",
    "SequenceRun",
    "Snapshot",
    "StaleFence",
    "Superseded",
    "Term",
    "Unavailable",
    "Waiter",
    "Withdrawn",
]

# All but the errors are imported on first access. Errors and plain data are also used where the client must not be
# loaded, for example in the sandbox of a Temporal workflow; and who only names an error needs no dataclasses.
_LATER = {
    "AllRequest": "primitives.all_of",
    "DamagedEntry": "models",
    "Durability": "options",
    "Duration": "limits",
    "Guard": "guards.redis",
    "HistoryEntry": "models",
    "Hold": "hold",
    "HoldRequest": "hold",
    "Holds": "primitives.all_of",
    "Leader": "primitives.leader",
    "Limit": "models",
    "Lock": "primitives.semaphore",
    "OnLost": "options",
    "Permit": "models",
    "Position": "models",
    "RWLock": "primitives.rwlock",
    "Rate": "limits",
    "Redlease": "client",
    "Retry": "primitives.sequence",
    "Semaphore": "primitives.semaphore",
    "SequenceProgress": "primitives.checkpoints",
    "SequenceRun": "primitives.sequence",
    "Snapshot": "models",
    "Term": "primitives.leader",
    "Waiter": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LATER[name] not in {"limits", "models", "options"}:  # which load no redis-py
        # Modules of redis-py import each other in circles, so a thread that imports one of them while another thread
        # imports the package meets a deadlock of import locks. The package first: then threads wait for each other.
        import_module("redis")
    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
