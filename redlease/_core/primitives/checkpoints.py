"""The checkpoints of a sequence: its keys, its scripts, and their calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from redlease._core import limits
from redlease._core.hold import Hold, lease_lost
from redlease._core.operations import GONE, Operations
from redlease._core.protocol.encoding import Resource, bulk
from redlease._core.protocol.scripts import operation
from redlease.errors import RedleaseError

ID_BYTES_MAX = 256
PAGE_BYTES = 100_000  # of the results that one call reads


class SequenceKeys(Resource):
    """The keys of a resource, and after them the key of one sequence."""

    __slots__ = ()

    def __init__(self, resource: Resource, id: str) -> None:  # noqa: A002
        limits.checked_text("id", id, ID_BYTES_MAX)
        key = f"{resource.state_key.decode().removesuffix('state')}sequence:{id}"
        self.name, self.state_key = resource.name, resource.state_key
        self.packed_keys = resource.packed_keys + bulk(key.encode())


CHECKPOINT = operation(
    *("checkpoint", "ticket fence items total index result error keep_ms"), package=__package__, keys=5
)
PROGRESS = operation("progress", "first bytes", package=__package__, keys=5)
FORGET = operation("forget", "", package=__package__, keys=5)
SCRIPTS = (CHECKPOINT, PROGRESS, FORGET)


@dataclass(frozen=True)
class SequenceProgress:
    """How far a sequence is.

    Attributes:
        resource: The name of the resource.
        id: The id of the sequence.
        handled: Items done.
        queued: Items not done, including the current one.
        error: Why the last attempt at the next item failed; None if it has not failed.
    """

    resource: str
    id: str
    handled: int
    queued: int
    error: str | None


class Plan(NamedTuple):
    """What a run of a sequence is to do. `items`: a digest of them; `keep_ms`: how long checkpoints are kept."""

    items: str
    total: int
    keep_ms: int


class Checkpoints:
    """What the server keeps of one sequence.

    A call that a hold protects has no time limit: it is repeated until the server answers or the hold is lost.
    """

    def __init__(self, operations: Operations, resource: Resource, id: str) -> None:  # noqa: A002
        self._operations = operations
        self._keys = SequenceKeys(resource, id)
        self._id = id

    async def begin(self, hold: Hold, plan: Plan) -> int:
        """Begins or resumes the sequence; returns how many items are done.

        Raises:
            LeaseLost: The permit is no longer held under its fence; as for the following.
            ValueError: The sequence has other items.
        """
        handled = await self._write(hold, plan, -1)
        if handled < 0:
            raise ValueError(
                f"resource {self._keys.name!r}: sequence {self._id!r} has other items. None was begun: give each list "
                "of items an id of its own, or forget the former sequence"
            )
        return handled

    async def record(self, hold: Hold, plan: Plan, index: int, result: str) -> None:
        """Writes the result of the next item; does nothing if it is written already."""
        self._check(await self._write(hold, plan, index, result=result))

    async def record_error(self, hold: Hold, plan: Plan, index: int, why: str) -> None:
        """Writes why an attempt at the next item failed."""
        self._check(await self._write(hold, plan, index, why=why))

    async def _write(self, hold: Hold, plan: Plan, index: int, *, result: str = "", why: str = "") -> int:
        hold.check()  # a handler may have gone on after the loss, which cancels only once
        self._operations.connect(*SCRIPTS)
        held, handled = await self._operations.run(
            *(self._keys, CHECKPOINT, hold.ticket, hold.fence, plan.items, plan.total),
            *(index, result, why, plan.keep_ms),
            limit_ms=None,
        )
        if not held:
            raise lease_lost(self._keys.name, hold.ticket, hold.fence, GONE)
        return int(handled)

    def _check(self, handled: int) -> None:
        if handled < 0:
            raise self.gone()

    def gone(self) -> RedleaseError:
        """Returns the error for a sequence that was removed while it ran."""
        message = (
            f"resource {self._keys.name!r}: progress of sequence {self._id!r} is gone while it runs: it was forgotten "
            "or has expired, or the server lost it. Call it again: what is not known as done is handled then"
        )
        return RedleaseError(message, resource=self._keys.name)

    async def results(self, first: int) -> list[str]:
        """Returns the results of done items from that index on, as many as one reply may have."""
        self._operations.connect(*SCRIPTS)
        _, _, _, *results = await self._operations.run(self._keys, PROGRESS, first, PAGE_BYTES, limit_ms=None)
        if not results:
            raise self.gone()
        return [result.decode() for result in results]

    async def progress(self) -> SequenceProgress | None:
        """Returns how far the sequence is; None if it has not begun."""
        self._operations.connect(*SCRIPTS)
        total, handled, error = await self._operations.run(self._keys, PROGRESS, 0, 0)
        if not total:
            return None
        return SequenceProgress(self._keys.name, self._id, handled, total - handled, error.decode() or None)

    async def forget(self) -> bool:
        """Removes the sequence; returns whether there was one."""
        self._operations.connect(*SCRIPTS)
        return bool((await self._operations.run(self._keys, FORGET))[0])
