"""The specifications in `proof/spec`, checked by TLC with and without each of their rules."""

from __future__ import annotations

import pytest

from lock_models import LOCK
from relay_models import RELAY
from specification import Broken, Specification

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BOTH = (LOCK, RELAY)


@pytest.mark.parametrize(("of", "model"), [(each, model) for each in BOTH for model in each.models])
def test_every_state_keeps_the_promises(of: Specification, model: str) -> None:
    """Exclusion, order, fences and the rest hold in all states of the model, and what is to happen happens."""
    verdict = of.check(model)
    assert not verdict.violated, verdict.output
    assert verdict.states > 50


@pytest.mark.parametrize(
    ("of", "broken"),
    [pytest.param(each, broken, id=broken.rule.replace(" ", "-")) for each in BOTH for broken in each.broken],
)
def test_without_a_rule_a_promise_fails(of: Specification, broken: Broken) -> None:
    """Each rule of the protocol is needed: TLC finds a run in which the property fails that it is for."""
    assert of.check_without(broken).violated


@pytest.mark.parametrize("of", BOTH)
def test_each_rule_of_a_specification_is_tried(of: Specification) -> None:
    """Every rule that the specification can turn off is turned off by one of the variants."""
    assert of.rules() == {broken.rule for broken in of.broken}
