"""What the examples show: who waited and who held when, and a verdict."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from redlease import Semaphore

BAR = 40  # characters

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Turn:
    """One turn of `who`: moments in seconds of one clock, and the fence that it held."""

    who: str
    asked_at: float
    began_at: float
    ended_at: float
    fence: int


@contextlib.asynccontextmanager
async def arrivals(pool: Semaphore, count: int) -> AsyncIterator[list[str]]:
    """Who is seen at a resource, in the order of arrival, until there are so many: Redis shows holders and queue."""
    seen: list[str] = []

    async def watch() -> None:
        async for snapshot in pool.watch():
            owners = [permit.owner for permit in snapshot.holders] + [waiter.owner for waiter in snapshot.waiters]
            seen.extend(owner for owner in owners if owner not in seen)
            if len(seen) == count:
                return

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()
        await asyncio.wait({watching}, timeout=1)


def most_inside(turns: list[Turn]) -> int:
    """How many were inside at once, at the most; who leaves at a moment makes room at that moment."""
    steps = sorted([(turn.began_at, 1) for turn in turns] + [(turn.ended_at, -1) for turn in turns])
    return max(sum(change for _, change in steps[:number]) for number in range(1, len(steps) + 1))


def in_order(turns: list[Turn], seen: list[str]) -> bool:
    """Whether the fences, which grow with each grant, follow the order of arrival."""
    fences = {turn.who: turn.fence for turn in turns}
    return sorted(seen) == sorted(fences) and all(fences[one] < fences[other] for one, other in pairwise(seen))


def makespan(turns: list[Turn]) -> float:
    """From the first who asked to the last who was done."""
    return max(turn.ended_at for turn in turns) - min(turn.asked_at for turn in turns)


def timeline(turns: list[Turn], seen: list[str]) -> RenderableType:
    """A row for each turn, in the order of arrival: the time that it waited, and the time that it was inside."""
    start, width = min(turn.asked_at for turn in turns), makespan(turns)
    table = Table(box=None, padding=(0, 1), header_style="bold dim")
    table.add_column("", no_wrap=True)
    table.add_column(_scale(width), no_wrap=True)
    for heading in ("waited", "fence"):
        table.add_column(heading, justify="right", no_wrap=True)
    for turn in sorted(turns, key=lambda turn: seen.index(turn.who) if turn.who in seen else turn.fence):
        asked, began, ended = (
            round((at - start) / width * BAR) for at in (turn.asked_at, turn.began_at, turn.ended_at)
        )
        bar = Text.assemble(" " * asked, ("░" * (began - asked), "yellow"), ("█" * (ended - began), "green"))
        table.add_row(turn.who, bar, f"{turn.began_at - turn.asked_at:.2f} s", Text(str(turn.fence), "cyan"))
    return table


def _scale(width: float) -> str:
    end = f"{width:.2f} s"
    return "0" + end.rjust(BAR - 1)


def verdict(*promises: tuple[bool, str, str]) -> bool:
    """Prints the promises: whether each was kept, what it says, and a figure. Whether all were kept."""
    table = Table(box=None, padding=(0, 1), show_header=False)
    for kept, promise, figure in promises:
        table.add_row(Text("✓", "bold green") if kept else Text("✗", "bold red"), Text(promise), Text(figure, "dim"))
    console.print("", table, "")
    return all(kept for kept, _, _ in promises)
