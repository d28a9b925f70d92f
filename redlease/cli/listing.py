"""Lists the resources under a prefix, with those first whose waiters have waited longest."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import typer
from rich.console import Console
from rich.text import Text

from redlease import Redlease, Snapshot
from redlease.limits import CAPACITY_MAX

from .plain import plain, span
from .snapshot import UNDECLARED, is_known, units

# How many holders, and as many waiters, are looked at for the longest hold and wait of a resource, so that each costs
# the server little. The first waiters of a queue have waited longest, unless one with priority has passed them.
LOOKED_AT = 100
BATCH = 256  # resources that are inspected together, so that memory is bounded however many there are
HEADS = ("held", "waiting", "longest wait", "longest hold")


@dataclass(frozen=True, slots=True)
class Summary:
    """A resource in a line; the longest hold and wait in ms by the server's clock, None if nobody holds or waits.

    `capacity`: None if no process has declared one.
    """

    resource: str
    capacity: int | None
    in_use: int
    waiting: int
    longest_hold_ms: int | None
    longest_wait_ms: int | None
    fence: int


def summary_of(snapshot: Snapshot) -> Summary:
    """Returns the line for a snapshot."""
    now_ms = snapshot.server_time_ms
    return Summary(
        snapshot.resource,
        None if snapshot.capacity == UNDECLARED else snapshot.capacity,
        snapshot.in_use,
        snapshot.waiting,
        max((now_ms - permit.granted_at_ms for permit in snapshot.holders), default=None),
        max((now_ms - waiter.queued_at_ms for waiter in snapshot.waiters), default=None),
        snapshot.fence,
    )


def matches(name: str, pattern: str) -> bool:
    """Returns True if the name matches a glob as Redis has them: `*`, `?`, `[ab]`, `[^ab]`, and a backslash."""
    # fnmatch negates with "!", and has no backslash but for a set of one character.
    translated = re.sub(r"\\(.)", lambda found: f"[{found[1]}]", pattern).replace("[^", "[!")
    return fnmatchcase(name, translated)


async def summaries(client: Redlease, pattern: str = "*") -> list[Summary]:
    """Returns the resources whose names match, sorted by what needs attention: the longest wait, then the name.

    Raises:
        Unavailable: The server was not reached.
        RedleaseError: The server refused, SCAN for example.
    """
    found: list[Summary] = []
    batch: list[str] = []
    async for name in client.tickets.names():
        if matches(name, pattern):
            batch.append(name)
        if len(batch) == BATCH:
            found += await _inspected(client, batch)
            batch = []
    found += await _inspected(client, batch)
    return sorted(found, key=lambda each: (-(each.longest_wait_ms or 0), each.resource))


async def _inspected(client: Redlease, names: Iterable[str]) -> list[Summary]:
    """Inspects resources together: the client sends the calls in batches, with few of them unanswered at a time."""
    tickets = client.tickets
    looks = (
        tickets.inspect(tickets.resource(name), declared=UNDECLARED, limit=LOOKED_AT, counted=LOOKED_AT)
        for name in names
    )
    snapshots = await asyncio.gather(*looks)
    return [summary_of(snapshot) for snapshot in snapshots if is_known(snapshot)]


def show_list(listed: list[Summary], *, as_json: bool) -> None:
    """Prints the resources as a table for people, or as a line of JSON each."""
    if as_json:
        for each in listed:
            typer.echo(json.dumps(asdict(each)))
        return
    console = Console(highlight=False)
    console.print(Text("\n").join(lines_of(listed)), soft_wrap=True)


def lines_of(listed: list[Summary]) -> Iterator[Text]:
    """Yields the lines of the table. The name comes last, so that a long one moves no column."""
    table = [HEADS, *(_cells(each) for each in listed)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *rows = ("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table)
    yield Text(f"{head}  resource", "bold dim")
    for each, row in zip(listed, rows, strict=True):
        style = "yellow" if each.waiting else "green" if each.in_use else ""
        yield Text(f"{row}  {plain(each.resource)}", style)


def _cells(each: Summary) -> tuple[str, ...]:
    of_all = "" if each.capacity in (None, CAPACITY_MAX) else f" of {each.capacity}"
    spans = (each.longest_wait_ms, each.longest_hold_ms)
    return f"{units(each.in_use)}{of_all}", str(each.waiting), *("-" if ms is None else span(ms) for ms in spans)
