"""`make prove`: records and simulates histories, judges them, checks the specification, and prints a report."""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import simulate
import specification
from campaign import OTHERS, REDLEASE, record_and_judge
from judges import Findings

OTHERS_HISTORIES = 100


def main() -> None:
    """Do what the options say; the exit code is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=10_000, help="how many are recorded (10000)")
    parser.add_argument("--simulated", type=int, default=100_000, help="how many are simulated on the model (100000)")
    parser.add_argument(
        "--on-scripts", type=int, default=2_000, help="how many are simulated on the Lua scripts (2000)"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the workload")
    parser.add_argument("--engine", default="valkey9", help="valkey9, redis7 or redis62 (valkey9)")
    parser.add_argument("--keep", type=Path, help="a directory for histories with violations")
    parser.add_argument("--only", choices=("histories", "simulation", "specification"), help="one of the parts")
    options = parser.parse_args()
    wrong = 0
    if options.only in (None, "histories"):
        wrong += prove_histories(options.histories, options.seed, options.engine, options.keep)
    if options.only in (None, "simulation"):
        wrong += prove_simulated({"model": options.simulated, "scripts": options.on_scripts}, options.seed)
    if options.only in (None, "specification"):
        began = time.monotonic()
        lines, found = specification.report()
        wrong += found
        say(f"\n## The specification ({time.monotonic() - began:.0f} s)\n", *lines)
    sys.exit(wrong > 0)


def prove_histories(count: int, seed: int, engine: str, keep: Path | None) -> int:
    """Record, judge and report; return how much is wrong."""
    say(f"## Histories (seed {seed}, {engine})\n")
    began = time.monotonic()
    findings = asyncio.run(record_and_judge(REDLEASE, count, seed, engine, keep))
    say(f"redlease, {time.monotonic() - began:.0f} s:\n", *described(findings))
    wrong = len(findings.violations)
    for name, workload in OTHERS.items():
        found = asyncio.run(record_and_judge(workload, OTHERS_HISTORIES, seed, engine))
        say(f"\n{name}:\n", *described(found))
        wrong += not found.violations
    return wrong


def prove_simulated(counts: dict[str, int], seed: int) -> int:
    """Simulate and report; return how much is wrong."""
    wrong = 0
    for engine, count in counts.items():
        began = time.monotonic()
        done = simulate.simulate_all(count, f"{seed}-", engine)
        say(f"\n## Simulated histories (seeds {seed}-0 to {seed}-{count - 1}, {engine})\n")
        say(*simulate.described(done, time.monotonic() - began))
        wrong += len(done.violations)
    return wrong


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


def say(*lines: str) -> None:
    """Print lines at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
