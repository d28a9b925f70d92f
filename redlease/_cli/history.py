"""Prints what happened to a resource, as lines for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

import typer
from rich.console import Console
from rich.text import Text

from redlease import HistoryEntry

from .plain import plain, span
from .snapshot import aligned, units

HEADS = ("time", "event", "ticket", "owner", "weight", "fence", "waited", "held")
WORDS = 4
STYLES = {"granted": "green", "released": "", "lost": "red", "forced": "red", "superseded": "yellow"}


def show_history(entries: list[HistoryEntry], *, as_json: bool) -> None:
    """Prints the entries, the newest last, as a table for people, or as a line of JSON each."""
    if as_json:
        for entry in entries:
            typer.echo(json.dumps(asdict(entry)))
        return
    console = Console(highlight=False)
    console.print(Text("\n").join(lines_of(entries)), soft_wrap=True)


def lines_of(entries: list[HistoryEntry]) -> Iterator[Text]:
    """Yields the lines of the table. Times are those of the server's clock, in this machine's time zone."""
    head, *lines = aligned([HEADS, *map(_cells, entries)], WORDS)
    yield Text(head, "bold dim")
    for entry, line in zip(entries, lines, strict=True):
        yield Text(line, STYLES.get(entry.event, "cyan"))


def _cells(entry: HistoryEntry) -> tuple[str, ...]:
    at = datetime.fromtimestamp(entry.at_ms / 1000, UTC).astimezone().replace(tzinfo=None)
    event = entry.event if entry.capacity is None else f"{entry.event} to {units(entry.capacity)}"
    numbers = (units(entry.weight) if entry.weight else "-", str(entry.fence or "-"))
    spans = ("-" if ms is None else span(ms) for ms in (entry.waited_ms, entry.held_ms))
    at_text = at.isoformat(" ", "milliseconds")
    return at_text, event, plain(entry.ticket) or "-", plain(entry.owner) or "-", *numbers, *spans
