"""The demo command: runs the demo, shows it, judges it, and writes its timeline."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from redlease._cli.plain import plain

from .evidence import Evidence
from .run import Demo, Notice
from .screen import Screen, line_of, progress, summary
from .timeline import draw, picture
from .verdict import judge


def run_demo(url: str | None, *, rounds: int, prefix: str, timeline: Path, as_json: bool) -> bool:
    """Runs the demo; returns True if every promise was kept."""
    timeline.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True)
    evidence = asyncio.run(_shown(console, url, rounds, prefix, quiet=as_json))
    verdict = judge(evidence)
    drawn = picture(evidence) if timeline.suffix == ".svg" else draw(evidence, verdict)
    timeline.write_text(drawn, encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(verdict.as_dict() | {"timeline": str(timeline)}, indent=2))
    else:
        console.print(summary(verdict), "")
        console.print(Text(plain(f"The timeline is in {timeline}: open it in a browser.")))
    return verdict.promises_kept


async def _shown(console: Console, url: str | None, rounds: int, prefix: str, *, quiet: bool) -> Evidence:
    """Runs the demo and shows it meanwhile: as a live table on a terminal, as lines elsewhere."""
    screen = Screen()

    def notice(what: Notice) -> None:
        screen.notices.append(what)
        if not quiet and not console.is_terminal:
            console.print(line_of(what))

    demo = screen.demo = Demo(url, rounds=rounds, prefix=prefix, on_notice=notice)
    if quiet:
        return await demo.run()
    if console.is_terminal:
        with Live(screen, console=console, refresh_per_second=12):
            return await demo.run()
    lines = asyncio.create_task(progress(demo, console.print))
    with _cancelled_at_the_end(lines):
        return await demo.run()


@contextlib.contextmanager
def _cancelled_at_the_end(task: asyncio.Task[None]) -> Iterator[None]:
    try:
        yield
    finally:
        task.cancel()
