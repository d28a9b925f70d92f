"""The task that runs a block under a permit: a loss cancels it, and the block takes that cancellation back."""

from __future__ import annotations

import asyncio


class BlockTask:
    """Cancels the task that entered a block, and tells that cancellation from those that others requested.

    As in `asyncio.timeout`, a count of the task's cancellations when it enters shows at the end whether one is left
    that the block did not request. No I/O and no await: for services and for workflows.
    """

    task: asyncio.Task[object] | None = None  # what `enter` was given
    cancelled = False  # whether `cancel` has cancelled it, and `uncancel` has not taken that back
    _others = 0  # cancellations that were requested before it entered

    def enter(self, task: asyncio.Task[object] | None) -> None:
        """Makes this the task that `cancel` cancels."""
        self.task = task
        self._others = task.cancelling() if task is not None else 0

    def cancel(self, why: str) -> None:
        """Cancels the task, unless none has entered or it is done."""
        if self.task is not None and not self.task.done():
            self.cancelled = True
            self.task.cancel(f"redlease: {why}")

    def leave(self) -> bool:
        """Ends the block. Takes back what `cancel` requested; returns True if no other cancellation is requested.

        False as well if `cancel` requested none, and in any task but the one that entered.
        """
        current, entered, self.task = asyncio.current_task(), self.task, None
        if not self.cancelled or current is None or current is not entered:
            return False
        self.cancelled = False
        return current.uncancel() <= self._others
