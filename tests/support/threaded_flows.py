"""A workflow whose activity, in a thread, takes a permit of a pool by `redlease.sync`."""

from __future__ import annotations

import threading
import time
from contextvars import copy_context
from datetime import timedelta
from typing import TYPE_CHECKING

from temporalio import activity, workflow
from temporalio.exceptions import CancelledError

if TYPE_CHECKING:
    from redlease.sync import Semaphore


@workflow.defn
class Threaded:
    """Runs the activity until it is cancelled."""

    @workflow.run
    async def run(self) -> None:
        await workflow.execute_activity(
            "hold",
            start_to_close_timeout=timedelta(minutes=5),
            heartbeat_timeout=timedelta(seconds=30),
            cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        )


class Holding:
    """The activity.

    Attributes:
        ended_after: How long each activity went on after it had been cancelled, in seconds.
    """

    def __init__(self, pool: Semaphore) -> None:
        self._pool = pool
        self.ended_after: list[float] = []

    @activity.defn
    def hold(self) -> None:
        """Hold a permit until the activity is cancelled."""
        cancelled: list[float] = []
        beating = threading.Thread(target=copy_context().run, args=(_beat, cancelled))
        beating.start()
        try:
            with self._pool.hold():
                while True:
                    time.sleep(0.01)
        except CancelledError:
            ended = time.monotonic()
            beating.join()
            self.ended_after.append(ended - cancelled[0])
            raise


def _beat(cancelled: list[float]) -> None:
    """Tell the server that the activity lives, until that tells that it is cancelled."""
    while not activity.is_cancelled():
        activity.heartbeat()
        activity.wait_for_cancelled_sync(0.1)
    cancelled.append(time.monotonic())
