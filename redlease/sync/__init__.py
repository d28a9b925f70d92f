"""The blocking face of redlease, for threads: every name of `redlease`, with the same parameters and errors.

    from redlease.sync import Redlease

What is `async with`, `async for` and `await` there is `with`, `for` and a plain call here. A hold without a block is
`pool.hold().acquire()`, and the results of a sequence are `client.sequence(...).results()`.
"""

from redlease import (
    AcquireTimeout,
    ClientClosed,
    DamagedEntry,
    Durability,
    Duration,
    HistoryEntry,
    LeaseLost,
    Limit,
    NeverFits,
    NotReplicated,
    Permit,
    Position,
    QueueFull,
    Rate,
    RedleaseError,
    Retry,
    SequenceFailed,
    SequenceProgress,
    Snapshot,
    StaleFence,
    Superseded,
    Unavailable,
    Waiter,
    Withdrawn,
)

from .all_of import AllRequest, Holds
from .client import Redlease
from .guard import Guard
from .hold import Hold, HoldRequest, OnLost
from .leader import Leader
from .rwlock import RWLock
from .semaphore import Lock, Semaphore
from .sequence import SequenceRun
from .term import Term

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
