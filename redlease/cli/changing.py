"""Changes what other processes hold or wait for; asks first, where somebody can answer."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from redlease import Snapshot

from .connecting import resource_at
from .plain import plain
from .snapshot import units

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def show_change(told: str, result: dict[str, object], *, as_json: bool) -> None:
    """Prints what has changed, in a sentence or as JSON."""
    typer.echo(json.dumps(result) if as_json else plain(told))


async def release_ticket(name: str, ticket: str, url: str, prefix: str, *, yes: bool) -> bool:
    """Takes a holder or waiter out; returns False if there was none."""
    _agree(f"Take {ticket} out of {name}?", yes=yes)
    async with resource_at(name, url, prefix) as resource:
        return await resource.release(ticket)


async def release_everybody(name: str, url: str, prefix: str, *, queue: bool, yes: bool) -> int:
    """Releases all holders, with `queue` first all waiters; returns how many.

    Raises:
        ValueError: It would have to ask, and there is no terminal.
    """
    if not yes and not _is_answered():
        whose = "holders and waiters" if queue else "holders"
        raise ValueError(f"this takes {name} from all its {whose}, and there is no terminal to ask at. Give --yes")
    async with resource_at(name, url, prefix) as resource:
        if not yes:
            _agree(_question(await resource.inspect(), queue=queue), yes=yes)
        return await resource.release_all(queue=queue)


async def set_capacity(name: str, capacity: int, url: str, prefix: str, *, yes: bool) -> None:
    """Sets the capacity, until a process declares another one."""
    _agree(f"Set the capacity of {name} to {capacity}, for all processes?", yes=yes)
    async with resource_at(name, url, prefix) as resource:
        await resource.resize(capacity)


def _question(snapshot: Snapshot, *, queue: bool) -> str:
    waiters = f" and take all {snapshot.waiting} waiters out of the queue" if queue else ""
    return f"Release all holders of {snapshot.resource} (units in use: {units(snapshot.in_use)}){waiters}?"


def _agree(question: str, *, yes: bool) -> None:
    """Asks at a terminal, and exits with 1 if the answer is no. A script that names what it changes is not asked."""
    if not yes and _is_answered():
        typer.confirm(plain(question), abort=True, err=True)


def _is_answered() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
