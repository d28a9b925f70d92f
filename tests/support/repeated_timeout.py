"""A test's timeout that comes again, for the case that a task takes the first one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(settings: Any) -> Generator[None, object, object]:
    """Repeat the alarm that pytest-timeout sets: its exception may be raised inside of a task that nobody awaits."""
    was_set = yield
    if settings.method == "signal":
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, settings.timeout)
    return was_set
