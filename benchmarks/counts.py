"""`make bench-quick`: what an operation costs in things that can be counted, against the table in counts.json.

No time is measured, so a busy machine shows the same as an idle one: commands (those in scripts too), messages, round
trips, connections, calls of Python functions, Lua instructions and bytes that Lua allocates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Self

import hiredis
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redlease import Redlease, Semaphore
from redlease._core.transport.opening.driver import SocketDriver
from redlease.events import OnEvent

from lua_steps import CountingLua
from meter import Meter
from server import any_binary, running_server

TABLE = Path(__file__).with_name("counts.json")
TIMES = 200
WAITERS = 8

# How far a figure may be above the table's: other versions of Python and asyncio call a little more or less.
SLACK = {"python_calls": 0.15, "lua_instructions": 0.02, "lua_bytes": 0.05}

Counts = dict[str, float]


class Calls:
    """Counts the calls of functions in this thread, those written in C too, while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Self:
        sys.setprofile(lambda _frame, event, _what: self._on_event(event))
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, event: str) -> None:
        if event in {"call", "c_call"}:
            self.count += 1


async def pair(client: Redlease) -> None:
    """A lock that nobody else wants, made, taken and given back, again and again."""
    for _ in range(TIMES):
        async with client.lock("pair").hold():
            pass


async def kept_pair(client: Redlease) -> None:
    """The same with the lock made once, as a service does that keeps it."""
    lock = client.lock("kept")
    for _ in range(TIMES):
        async with lock.hold():
            pass


async def fresh_pair(client: Redlease) -> None:
    """A lock with a name that was never used before."""
    for number in range(TIMES):
        async with client.lock(f"fresh:{number}").hold():
            pass


async def handoff(client: Redlease) -> None:
    """A lock that some tasks hand to each other."""

    async def caller() -> None:
        for _ in range(TIMES // WAITERS):
            async with client.lock("handoff").hold():
                pass

    await asyncio.gather(*(caller() for _ in range(WAITERS)))


async def data_pair(client: Redlease) -> None:
    """A permit as data: acquired and released."""
    lock: Semaphore = client.lock("data")
    for _ in range(TIMES):
        await lock.release(await lock.acquire())


async def renewal(client: Redlease) -> None:
    """A permit that is renewed."""
    lock = client.lock("renewal")
    permit = await lock.acquire()
    for _ in range(TIMES - 1):
        permit = await lock.renew(permit)


OPERATIONS: dict[str, Callable[[Redlease], Awaitable[None]]] = {
    "pair": pair,
    "pair of a kept lock": kept_pair,
    "fresh pair": fresh_pair,
    "hand-off": handoff,
    "data pair": data_pair,
    "renewal": renewal,
}


async def count_all(url: str) -> dict[str, Counts]:
    """The counts of each operation, a time that it is done; at the end those of the pair with OpenTelemetry on."""
    found = {name: await count(url, operation) for name, operation in OPERATIONS.items()}
    with observed() as (tracer, telemetry):
        found["observed pair"] = await count(url, pair, telemetry)
        with tracer.start_as_current_span("the caller's"):
            found["traced pair"] = await count(url, pair, telemetry)
    return found


@contextmanager
def observed() -> Iterator[tuple[Any, OnEvent]]:
    """OpenTelemetry with its SDK, which keeps metrics and spans in memory: a tracer, and what clients get."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from redlease.otel import Telemetry

    meters, tracers = MeterProvider(metric_readers=[InMemoryMetricReader()]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    try:
        yield tracers.get_tracer("counts"), Telemetry(meter_provider=meters, tracer_provider=tracers)
    finally:
        meters.shutdown()
        tracers.shutdown()


async def count(url: str, operation: Callable[[Redlease], Awaitable[None]], on_event: OnEvent | None = None) -> Counts:
    """The counts of one."""
    with closing(Meter(url)) as meter, closing(CountingLua(url)) as lua:
        meter.empty()
        async with opened(url, on_event) as client:
            with recorded() as written, meter.measuring() as cost, Calls() as calls:
                await operation(client)
        commands = read_commands(written)
        meter.empty()
        steps = [lua.run(command) for command in commands]
    each = {
        "connections": (cost.connections - 1) * TIMES,  # without that of `lua`
        "round_trips": len(written),
        "scripts": len(commands),
        "messages": cost.commands.get("publish", 0),
        "commands": cost.commands_all,
        "python_calls": calls.count,
        "lua_instructions": sum(one.instructions for one in steps),
        "lua_bytes": sum(one.allocated for one in steps),
    }
    return {name: round(total / TIMES, 2 if total < 100 * TIMES else 0) for name, total in each.items()}


@asynccontextmanager
async def opened(url: str, on_event: OnEvent | None = None) -> AsyncIterator[Redlease]:
    """A client that has done each thing once."""
    async with Redlease.from_url(url, owner="counts", on_event=on_event) as client:
        async with client.lock("first").hold():
            pass
        yield client


@contextmanager
def recorded() -> Iterator[list[bytes]]:
    """What is written to a server while the block runs, a write each."""
    write, written = SocketDriver.write, list[bytes]()

    def recording(driver: SocketDriver, data: bytes) -> None:
        written.append(bytes(data))
        write(driver, data)

    SocketDriver.write = recording  # type: ignore[method-assign,assignment]
    try:
        yield written
    finally:
        SocketDriver.write = write  # type: ignore[method-assign]


def read_commands(written: list[bytes]) -> list[list[bytes]]:
    """The calls of scripts among what was written, in their order."""
    reader = hiredis.Reader()
    reader.feed(b"".join(written))
    commands = iter(reader.gets, False)
    return [command for command in commands if command[0] == b"EVALSHA"]


def too_many(found: dict[str, Counts], allowed: dict[str, Counts]) -> list[str]:
    """What is above the table, in sentences."""
    return [
        f"{operation}: {found[operation][name]:g} {name}, where counts.json has {most:g}"
        for operation, counts in allowed.items()
        for name, most in counts.items()
        if found[operation][name] > most * (1 + SLACK.get(name, 0.0))
    ]


def grid(found: dict[str, Counts], allowed: dict[str, Counts]) -> Table:
    """What was found, and in brackets what the table has where that differs."""
    table = Table("a time", *(name.replace("_", " ") for name in next(iter(found.values()))), box=SIMPLE_HEAD)
    for operation, counts in found.items():
        known = allowed.get(operation, {})
        cells = [
            f"{value:g}" if known.get(name, value) == value else f"{value:g} ({known[name]:g})"
            for name, value in counts.items()
        ]
        table.add_row(operation, *cells)
    return table


def main() -> int:
    """Counts, and compares or writes."""
    parser = argparse.ArgumentParser(prog="make bench-quick", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make what is counted the table")
    options = parser.parse_args()
    with running_server(any_binary()) as url:
        found = asyncio.run(count_all(url))
    allowed: dict[str, Counts] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(grid(found, allowed))
    if options.write:
        TABLE.write_text(json.dumps(found, indent=2) + "\n")
        return 0
    problems = too_many(found, allowed)
    for problem in problems:
        console.print(problem, style="red")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
