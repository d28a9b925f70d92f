"""Changes what other processes hold or wait for; asks first, where somebody can answer."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer

from redlease import Snapshot
from redlease.limits import Until

from .connecting import resource_at
from .plain import plain
from .snapshot import units


@dataclass(frozen=True, slots=True)
class LimitJob:
    """What `redlease limit` is told."""

    resource: str
    capacity: int | None
    per_key: int | None
    key: str | None
    until: str | None
    reason: str


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


async def set_limit(job: LimitJob, url: str, prefix: str, *, yes: bool) -> None:
    """Limits a resource or a key of it, for all processes."""
    until = read_until(job.until)
    whose = job.resource if job.key is None else f"key {job.key} of {job.resource}"
    _agree(f"Limit {whose} for all processes?", yes=yes)
    async with resource_at(job.resource, url, prefix) as resource:
        await resource.limit(job.capacity, per_key=job.per_key, key=job.key, until=until, reason=job.reason)


async def lift_limits(name: str, key: str | None, url: str, prefix: str, *, held_back: bool) -> bool:
    """Lifts the limits of a resource, or of one key; returns whether there was one."""
    async with resource_at(name, url, prefix) as resource:
        return await (resource.end_hold_back(key) if held_back else resource.unlimit(key=key))


async def set_pause(name: str, until: str | None, reason: str, url: str, prefix: str, *, yes: bool) -> None:
    """Stops all grants of a resource."""
    ends = read_until(until)
    _agree(f"Grant nothing of {name} to any process?", yes=yes)
    async with resource_at(name, url, prefix) as resource:
        await resource.pause(until=ends, reason=reason)


async def end_pause(name: str, url: str, prefix: str) -> bool:
    """Ends a pause; returns whether there was one."""
    async with resource_at(name, url, prefix) as resource:
        return await resource.unpause()


def read_until(text: str | None) -> Until:
    """Reads a duration as `90s`, `30m`, `2h` or `1d`, or a time in ISO 8601, local unless it has a zone.

    Raises:
        ValueError: It is neither.
    """
    if text is None:
        return None
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        raise ValueError(
            f"--until is a duration as 90s, 30m, 2h or 1d, or a time as 2031-01-31T18:00, not {text!r}"
        ) from None


def _question(snapshot: Snapshot, *, queue: bool) -> str:
    waiters = f" and take all {snapshot.waiting} waiters out of the queue" if queue else ""
    return f"Release all holders of {snapshot.resource} (units in use: {units(snapshot.in_use)}){waiters}?"


def _agree(question: str, *, yes: bool) -> None:
    """Asks at a terminal, and exits with 1 if the answer is no. A script that names what it changes is not asked."""
    if not yes and _is_answered():
        typer.confirm(plain(question), abort=True, err=True)


def _is_answered() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
