"""Finalizers and signal handlers call `redlease.sync`, at whatever step of it they interrupt, and nothing hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "support" / "reentry.py"


def outcome(kind: str, url: str, prefix: str, rounds: int) -> str:
    """Run the program; return what it prints, or fail with what it says of threads that hang."""
    command = [sys.executable, "-W", "ignore", str(PROGRAM), kind, url, prefix, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_at_each_step_redlease_may_be_called(url: str, prefix: str, is_long: bool) -> None:
    """A call between any two bytecodes of another call ends, and so does that: from the first use of a client on."""
    assert outcome("at-each-step", url, prefix, 1 if is_long else 11) == "free"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collected", "signalled"])
def test_finalizers_and_handlers_take_and_release(url: str, prefix: str, kind: str, is_long: bool) -> None:
    """Finalizers, with a collection at every allocation, and handlers of signals hold permits, and no thread hangs."""
    assert outcome(kind, url, prefix, 100_000 if is_long else 2000) == "free"
