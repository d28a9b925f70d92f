"""The local clock for lease deadlines, and a wait with a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import time
from time import clock_gettime

# CLOCK_BOOTTIME runs while the machine is suspended, like the server's clock; CLOCK_MONOTONIC stops then.
CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

# The server rounds its clock down to whole ms: the start of a lease may be this much earlier than the call.
SERVER_TICK_MS = 1.0


def now_ms() -> float:
    """Returns ms of a local clock that is never set and, if the system has such a clock, runs during suspend.

    Only differences are meaningful. It is never compared with the server's clock.
    """
    return clock_gettime(CLOCK) * 1000


async def pause(event: asyncio.Event, seconds: float | None) -> None:
    """Returns when the event is set, or after `seconds`; None waits forever."""
    # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that comes at the same time as the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
