"""Simulates a scenario with many seeds, and shrinks what fails to the faults that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, TypeVar

from .faults import Fault, draw_faults
from .world import Report, Simulation, SimulationFailed

Item = TypeVar("Item")
Scenario = Callable[[Simulation], object]
SIMULATED_MOST = 200  # how many simulations one shrinking may take


def shrunk(items: Sequence[Item], fails: Callable[[list[Item]], bool], most: int = SIMULATED_MOST) -> list[Item]:
    """Return a part of the items with which it still fails, and none of which can be left out (delta debugging).

    Args:
        items: With all of these it fails.
        fails: Tells whether it fails with so many of them, in their order.
        most: How often `fails` is called at most.
    """
    kept, size, tried = list(items), len(items), 0
    while size:
        at = 0
        while at < len(kept) and tried < most:
            rest = kept[:at] + kept[at + size :]
            tried += 1
            if fails(rest):
                kept = rest
            else:
                at += size
        size //= 2
    return kept


def explore(
    scenario: Scenario,
    seeds: Iterable[int] = range(100),
    *,
    until: float = 10.0,
    faults: int = 5,
    lease: float = 2.0,
    **settings: Any,
) -> list[Report]:
    """Simulates a scenario once for each seed, with other faults each time.

    Args:
        scenario: Adds its processes to a simulation. If it returns a callable, that is called after the simulation has
            run, and may raise to fail it.
        seeds: Of the simulations.
        until: Within how many virtual seconds faults begin.
        faults: How many there are at most.
        lease: Around how many seconds faults last: the lease that the scenario uses, so that some last longer.
        **settings: Of `Simulation`: `engine`, `latency`, `limit`.

    Returns:
        The report of each simulation.

    Raises:
        SimulationFailed: One failed. Its text has the seed, and the faults that it needs to fail, which are all that
            `Simulation(seed, faults=[...])` needs to show the same again.
    """
    reports = []
    for seed in seeds:
        probe = Simulation(seed, **settings)
        scenario(probe)
        drawn = draw_faults(Random(f"faults {seed}"), probe.processes, until, faults, lease)
        report, error = simulate(scenario, seed, drawn, settings)
        if report is None:
            raise _explained(scenario, seed, drawn, settings) from error
        reports.append(report)
    return reports


def simulate(
    scenario: Scenario, seed: int, faults: Sequence[Fault], settings: dict[str, Any]
) -> tuple[Report | None, Exception | None]:
    """Simulate a scenario once; return its report, or what made it fail."""
    simulation = Simulation(seed, faults=faults, **settings)
    check = scenario(simulation)
    try:
        report = simulation.run()
        if callable(check):
            check()
    except Exception as error:  # noqa: BLE001 - whatever a check raises
        return None, error
    return report, None


def _explained(scenario: Scenario, seed: int, faults: Sequence[Fault], settings: dict[str, Any]) -> SimulationFailed:
    """Return the error of a simulation that has failed, with no more faults than it needs to fail."""
    needed = shrunk(faults, lambda some: simulate(scenario, seed, some, settings)[1] is not None)
    error = simulate(scenario, seed, needed, settings)[1]
    found = error if isinstance(error, SimulationFailed) else SimulationFailed([repr(error)])
    listed = "".join(f"\n    {fault}," for fault in needed)
    return SimulationFailed(
        [*found.violations[:5], f"Simulation({seed}, faults=[{listed}\n]) shows it again"], found.trace
    )
