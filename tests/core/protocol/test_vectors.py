"""The golden vectors of the protocol: the scripts do what they tell."""

from __future__ import annotations

import pytest

import vectors
from vectors import Scenario

SCENARIOS = vectors.read()


def test_the_file_is_what_the_generator_writes() -> None:
    """It has at least 200 calls, those that `make vectors` writes."""
    assert sum(len(scenario.calls) for scenario in SCENARIOS) >= 200
    told = vectors.told()
    assert [scenario.asked for scenario in SCENARIOS[: len(told)]] == told


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_a_scenario(scenario: Scenario) -> None:
    """The scripts reply, publish and store what the vector tells."""
    assert vectors.played(scenario.asked) == scenario
