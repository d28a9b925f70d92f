"""`make bench-profile`: where the CPU time of an uncontended pair goes, by layers of the server and client files.

512 tasks each take a lock of their own again and again, as in w2same, so that calls leave and arrive in batches.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import redis
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import redlease

from counts import opened, read_commands, recorded
from floor import packed
from lua_steps import CountingLua
from meter import Meter
from peers import PEERS, Terms
from server import any_binary, running_server
from workloads import MICRO, Outcome, pairs

BATCH = 512
PACKAGE = Path(redlease.__file__).parent
BATCHES = 60
SAMPLE_EVERY_S = 0.001


def main() -> None:
    """Measures and prints."""
    console = Console(highlight=False)
    with running_server(any_binary()) as url:
        shares, ours = asyncio.run(client_shares(url))
        layers = [*server_layers(url), ("the scripts as they are", ours.figures["server_us_pair"])]
    console.print(_table("server", "µs a pair, this layer included", layers))
    client_us = ours.figures["client_us_pair"]
    console.print(_table("client", "µs a pair", [(name, share * client_us) for name, share in shares]))


def server_layers(url: str) -> list[tuple[str, float]]:
    """The server's us a pair: of two bare commands, then of two scripts that do ever more of what ours do."""
    calls = asyncio.run(_calls_of_a_pair(url))
    with closing(Meter(url)) as meter, closing(CountingLua(url)) as lua:
        meter.empty()
        # The first pair makes the resource known; the second is a usual one.
        _, called = ([lua.run(call).commands for call in calls] for _ in range(2))
        nothing = _scripts(url, calls, ["return 1", "return 1"])
        commands = _scripts(url, calls, [_replay(each) for each in called])
        return [
            ("two commands (PING): read, found, answered", _server_us(url, meter, [[b"PING"], [b"PING"]])),
            ("two scripts with our keys and arguments that do nothing", _server_us(url, meter, nothing)),
            (f"the {sum(map(len, called))} commands that ours call, as constants", _server_us(url, meter, commands)),
        ]


async def client_shares(url: str, seconds: float = 3.0) -> tuple[list[tuple[str, float]], Outcome]:
    """Which share of this process's CPU time is spent in which file, by a sample a millisecond, and the outcome."""
    peer = PEERS["redlease"](url, Terms(callers=BATCH))
    with closing(Meter(url)) as meter:
        meter.empty()
        await peer.open()
        with sampled() as found:
            outcome = await pairs(peer, meter, tasks=BATCH, seconds=seconds, fresh=False)
        await peer.close()
    total = sum(found.values())
    return [(name, count / total) for name, count in found.most_common()], outcome


@contextmanager
def sampled() -> Iterator[Counter[str]]:
    """Counts the files in which this process is found; C functions count for the file that calls them."""
    found: Counter[str] = Counter()

    def sample(_: int, frame: FrameType | None) -> None:
        if frame is not None:
            found[_group(Path(frame.f_code.co_filename))] += 1

    before = signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_EVERY_S, SAMPLE_EVERY_S)
    try:
        yield found
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _group(path: Path) -> str:
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE.parent).as_posix()
    return "asyncio, with the system's calls" if path.parent.name == "asyncio" else "the benchmark and all else"


async def _calls_of_a_pair(url: str) -> list[list[bytes]]:
    """The two calls of a pair."""
    with closing(Meter(url)) as meter:
        meter.empty()
    async with opened(url) as client:
        with recorded() as written:
            async with client.lock("first").hold():
                pass
    return read_commands(written)


def _scripts(url: str, calls: Sequence[Sequence[bytes]], texts: Sequence[str]) -> list[list[bytes]]:
    """The same calls of other scripts."""
    with redis.Redis.from_url(url) as client:
        shas = [client.script_load(text) for text in texts]
    return [[call[0], sha.encode(), *call[2:]] for call, sha in zip(calls, shas, strict=True)]


def _replay(commands: Sequence[Sequence[bytes]]) -> str:
    """A script that runs the same commands and does nothing besides."""
    lines = [f"redis.call({', '.join(_quoted(word) for word in command)})" for command in commands]
    return "\n".join([*lines, "return 1"])


def _quoted(word: bytes) -> str:
    return '"' + "".join(f"\\{byte:03d}" for byte in word) + '"'


def _server_us(url: str, meter: Meter, calls: Sequence[Sequence[bytes]]) -> float:
    """The server's us for these calls together, many times over, in batches."""
    connection: Any = redis.ConnectionPool.from_url(url).get_connection()
    batch = [b"".join(packed(*call) for call in calls) * BATCH]
    with meter.measuring() as cost:
        for _ in range(BATCHES):
            connection.send_packed_command(batch)
            for _ in range(BATCH * len(calls)):
                connection.read_response()
    connection.disconnect()
    return cost.server_s * MICRO / (BATCH * BATCHES)


def _table(who: str, what: str, rows: list[tuple[str, float]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(who, no_wrap=True)
    table.add_column(what, justify="right")
    for name, us in rows:
        table.add_row(name, f"{us:.1f}")
    return table


if __name__ == "__main__":
    main()
