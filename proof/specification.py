"""What TLC checks: models small enough to visit every state, and what fails without each rule of the protocol."""

from __future__ import annotations

from typing import NamedTuple

import tlc
from tlc import Verdict

FAULTS = ("Losses", "Delays", "Resends", "Withdrawals", "Crashes", "Wipes", "Steps", "Writes")
USUAL: dict[str, object] = {"Clients": "{a, b}", "Capacity": 1, "Requests": 1, "Lease": 2, "WaiterLease": 2, "Clock": 3}
INVARIANTS = ("Exclusion", "BelieversHold", "BeliefsExclude", "NothingLeft")
STEPS = ("Fifo", "FencesGrow", "NoRevival", "WritesInOrder")

# Each is a set of constants. Its time ends at `Clock`, a tick later in the long form. `Clock` 0: time has no end, and
# what is checked is that everybody who lives is served.
MODELS: dict[str, dict[str, object]] = {
    "late messages": {"Requests": 2, "Delays": 1},
    "doubled requests": {"Requests": 2, "Delays": 1, "Resends": 1, "Withdrawals": 1, "Clock": 2},
    "lost messages": {"Losses": 1, "Delays": 1, "Withdrawals": 1},
    "lost data": {"Requests": 2, "Wipes": 1},
    "a clock that is stepped": {"Delays": 1, "Steps": 1},
    "a queue of two": {"Clients": "{a, b, c}", "Delays": 1, "Resends": 1, "Clock": 2},
    "a pool of two": {"Clients": "{a, b, c}", "Capacity": 2, "Clock": 2},
    "late writes": {"Writes": 2, "Delays": 1},
    "everybody is served": {"Crashes": 1, "Losses": 1, "Clock": 0},
}


class Broken(NamedTuple):
    """A rule of the protocol, a model in which it is turned off, and the property that fails then."""

    rule: str
    model: str
    fails: str


BROKEN = (
    Broken("capacity", "late messages", "Exclusion"),
    Broken("reap", "everybody is served", "Served"),
    Broken("remove dead waiters", "everybody is served", "Served"),
    Broken("ask after grants", "everybody is served", "Served"),
    Broken("behind the queue", "a queue of two", "Fifo"),
    Broken("same place again", "a queue of two", "Fifo"),
    Broken("same permit again", "doubled requests", "BelieversHold"),
    Broken("request id in messages", "doubled requests", "BelieversHold"),
    Broken("release by fence", "doubled requests", "BelieversHold"),
    Broken("tombstones", "doubled requests", "NothingLeft"),
    Broken("deadline from the sending", "late messages", "BelieversHold"),
    Broken("first lease is the place's", "late messages", "BelieversHold"),
    Broken("late grants end early", "late messages", "BelieversHold"),
    Broken("no revival", "late messages", "NoRevival"),
    Broken("time in the fence", "lost data", "FencesGrow"),
    Broken("last fence + 1", "a clock that is stepped", "FencesGrow"),
    Broken("guard", "late writes", "WritesInOrder"),
)


def check(model: str, *, long: bool = False) -> Verdict:
    """Check all properties in all states of a model."""
    return _check(model, "{}", INVARIANTS, STEPS, long=long)


def check_without(broken: Broken) -> Verdict:
    """Check the one property that must fail while a rule is turned off."""
    only = (broken.fails,)
    invariants, steps = (only, ()) if broken.fails in INVARIANTS else ((), only)
    return _check(broken.model, f'{{"{broken.rule}"}}', invariants, steps, long=False)


def _check(model: str, off: str, invariants: tuple[str, ...], steps: tuple[str, ...], *, long: bool) -> Verdict:
    constants = USUAL | dict.fromkeys(FAULTS, 0) | MODELS[model] | {"Off": off}
    if constants["Clock"] == 0:
        return tlc.check("Lock", tlc.configuration("FairSpec", constants, (), ("Served",), ""))
    if long:
        constants["Clock"] = int(str(constants["Clock"])) + 1
    return tlc.check("Lock", tlc.configuration("Spec", constants, invariants, steps, "Symmetry"), long=long)


def report() -> tuple[list[str], int]:
    """Check everything in its long form; return lines of Markdown on what was found, and how much of it is wrong."""
    wrong, lines = 0, ["| model | distinct states | result |", "| --- | ---: | --- |"]
    for model in MODELS:
        verdict = check(model, long=True)
        wrong += bool(verdict.violated)
        lines.append(f"| {model} | {verdict.states:,} | {verdict.violated or 'all hold'} |")
    lines += ["", "| without this rule | in this model | this fails |", "| --- | --- | --- |"]
    for broken in BROKEN:
        verdict = check_without(broken)
        wrong += not verdict.violated
        lines.append(f"| {broken.rule} | {broken.model} | {broken.fails if verdict.violated else 'NOT CAUGHT'} |")
    return lines, wrong
