"""The files for GitHub: they can be read, name what there is, and pin what they fetch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import ROOT, make_targets

FILES = sorted([*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"])
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def steps(path: Path) -> list[dict[str, Any]]:
    """Return all steps of a workflow."""
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_can_be_read(path: Path) -> None:
    """It is YAML, and not empty."""
    assert yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    """Each `make` names targets, each script exists, and no job may write more than it says or run for ever."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 90 for job in workflow["jobs"].values())
    for run in [step["run"] for step in steps(path) if "run" in step]:
        if run.startswith("make "):
            assert {word for word in run.split()[1:] if "=" not in word} <= make_targets(), run
        else:
            assert run.startswith("test ") or (ROOT / run).is_file(), run


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned(path: Path) -> None:
    """Each action is one commit, with the version that it is of beside it for those who read."""
    uses = re.findall(r"uses: (.*)", path.read_text())
    assert len(uses) == len([step for step in steps(path) if "uses" in step])
    assert not [each for each in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each)]


def test_every_python_that_is_declared_is_tested() -> None:
    """The matrix has the Pythons of the classifiers."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    declared = [each.split()[-1] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["quick"]["strategy"]["matrix"]["python"] == declared


def test_style_is_that_of_ci() -> None:
    """What runs before a commit is a ruff that the group `dev` allows."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    (allowed,) = (each.removeprefix("ruff~=") for each in dev if each.startswith("ruff"))
    assert repository["rev"].removeprefix("v").rpartition(".")[0] == allowed.rpartition(".")[0]
