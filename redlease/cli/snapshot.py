"""A snapshot for operators: a table, or a line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from redlease import Snapshot


def show(snapshot: Snapshot, *, as_json: bool) -> None:
    """Prints it: one line of JSON, so that a stream of them can be read line by line, or a table."""
    console = Console(highlight=False)
    if as_json:
        console.print(json.dumps(asdict(snapshot)), soft_wrap=True, markup=False)
        return
    used = sum(permit.weight for permit in snapshot.holders)
    console.print(
        f"{snapshot.resource}: {used} of {snapshot.capacity} held, {len(snapshot.waiters)} waiting, "
        f"last fence {snapshot.fence or 'unknown'}",
        markup=False,
        soft_wrap=True,
    )
    if snapshot.holders or snapshot.waiters:
        console.print(table_of(snapshot), "")


def table_of(snapshot: Snapshot) -> Table:
    """Holders by grant, then the waiters in the order of the queue."""
    table = Table(box=None, padding=(0, 2), header_style="bold dim")
    for name in ("", "ticket", "owner"):
        table.add_column(name, overflow="fold")
    for name in ("weight", "fence", "for", "lease left"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("metadata", overflow="fold")
    now_ms = snapshot.server_time_ms
    for permit in snapshot.holders:
        spans = (_seconds(now_ms - permit.granted_at_ms), _seconds(permit.expires_at_ms - now_ms))
        what = (permit.ticket, permit.owner, str(permit.weight), str(permit.fence))
        table.add_row("holds", *what, *spans, _pairs(permit.metadata), style="green")
    for place, waiter in enumerate(snapshot.waiters, 1):
        what = (waiter.ticket, waiter.owner, str(waiter.weight), "")
        spans = (_seconds(now_ms - waiter.queued_at_ms), "")
        table.add_row(f"waits {place}", *what, *spans, _pairs(waiter.metadata), style="yellow")
    return table


def _seconds(span_ms: int) -> str:
    return f"{span_ms / 1000:.1f} s"


def _pairs(metadata: dict[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in metadata.items())
