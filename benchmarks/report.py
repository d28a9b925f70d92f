"""Results as tables: medians, and how many times the floor's they are."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from growth import CAPACITIES, GROWTH, QUEUES
from peers import PEERS
from trial import EVERY_WORKLOAD
from workloads import SCALING, WORKLOADS, Outcome

# By workload and library, one outcome a round.
Results = dict[str, dict[str, list[Outcome]]]


class Column(NamedTuple):
    """How a figure is shown."""

    title: str
    digits: int = 0
    of_floor: bool = False


COLUMNS = {
    "pairs_s": Column("pairs/s", 0, of_floor=True),
    "handoffs_s": Column("hand-offs/s", 0, of_floor=True),
    "makespan_x": Column("makespan over ideal", 2, of_floor=True),
    "commands_s": Column("commands/s", 1),
    "p50_us": Column("p50 µs", 0, of_floor=True),
    "p99_us": Column("p99 µs"),
    "retaken_pct": Column("to the releaser %"),
    "inverted_pct": Column("inverted %", 1),
    "client_pct": Column("client CPU %", 2),
    "server_pct": Column("server CPU %", 2),
    "connections": Column("connections"),
    "lost": Column("lost"),
    "waiter_bytes": Column("bytes each"),
    "keys_left": Column("keys left"),
    "gone_after_s": Column("gone after s", 1),
    "server_us_grant": Column("server µs a grant", 1, of_floor=True),
    "client_us_grant": Column("client µs a grant", 1, of_floor=True),
}
for _one in ("pair", "handoff"):
    COLUMNS[f"server_us_{_one}"] = Column("server CPU µs", 1, of_floor=True)
    COLUMNS[f"client_us_{_one}"] = Column("client CPU µs", 1, of_floor=True)
for _one in ("pair", "handoff", "grant"):
    COLUMNS[f"commands_{_one}"] = Column("commands", 1)

# Workloads that differ in one number make one table: what of them it shows, by library.
SERIES = {
    "Throughput against tasks": (list(SCALING), "pairs_s"),
    "A grant against the length of the queue": ([f"queue{count}" for count in QUEUES], "server_us_grant"),
    "Memory of a process": (["memory", "bare"], "waiter_bytes"),
    "A grant against the capacity": ([f"capacity{count}" for count in CAPACITIES], "server_us_grant"),
}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as text; the first column is to be read from the left, the others are numbers."""

    title: str
    head: list[str]
    rows: list[list[str]]

    def as_rich(self) -> Table:
        """For a terminal."""
        table = Table(title=self.title, title_justify="left", box=SIMPLE_HEAD)
        for number, title in enumerate(self.head):
            table.add_column(title, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def as_markdown(self) -> str:
        """For a page."""
        lines = [self.head, ["---", *("--:" for _ in self.head[1:])], *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def grids(results: Results) -> Iterator[Grid]:
    """A table for each workload, and one for each series."""
    of_series = {key for keys, _ in SERIES.values() for key in keys}
    for key in results:
        if key not in of_series:
            yield _by_peer(key, results[key])
    for title, (keys, figure) in SERIES.items():
        measured = [key for key in keys if key in results]
        if measured:
            yield _by_workload(title, figure, {key: results[key] for key in measured})


def median(outcomes: Iterable[Outcome], figure: str) -> float:
    """The median of a figure over the rounds."""
    return statistics.median(outcome.figures[figure] for outcome in outcomes)


def of_floor(outcomes: list[Outcome], floor: list[Outcome], figure: str) -> float | None:
    """How many times the floor's a figure is: the median over the rounds that measured both."""
    ratios = [
        mine.figures[figure] / its.figures[figure]
        for mine, its in zip(outcomes, floor, strict=False)
        if its.figures.get(figure)
    ]
    return statistics.median(ratios) if ratios else None


def _by_peer(key: str, by_peer: dict[str, list[Outcome]]) -> Grid:
    figures = [figure for figure in COLUMNS if figure in next(iter(by_peer.values()))[0].figures]
    rows = [
        [PEERS[peer].name, *(_cell(outcomes, by_peer.get("floor", []), figure) for figure in figures)]
        for peer, outcomes in by_peer.items()
    ]
    return Grid(f"{key}: {EVERY_WORKLOAD[key].about}", ["", *(COLUMNS[figure].title for figure in figures)], rows)


def _by_workload(title: str, figure: str, results: Results) -> Grid:
    peers = list(dict.fromkeys(peer for by_peer in results.values() for peer in by_peer))
    rows = [
        [
            EVERY_WORKLOAD[key].about,
            *(_cell(by_peer[peer], by_peer.get("floor", []), figure) if peer in by_peer else "" for peer in peers),
        ]
        for key, by_peer in results.items()
    ]
    return Grid(f"{title}: {COLUMNS[figure].title}", ["", *(PEERS[peer].name for peer in peers)], rows)


def _cell(outcomes: list[Outcome], floor: list[Outcome], figure: str) -> str:
    """The median, and behind it the ratio to the floor's."""
    column = COLUMNS[figure]
    text = f"{median(outcomes, figure):,.{column.digits}f}"
    ratio = of_floor(outcomes, floor, figure) if column.of_floor and outcomes is not floor else None
    return text if ratio is None else f"{text} ({ratio:.2f})"


def order(keys: Iterable[str]) -> list[str]:
    """Workloads in the order in which they are told of."""
    wanted = set(keys)
    return [key for key in (*WORKLOADS, *SCALING, *GROWTH) if key in wanted]
