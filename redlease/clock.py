"""The local clock that leases are watched by."""

from __future__ import annotations

import time
from time import clock_gettime

# CLOCK_BOOTTIME goes on while the machine is suspended, as the server's clock does; CLOCK_MONOTONIC stands still then.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_ms() -> float:
    """Milliseconds of a local clock that is never set and counts suspend where the system has such a clock.

    Only differences mean anything. It is never compared with the server's clock.
    """
    return clock_gettime(_CLOCK) * 1000
