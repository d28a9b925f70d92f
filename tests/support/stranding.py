"""Runs that Temporal's test server strands, told from those that the library would.

That server refuses a workflow task which cancels a timer that fired while the task was under way, and neither times the
task out nor gives it out again: https://github.com/temporalio/sdk-java/issues/3088. A real server takes the cancel.

Nor is it one step there that a run ends and continues as new: whoever starts a workflow with its id in between gets it,
and two runs go on with one id. In a slot that is so, a second run believes to hold, and waits for the test to end it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Self

from temporal_tools import names_of

if TYPE_CHECKING:
    from temporalio.client import WorkflowHandle

logger = logging.getLogger(__name__)
CORE = logging.getLogger("temporalio.core")  # where `quiet` lets it log
STRANDED = "stranded by the test server"
STANDS = "stands still with no task"
REFUSED = "invalid history builder state for action"
TASK_S = 10.0  # after which a server gives a workflow task out again
STILL_S = 120.0  # longer than the test server takes, on a busy machine, to skip to the next timer of some run


class Stranding(logging.Handler):
    """Listens for such refusals, and tells which runs they have stranded."""

    def __init__(self) -> None:
        """Begin with none heard of."""
        super().__init__()
        self.refused = 0
        self._loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Listen from now on."""
        CORE.addHandler(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Listen no longer."""
        CORE.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Hear what the SDK's core logs, from whichever thread."""
        if REFUSED in record.getMessage():
            self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self.refused += 1
        self._heard.set()

    async def outcome(self, run: WorkflowHandle[Any, str], task_s: float = TASK_S, still_s: float = STILL_S) -> str:
        """Return what a run has returned, STRANDED or STANDS.

        It is stranded if a task was refused and nothing happens to the one that it is at for twice the time after which
        every task is given out again. It stands still if it has no task, and no timer that could be skipped to.
        """
        ended, heard = asyncio.create_task(run.result()), asyncio.create_task(self._heard.wait())
        try:
            await asyncio.wait([ended, heard], timeout=still_s, return_when=asyncio.FIRST_COMPLETED)
            while not ended.done():
                before = await names_of(run)
                has_task = before[-1] == "WORKFLOW_TASK_STARTED"
                await asyncio.wait([ended], timeout=2 * task_s if has_task else still_s)
                if not ended.done() and await names_of(run) == before:
                    return STRANDED if has_task else STANDS
            return ended.result()
        except asyncio.CancelledError:  # the test's time is over
            logger.warning("%s, with %d refusals heard, stands at %s", run.id, self.refused, (await names_of(run))[-9:])
            raise
        finally:
            heard.cancel()
            ended.cancel()
