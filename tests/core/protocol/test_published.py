"""The model of the simulated server publishes what the scripts do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.replies import Status
from redlease.testing.simulation.publishing import PublishingModel

import vectors
from against_model import LABEL, without_guesses
from random_calls import RandomCalls
from set_clock import FakeEngine, HeardEngine, SetClock

if TYPE_CHECKING:
    from typing import Any

    from vectors import Scenario

STATE_KEY = Resource("model", "r").keys[0]
MODELLED = {
    "acquire",
    "release",
    "renew",
    "adopt",
    "beat",
    "reduce",
    "supersede",
    "resize",
    "limit",
    "check",
    "position",
}


@pytest.mark.parametrize("scenario", vectors.read(), ids=lambda scenario: scenario.name)
def test_the_messages_of_a_scenario(scenario: Scenario) -> None:
    """Each call of the golden vectors gets its reply, and publishes its messages."""
    model = PublishingModel(state_key=STATE_KEY)
    engine = FakeEngine()
    engine.clear()
    for number, call in enumerate(scenario.calls):
        if call.call not in MODELLED:
            continue
        existed, _ = engine.run(call.call, tuple(call.args), call.at_us)
        model.clock = call.at_us
        if not existed and model.kept_until:
            model = model.forgotten()
        had_keys = model.has_keys
        reply = getattr(model, call.call)(*(arg for arg in call.args if arg != LABEL))
        if call.call == "acquire" and reply[0] == Status.GRANTED:
            reply = reply[: len(call.reply)]  # the usual case spares the declaration
        told, expected_reply = vectors.written(reply), call.reply
        if had_keys or model.has_keys:
            told, expected_reply = (without_guesses(call.call, each) for each in (told, expected_reply))
        assert told == expected_reply, f"call {number}: {call}"
        messages = [list(message) for message in model.published()]
        expected = [message for message in call.messages if not message[0].endswith(":watch")]
        assert sorted(messages) == sorted(expected), f"call {number}: {call}"


class HeardClock(SetClock):
    """Makes calls at given times; the messages of each are compared too."""

    def __init__(self, caller: RandomCalls, engine: HeardEngine) -> None:
        super().__init__(caller, engine)
        self._heard = engine
        engine.heard()

    def call(self, name: str, args: tuple[Any, ...]) -> None:
        """Make a call."""
        super().call(name, args)
        model = self.judge.model
        assert isinstance(model, PublishingModel)
        heard = [message for message in self._heard.heard() if message[1].startswith("l ")]
        told = [message for message in model.published() if message[1].startswith("l ")]
        assert sorted(heard) == sorted(told), f"the model publishes {told}"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_messages_of_random_calls(seed: int, is_long: bool) -> None:
    """Whatever is asked at whatever time: who is told when to call next, and when, is what the model says."""
    engine = HeardEngine()
    for number in range(2_000 if is_long else 6):
        calls = RandomCalls.in_set_time(seed, number)
        calls.model = PublishingModel(state_key=STATE_KEY)
        HeardClock(calls, engine).run(calls, 250)
