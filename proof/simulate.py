"""Simulates histories from seeds, or replays one and shrinks it to what it needs to break a promise.

python proof/simulate.py --histories 1000           # seeds 0 to 999, on the model
python proof/simulate.py --histories 100 --engine scripts
python proof/simulate.py --seed 7                   # one, told line by line; shrunk if it breaks a promise
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pprint import pformat
from typing import Any

from redlease.testing.simulation.exploring import shrunk

import stories
from stories import Actor, Story

CHUNK = 50  # how many histories a process simulates before it reports


@dataclass
class Simulated:
    """What came of many histories."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Simulated) -> None:
        """Add what came of others."""
        self.counts += other.counts
        self.violations += other.violations


def failure(story: Story, engine: str) -> BaseException | None:
    """Simulate a story, and return what is wrong."""
    try:
        stories.simulate(story, engine)
    except Exception as error:  # noqa: BLE001 - whatever a history raises is wrong
        return error
    return None


@contextmanager
def unheard() -> Iterator[None]:
    """Log nothing meanwhile: redlease warns of every loss."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@unheard()
def simulate_some(drawn: list[str], engine: str, violations: int = 0) -> Simulated:
    """Simulate the stories of these seeds, or of the first ones with so many violations."""
    done = Simulated()
    for seed in drawn:
        story = stories.draw(seed)
        done.counts.update(f"fault: {fault.kind}" for fault in story.faults)
        try:
            report = stories.simulate(story, engine)
        except Exception as error:  # noqa: BLE001 - as above
            said = str(error).partition("The last of what")[0].strip().splitlines() or [repr(error)]
            done.violations.append(f"seed {seed}: {said[0]}")
        else:
            done.counts.update(calls=report.calls, grants=report.grants, losses=report.losses)
        done.counts["histories"] += 1
        if violations and len(done.violations) >= violations:
            break
    return done


def seeds(count: int, first: str = "") -> list[str]:
    """Return so many seeds: the numbers from 0, with `first` before them."""
    return [f"{first}{number}" for number in range(count)]


def simulate_all(count: int, first: str = "", engine: str = "model", jobs: int = 2) -> Simulated:
    """Simulate so many histories in several processes."""
    drawn = seeds(count, first)
    chunks = [drawn[at : at + CHUNK] for at in range(0, count, CHUNK)]
    done = Simulated()
    with ProcessPoolExecutor(jobs) as pool:
        for some in pool.map(simulate_some, chunks, [engine] * len(chunks)):
            done.add(some)
    return done


def shrink(story: Story, engine: str) -> Story:
    """Return a smaller story that still breaks the same promise: fewer faults, actors and steps."""
    wanted = kind(failure(story, engine))

    def fails(smaller: Story) -> bool:
        return kind(failure(smaller, engine)) == wanted

    story = replace(story, faults=tuple(shrunk(story.faults, lambda some: fails(replace(story, faults=tuple(some))))))
    actors = shrunk(story.actors, lambda some: fails(replace(story, actors=tuple(some))))
    steps = list(chain.from_iterable([(number, step) for step in each.steps] for number, each in enumerate(actors)))

    def with_steps(some: list[Any]) -> Story:
        kept = [Actor(each.process, tuple(s for n, s in some if n == number)) for number, each in enumerate(actors)]
        return replace(story, actors=tuple(each for each in kept if each.steps))

    return with_steps(shrunk(steps, lambda some: fails(with_steps(some))))


def kind(error: BaseException | None) -> str:
    """Return which promise an error says is broken; empty if there is none."""
    if error is None:
        return ""
    first = next(iter(getattr(error, "violations", [])), str(error))
    return first.partition("(P")[2][:1] or type(error).__name__


def described(done: Simulated, seconds: float) -> list[str]:
    """Return lines on what was simulated and found."""
    counts, befell = done.counts, {kind: n for kind, n in sorted(done.counts.items()) if kind.startswith("fault: ")}
    faults = ", ".join(f"{number:,} {name.removeprefix('fault: ')}" for name, number in befell.items())
    return [
        f"- {counts['histories']:,} histories in {seconds:.0f} s",
        f"- {counts['calls']:,} calls, {counts['grants']:,} grants, {counts['losses']:,} holds lost",
        f"- faults: {faults}",
        f"- violations: {len(done.violations):,}",
        *(f"  - {violation}" for violation in done.violations[:5]),
    ]


@unheard()
def replay(seed: str, engine: str) -> bool:
    """Show the history of a seed, shrunk if it breaks a promise; return whether it does."""
    story = stories.draw(seed)
    error = failure(story, engine)
    if error is None:
        sys.stdout.write(f"{pformat(story)}\nbreaks no promise: {stories.simulate(story, engine)}\n")
        return False
    story = shrink(story, engine)
    sys.stdout.write(f"{pformat(story)}\nbreaks a promise:\n{failure(story, engine)}\n")
    return True


def main() -> None:
    """Do what the options say; the exit code is 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=1000, help="how many are simulated (1000)")
    parser.add_argument("--engine", choices=("model", "scripts"), default="model", help="what answers (model)")
    parser.add_argument("--seed", help="simulate this one, and shrink it if it breaks a promise")
    parser.add_argument("--first", default="", help="what the seeds begin with, to draw others")
    parser.add_argument("--until-found", action="store_true", help="stop at the first violation, in one process")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes (2)")
    options = parser.parse_args()
    if options.seed is not None:
        sys.exit(replay(options.seed, options.engine))
    began = time.monotonic()
    if options.until_found:
        done = simulate_some(seeds(options.histories, options.first), options.engine, violations=1)
    else:
        done = simulate_all(options.histories, options.first, options.engine, options.jobs)
    sys.stdout.write("\n".join(described(done, time.monotonic() - began)) + "\n")
    sys.exit(bool(done.violations))


if __name__ == "__main__":
    main()
