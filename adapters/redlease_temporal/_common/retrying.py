"""Restarts work that fails, and logs each kind of failure once, not at each retry."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from temporalio.service import RPCError

from redlease import RedleaseError
from redlease._core import clock

logger = logging.getLogger("redlease.temporal")

RETRY_PAUSES_S = (0.1, 5.0)  # the first and the longest pause before work is restarted
TEXTS_MAX = 1000


class LogOnce:
    """Logs each failure once, until the work succeeds again."""

    def __init__(self) -> None:
        self._logged: dict[str, set[str]] = {}

    def warn(self, what: str, error: BaseException) -> None:
        """Logs a failure unless it is logged already; with a traceback if no outage explains it."""
        if len(self._logged) > TEXTS_MAX:
            self._logged.clear()
        logged = self._logged.setdefault(what, set())
        text = f"{type(error).__name__}: {error}"
        if text in logged or len(logged) > TEXTS_MAX:
            return
        logged.add(text)
        if isinstance(error, RedleaseError | RPCError | TimeoutError):
            logger.warning("%s: %s", what, text)
        else:
            logger.error("%s: %s", what, text, exc_info=error)

    def succeeded(self, what: str) -> None:
        """The work succeeded: if it fails again, that is logged again."""
        self._logged.pop(what, None)


async def retry_until_done(
    what: str,
    work: Callable[[], Awaitable[None]],
    pauses_s: tuple[float, float] = RETRY_PAUSES_S,
    once: LogOnce | None = None,
) -> None:
    """Runs work until it returns. After an exception it starts again, and must continue from the current state.

    Args:
        what: The name of the work in log messages.
        work: Called at the start and after each failure.
        pauses_s: The first and the longest pause before a restart. When the work has run for longer than the longest
            pause, pauses start over with the first.
        once: Pass one if more is logged about the same work.
    """
    first_s, longest_s = pauses_s
    once, failed, pause_s = once or LogOnce(), f"{what} failed, and is begun again", 0.0
    while True:
        began_ms = clock.now_ms()
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            await work()
        except Exception as error:  # noqa: BLE001  whatever it is, it is logged
            if clock.now_ms() - began_ms > (pause_s + longest_s) * 1000:
                once.succeeded(failed)
                pause_s = 0.0
            once.warn(failed, error)
            pause_s = min(max(first_s, 2 * pause_s), longest_s)
        else:
            return
