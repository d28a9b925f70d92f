"""What an examination has found, and how it is shown."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum

import typer
from rich.console import Console
from rich.text import Text

from redlease._cli.plain import plain


class Level(IntEnum):
    """How bad it is; the worst of all is the exit status."""

    OK = 0
    WARNING = 1
    ERROR = 2


STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found.

    `detail`: the fact; `advice`: what to do, empty if there is nothing; `server`: the address of a master, empty for
    what concerns all of them.
    """

    check: str
    level: Level
    detail: str
    advice: str = ""
    server: str = ""


def show_findings(findings: list[Finding], *, as_json: bool) -> None:
    """Prints the findings for people, or as a line of JSON each."""
    if as_json:
        for each in findings:
            typer.echo(json.dumps(asdict(each) | {"level": each.level.name.lower()}))
        return
    console = Console(highlight=False)
    console.print(Text("\n").join(lines_of(findings, console.width if sys.stdout.isatty() else None)), soft_wrap=True)


def lines_of(findings: list[Finding], width: int | None) -> Iterator[Text]:
    """Yields the lines for people: level, check, fact and advice. Without a `width` each finding is one line."""
    checks = max(len(each.check) for each in findings)
    servers = {each.server for each in findings if each.server}
    for each in findings:
        level = each.level.name.lower()
        head = f"{level:7}  {each.check:{checks}}  "
        detail = plain(f"{each.server}: {each.detail}" if each.server and len(servers) > 1 else each.detail)
        if width is None:
            lines = [". ".join(filter(None, (detail, plain(each.advice))))]
        else:
            room = max(20, width - len(head))
            lines = [*_wrapped(detail, room), *_wrapped(f"→ {plain(each.advice)}" if each.advice else "", room)]
        for number, line in enumerate(lines):
            text = Text((head if number == 0 else " " * len(head)) + line)
            text.stylize(STYLES[each.level], 0, len(level) if number == 0 else 0)
            yield text


def _wrapped(text: str, width: int) -> list[str]:
    indent = "  " if text.startswith("→") else ""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
