"""Changes what other processes hold or wait for; asks first, where somebody can answer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NamedTuple

import typer

from redlease import Semaphore, Snapshot
from redlease._core.limits import CAPACITY_MAX, Until
from redlease._core.primitives.overview import is_known

from .connecting import NothingKnown, resource_at
from .plain import plain
from .snapshot import units


@dataclass(frozen=True, slots=True)
class Target:
    """A resource that is changed. `create`: even if nothing is known of it; `yes`: without a question."""

    name: str
    url: str
    prefix: str
    create: bool
    yes: bool


@dataclass(frozen=True, slots=True)
class LimitJob:
    """The options of `redlease set-limit`."""

    capacity: int | None
    per_key: int | None
    key: str | None
    until: str | None
    reason: str


Create = Annotated[bool, typer.Option("--create", help="Even if nothing is known of a resource of that name.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def show_change(text: str, result: dict[str, object], *, as_json: bool) -> None:
    """Prints what has changed, in a sentence or as JSON."""
    typer.echo(json.dumps(result) if as_json else text)


async def release_ticket(name: str, ticket: str, url: str, prefix: str, *, yes: bool) -> bool:
    """Takes a holder or waiter out; returns False if there was none."""
    _agree(f"Take {plain(ticket)} out of {plain(name)}?", yes=yes)
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


async def set_capacity(capacity: int, target: Target) -> None:
    """Sets the capacity, until a process declares another one."""
    question = f"Set the capacity of {plain(target.name)} to {capacity}, for all processes?"
    async with _to_change(target, question) as found:
        await found.resource.resize(capacity)


async def apply_limit(job: LimitJob, target: Target) -> None:
    """Limits a resource or a key of it, for all processes."""
    until, name = read_until(job.until), plain(target.name)
    whose = name if job.key is None else f"key {plain(job.key)} of {name}"
    async with _to_change(target, f"Limit {whose} for all processes?") as found:
        if found.before.fence and found.before.capacity == CAPACITY_MAX:
            raise ValueError(f"{target.name!r} is a read-write lock, which has no capacity to limit: `redlease pause`")
        await found.resource.set_limit(job.capacity, per_key=job.per_key, key=job.key, until=until, reason=job.reason)


async def lift_limits(name: str, key: str | None, url: str, prefix: str, *, back_off: bool) -> bool:
    """Lifts the limits of a resource, or of one key; returns whether there was one."""
    async with resource_at(name, url, prefix) as resource:
        return await (resource.end_back_off(key) if back_off else resource.clear_limit(key=key))


async def set_pause(until: str | None, reason: str, target: Target) -> None:
    """Stops all grants of a resource."""
    ends = read_until(until)
    async with _to_change(target, f"Grant nothing of {plain(target.name)} to any process?") as found:
        await found.resource.pause(until=ends, reason=reason)


async def end_pause(name: str, url: str, prefix: str) -> bool:
    """Ends a pause; returns whether there was one."""
    async with resource_at(name, url, prefix) as resource:
        return await resource.resume()


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


class Found(NamedTuple):
    """A resource that may be changed, and what it was before."""

    resource: Semaphore
    before: Snapshot


@asynccontextmanager
async def _to_change(target: Target, question: str) -> AsyncIterator[Found]:
    """Connects, and asks; a name of which nothing is known may be mistyped, so it takes an answer or `--create`.

    Raises:
        NothingKnown: It would have to ask, and there is no terminal, or nothing is to be asked.
    """
    async with resource_at(target.name, target.url, target.prefix) as resource:
        before = await resource.inspect(max_items=1)
        if not target.create and not is_known(before):
            if target.yes or not _is_answered():
                raise NothingKnown(
                    f"nothing is known of {target.name!r} under the prefix {target.prefix!r}, so nothing was changed. "
                    "If the name is right, give --create"
                )
            question = f"Nothing is known of that name under the prefix {target.prefix!r}. {question}"
        _agree(question, yes=target.yes)
        yield Found(resource, before)


def _question(snapshot: Snapshot, *, queue: bool) -> str:
    waiters = f" and take all {snapshot.waiting} waiters out of the queue" if queue else ""
    return f"Release all holders of {plain(snapshot.resource)} (units in use: {units(snapshot.in_use)}){waiters}?"


def _agree(question: str, *, yes: bool) -> None:
    """Asks at a terminal, and exits with 1 if the answer is no. A script that names what it changes is not asked."""
    if not yes and _is_answered():
        typer.confirm(question, abort=True, err=True)


def _is_answered() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
