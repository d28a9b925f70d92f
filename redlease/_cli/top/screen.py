"""Draws what `redlease top` shows, as lines that fit the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from rich.text import Text

from redlease._cli import history, snapshot
from redlease._cli.listing import HEADS, cells_of, name_of, style_of
from redlease._cli.plain import plain, printable
from redlease._core.primitives.overview import Summary

from .view import BY_NAME, SORTINGS, View

LOST_HEADS = ("lost", "forced")
WIDTHS = (10, 7, 12, 12, 4, 6)
AROUND = 4  # lines that are no resource: what all of them come to, a gap, the heads, and the keys
KEYS = "sort: w wait  n waiting  u held  o hold  r name   / filter   enter open   q quit"
KEYS_OPENED = "up, down, page up, page down   escape back   q quit"
KEYS_TYPING = "enter keep the filter   escape drop it"


def draw(view: View, width: int, height: int) -> Text:
    """Returns the whole screen, of exactly that many lines, none longer than the width."""
    body = max(1, height - AROUND)
    lines = [*(_opened(view, width, body + 1) if view.opened is not None else _listed(view, body))]
    lines = [_heading(view), Text(), *lines][: height - 1]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(_foot(view))
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True).join(lines)


def _heading(view: View) -> Text:
    resources = view.summaries
    held = sum(1 for each in resources if each.in_use)
    waiting = sum(each.waiting for each in resources)
    line = Text("redlease top", "bold")
    line.append(f"   {len(resources)} resources, {held} of them held, {waiting} waiting", "not bold")
    if view.pattern or view.typing:
        line.append(f"   filter: {plain(view.pattern)}{'_' if view.typing else ''}", "bold cyan")
    return line


def _foot(view: View) -> Text:
    if view.trouble:
        return Text(printable(view.trouble), "bold white on red")
    return Text(KEYS_TYPING if view.typing else KEYS_OPENED if view.opened is not None else KEYS, "dim")


def _listed(view: View, rows: int) -> Iterator[Text]:
    shown, selected = view.window(rows)
    yield _heads(view)
    for at, each in enumerate(shown):
        cells = (*cells_of(each), *_losses(view, each))
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(cells, WIDTHS, strict=True))
        line = Text(f"{numbers}  {name_of(each)}", style_of(each))
        if at == selected:
            line.stylize("reverse")
        yield line


def _losses(view: View, each: Summary) -> tuple[str, str]:
    if not each.history:
        return "-", "-"
    lost, forced = view.losses.get(each.resource, ("?", "?"))  # not read yet, or not readable
    return str(lost), str(forced)


def _heads(view: View) -> Text:
    """Returns the heads of the columns; that of the order is underlined."""
    line = Text(style="bold")
    by = "resource" if view.sorting == BY_NAME else SORTINGS[view.sorting].column
    for head, width in zip((*HEADS, *LOST_HEADS, "resource"), (*WIDTHS, 0), strict=True):
        line.append(" " * (width - len(head)))
        line.append(head, "underline" if head == by else "dim")
        line.append("  ")
    line.rstrip()
    return line


def _opened(view: View, width: int, rows: int) -> Iterator[Text]:
    """Yields the lines of one resource: the holders, the waiters and the end of its history."""
    if view.detail is None:
        text = f"{plain(view.opened or '')}: being read" if not view.trouble else printable(view.trouble)
        yield from (Text(line, "dim" if not view.trouble else "red") for line in textwrap.wrap(text, width))
        return
    lines = list(snapshot.lines_of(view.detail.snapshot, width))
    if view.detail.entries:
        lines += [Text("history, the newest first", "bold"), *_newest_first(view)]
    first = view.lines_from(len(lines), rows)
    yield from lines[first : first + rows]


def _newest_first(view: View) -> list[Text]:
    entries = view.detail.entries if view.detail else []
    head, *lines = history.lines_of(entries)
    return [head, *reversed(lines)]
