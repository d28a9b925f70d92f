"""Simulated histories keep the promises, and a bug planted in the client or in the scripts does not pass them."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import redlease

import simulate
import stories

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
logger = logging.getLogger(__name__)

PROOF = Path(__file__).parents[2] / "proof"
BUGS = sorted((PROOF / "bugs" / "client").glob("*.patch"))
FOUND_WITHIN = 2000  # histories; five times as many as were needed


@pytest.mark.parametrize(("engine", "histories"), [("model", 200), ("scripts", 10)])
def test_simulated_histories_keep_the_promises(engine: str, histories: int) -> None:
    """Processes hold, wait, give up and adopt under faults that the seeds draw, and no promise is broken."""
    done = simulate.simulate_some(simulate.seeds(histories), engine)
    assert done.violations == []
    assert done.counts["grants"] > 5 * histories
    assert done.counts["losses"] > 0


@pytest.mark.parametrize("seed", ["7655", "7717", "8487", "21573", "28577"])
def test_what_the_judge_once_misread(seed: str) -> None:
    """One call grants to several, told in any order; and a clock is set back over the end of a permit that is gone."""
    assert simulate.simulate_some([f"20261125-{seed}"], "model").violations == []


@pytest.mark.parametrize("patch", BUGS, ids=lambda patch: patch.stem)
def test_a_bug_planted_in_the_client_is_found(patch: Path, tmp_path: Path) -> None:
    """The simulation of a client with a bug breaks a promise, and says with which seed."""
    shutil.copytree(Path(redlease.__file__).parent, tmp_path / "redlease")
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    done = subprocess.run(
        [sys.executable, str(PROOF / "simulate.py"), "--until-found", "--histories", str(FOUND_WITHIN)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROOF)])},
        capture_output=True,
        text=True,
        check=False,
    )
    logger.info("%s: %s", patch.stem, done.stdout)
    assert done.returncode == 1, done.stderr
    assert "violations: 1" in done.stdout


def test_a_violation_is_shrunk_to_what_it_needs() -> None:
    """Of a story with a defect at one step only that step, and no fault, is left."""
    story = stories.draw("5")
    wrong = stories.Step("nothing", 0.0)  # which no task can do
    first = stories.Actor(story.actors[0].process, (*story.actors[0].steps, wrong))
    smaller = simulate.shrink(replace(story, actors=(first, *story.actors[1:])), "model")
    assert smaller.faults == ()
    assert smaller.actors == (stories.Actor(first.process, (wrong,)),)
