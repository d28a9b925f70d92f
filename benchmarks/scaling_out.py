"""`make bench-cluster`: what a pair costs each master of a cluster on loopback, and how evenly they share the load.

Three masters and the client are four processes: with fewer cores only the CPU time means something, not how many pairs
there are in a second.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import redis
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from meter import Cost, Meter
from peers import PEERS, Terms
from server import any_binary, describe, running_server
from workloads import MICRO, pairs

SLOTS = 16384
TASKS, SECONDS, ROUNDS = 512, 1.0, 5
TOGETHER_WITHIN_S = 20.0


class Share(NamedTuple):
    """What one master had of the work: pairs and keys, in shares of all, and the server's us a pair."""

    pairs: float
    keys: float
    server_us: float


class Work(NamedTuple):
    """All masters' shares, and how many pairs a second there were in all."""

    masters: list[Share]
    pairs_s: float


def main() -> None:
    """Measures and prints."""
    console = Console(highlight=False)
    table = Table("masters", "names", "pairs/s", "server µs a pair", "pairs, %", "keys, %", box=SIMPLE_HEAD)
    with ExitStack() as servers:
        binary = any_binary()
        alone = servers.enter_context(running_server(binary))
        settings = {f"{masters} of a cluster": servers.enter_context(cluster(binary, masters)) for masters in (1, 3)}
        console.print(f"{describe(alone)}, {os.cpu_count()} cores; {TASKS} tasks, medians of {ROUNDS} rounds")
        places = {"one server": (alone, [alone])} | settings
        trials = {(name, fresh): place for fresh in (False, True) for name, place in places.items()}
        rounds = [
            {trial: asyncio.run(work(*place, fresh=trial[1])) for trial, place in trials.items()} for _ in range(ROUNDS)
        ]
        for name, fresh in trials:
            table.add_row(name, "new" if fresh else "kept", *_cells([done[name, fresh] for done in rounds]))
    console.print(table)


def _cells(rounds: Sequence[Work]) -> Iterator[str]:
    yield f"{median(one.pairs_s for one in rounds):.0f}"
    each = list(zip(*(one.masters for one in rounds), strict=True))
    yield ", ".join(f"{median(share.server_us for share in one):.1f}" for one in each)
    yield ", ".join(f"{100 * median(share.pairs for share in one):.0f}" for one in each)
    yield ", ".join(f"{100 * median(share.keys for share in one):.0f}" for one in each)


async def work(url: str, masters: Sequence[str], *, fresh: bool, tasks: int = TASKS, seconds: float = SECONDS) -> Work:
    """So many tasks enter and leave empty blocks, each of names of its own, while every master's counters are read."""
    peer = PEERS["redlease"](url, Terms(callers=tasks))
    with ExitStack() as meters:
        opened = [meters.enter_context(closing(Meter(one))) for one in masters]
        for meter in opened:
            meter.empty()
        await peer.open()
        with ExitStack() as measuring:
            costs = [measuring.enter_context(meter.measuring()) for meter in opened]
            outcome = await pairs(peer, opened[0], tasks=tasks, seconds=seconds, fresh=fresh)
        keys = [meter.keys() for meter in opened]
        await peer.close()
    return Work(_shares(costs, keys), outcome.figures["pairs_s"])


def _shares(costs: Sequence[Cost], keys: Sequence[int]) -> list[Share]:
    done = [cost.commands["evalsha"] / 2 for cost in costs]
    return [
        Share(mine / sum(done), kept / sum(keys), cost.server_s * MICRO / mine)
        for mine, kept, cost in zip(done, keys, costs, strict=True)
    ]


@contextmanager
def cluster(binary: Path, masters: int) -> Iterator[tuple[str, list[str]]]:
    """Runs a cluster of so many masters, with an equal part of the slots each; gives its URL and theirs."""
    with ExitStack() as servers:
        urls = [servers.enter_context(running_server(binary, cluster=True)).removesuffix("/0") for _ in range(masters)]
        nodes = [servers.enter_context(closing(redis.Redis.from_url(url, decode_responses=True))) for url in urls]
        for number, node in enumerate(nodes):
            first, last = SLOTS * number // masters, SLOTS * (number + 1) // masters - 1
            _say(node, "SET-CONFIG-EPOCH", number + 1)
            _say(node, "ADDSLOTSRANGE", first, last)
            _say(node, "MEET", "127.0.0.1", urls[0].rpartition(":")[2])
        deadline = time.monotonic() + TOGETHER_WITHIN_S
        while not all(_sees_whole(node, masters) for node in nodes):
            if time.monotonic() > deadline:
                raise RuntimeError("The masters did not come together as a cluster.")
            time.sleep(0.05)
        yield "redis+cluster://" + ",".join(url.removeprefix("redis://") for url in urls), urls


def _sees_whole(node: redis.Redis, masters: int) -> bool:
    said = _say(node, "INFO").splitlines()
    return {"cluster_state:ok", f"cluster_known_nodes:{masters}"} <= set(said)


def _say(node: redis.Redis, verb: str, *arguments: str | int) -> str:
    return str(node.execute_command("CLUSTER", verb, *arguments))  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
