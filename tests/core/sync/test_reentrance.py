"""What interrupts `redlease.sync` at any step: finalizers, signal handlers, and exceptions from other threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[2] / "support"


def outcome(program: str, kind: str, url: str, prefix: str, rounds: int) -> str:
    """Run the program; return what it prints, or fail with what it says of threads that hang."""
    command = [sys.executable, "-W", "ignore", str(SUPPORT / program), kind, url, prefix, str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_at_each_step_redlease_may_be_called(url: str, prefix: str, is_long: bool) -> None:
    """A call between any two bytecodes of another call ends, and so does that: from the first use of a client on."""
    assert outcome("reentry.py", "at-each-step", url, prefix, 1 if is_long else 11) == "free"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["collected", "signalled"])
def test_finalizers_and_handlers_take_and_release(url: str, prefix: str, kind: str, is_long: bool) -> None:
    """Finalizers, with a collection at every allocation, and handlers of signals hold permits, and no thread hangs."""
    assert outcome("reentry.py", kind, url, prefix, 100_000 if is_long else 2000) == "free"


@pytest.mark.slow
def test_an_exception_at_any_step_leaves_nothing(url: str, prefix: str) -> None:
    """Wherever an exception may come, the permit is free at once, also while its traceback refers to the hold."""
    assert outcome("cancelled_threads.py", "at-each-step", url, prefix, 1) == "free"


def test_an_exception_between_two_slices_of_a_wait_ends_it(url: str, prefix: str) -> None:
    """The jump back of the loop that waits is a step at which one may come: the request is out of the queue."""
    assert outcome("cancelled_threads.py", "at-the-jump", url, prefix, 1) == "free"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["waiting", "working"])
def test_an_exception_from_another_thread_ends_a_wait(url: str, prefix: str, kind: str, is_long: bool) -> None:
    """It comes out of a wait within two seconds, and neither a permit nor a place in the queue is left."""
    assert outcome("cancelled_threads.py", kind, url, prefix, 100_000 if is_long else 2000) == "free"
