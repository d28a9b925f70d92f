"""The scripts on real servers against the model: random calls, late copies among them, while leases end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

from redlease._core.protocol.replies import Status

from real_clock import RealClock

if TYPE_CHECKING:
    from servers import Server

logger = logging.getLogger(__name__)

TWO_OUTCOMES = ("release", "renew", "adopt", "reduce", "check", "limit", "supersede")
MOST_CALLS = 40_000


@pytest.mark.timeout(3600)
def test_random_calls_do_what_the_model_does(server: Server, prefix: str, seed: int, is_long: bool) -> None:
    """Each reply, and all that inspect tells after it, is what the model says, and every outcome occurs."""
    expected = {("acquire", status) for status in Status} | {(name, done) for name in TWO_OUTCOMES for done in (0, 1)}
    expected |= {("beat", status) for status in (Status.GRANTED, Status.QUEUED, Status.LAPSED)}
    comparison = RealClock(server, prefix, seed)
    judge = comparison.judge
    seen = judge.seen
    comparison.run(1_000_000 if is_long else 4_000)
    # Which leases end, and which idle resources the server deletes, depends on the machine's speed.
    while not (expected <= seen.keys() and judge.forgotten) and seen.total() < MOST_CALLS:
        comparison.run(seen.total() + 4_000)
    logger.info("%d calls, idle resources deleted: %d, stalls: %d", seen.total(), judge.forgotten, comparison.stalls)
    assert expected <= seen.keys()
    assert judge.forgotten > 0
