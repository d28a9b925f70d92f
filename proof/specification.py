"""What TLC checks of a specification: models small enough to visit every state, and what fails without each rule."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import tlc
from tlc import Verdict

Constants = Mapping[str, object]


class Broken(NamedTuple):
    """A rule of the protocol, a model in which it is turned off, and the property that fails then."""

    rule: str
    model: str
    fails: str


class Specification(NamedTuple):
    """A module of `spec/`, its models, and its rules.

    Attributes:
        module: Its name.
        usual: Its constants, where a model does not say otherwise.
        models: What differs in each model, in its long form.
        shorter: What the short form of a model changes, which CI checks; a rule is turned off there.
        invariants: What holds in every state.
        steps: What holds of every step.
        served: Models in which it is checked that something happens at last, if who lives goes on; and what.
        broken: What fails without each of its rules.
    """

    module: str
    usual: Constants
    models: Mapping[str, Constants]
    shorter: Mapping[str, Constants]
    invariants: tuple[str, ...]
    steps: tuple[str, ...]
    served: Mapping[str, tuple[str, ...]]
    broken: tuple[Broken, ...]

    def check(self, model: str, *, long: bool = False) -> Verdict:
        """Check all properties in all states of a model."""
        constants = self._constants(model, "{}", long=long)
        if served := self.served.get(model):
            return tlc.check(self.module, tlc.configuration("FairSpec", constants, (), served, ""), long=long)
        config = tlc.configuration("Spec", constants, self.invariants, self.steps, "Symmetry")
        return tlc.check(self.module, config, long=long)

    def check_without(self, broken: Broken) -> Verdict:
        """Check the one property that must fail while a rule is turned off."""
        constants = self._constants(broken.model, f'{{"{broken.rule}"}}', long=False)
        if broken.fails in self.invariants:
            config = tlc.configuration("Spec", constants, (broken.fails,), (), "Symmetry")
        elif broken.fails in self.steps:
            config = tlc.configuration("Spec", constants, (), (broken.fails,), "Symmetry")
        else:
            config = tlc.configuration("FairSpec", constants, (), (broken.fails,), "")
        return tlc.check(self.module, config)

    def _constants(self, model: str, off: str, *, long: bool) -> Constants:
        shorter = {} if long else self.shorter.get(model, {})
        return {**self.usual, **self.models[model], **shorter, "Off": off}

    def rules(self) -> set[str]:
        """Return the rules that the module can turn off."""
        text = (tlc.SPECIFICATIONS / f"{self.module}.tla").read_text()
        return set(re.findall(r'On\("([^"]+)"\)', text))

    def report(self) -> tuple[list[str], int]:
        """Check everything in its long form; return lines of Markdown on it, and how much of it is wrong."""
        wrong, lines = 0, ["| model | distinct states | result |", "| --- | ---: | --- |"]
        for model in self.models:
            verdict = self.check(model, long=True)
            wrong += bool(verdict.violated)
            lines.append(f"| {model} | {verdict.states:,} | {verdict.violated or 'all hold'} |")
        lines += ["", "| without this rule | in this model | this fails |", "| --- | --- | --- |"]
        for broken in self.broken:
            verdict = self.check_without(broken)
            wrong += not verdict.violated
            lines.append(f"| {broken.rule} | {broken.model} | {broken.fails if verdict.violated else 'NOT CAUGHT'} |")
        return lines, wrong
