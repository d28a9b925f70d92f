"""Bugs planted in the scripts, as the patches of proof/bugs: the short comparison with the model catches each."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import loss_cases
import pytest
import redis
from many_keys import ManyKeys
from stopped_scripts import History, RealStopping, stopping

import redlease
from redlease._core.protocol import scripts

from random_calls import RandomCalls
from set_clock import RealEngine, SetClock

if TYPE_CHECKING:
    from servers import Server

logger = logging.getLogger(__name__)

BUGS = sorted((Path(__file__).parents[3] / "proof" / "bugs").glob("*.patch"))
BUGS_OF_REPAIR = sorted((Path(__file__).parents[3] / "proof" / "bugs" / "repair").glob("*.patch"))
BUGS_OF_KEYS = sorted((Path(__file__).parents[3] / "proof" / "bugs" / "keys").glob("*.patch"))
BUGS_OF_STOPPED = sorted((Path(__file__).parents[3] / "proof" / "bugs" / "stopped").glob("*.patch"))
RESOURCES, CALLS_EACH = 1000, 250
# The first resource of a search from 0 on that shows a bug which few of them show: to begin with it spares minutes.
RARE = {
    "all-of-a-key-get-the-next-token": 21,
    "dead-first-of-a-parked-key": 425,
    "fast-path-grants-the-dead": 336,
    "full-counts-the-dead": 21,
    "full-key-counts-the-dead": 474,
    "heavy-requests-hold-up-other-keys": 810,
    "lifted-limit-leaves-keys-parked": 121,
    "rate-outlived-by-nothing": 66,
    "replaced-units-go-to-others": 146,
    "replaces-more-than-it-needs": 32,
    "tokens-of-keys-are-forgotten": 21,
    "who-leaves-costs-a-turn": 201,
}


def planted(patch: Path, directory: Path) -> dict[str, scripts.Script]:
    """Return the scripts with a bug."""
    shutil.copytree(Path(redlease.__file__).parent / "_core" / "lua", directory / "lua")
    subprocess.run(["git", "apply", str(patch)], cwd=directory, check=True)
    with mock.patch.object(scripts, "read_lua", lambda _, name: (directory / "lua" / f"{name}.lua").read_text()):
        return {each.name: scripts.operation(each.name, " ".join(each.args[1:])) for each in scripts.SCRIPTS}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("real_engine", ["valkey9"])
@pytest.mark.parametrize("patch", BUGS, ids=lambda patch: patch.stem)
def test_a_planted_bug_is_caught(server: Server, patch: Path, tmp_path: Path) -> None:
    """Random calls at given times differ from the model, or the script fails."""
    buggy = planted(patch, tmp_path)
    assert any(script.text != buggy[script.name].text for script in scripts.SCRIPTS)
    first = RARE.get(patch.stem, 0)
    with RealEngine(server, buggy) as engine, pytest.raises((AssertionError, redis.ResponseError)) as caught:
        for number in [*range(first, RESOURCES), *range(first)]:
            calls = RandomCalls.in_set_time(0, number)
            SetClock(calls, engine).run(calls, CALLS_EACH)
    logger.info("%s: resource %d, %s", patch.stem, number, str(caught.value).partition("\n")[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("real_engine", ["valkey9"])
@pytest.mark.parametrize("patch", BUGS_OF_REPAIR, ids=lambda patch: patch.stem)
def test_a_planted_bug_of_the_repair_is_caught(server: Server, patch: Path, tmp_path: Path) -> None:
    """After a loss of data a script fails, or not all is served, or too much."""
    buggy = planted(patch, tmp_path)
    assert any(script.text != buggy[script.name].text for script in scripts.SCRIPTS)
    with RealEngine(server, buggy) as engine, pytest.raises(AssertionError) as caught:
        loss_cases.lose_a_limit(engine)
        for kind in loss_cases.KINDS:
            loss_cases.lose_each(engine, kind)
        for number in range(RESOURCES):
            loss_cases.play(engine, 0, number)
    logger.info("%s: %s", patch.stem, str(caught.value).partition("\n")[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("real_engine", ["valkey9"])
@pytest.mark.parametrize("patch", BUGS_OF_STOPPED, ids=lambda patch: patch.stem)
def test_a_planted_bug_of_stopped_calls_is_caught(server: Server, patch: Path, tmp_path: Path) -> None:
    """After a call that an error stopped, too much is held, or not all is served."""
    buggy = planted(patch, tmp_path)
    assert any(script.text != buggy[script.name].text for script in scripts.SCRIPTS)
    stopped = {name: stopping(script) for name, script in buggy.items()}
    with RealStopping(server, stopped) as engine, pytest.raises(AssertionError) as caught:
        for number in range(RESOURCES):
            History(engine, "planted", number).stop_each()
    logger.info("%s: %s", patch.stem, str(caught.value).partition("\n")[0])


@pytest.mark.slow
@pytest.mark.parametrize("real_engine", ["valkey9"])
@pytest.mark.parametrize("patch", BUGS_OF_KEYS, ids=lambda patch: patch.stem)
def test_a_planted_bug_of_many_keys_is_caught(server: Server, patch: Path, tmp_path: Path) -> None:
    """After a raised limit units are idle, or a key is passed over again and again."""
    buggy = planted(patch, tmp_path)
    assert any(script.text != buggy[script.name].text for script in scripts.SCRIPTS)
    with RealEngine(server, buggy) as engine, pytest.raises(AssertionError) as caught:
        for number in range(RESOURCES):
            ManyKeys(engine, f"0 {number}").play(200)
    logger.info("%s: %s", patch.stem, str(caught.value).partition("\n")[0])
