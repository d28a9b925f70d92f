"""The pictures of docs/performance.md, as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from growth import CAPACITIES, QUEUES
from peers import PEERS
from report import Results, median
from workloads import TASKS

# A library has one colour and one mark in all pictures; the palette is told apart by the colour-blind too.
LOOKS: dict[str, dict[str, Any]] = {
    "floor": {"color": "#777777", "linestyle": "--", "marker": "o"},
    "redlease": {"color": "#d55e00", "linewidth": 2.4, "marker": "o"},
    "redlease-sync": {"color": "#d55e00", "linestyle": ":", "marker": "x"},
    "redis-py": {"color": "#0072b2", "marker": "s"},
    "python-redis-lock": {"color": "#009e73", "marker": "^"},
    "py-redis-semaphore": {"color": "#cc79a7", "marker": "D"},
    "asyncio-advanced-semaphores": {"color": "#e69f00", "marker": "v"},
}

# 10,000 and not a power of ten.
PLAIN = StrMethodFormatter("{x:,.0f}")

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10.0,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.0,
    # Equal figures make equal files, so that a commit shows what has changed.
    "svg.hashsalt": "redlease",
}


def draw_all(results: Results, directory: Path) -> Iterator[Path]:
    """Draws each picture whose workloads were all measured, and yields where it is."""
    pictures = {
        "handoffs": (["w3"], _handoffs),
        "throughput": ([f"tasks{count}" for count in TASKS], _throughput),
        "growth": ([f"queue{count}" for count in QUEUES] + [f"capacity{count}" for count in CAPACITIES], _growth),
    }
    for name, (needed, draw) in pictures.items():
        if results.keys() >= set(needed):
            with mpl.rc_context(STYLE):
                figure = Figure(figsize=(8.0, 4.2), layout="constrained")
                draw(figure, results)
                path = directory / f"{name}.svg"
                figure.savefig(path, metadata={"Date": None}, facecolor="white")
            yield path


def _handoffs(figure: Figure, results: Results) -> None:
    """Which share of the hand-offs of w3 took at most so long, in the round whose median is the middle one."""
    axes = figure.subplots()
    for peer, outcomes in results["w3"].items():
        by_median = sorted(outcomes, key=lambda outcome: outcome.figures["p50_us"])
        middle = by_median[len(by_median) // 2]
        axes.plot(middle.percentiles_us, range(101), **LOOKS[peer] | {"marker": None}, label=PEERS[peer].name)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(PLAIN)
    axes.set(xlabel="µs from leaving the block to the next entering it", ylabel="% of hand-offs", ylim=(0, 100))
    axes.set_title("64 waiters, one lock: how long a hand-off takes", loc="left")
    axes.legend(loc="lower right")


def _throughput(figure: Figure, results: Results) -> None:
    """Pairs a second against the number of tasks."""
    axes = figure.subplots()
    for peer in results[f"tasks{TASKS[0]}"]:
        measured = [count for count in TASKS if peer in results[f"tasks{count}"]]
        rates = [median(results[f"tasks{count}"][peer], "pairs_s") for count in measured]
        axes.plot(measured, rates, **LOOKS[peer], label=PEERS[peer].name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(TASKS, [str(count) for count in TASKS])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(PLAIN)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="tasks in one process, each with a lock of its own", ylabel="pairs a second")
    axes.set_title("Throughput against the number of tasks", loc="left")
    figure.legend(loc="outside right upper")


def _growth(figure: Figure, results: Results) -> None:
    """The server's CPU for a grant against the length of the queue and against the capacity."""
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, what, counts, label in (
        (left, "queue", QUEUES, "waiters queued, capacity 1"),
        (right, "capacity", CAPACITIES, "capacity, 10 waiters queued"),
    ):
        for peer in results[f"{what}{counts[0]}"]:
            costs = [median(results[f"{what}{count}"][peer], "server_us_grant") for count in counts]
            axes.plot(counts, costs, **LOOKS[peer], label=PEERS[peer].name)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(PLAIN)
    left.set(ylabel="server CPU µs a grant", ylim=(0, 1.25 * left.get_ylim()[1]))
    left.legend(loc="upper left", ncols=2)
    figure.suptitle("What a grant costs the server", x=0.01, ha="left", fontsize=12)
