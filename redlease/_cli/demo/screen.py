"""The display of a run: a live table on a terminal, plain lines elsewhere, and the summary at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import get_args

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from redlease import Snapshot
from redlease._cli.plain import plain

from .evidence import KillKind
from .run import Demo, Notice
from .verdict import Recovery, Verdict

NOTICES_SHOWN = 5
STYLES = {"start": "dim", "kill": "bold red", "gone": "green"}


class Screen:
    """A rich renderable that shows the current state of a run.

    Attributes:
        demo: The run, once there is one.
        notices: The events so far.
    """

    def __init__(self) -> None:
        self.demo: Demo | None = None
        self.notices: list[Notice] = []

    def __rich__(self) -> RenderableType:
        demo = self.demo
        if demo is None or demo.snapshot is None:
            return Text("starting the processes ...", style="dim")
        lines = [line_of(notice) for notice in self.notices[-NOTICES_SHOWN:]]
        return Group(self._head(demo, demo.snapshot), self._table(demo, demo.snapshot), "", *lines, "")

    @staticmethod
    def _head(demo: Demo, snapshot: Snapshot) -> Text:
        used, capacity = len(snapshot.holders), snapshot.capacity
        head = Text.assemble(
            ("  redlease demo  ", "bold reverse"),
            (f"  {demo.now():4.1f} s   ", ""),
            ("█" * used, "green"),
            ("░" * (capacity - used), "dim"),
            (f" {used} of {capacity} held   ", ""),
            (f"{len(snapshot.waiters)} waiting   ", ""),
            (f"last fence {snapshot.fence}", "cyan"),
        )
        head.append("\n")
        return head

    @staticmethod
    def _table(demo: Demo, snapshot: Snapshot) -> Table:
        table = Table(box=None, padding=(0, 1), header_style="bold dim")
        for name, width in (("", 17), ("owner", 10), ("ticket", 6)):
            table.add_column(name, no_wrap=True, min_width=width)
        for name, width in (("weight", 6), ("fence", 16), ("for", 6), ("grants", 6)):
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        for consumer, (state, *cells) in _rows(demo, snapshot).items():
            turns = [turn for turn in demo.evidence.turns.values() if turn.consumer == consumer]
            shown, style = state, {"holds": "green", "rests": "dim"}.get(state, "yellow")
            if demo.evidence.killed(consumer) is not None:
                shown, style = f"killed, {state}" if cells else "killed", "red"
            elif not cells and len(turns) == demo.evidence.rounds:
                shown = "done"
            grants = str(sum(turn.fence is not None for turn in turns))
            texts = [Text(plain(cell)) for cell in (f"● {shown}", consumer, *(cells or [""] * 4), grants)]
            table.add_row(*texts, style=style)
        return table


def _rows(demo: Demo, snapshot: Snapshot) -> dict[str, tuple[str, ...]]:
    """Returns state, ticket, weight, fence and time by consumer: holders by grant, then the queue, then the others."""
    now_ms = snapshot.server_time_ms + (demo.now() - demo.evidence.sightings[-1].at) * 1000
    rows: dict[str, tuple[str, ...]] = {}
    for permit in snapshot.holders:
        held = f"{(now_ms - permit.granted_at_ms) / 1000:.1f} s"
        rows[permit.owner] = ("holds", permit.ticket, str(permit.weight), str(permit.fence), held)
    for place, waiter in enumerate(snapshot.waiters, 1):
        waited = f"{(now_ms - waiter.queued_at_ms) / 1000:.1f} s"
        rows[waiter.owner] = (f"waits {place}", waiter.ticket, str(waiter.weight), "", waited)
    return rows | {consumer: ("rests",) for consumer in demo.processes if consumer not in rows}


def line_of(notice: Notice) -> Text:
    """Returns an event as a line."""
    return Text(f"{notice.at:5.1f} s  {plain(notice.text)}", style=STYLES[notice.kind])


async def progress(demo: Demo, write: Callable[[str], None]) -> None:
    """Writes a plain line every second, for use without a terminal."""
    while True:
        await asyncio.sleep(1)
        if demo.snapshot is not None:
            grants = sum(turn.fence is not None for turn in demo.evidence.turns.values())
            held, waiting = len(demo.snapshot.holders), len(demo.snapshot.waiters)
            write(
                f"{demo.now():5.1f} s  {held} of {demo.snapshot.capacity} held, {waiting} waiting, {grants} grants, "
                f"last fence {demo.snapshot.fence}"
            )


def summary(verdict: Verdict) -> RenderableType:
    """Returns the verdict as a table, one line per promise."""
    most = max(verdict.most_inside, verdict.most_permits)
    by_kind = {kill.what: kill for kill in verdict.kills}
    promises = [
        (most <= verdict.capacity, f"at most {verdict.capacity} inside at any moment", f"{most} at the most"),
        (verdict.in_arrival_order, "granted in the order of arrival", f"{verdict.grants} grants"),
        (verdict.fences_increasing, "every fence greater than those before", ""),
        *(_got_over(kind, by_kind.get(kind)) for kind in get_args(KillKind)),
        (verdict.all_served, "everybody left alive was served", f"in {verdict.seconds:.1f} s"),
        *((False, failure, "") for failure in verdict.failures),
    ]
    table = Table(box=None, padding=(0, 1), show_header=False)
    for kept, promise, figure in promises:
        table.add_row(
            Text("✓", "bold green") if kept else Text("✗", "bold red"), Text(plain(promise)), Text(figure, "dim")
        )
    return table


def _got_over(kind: KillKind, kill: Recovery | None) -> tuple[bool, str, str]:
    promise = f"the permit of the killed {kind} was recovered within its lease"
    if kill is None or kill.seconds_lost is None:
        return False, promise, "none was killed" if kill is None else "never"
    return kill.recovered_within_lease, promise, f"{kill.seconds_lost:.2f} s of {kill.lease:g} s"
