"""The local clock that leases are watched by, and waiting by it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from time import clock_gettime

# CLOCK_BOOTTIME goes on while the machine is suspended, as the server's clock does; CLOCK_MONOTONIC stands still then.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_ms() -> float:
    """Milliseconds of a local clock that is never set and counts suspend where the system has such a clock.

    Only differences mean anything. It is never compared with the server's clock.
    """
    return clock_gettime(_CLOCK) * 1000


async def pause(event: asyncio.Event, seconds: float | None) -> None:
    """Returns when the event is set, or so many seconds later."""
    # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that comes at the same time as the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
