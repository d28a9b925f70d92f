"""Golden vectors: scenarios of calls at given times, with all that the scripts reply, publish and leave behind.

`python tests/support/vectors.py` writes them anew into tests/golden/protocol.json, as `make vectors` does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from random_calls import RandomCalls
from scenarios import SCENARIOS
from set_clock import FakeEngine, HeardEngine, SetClock

FILE = Path(__file__).parents[1] / "golden" / "protocol.json"
BEGINS_MS = 1_700_000_000_000
DRAWN, CALLS_EACH = 10, 25  # how many scenarios are drawn at random, and how long each is


@dataclass
class Vector:
    """One call: when it is made, in µs of the server's clock, and what comes of it."""

    at_us: int
    call: str
    args: list[Any]
    reply: list[Any] = field(default_factory=list)
    messages: list[list[str]] = field(default_factory=list)


@dataclass
class Scenario:
    """Calls on a resource that does not exist before the first; `keys` tells what is stored after the last."""

    name: str
    calls: list[Vector]
    keys: dict[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> Scenario:
        """Without what came of it."""
        return Scenario(self.name, [Vector(call.at_us, call.call, call.args) for call in self.calls])


def played(scenario: Scenario) -> Scenario:
    """Return a scenario with what comes of it now."""
    engine = HeardEngine()
    calls = []
    for asked in scenario.calls:
        _, reply = engine.run(asked.call, tuple(asked.args), asked.at_us)
        messages = [list(message) for message in engine.heard()]
        calls.append(Vector(asked.at_us, asked.call, asked.args, written(reply[1:]), messages))
    return Scenario(scenario.name, calls, engine.stored(scenario.calls[-1].at_us))


def written(reply: Any) -> Any:
    """Return a reply as JSON has it; a byte that is no UTF-8 stands as the character of its number."""
    if isinstance(reply, list):
        return [written(part) for part in reply]
    if not isinstance(reply, bytes):
        return reply
    try:
        return reply.decode()
    except UnicodeDecodeError:
        return reply.decode("latin-1")


def told() -> list[Scenario]:
    """Return the scenarios that are told in words."""
    return [
        Scenario(
            name,
            [Vector((BEGINS_MS + ms) * 1000 + number, call, args) for number, (ms, call, *args) in enumerate(steps)],
        )
        for name, steps in SCENARIOS.items()
    ]


def drawn(number: int) -> Scenario:
    """Return a scenario of random calls."""
    calls = RandomCalls.of_kind(Random(number), number)
    clock = SetClock(calls, FakeEngine())
    clock.run(calls, CALLS_EACH)
    made = [Vector(at_us, name, list(args)) for at_us, name, args in clock.made]
    return Scenario(f"random calls, {number}", made)


def read() -> list[Scenario]:
    """Return the vectors of the file."""
    scenarios = json.loads(FILE.read_text())
    return [Scenario(each["name"], [Vector(**call) for call in each["calls"]], each["keys"]) for each in scenarios]


def write(scenarios: list[Scenario]) -> None:
    """Write the file, a call a line."""
    parts = []
    for each in scenarios:
        calls = ",\n".join(f"  {json.dumps(asdict(call), ensure_ascii=False)}" for call in each.calls)
        keys = json.dumps(each.keys, ensure_ascii=False)
        parts.append(f' {{"name": {json.dumps(each.name)}, "keys": {keys}, "calls": [\n{calls}]}}')
    FILE.write_text("[\n" + ",\n".join(parts) + "\n]\n")


if __name__ == "__main__":
    write([played(scenario) for scenario in [*told(), *map(drawn, range(DRAWN))]])
