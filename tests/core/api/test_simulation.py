"""What users get to simulate their own code: virtual time, faults from a seed, and the same run again."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from redlease import LeaseLost
from redlease.testing import Fault, Simulation, SimulationFailed, explore

if TYPE_CHECKING:
    from collections.abc import Callable

    from redlease import Redlease

Engine = Literal["scripts", "model"]
DIGESTS = """
import sys
import stories
for seed in ("1", "2", "3"):
    print(stories.simulate(stories.draw(seed), sys.argv[1]).digest)
"""


@pytest.mark.parametrize("engine", ["scripts", "model"])
def test_processes_take_turns(engine: Engine) -> None:
    """A killed holder's lock passes on when its lease ends, in virtual time, which costs no real time."""
    entered: list[tuple[str, float, int]] = []
    simulation = Simulation(7, faults=[Fault(1.0, "kill", "a")], engine=engine)

    def worker(name: str) -> Callable[[Redlease], object]:
        async def main(client: Redlease) -> None:
            async with client.lock("invoice:42").hold() as hold:
                entered.append((name, simulation.now, hold.fence))
                await asyncio.sleep(100)

        return main

    simulation.process("a", worker("a"), lease=30)  # type: ignore[arg-type]
    simulation.process("b", worker("b"), start=0.5, lease=30)  # type: ignore[arg-type]
    began = time.monotonic()
    report = simulation.run()
    assert time.monotonic() - began < 60
    assert [name for name, *_ in entered] == ["a", "b"]
    assert 20 < entered[1][1] < 32  # a's last renewal was before it was killed
    assert entered[0][2] < entered[1][2]
    assert (report.grants, report.left) == (2, {})


@pytest.mark.parametrize("engine", ["scripts", "model"])
def test_keys_take_turns(engine: Engine) -> None:
    """Who has a turn before earlier requests of another key breaks no promise."""
    granted: list[str] = []

    async def take(client: Redlease, key: str) -> None:
        async with client.lock("r").hold(key=key):
            granted.append(key)
            await asyncio.sleep(1)

    async def main(client: Redlease) -> None:
        await asyncio.gather(*(take(client, key) for key in "aaaab"))

    simulation = Simulation(5, engine=engine)
    simulation.process("a", main)
    assert simulation.run().grants == 5
    assert granted.index("b") < 3


def test_code_under_simulation_finds_its_clocks_and_chance_replaced() -> None:
    """time.time, time.sleep, random and uuid follow the simulation, and are real again after it."""
    told: list[object] = []

    async def main(_: Redlease) -> None:
        loop, began = asyncio.get_running_loop(), time.time()
        time.sleep(5)
        told.extend((round(time.time() - began, 3), round(loop.time(), 1), random.random(), uuid.uuid4()))

    for _ in range(2):
        simulation = Simulation(1, engine="model")
        simulation.process("a", main)
        simulation.run()
    assert told[:2] == [5.0, 5.0]
    assert told[:4] == told[4:]
    assert "lambda" not in repr([time.time, time.sleep, random.random, os.urandom])


def test_a_pause_loses_the_hold_and_the_body_hears_of_it() -> None:
    """A process that stands still for longer than its lease hears of it in its first turn; the other held."""
    lost: list[float] = []
    simulation = Simulation(3, faults=[Fault(1.0, "pause", "a", 5.0)], engine="model")

    async def paused(client: Redlease) -> None:
        try:
            async with client.lock("ledger", lease=2).hold():
                await asyncio.sleep(20)
        except LeaseLost:
            lost.append(simulation.now)

    async def other(client: Redlease) -> None:
        async with client.lock("ledger", lease=2).hold():
            pass

    simulation.process("a", paused)
    simulation.process("b", other, start=0.5)
    assert simulation.run().losses == 1
    assert 6.0 <= lost[0] < 6.01


def careless(simulation: Simulation) -> Callable[[], None]:
    """Simulate code that writes without a look at its permit, which nobody renews."""
    took: list[float] = []

    async def main(client: Redlease) -> None:
        permit = await client.lock("ledger", lease=2).acquire()
        granted_at = simulation.now
        await asyncio.sleep(0.5)
        took.append(simulation.now - granted_at)
        await client.lock("ledger").release(permit)

    for name in "ab":
        simulation.process(name, main)

    def check() -> None:
        assert max(took, default=0) < 2, "a write after the end of the lease"

    return check


def test_explore_finds_a_mistake_and_shrinks_its_faults() -> None:
    """Code that trusts a permit past its lease fails under one fault, which the error names, with the seed."""
    with pytest.raises(SimulationFailed) as failed:
        explore(careless, range(100), until=0.5, engine="model")
    text = str(failed.value)
    assert "a write after the end of the lease" in text
    assert text.count("Fault(at=") == 1
    assert "shows it again" in text


def test_what_a_process_raises_fails_the_simulation() -> None:
    """The error names the process; its cause is what the process raised."""
    simulation = Simulation(engine="model")

    async def main(_: Redlease) -> None:
        raise KeyError("missing")

    simulation.process("a", main)
    with pytest.raises(SimulationFailed, match="the process 'a' has raised KeyError") as failed:
        simulation.run()
    assert isinstance(failed.value.__cause__, KeyError)


def test_a_process_that_never_ends_fails_the_simulation() -> None:
    """A lock that is never given back keeps the other waiting until the limit."""
    simulation = Simulation(engine="model", limit=20)

    async def keeps(client: Redlease) -> None:
        async with client.lock("x", lease=2).hold():
            await asyncio.Event().wait()

    for name in "ab":
        simulation.process(name, keeps)
    with pytest.raises(SimulationFailed, match="has not ended within 20 s"):
        simulation.run()


@pytest.mark.parametrize(
    "wrong", [lambda: Fault(0, "flood", "a"), lambda: Fault(0, "restart", "a"), lambda: Fault(0, "kill")]
)
def test_wrong_faults_are_refused(wrong: Callable[[], Fault]) -> None:
    """A fault must exist, and befall what it can befall."""
    with pytest.raises(ValueError, match="fault"):
        wrong()


def test_a_fault_of_nobody_is_refused() -> None:
    """The process that a fault names must be there."""
    with pytest.raises(ValueError, match="no processes"):
        Simulation(faults=[Fault(0, "kill", "a")], engine="model").run()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["model", "scripts"])
def test_the_same_seed_gives_the_same_trace_in_another_process(engine: str) -> None:
    """The hash of all calls, events and faults does not depend on the process or on the order of its hashes."""
    proof = Path(__file__).parents[3] / "proof"
    path = os.pathsep.join([str(proof), *filter(None, [os.environ.get("PYTHONPATH")])])
    digests = [
        subprocess.run(
            [sys.executable, "-c", DIGESTS, engine],
            env=os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0].split())) == 3
