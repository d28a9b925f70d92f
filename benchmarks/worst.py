"""`make bench-worst`: what the worst call of each operation costs the server, whatever other clients have left there.

Each operation meets the state that is the worst for it: tens of thousands of waiters and keys, most of them dead, with
metadata of the greatest size. Of several calls the table has those with the most commands in their script, which are as
many on every machine, and the median of their times, since a machine is rarely idle.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from redlease._core.primitives.overview import CHECKED_EACH
from redlease._core.protocol import scripts
from redlease._core.protocol.histories import PAGE_ENTRIES
from redlease._core.protocol.snapshots import Reading

from filling import HELD_MS, IDLE_MS, LARGE, REASON, Call, Filling
from server import any_binary, describe, running_server

WAITERS, KEYS = 50_000, 20_000
TIMES = 20
OF_THE_BENCH = ("cmdstat_info", "cmdstat_slowlog")

PER_KEY = "1 0   1"  # a weight, and one unit for each key
KEY_RATE = "1 0   0 1  1000000000:2"  # a burst of two for each key, and then next to nothing


class Worst(NamedTuple):
    """What a call of one operation costs."""

    operation: str
    ms: float
    commands: int


class Bench:
    """Measures calls, one by one.

    Args:
        filling: What fills the server.
        size: How much of everything, 1 for all.
    """

    def __init__(self, filling: Filling, size: float = 1) -> None:
        self.filling = filling
        self.waiters, self.keys = max(200, int(WAITERS * size)), max(50, int(KEYS * size))
        self.found: list[Worst] = []
        filling.redis.config_set("slowlog-log-slower-than", 0)
        filling.redis.config_set("slowlog-max-len", 10)

    def measure(self, operation: str, calls: Iterable[Call]) -> None:
        """Makes calls, and finds what the worst of them cost: those with about the most commands."""
        costs = [self._cost(call)[1:] for call in calls]
        self._note(operation, costs)

    def look(self, operation: str, name: str) -> None:
        """Reads a snapshot in pages as `inspect()` does, and finds what the worst of them cost."""
        costs = []
        for _ in range(3):
            reading = Reading(name, 1, 100)
            while (args := reading.args) is not None:
                reply, *cost = self._cost(self.filling.call(name, scripts.INSPECT, *args))
                reading.add(reply[1:])
                costs.append((cost[0], cost[1]))
        self._note(operation, costs)

    def _note(self, operation: str, costs: list[tuple[int, int]]) -> None:
        most = max(commands for _, commands in costs)
        us = statistics.median(us for us, commands in costs if commands >= 0.9 * most)
        self.found.append(Worst(operation, us / 1000, most))

    def rest_of(self, name: str, first: Call) -> Iterator[Call]:
        """Yields a call, and those that go on with what it has left."""
        yield first
        for _ in range(TIMES - 1):
            yield self.filling.release(name)

    def _cost(self, call: Call) -> tuple[Any, int, int]:
        redis: Any = self.filling.redis
        before = self._commands()
        redis.slowlog_reset()
        reply = redis.execute_command(*call)
        took = max(each["duration"] for each in redis.slowlog_get(10) if each["command"].startswith(b"EVALSHA"))
        return reply, took, self._commands() - before

    def _commands(self) -> int:
        stats: Any = self.filling.redis.info("commandstats")
        calls = [int(one["calls"]) for name, one in stats.items() if not name.startswith(OF_THE_BENCH)]
        return sum(calls) - 1


def queued(bench: Bench) -> None:
    """Waiters without keys, all alive; one place has lapsed."""
    fill = bench.filling
    fill.hold("r", label=LARGE)
    fill.wait("r", [""] * bench.waiters, label=LARGE)
    args = ("holder", "", HELD_MS, "0", IDLE_MS)
    bench.measure("acquire, queued", (fill.acquire("r", label=LARGE) for _ in range(TIMES)))
    bench.measure("acquire, refused at max_waiters", (fill.acquire("r", most=100, label=LARGE) for _ in range(TIMES)))
    fill.die("r", "gone|1")
    bench.measure(
        "acquire, refused at max_waiters, a process has died", _paced(fill.acquire("r", most=100, label=LARGE))
    )
    bench.measure("try_acquire, refused", (fill.acquire("r", waits_ms=0) for _ in range(TIMES)))
    bench.measure("release of a waiter", (fill.release("r", f"{number:032d}") for number in range(100, 100 + TIMES)))
    last = f"{bench.waiters - 1:032d}"
    bench.measure("beat", [fill.call("r", scripts.BEAT, "alive|1", HELD_MS, last, IDLE_MS)] * TIMES)
    bench.measure("renew", [fill.call("r", scripts.RENEW, *args)] * TIMES)
    bench.measure("check", [fill.call("r", scripts.CHECK, "holder", 1)] * TIMES)
    bench.measure("position", [fill.call("r", scripts.POSITION, last)] * TIMES)
    bench.measure("totals", [fill.call("r", scripts.TOTALS, CHECKED_EACH)] * TIMES)
    bench.look("inspect, a page, large metadata", "r")
    bench.measure("watch", [fill.call("r", scripts.WATCH, 1000)] * TIMES)
    fill.die("r")
    bench.measure("release, all waiters dead", bench.rest_of("r", fill.release("r", "holder")))


def small_records(bench: Bench) -> None:
    """Many waiters with small records: more of them are looked at and granted at a time."""
    fill = bench.filling
    fill.hold("r", 1000)
    fill.wait("r", [""] * 2000, capacity=1000)
    bench.look("inspect, a page, small metadata", "r")
    bench.measure("release, many grants", bench.rest_of("r", fill.release("r", "holder")))
    fill.lapse("r")
    bench.measure("acquire, expired holders", bench.rest_of("r", fill.acquire("r", capacity=1000)))


def keyed(bench: Bench) -> None:
    """Waiters of many keys at their limits, then dead."""
    fill = bench.filling
    names = [f"{number:064d}" for number in range(bench.keys)]
    fill.hold("r", 2 * bench.keys)
    options: dict[str, Any] = {"weight": PER_KEY, "capacity": 2 * bench.keys}
    fill.make([fill.release("r", "holder")])
    fill.wait("r", itertools.islice(itertools.cycle(names), bench.waiters), **options)
    key = names[7]
    bench.measure("acquire with a key, queued", (fill.acquire("r", key=key, **options) for _ in range(TIMES)))
    refused = [fill.acquire("r", key=key, most="-1 1", **options) for _ in range(TIMES)]
    bench.measure("acquire, refused at max_waiters_per_key", refused)
    words = {
        "pause": ("pause", "", 0, ""),
        "back_off": ("back", key, 0, 60_000),
        "limit of a key": ("limit", key, 3, ""),
    }
    for kind, (word, of, units, until) in words.items():
        each = [fill.call("r", scripts.LIMIT, word, of, units, until, IDLE_MS, LARGE)] * TIMES
        bench.measure(kind, each)
        lifting = fill.call("r", scripts.LIMIT, word, of, "", "", IDLE_MS, LARGE)
        fill.make([lifting])
    raising = fill.call("r", scripts.LIMIT, "each", "", 2, "", IDLE_MS, LARGE)
    bench.measure("limit of each key, raised", bench.rest_of("r", raising))
    last = fill.waiting("r")
    bench.measure("position with a key", [fill.call("r", scripts.POSITION, last)] * TIMES)
    bench.measure("beat with a key", [fill.call("r", scripts.BEAT, "alive|1", HELD_MS, last, IDLE_MS)] * TIMES)
    bench.look("inspect, a page, waiters with keys", "r")
    fill.die("r")
    bench.measure(
        "release with a key, its waiters dead", (fill.release("r", ticket) for ticket in fill.held("r", TIMES))
    )
    bench.measure("resize", [fill.call("r", scripts.RESIZE, 3 * bench.keys + more, IDLE_MS) for more in range(TIMES)])


def one_key(bench: Bench) -> None:
    """All waiters are of one key."""
    fill = bench.filling
    fill.hold("r")
    fill.wait("r", ["k"] * bench.waiters, label=LARGE)
    fill.die("r", "gone|1")
    full = fill.acquire("r", key="k", most="-1 100", label=LARGE)
    bench.measure("acquire, refused at max_waiters_per_key, a process has died", _paced(full))
    fill.make([fill.acquire("r", ticket="newest", key="k", place="new|1", label=LARGE)])
    newest = fill.call("r", scripts.SUPERSEDE, "newest", "hnewest", 1, 60_000, 1000, IDLE_MS, "")
    bench.measure('when_full="replace-holder"', [newest] * TIMES)
    fill.die("r")
    bench.measure("release, all waiters of a key dead", bench.rest_of("r", fill.release("r", "holder")))


def expired(bench: Bench) -> None:
    """Permits with keys, large metadata, a lock delay and a history have expired."""
    fill = bench.filling
    count = min(bench.waiters, 5000)
    options: dict[str, Any] = {"weight": "1 0 60000 1000", "capacity": count, "label": LARGE}
    fill.wait("r", (f"k{number}" for number in range(count)), **options)
    bench.measure("totals, many holders", [fill.call("r", scripts.TOTALS, CHECKED_EACH)] * TIMES)
    fill.lapse("r")
    asking = (fill.acquire("r", key="k1", waits_ms=0, weight=1, capacity=count) for _ in range(TIMES))
    bench.measure("acquire, expired holders with a lock delay", asking)
    bench.measure("history, a page", [fill.call("r", scripts.HISTORY, "", PAGE_ENTRIES)] * TIMES)


def paced(bench: Bench) -> None:
    """Requests of many keys with rates of their own."""
    fill = bench.filling
    options: dict[str, Any] = {"weight": KEY_RATE, "capacity": 3 * bench.keys, "label": LARGE}
    fill.wait("r", (f"k{number}" for number in range(min(bench.keys, 5000))), **options)
    asking = (fill.acquire("r", key=f"k{number}", **options) for number in range(TIMES))
    bench.measure("acquire of a key with a rate, granted", asking)
    asking = (fill.acquire("r", key="k1", **options) for _ in range(TIMES))
    bench.measure("acquire of a key with a rate, queued", asking)
    bench.look("inspect, a page, keys with rates", "r")


def killed(bench: Bench) -> None:
    """A process with as many waiters of each of a hundred keys has died."""
    fill = bench.filling
    fill.hold("r", key="k0")
    fill.wait("r", (f"k{number % 100}" for number in range(min(bench.waiters, 10_000))))
    fill.die("r")
    bench.measure("release, a hundred waiters of a hundred keys dead", bench.rest_of("r", fill.release("r", "holder")))


def limited(bench: Bench) -> None:
    """Each of many keys is limited, with the longest reason, and holds."""
    fill = bench.filling
    names = [f"k{number}" for number in range(bench.keys)]
    fill.wait("r", names, capacity=2 * bench.keys)
    fill.make(fill.call("r", scripts.LIMIT, "limit", name, 2, HELD_MS, IDLE_MS, REASON) for name in names)
    bench.look("inspect, a page, limits of keys", "r")
    of_a_key = fill.acquire("r", ticket="newest", key=names[-1], weight=2, capacity=2 * bench.keys)
    fill.make([of_a_key])
    newest = fill.call("r", scripts.SUPERSEDE, "newest", "hnewest", 1, 60_000, 1000, IDLE_MS, "")
    bench.measure('when_full="replace-holder", many holders', [newest] * TIMES)


STATES: tuple[Callable[[Bench], None], ...] = (
    queued,
    small_records,
    keyed,
    one_key,
    expired,
    paced,
    killed,
    limited,
)


def _paced(call: Call) -> Iterator[Call]:
    """Yields a call again and again, with a pause: in one ms only one looks for dead waiters."""
    for _ in range(TIMES):
        yield call
        time.sleep(0.002)


def main() -> None:
    """Measures each state on a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=float, default=1, help=f"1 for {WAITERS:,} waiters and {KEYS:,} keys")
    parser.add_argument("--markdown", action="store_true", help="for docs/performance.md")
    asked = parser.parse_args()
    found: list[Worst] = []
    name = ""
    for state in STATES:
        with running_server(any_binary()) as url:
            filling = Filling(url)
            bench = Bench(filling, asked.size)
            state(bench)
            found += bench.found
            name = describe(url)
            filling.close()
    if asked.markdown:
        print("| operation | ms | commands |\n| --- | --: | --: |")  # noqa: T201
        for each in found:
            print(f"| {each.operation} | {each.ms:.2f} | {each.commands:,} |")  # noqa: T201
        return
    table = Table("operation", title=name, box=SIMPLE_HEAD)
    for column in ("ms", "commands"):
        table.add_column(column, justify="right")
    for each in found:
        table.add_row(each.operation, f"{each.ms:.2f}", f"{each.commands:,}")
    Console().print(table)


if __name__ == "__main__":
    main()
