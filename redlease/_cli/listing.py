"""Prints the resources under a prefix, with those first whose waiters have waited longest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import typer
from rich.console import Console
from rich.text import Text

from redlease._core.limits import CAPACITY_MAX
from redlease._core.primitives.overview import Summary

from .plain import plain, printable, span
from .snapshot import units

HEADS = ("held", "waiting", "longest wait", "longest hold")


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
    table = [HEADS, *(cells_of(each) for each in listed)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *rows = ("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in table)
    yield Text(f"{head}  resource", "bold dim")
    for each, row in zip(listed, rows, strict=True):
        yield Text(f"{row}  {name_of(each)}", style_of(each))


def name_of(each: Summary) -> str:
    """Returns the name for the last column; why a resource cannot be read follows it."""
    return plain(each.resource) if each.error is None else f"{plain(each.resource)}  ({printable(each.error)})"


def style_of(each: Summary) -> str:
    """Returns the colour of a line."""
    return "red" if each.error else "yellow" if each.waiting else "green" if each.in_use else ""


def cells_of(each: Summary) -> tuple[str, ...]:
    """Returns what is held, who waits, and the longest wait and hold, as text."""
    if each.error is not None:
        return ("?",) * len(HEADS)
    of_all = "" if each.capacity in (None, CAPACITY_MAX) else f" of {each.capacity}"
    if each.limit is not None:
        of_all = f"{of_all}, limit {each.limit}" if each.limit else f"{of_all}, paused"
    spans = (each.longest_wait_ms, each.longest_hold_ms)
    return f"{units(each.in_use)}{of_all}", str(each.waiting), *("-" if ms is None else span(ms) for ms in spans)
