"""The scripts on real servers against the model: random calls, late copies among them, while leases end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from redlease.protocol.replies import Status

from real_clock import RealClock

if TYPE_CHECKING:
    from servers import Server

logger = logging.getLogger(__name__)

TWO_OUTCOMES = ("release", "renew", "adopt", "reduce", "check", "limit", "supersede")


@pytest.mark.timeout(3600)
def test_random_calls_do_what_the_model_does(server: Server, prefix: str, seed: int, is_long: bool) -> None:
    """Each reply, and all that inspect tells after it, is what the model says, and every outcome occurs."""
    comparison = RealClock(server, prefix, seed)
    comparison.run(1_000_000 if is_long else 4_000)
    seen, forgotten = comparison.judge.seen, comparison.judge.forgotten
    logger.info("%d calls, idle resources deleted: %d, stalls: %d", seen.total(), forgotten, comparison.stalls)
    expected = {("acquire", status) for status in Status} | {(name, done) for name in TWO_OUTCOMES for done in (0, 1)}
    expected |= {("beat", status) for status in (Status.GRANTED, Status.QUEUED, Status.LAPSED)}
    assert expected <= seen.keys()
    assert forgotten > 0
