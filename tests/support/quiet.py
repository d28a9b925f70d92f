"""Noise: what the SDK, asyncio and Python log or warn of when something went wrong that no result shows."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from typing import TYPE_CHECKING

from temporalio.runtime import LogForwardingConfig, LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long the SDK's core keeps back what it logs, in seconds, with as much again for a busy machine.
CORE_TELLS_WITHIN = 0.02

NOISE = (
    # asyncio, and Python where it can raise no more.
    r"was never retrieved",
    r"was never awaited",
    r"Task was destroyed but it is pending",
    r"coroutine ignored GeneratorExit",
    r"Exception ignored in",
    r"\w+Warning: ",
    # A workflow that ended over a running handler, see `_warn_if_unfinished_handlers`: [TMPRL1102].
    r"[Uu]nfinished|handlers are still running",
    # A workflow task that failed: by an error in workflow code, a deadlock or a changed history.
    r"Failed (activation|handling activation|converting activation|encoding completion|completing activation)",
    r"[Nn]on-?[Dd]etermini|TMPRL110[01]",
    # Code that goes on while its workflow is being evicted.
    r"\bIgnoring\b",
    r"evicting workflow|running eviction job|Eviction processed, but|could not be evicted",
    # What a worker was given and does not know, and what broke inside it.
    r"is not registered on this worker",
    r"Failed completing activity task|Exception handling failed|Final heartbeat task didn't trap",
    r"Worker failed, shutting down|Activity task raised during worker shutdown",
    r"in (default|custom) exception handler",
    r"a task of the relay failed",
)
# The SDK was told to cancel an activity that ended at the same moment, which is nobody's fault; and pydantic before 2.8
# imports a module of its own as it first checks a value, in a workflow's sandbox too.
HARMLESS = r"Cannot find activity to cancel for token|Module annotated_types was imported after initial workflow load"
_NOISE = re.compile("|".join(NOISE))


def hear_the_core() -> None:
    """Let the SDK's core, which by itself prints its warnings, log them as Python does; once in a process."""
    Runtime.set_default(
        Runtime(
            telemetry=TelemetryConfig(
                logging=LoggingConfig(
                    filter=TelemetryFilter(core_level="WARN", other_level="ERROR"),
                    forwarding=LogForwardingConfig(logger=logging.getLogger("temporalio.core")),
                )
            )
        )
    )


class Quiet(logging.Handler):
    """Listens to all that is logged and warned of, and tells what of that is noise."""

    def __init__(self) -> None:
        """Begin with nothing heard and nothing expected."""
        super().__init__()
        self._heard: list[str] = []
        self._expected: list[re.Pattern[str]] = []
        self._allowed: list[re.Pattern[str]] = []

    def expect(self, pattern: str) -> None:
        """Let noise be that matches, as the test is about it; that nothing was heard that matches fails the test."""
        self._expected.append(re.compile(pattern))

    def allow(self, pattern: str) -> None:
        """Let noise be that matches, if there is some."""
        self._allowed.append(re.compile(pattern))

    def emit(self, record: logging.LogRecord) -> None:
        """Hear a log record with its traceback; logging calls this, from any thread."""
        self.hear(self.format(record))

    def hear(self, text: str) -> None:
        """Hear a text, such as what a process wrote to its standard error."""
        self._heard.append(text)

    def problems(self) -> list[str]:
        """Return the noise that nobody expected, and what was expected and did not come."""
        borne = self._expected + self._allowed
        heard = [text for text in self._heard if not re.search(HARMLESS, text)]
        noise = [text for text in heard if _NOISE.search(text) and not any(one.search(text) for one in borne)]
        absent = [one.pattern for one in self._expected if not any(one.search(text) for text in self._heard)]
        return [f"noise: {text}" for text in noise] + [f"expected, and not heard: {pattern}" for pattern in absent]

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen for as long as the block runs.

        Warnings are heard rather than raised: raised in workflow code, one would fail the workflow task for ever, and
        the test would end by its timeout.
        """
        logging.getLogger().addHandler(self)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = lambda message, category, filename, lineno, *_: self.hear(
                    warnings.formatwarning(message, category, filename, lineno)
                )
                yield
        finally:
            logging.getLogger().removeHandler(self)
