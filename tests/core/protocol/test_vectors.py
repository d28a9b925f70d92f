"""The golden vectors of the protocol: the scripts do what they tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from redlease._core.protocol import scripts

import vectors
from vectors import Scenario

SCENARIOS = vectors.read()
PAGE = Path(__file__).parents[3] / "docs" / "protocol.md"


def test_the_page_names_every_script_and_its_arguments() -> None:
    """The table of docs/protocol.md has them as they are sent."""
    page = PAGE.read_text()
    for script in (scripts.ACQUIRE_FOR_KEY, *scripts.SCRIPTS[1:]):
        assert f"\n| {script.name} | `{' '.join(script.args[1:])}` |" in page


def test_the_file_is_what_the_generator_writes() -> None:
    """It has at least 200 calls, those that `make vectors` writes."""
    assert sum(len(scenario.calls) for scenario in SCENARIOS) >= 200
    told = vectors.told()
    assert [scenario.asked for scenario in SCENARIOS[: len(told)]] == told


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario(scenario: Scenario) -> None:
    """The scripts reply, publish and store what the vector tells."""
    assert vectors.played(scenario.asked) == scenario
