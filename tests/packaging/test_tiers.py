"""Nothing falls between `make test` and `make test-rest`, no test is run by both, and none goes on for ever."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest

from repeated_timeout import pytest_timeout_set_timer

ROOT = Path(__file__).parents[2]

# What a line of a recipe runs: settings of the environment, pytest, and its words, up to what happens when it fails.
RUN = re.compile(r"^((?:\w+=\S* )*)\S*/pytest --dist worksteal --numprocesses \d+ (.*?)(?: \|\| .*)?$", re.MULTILINE)


def runs_of(target: str) -> list[tuple[str, list[str]]]:
    """Return the settings and the words of each run of pytest that a target makes."""
    # A make that runs these tests has told its options to everything that it starts.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    said = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return [(settings, shlex.split(words)) for settings, words in RUN.findall(said.stdout)]


def collecting(*words: str) -> subprocess.Popen[str]:
    """Begin to collect what pytest would run."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def collected(process: subprocess.Popen[str]) -> set[str]:
    """Return the names of the tests."""
    said, _ = process.communicate()
    assert process.returncode == 0, said
    return {line for line in said.splitlines() if "::" in line}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_each_test_is_run_once() -> None:
    """By `make test` or by `make test-rest`, which repeats some in other surroundings."""
    first, rest = runs_of("test"), runs_of("test-rest")
    repeating = ("REDLEASE_TEMPORAL", "REDLEASE_PROTOCOL", "FAKEREDIS_LUA_VERSION", "PYTHONPATH")
    again = [words for settings, words in rest if any(name in settings for name in repeating)]
    once = [words for _, words in first + rest if words not in again]
    assert (len(first), len(once), bool(again)) == (1, 3, True)
    running = [collecting(*words) for words in ([], *once)]
    everything, *parts = [collected(process) for process in running]
    assert set.union(*parts) == everything
    assert not [one & other for one, other in combinations(parts, 2) if one & other]
    assert all((ROOT / word).exists() for words in again for word in words if word.startswith("tests/"))


HANGING = """
import asyncio, signal

async def takes_the_timeout():
    signal.pause()

async def test_that_hangs():
    task = asyncio.ensure_future(takes_the_timeout())
    await asyncio.Event().wait()
"""


@pytest.mark.slow
def test_a_timeout_that_a_task_takes_comes_again(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """As one did that was raised in a worker's task: that task ended, unheard, and the test waited for ever."""
    timers = pytestconfig.hook.pytest_timeout_set_timer.get_hookimpls()
    assert pytest_timeout_set_timer in [timer.function for timer in timers]
    (tmp_path / "conftest.py").write_text("from repeated_timeout import pytest_timeout_set_timer\n")
    (tmp_path / "test_hanging.py").write_text(HANGING)
    config = f"--config-file={ROOT / 'pyproject.toml'}"
    command = [sys.executable, "-m", "pytest", config, "-p", "no:cacheprovider", "-o", "timeout=2", str(tmp_path)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert said.returncode == pytest.ExitCode.TESTS_FAILED, said
    assert "Timeout (>2.0s)" in said.stdout
