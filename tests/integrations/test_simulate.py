"""Simulation: the page's tests, in a run of pytest of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from how_to import Project

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_tests_of_the_page(tmp_path: Path) -> None:
    """They pass, with every warning an error."""
    Project(tmp_path, "").write("simulate")
    command = [sys.executable, "-X", "dev", "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", "-p", "no:valkey"]
    options = ["-o", "asyncio_default_fixture_loop_scope=function", "."]
    done = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert "3 passed" in done.stdout, done.stdout + done.stderr
