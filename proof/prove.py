"""`make prove`: judges histories, lets servers fail, simulates, checks the specifications, and writes a report."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import simulate
from campaign import OTHERS, REDISSON, REDLEASE, record_and_judge
from episodes import FAULTS
from judges import Findings
from lock_models import LOCK
from relay_models import RELAY

OTHERS_HISTORIES = 100
PARTS = ("histories", "episodes", "libraries", "simulation", "specification")
# What runs side by side, each line from left to right: all but the last wait for leases most of their time.
HALF = len(FAULTS) // 2
LINES = (
    (("histories",), ("libraries",)),
    (("episodes", "--faults", *list(FAULTS)[:HALF]),),
    (("episodes", "--faults", *list(FAULTS)[HALF:]),),
    (("simulation",), ("specification",)),
)
COLUMNS = ("faults", "histories", "acquire", "check", "pairs in order", "losses", "data missed")


class Proof:
    """One part: what is wrong is counted."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.wrong = 0

    def say(self, *lines: str) -> None:
        """Print lines at once."""
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()

    def run(self) -> None:
        """Do it, and tell how long it took."""
        parts: dict[str, Callable[[], None]] = {
            "histories": self.histories,
            "episodes": self.episodes,
            "libraries": self.libraries,
            "simulation": self.simulation,
            "specification": self.specifications,
        }
        began = time.monotonic()
        self.say(f"\n## {self.options.only.capitalize()}\n")
        parts[self.options.only]()
        self.say(f"\n{time.monotonic() - began:.0f} s.")

    def histories(self) -> None:
        """Record histories in which processes are stopped and killed."""
        options = self.options
        findings = asyncio.run(
            record_and_judge(REDLEASE, options.histories, options.seed, options.engine, options.keep)
        )
        self.say(*described(findings))
        self.wrong += len(findings.violations)

    def simulation(self) -> None:
        """Simulate histories on the model, and some on the scripts."""
        options = self.options
        for engine, count in (("model", options.simulated), ("scripts", options.on_scripts)):
            began = time.monotonic()
            done = simulate.simulate_all(count, f"{options.seed}-", engine)
            self.say(f"Seeds {options.seed}-0 to {options.seed}-{count - 1}, {engine}:\n")
            self.say(*simulate.described(done, time.monotonic() - began), "")
            self.wrong += len(done.violations)

    def episodes(self) -> None:
        """Record histories in which the server fails, in each way in turn."""
        options, each, violations = self.options, -(-self.options.episodes // len(FAULTS)), list[str]()
        self.say(f"| fault | {' | '.join(COLUMNS)} | violations |", f"| --- |{' ---: |' * (len(COLUMNS) + 1)}")
        for name, fault in ((name, FAULTS[name]) for name in options.faults):
            count = each * REDLEASE.histories
            found = asyncio.run(record_and_judge(REDLEASE, count, options.seed, options.engine, options.keep, fault))
            cells = [f"{found.judged[column]:,}" for column in COLUMNS]
            self.say(f"| {name} | {' | '.join(cells)} | {len(found.violations)} |")
            violations += found.violations
            self.wrong += len(found.violations)
        self.say(*(f"- {violation}" for violation in violations[:20]))

    def libraries(self) -> None:
        """Show that the judges find what is wrong with others."""
        options = self.options
        for name, workload in (OTHERS | {"redisson": REDISSON}).items():
            found = asyncio.run(record_and_judge(workload, OTHERS_HISTORIES, options.seed, options.engine))
            self.say(f"{name}:\n", *described(found), "")
            self.wrong += not found.violations

    def specifications(self) -> None:
        """Check both in their long form."""
        for each in (LOCK, RELAY):
            lines, found = each.report()
            self.say(f"`{each.module}.tla`:\n", *lines, "")
            self.wrong += found


def described(findings: Findings) -> Iterator[str]:
    """Return lines on what was judged and found."""
    yield "- judged: " + ", ".join(f"{number:,} {what}" for what, number in sorted(findings.judged.items()))
    late = sorted(findings.lateness_ms)
    if late:
        median, worst = late[len(late) // 2], late[-1]
        yield f"- losses were told {median:.0f} ms after the end of the lease (median), {worst:.0f} ms at most"
    kinds = ", ".join(f"{number:,} of {kind}" for kind, number in sorted(findings.kinds().items()))
    yield f"- violations: {len(findings.violations):,}{f' ({kinds})' if kinds else ''}"
    yield from (f"  - {violation}" for violation in findings.violations[:5])


def main() -> None:
    """Do what the options say; the exit code is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000, help="how many are recorded (10000)")
    parser.add_argument("--simulated", type=int, default=100_000, help="how many are simulated on the model (100000)")
    parser.add_argument("--on-scripts", type=int, default=2_000, help="and how many on the Lua scripts (2000)")
    parser.add_argument("--episodes", type=int, default=200, help="how often a server fails (200)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="of the episodes (all)")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the workload")
    parser.add_argument("--engine", default="valkey9", help="valkey9, redis7 or redis62 (valkey9)")
    parser.add_argument("--keep", type=Path, help="a directory for histories with violations")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--report", type=Path, default=Path("build/proof.md"), help="where it writes (build/proof.md)")
    options = parser.parse_args()
    options.report.parent.mkdir(parents=True, exist_ok=True)
    if options.only:
        proof = Proof(options)
        proof.run()
        sys.exit(proof.wrong > 0)
    sys.exit(not prove_all(options))


def prove_all(options: argparse.Namespace) -> bool:
    """Does every part, prints and writes what each found when it has ended, and returns whether all is well."""
    began = time.monotonic()
    # Those of the episodes count.
    options.histories = max(1, options.histories - options.episodes * REDLEASE.histories)
    lock = threading.Lock()
    with options.report.open("w") as report:

        def say(text: str) -> None:
            with lock:
                for to in (sys.stdout, report):
                    to.write(text)
                    to.flush()

        def run_line(number: int) -> bool:
            # What computes lets the others go first, so that they are judged as on a machine that is free.
            first = ["nice"] if number == len(LINES) - 1 else []
            ports = os.environ | {"PYTEST_XDIST_WORKER": f"gw{number}"}  # each line has its own, see ports.py
            ended = []
            for part in LINES[number]:
                command = [*first, sys.executable, __file__, "--only", *part, *given(options)]
                ended.append(subprocess.run(command, env=ports, stdout=subprocess.PIPE, text=True, check=False))
                say(ended[-1].stdout)
            return all(one.returncode == 0 for one in ended)

        say(f"# make prove: seed {options.seed}, {options.engine}\n")
        with ThreadPoolExecutor() as pool:
            is_well = all(list(pool.map(run_line, range(len(LINES)))))
        say(f"\n{time.monotonic() - began:.0f} s in all; {'nothing' if is_well else 'something'} is wrong.\n")
    return is_well


def given(options: argparse.Namespace) -> Iterator[str]:
    """The options that each part gets, as words."""
    for name in ("histories", "simulated", "on_scripts", "episodes", "seed", "engine", "keep"):
        if (value := getattr(options, name)) is not None:
            yield f"--{name.replace('_', '-')}={value}"


if __name__ == "__main__":
    main()
