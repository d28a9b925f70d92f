"""Measures locks on the user's own server: short, on resources of its own that expire by themselves."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from statistics import median, quantiles

import typer

from redlease import Lock, Redlease
from redlease._core import clock

LEASE_S = IDLE_TTL_S = 10.0  # after which nothing is left on the server, though this process be killed
WARM_UP_S = 0.2
MANY = 64  # tasks that use one connection, each with a lock of its own
CONTENDERS = 4  # clients that pass one lock around: enough that one always waits


@dataclass(frozen=True, slots=True)
class Times:
    """How long something took, in ms, and how often it was done in a second, with all that did it."""

    median_ms: float
    slowest_hundredth_ms: float
    per_second: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run has measured.

    `round_trip`: PING; `pair`: a lock is acquired and released by one task; `pairs`: by many tasks, each with its own
    lock; `hand_off`: from the call of release until the next client in the queue has the lock.
    """

    server: str
    round_trip: Times
    pair: Times
    pairs: Times
    hand_off: Times


class Stopwatch:
    """Collects times, but for those of the warm-up, until the measurement is over."""

    def __init__(self, seconds: float) -> None:
        self._begin_ms = clock.now_ms() + WARM_UP_S * 1000
        self._seconds = seconds
        self._spans_ms: list[float] = []

    @property
    def over(self) -> bool:
        """Whether the measurement is over."""
        return clock.now_ms() >= self._begin_ms + self._seconds * 1000

    def add(self, began_ms: float) -> None:
        """Adds what began then and ends now."""
        if began_ms >= self._begin_ms:
            self._spans_ms.append(clock.now_ms() - began_ms)

    def times(self) -> Times:
        """Returns the times; raises ValueError if there are too few to tell."""
        if len(self._spans_ms) < 2:
            raise ValueError(f"the server answered too slowly to measure anything in {self._seconds:g} s: --seconds")
        slowest_ms = quantiles(self._spans_ms, n=100)[-1]
        return Times(median(self._spans_ms), slowest_ms, len(self._spans_ms) / self._seconds)


async def measure(url: str, prefix: str, seconds: float) -> Measured:
    """Measures for so many seconds each: a lock by one task, many locks, and a lock that is passed around."""
    name = f"bench:{secrets.token_hex(8)}"
    async with _clients(url, prefix, CONTENDERS) as clients:
        first, *_ = clients
        server, round_trip = await _round_trip(first, seconds)
        pair = await _pairs([first.lock(name)], seconds)
        pairs = await _pairs([first.lock(f"{name}:{number}") for number in range(MANY)], seconds)
        hand_off = await _hand_offs([client.lock(f"{name}:passed") for client in clients], seconds)
    return Measured(server, round_trip, pair, pairs, hand_off)


@asynccontextmanager
async def _clients(url: str, prefix: str, count: int) -> AsyncIterator[list[Redlease]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(Redlease.from_url(url, prefix=prefix, lease=LEASE_S, idle_ttl=IDLE_TTL_S))
            for _ in range(count)
        ]


async def _round_trip(client: Redlease, seconds: float) -> tuple[str, Times]:
    """Returns the name of the first master, and how long it takes to answer."""
    async with client._operations.masters() as (master, *_):
        watch = Stopwatch(min(seconds, 0.5))
        while not watch.over:
            began_ms = clock.now_ms()
            await master.ask("PING")
            watch.add(began_ms)
        return master.name, watch.times()


async def _pairs(locks: list[Lock], seconds: float) -> Times:
    watch = Stopwatch(seconds)

    async def acquire_and_release(lock: Lock) -> None:
        while not watch.over:
            began_ms = clock.now_ms()
            async with lock.hold():
                pass
            watch.add(began_ms)

    await asyncio.gather(*map(acquire_and_release, locks))
    return watch.times()


async def _hand_offs(locks: list[Lock], seconds: float) -> Times:
    watch = Stopwatch(seconds)
    released_ms = 0.0

    async def pass_on(lock: Lock) -> None:
        nonlocal released_ms
        while not watch.over:
            hold = await lock.hold()
            watch.add(released_ms)
            released_ms = clock.now_ms()
            await hold.release()

    await asyncio.gather(*map(pass_on, locks))
    return watch.times()


def show_measured(measured: Measured, *, as_json: bool) -> None:
    """Prints the figures as lines for people, or as a line of JSON."""
    if as_json:
        typer.echo(json.dumps(asdict(measured)))
        return
    text = (
        ("server", measured.server),
        ("round trip", _text(measured.round_trip, "of PING")),
        ("one lock", f"{_text(measured.pair, 'to acquire and release')}; {measured.pair.per_second:,.0f} a second"),
        ("many locks", f"{measured.pairs.per_second:,.0f} pairs a second by {MANY} tasks on one connection"),
        ("hand-off", f"{_text(measured.hand_off, 'from a release to the next of ' + str(CONTENDERS) + ' clients')}"),
    )
    for what, detail in text:
        typer.echo(f"{what:<12}{detail}")


def _text(times: Times, what: str) -> str:
    return f"{times.median_ms:.2f} ms in the median, {times.slowest_hundredth_ms:.2f} ms at most in 99 of 100, {what}"
