"""Prints a snapshot for operators: as lines for people, grep and awk, or as a line of JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from redlease import DamagedEntry, Limit, Snapshot
from redlease._core.limits import CAPACITY_MAX
from redlease._core.primitives.overview import is_known
from redlease._core.protocol.snapshots import SNAPSHOT_LIMIT

from .plain import plain

GAP = "  "
HEADS = ("", "ticket", "owner", "weight", "fence", "for", "lease left")
WORDS = 3  # the first columns, which contain words and are aligned left; the others contain numbers


def show(snapshot: Snapshot, *, as_json: bool) -> None:
    """Prints the snapshot as lines for people, or as one line of JSON, so that a stream has one per line."""
    if as_json:
        known = {} if is_known(snapshot) else {"capacity": None}
        typer.echo(json.dumps(asdict(snapshot) | known))
        return
    # Ask the stream, not rich: colours can be forced without a terminal, but then lines must not be cut.
    console = Console(highlight=False)
    lines = lines_of(snapshot, console.width if sys.stdout.isatty() else None)
    console.print(Text("\n").join(lines), soft_wrap=True)


def lines_of(snapshot: Snapshot, width: int | None) -> Iterator[Text]:
    """Yields the lines for people: holders by grant, then waiters in the order of the queue.

    With a `width` each entry is a row of a table with its metadata below, or several lines if the table is too wide.
    Without a width each entry is one line. No word is ever broken: a ticket longer than the width is wrapped by the
    terminal, so that it can be copied as one word.
    """
    yield Text(_head(snapshot))
    yield from (Text(_limit(limit, snapshot), "yellow") for limit in snapshot.limits)
    yield from (Text(_damage(entry, snapshot), "red") for entry in snapshot.damaged)
    rows = list(_rows(snapshot))
    if not rows:
        return
    yield Text()
    head, *lines = aligned([HEADS, *(row.cells for row in rows)], WORDS)
    if width is None:
        yield Text(head + GAP + "metadata", "bold dim")
        yield from (Text(GAP.join((line, *row.metadata)), row.style) for row, line in zip(rows, lines, strict=True))
    else:
        fits, indent = cell_len(head) <= width, " " * (max(len(row.cells[0]) for row in rows) + len(GAP))
        if fits:
            yield Text(head, "bold dim")
        for row, line in zip(rows, lines, strict=True):
            first = [line] if fits else _stacked(row, indent, width)
            yield from (Text(part, row.style) for part in (*first, *_packed(row.metadata, indent, width)))
    yield Text()


@dataclass(frozen=True, slots=True)
class Row:
    """A holder or a waiter as text."""

    style: str
    cells: tuple[str, ...]
    metadata: tuple[str, ...]


def _head(snapshot: Snapshot) -> str:
    name = plain(snapshot.resource)
    if not is_known(snapshot):
        return f"{name}: nothing is known of it; it was not used under this prefix, or not for as long as its idle_ttl"
    of_all = "" if snapshot.capacity == CAPACITY_MAX else f" of {snapshot.capacity}"
    held, waiting = f"{units(snapshot.in_use)}{of_all} held", f"{snapshot.waiting} waiting"
    unlisted = f"; the first {SNAPSHOT_LIMIT} of each are listed" if _is_cut(snapshot) else ""
    return f"{name}: {held}, {waiting}, last fence {snapshot.fence or 'unknown'}{unlisted}"


def _limit(limit: Limit, snapshot: Snapshot) -> str:
    """Returns a limit as a sentence."""
    if limit.kind == "rate":
        left_ms = (limit.until_ms or 0) - snapshot.server_time_ms
        return (
            f"  rate: {f'key {plain(limit.key)}' if limit.key else 'everybody'} waits {_seconds(left_ms)} for a token"
        )
    whose = "each key" if limit.kind == "per_key" else limit.key and f"key {plain(limit.key)}"
    if limit.units:
        what = f"{whose or 'everybody together'} may hold at most {limit.units}"
    else:
        what = f"{whose} is granted nothing" if whose else "nobody is granted anything"
    ends = "until it is lifted"
    if limit.until_ms is not None:
        ends = f"for {_seconds(limit.until_ms - snapshot.server_time_ms)} more"
    why = f": {plain(limit.reason)}" if limit.reason else ""
    word = {"per_key": "limit", "back_off": "held back"}.get(limit.kind, limit.kind)
    return f"  {word} by {plain(limit.owner)}, {ends}: {what}{why}"


def _damage(entry: DamagedEntry, snapshot: Snapshot) -> str:
    """Returns an entry that cannot be read as a line."""
    ends = "" if entry.until_ms is None else f"; ends in {_seconds(entry.until_ms - snapshot.server_time_ms)}"
    return f"  damaged {entry.kind} {plain(entry.name)}: {entry.reason}{ends}"


def units(weight: int) -> str:
    """Returns a number of units as text."""
    return "all" if weight == CAPACITY_MAX else str(weight)  # a writer of a read-write lock holds all


def _is_cut(snapshot: Snapshot) -> bool:
    """Returns True if there may be more holders or waiters than are listed."""
    return SNAPSHOT_LIMIT in (len(snapshot.holders), len(snapshot.waiters))


def _rows(snapshot: Snapshot) -> Iterator[Row]:
    now_ms = snapshot.server_time_ms
    for permit in snapshot.holders:
        what = (plain(permit.ticket), plain(permit.owner), units(permit.weight), str(permit.fence))
        spans = (_seconds(now_ms - permit.granted_at_ms), _seconds(permit.expires_at_ms - now_ms))
        yield Row("green", ("holds", *what, *spans), _pairs(permit.metadata))
    for place, waiter in enumerate(snapshot.waiters, 1):
        what = (plain(waiter.ticket), plain(waiter.owner), units(waiter.weight), "-")
        spans = (_seconds(now_ms - waiter.queued_at_ms), "-")
        yield Row("yellow", (f"waits {place}", *what, *spans), _pairs(waiter.metadata))


def aligned(table: list[tuple[str, ...]], words: int) -> Iterator[str]:
    """Yields each row as a line, every column as wide as its widest cell, the first `words` of them aligned left."""
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        pads = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
        left = map(str.__add__, cells[:words], pads[:words])
        right = map(str.__add__, pads[words:], cells[words:])
        yield GAP.join((*left, *right))


def _stacked(row: Row, indent: str, width: int) -> Iterator[str]:
    """Yields the lines of a row if the table is too wide: ticket and owner, then the numbers with their names."""
    state, ticket, owner, *numbers = row.cells
    names = zip(HEADS[WORDS:], numbers, strict=True)
    first, *more = _packed((ticket, owner), indent, width)
    yield state.ljust(len(indent)) + first.removeprefix(indent)
    yield from more
    yield from _packed((f"{name} {number}" for name, number in names if number != "-"), indent, width)


def _packed(items: Iterable[str], indent: str, width: int) -> Iterator[str]:
    """Yields the items on as few lines as possible. No item is broken: one longer than a line gets its own line."""
    line = ""
    for item in items:
        if line and len(indent) + cell_len(line + GAP + item) > width:
            yield indent + line
            line = ""
        line += GAP + item if line else item
    if line:
        yield indent + line


def _seconds(span_ms: int) -> str:
    return f"{span_ms / 1000:.1f} s"


def _pairs(metadata: dict[str, str]) -> tuple[str, ...]:
    return tuple(plain(f"{key}={value}") for key, value in metadata.items())
