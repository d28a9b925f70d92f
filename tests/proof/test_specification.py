"""The specification of the protocol, `proof/spec/Lock.tla`, checked by TLC with and without each of its rules."""

from __future__ import annotations

import re

import pytest

import specification
import tlc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("model", specification.MODELS)
def test_every_state_keeps_the_promises(model: str) -> None:
    """Exclusion, order, fences and the rest hold in all states of the model, and who waits is served."""
    verdict = specification.check(model)
    assert not verdict.violated, verdict.output
    assert verdict.states > 1000


@pytest.mark.parametrize("broken", specification.BROKEN, ids=lambda broken: broken.rule.replace(" ", "-"))
def test_without_a_rule_a_promise_fails(broken: specification.Broken) -> None:
    """Each rule of the protocol is needed: TLC finds a run in which the property fails that it is for."""
    assert specification.check_without(broken).violated


def test_each_rule_of_the_specification_is_tried() -> None:
    """Every rule that the specification can turn off is turned off by one of the variants."""
    rules = set(re.findall(r'On\("([^"]+)"\)', (tlc.SPECIFICATIONS / "Lock.tla").read_text()))
    assert rules == {broken.rule for broken in specification.BROKEN}
