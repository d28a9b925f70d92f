"""pytest: the page's tests under pytest-asyncio and under the plugin of anyio, in a run of their own."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

import pytest

from how_to import Project

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_the_tests_of_the_page(tmp_path: Path) -> None:
    """They pass side by side with both plugins, every warning an error."""
    Project(tmp_path, "").write("pytest")
    # Where redlease is not installed its entry point is missing, and the plugin is named instead.
    installed = any(point.value == "redlease.testing.plugin" for point in entry_points(group="pytest11"))
    plugin = () if installed else ("-p", "redlease.testing.plugin")
    command = [sys.executable, "-X", "dev", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-p", "no:valkey"]
    options = [*plugin, "-o", "asyncio_mode=strict", "-o", "asyncio_default_fixture_loop_scope=function", "."]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=50, check=False)
    assert "5 passed" in done.stdout, done.stdout + done.stderr
    assert "Task was destroyed" not in done.stdout + done.stderr
