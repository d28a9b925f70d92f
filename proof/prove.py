"""`make prove`: judges histories, lets servers fail, simulates, checks the specifications, and writes a report."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import simulate
from campaign import OTHERS, REDISSON, REDLEASE, record_and_judge
from episodes import FAULTS
from judges import Findings
from lock_models import LOCK
from relay_models import RELAY

OTHERS_HISTORIES = 100
PARTS = ("histories", "libraries", "episodes", "simulation", "specification")
COLUMNS = ("faults", "histories", "acquire", "check", "pairs in order", "losses", "data missed")


class Proof:
    """What some parts find: a text, and how much of it is wrong."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.text = ""
        self.wrong = 0

    def say(self, *lines: str) -> None:
        """Add lines to the text."""
        self.text += "".join(f"{line}\n" for line in lines)

    def run(self, name: str) -> None:
        """Do a part, print what it finds when it has ended, and tell how long it took."""
        parts: dict[str, Callable[[], None]] = {
            "histories": self.histories,
            "libraries": self.libraries,
            "episodes": self.episodes,
            "simulation": self.simulation,
            "specification": self.specifications,
        }
        began, before = time.monotonic(), len(self.text)
        self.say(f"\n## {name.capitalize()}\n")
        parts[name]()
        self.say(f"\n{time.monotonic() - began:.0f} s.")
        sys.stdout.write(self.text[before:])
        sys.stdout.flush()

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
    began = time.monotonic()
    head = f"# make prove: seed {options.seed}, {options.engine}\n"
    sys.stdout.write(head)
    sys.stdout.flush()
    # Of which a process does one after the other, beside the other processes.
    lines = [line for line in planned(options) if line[0]]
    with ProcessPoolExecutor(len(lines), multiprocessing.get_context("spawn")) as pool:
        proofs = list(pool.map(run_line, range(len(lines)), *zip(*lines, strict=True)))
    wrong = sum(proof.wrong for proof in proofs)
    tail = f"\n{time.monotonic() - began:.0f} s in all; {'something' if wrong else 'nothing'} is wrong.\n"
    sys.stdout.write(tail)
    options.report.write_text(head + "".join(proof.text for proof in proofs) + tail)
    sys.exit(wrong > 0)


def planned(options: argparse.Namespace) -> Iterator[tuple[list[str], argparse.Namespace]]:
    """Yield which parts run one after the other, and with which options.

    All but the last line wait for leases most of their time. In the whole of it the histories of the episodes count.
    """
    recorded = 0 if options.only else options.episodes * REDLEASE.histories
    half = len(options.faults) // 2
    for parts, changed in (
        (("histories", "libraries"), {"histories": max(1, options.histories - recorded)}),
        (("episodes",), {"faults": options.faults[half:]}),
        (("episodes",) if half else (), {"faults": options.faults[:half]}),
        (("simulation", "specification"), {}),
    ):
        wanted = [part for part in parts if options.only in {None, part}]
        yield wanted, argparse.Namespace(**vars(options) | changed)


def run_line(number: int, parts: list[str], options: argparse.Namespace) -> Proof:
    """Do these parts, in a process of their own."""
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"  # each line has ports of its own, see ports.py
    if not {"histories", "libraries", "episodes"} & set(parts):
        os.nice(10)  # what computes lets the others go first, so that they are judged as on a machine that is free
    proof = Proof(options)
    for part in parts:
        proof.run(part)
    return proof


if __name__ == "__main__":
    main()
