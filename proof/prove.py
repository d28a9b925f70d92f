"""`make prove`: judges histories, lets servers fail, simulates, checks the specifications, and writes a report."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import simulate
from campaign import OTHERS, REDISSON, REDLEASE, record_and_judge
from episodes import FAULTS
from judges import Findings
from lock_models import LOCK
from relay_models import RELAY

OTHERS_HISTORIES = 100
PARTS = ("histories", "simulation", "episodes", "libraries", "specification")
COLUMNS = ("faults", "histories", "acquire", "check", "pairs in order", "losses", "data missed")


class Proof:
    """One run: what is printed goes to a file too, and what is wrong is counted."""

    def __init__(self, options: argparse.Namespace, report: TextIO) -> None:
        self.options, self.report = options, report
        self.wrong = 0

    def say(self, *lines: str) -> None:
        """Print lines at once, and write them."""
        for to in (sys.stdout, self.report):
            to.write("\n".join(lines) + "\n")
            to.flush()

    def run(self) -> None:
        """Do each part that was asked for, and tell how long it took."""
        self.say(f"# make prove: seed {self.options.seed}, {self.options.engine}")
        parts: dict[str, Callable[[], None]] = dict(
            zip(
                PARTS,
                (self.histories, self.simulation, self.episodes, self.libraries, self.specifications),
                strict=True,
            )
        )
        for name in [self.options.only] if self.options.only else PARTS:
            began = time.monotonic()
            self.say(f"\n## {name.capitalize()}\n")
            parts[name]()
            self.say(f"\n{time.monotonic() - began:.0f} s.")

    def histories(self) -> None:
        """Record histories in which processes are stopped and killed."""
        options = self.options
        # Those of the episodes count.
        count = options.histories - (0 if options.only else options.episodes * REDLEASE.histories)
        findings = asyncio.run(record_and_judge(REDLEASE, max(1, count), options.seed, options.engine, options.keep))
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
        options, each = self.options, -(-self.options.episodes // len(FAULTS))
        self.say(f"| fault | {' | '.join(COLUMNS)} | violations |", f"| --- |{' ---: |' * (len(COLUMNS) + 1)}")
        for name, fault in FAULTS.items():
            count = each * REDLEASE.histories
            found = asyncio.run(record_and_judge(REDLEASE, count, options.seed, options.engine, options.keep, fault))
            cells = [f"{found.judged[column]:,}" for column in COLUMNS]
            self.say(f"| {name} | {' | '.join(cells)} | {len(found.violations)} |")
            self.say(*(f"  - {violation}" for violation in found.violations[:5]))
            self.wrong += len(found.violations)

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
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the workload")
    parser.add_argument("--engine", default="valkey9", help="valkey9, redis7 or redis62 (valkey9)")
    parser.add_argument("--keep", type=Path, help="a directory for histories with violations")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--report", type=Path, default=Path("build/proof.md"), help="where it writes (build/proof.md)")
    options = parser.parse_args()
    options.report.parent.mkdir(parents=True, exist_ok=True)
    with options.report.open("w") as report:
        proof = Proof(options, report)
        proof.run()
    sys.exit(proof.wrong > 0)


if __name__ == "__main__":
    main()
