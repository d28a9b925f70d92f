"""Durable locks and counting semaphores on Redis for async services."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import (
    AcquireTimeout,
    ClientClosed,
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
    from ._core.client import Redlease
    from ._core.hold import Hold, HoldRequest
    from ._core.limits import Duration, Rate
    from ._core.options import Durability, OnLost
    from ._core.primitives.all_of import AllRequest, Holds
    from ._core.primitives.checkpoints import SequenceProgress
    from ._core.primitives.leader import Leader, Term
    from ._core.primitives.rwlock import RWLock
    from ._core.primitives.semaphore import Lock, Semaphore
    from ._core.primitives.sequence import Retry, SequenceRun
    from .guards.redis import Guard
    from .models import DamagedEntry, HistoryEntry, Limit, Permit, Position, Snapshot, Waiter

__version__ = "0.1.0"  # the build reads it for the wheel

__all__ = [
    "AcquireTimeout",
    "AllRequest",
    "ClientClosed",
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
    "AllRequest": "_core.primitives.all_of",
    "DamagedEntry": "models",
    "Durability": "_core.options",
    "Duration": "_core.limits",
    "Guard": "guards.redis",
    "HistoryEntry": "models",
    "Hold": "_core.hold",
    "HoldRequest": "_core.hold",
    "Holds": "_core.primitives.all_of",
    "Leader": "_core.primitives.leader",
    "Limit": "models",
    "Lock": "_core.primitives.semaphore",
    "OnLost": "_core.options",
    "Permit": "models",
    "Position": "models",
    "RWLock": "_core.primitives.rwlock",
    "Rate": "_core.limits",
    "Redlease": "_core.client",
    "Retry": "_core.primitives.sequence",
    "Semaphore": "_core.primitives.semaphore",
    "SequenceProgress": "_core.primitives.checkpoints",
    "SequenceRun": "_core.primitives.sequence",
    "Snapshot": "models",
    "Term": "_core.primitives.leader",
    "Waiter": "models",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _LATER[name] not in {"_core.limits", "models", "_core.options"}:  # which load no redis-py
        # Modules of redis-py import each other in circles, so a thread that imports one of them while another thread
        # imports the package meets a deadlock of import locks. The package first: then threads wait for each other.
        import_module("redis")
    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | set(__all__))
