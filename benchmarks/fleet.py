"""A fleet: processes with a client each, whose tasks want names that all of them share, a few of them far more often.

Run as a program it is one process of the fleet: it says when it is ready, begins with a line from its parent, and
prints what it measured as a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from asyncio.subprocess import PIPE, Process
from time import perf_counter

from meter import Meter
from peers import PEERS, Peer, Terms
from workloads import Outcome, Workload, latency, per

NAMES, WANTED, WANTED_SHARE = 200, 10, 0.25  # a quarter of all holds are of ten of the two hundred names
TERMS = Terms(callers=64)


async def fleet(peer: Peer, meter: Meter, *, processes: int, tasks: int, seconds: float) -> Outcome:
    """Each process has so many tasks, which hold one name after the other and do nothing with it."""
    key = next(key for key, each in PEERS.items() if type(peer) is each)
    size = json.dumps({"tasks": tasks, "seconds": seconds})
    members = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, key, peer.url, size, str(number)), stdin=PIPE, stdout=PIPE, limit=2**26
        )
        for number in range(processes)
    ]
    for member in members:
        await _said(member)  # that it is ready
    with meter.measuring() as cost:
        for member in members:
            assert member.stdin is not None
            member.stdin.write(b"begin\n")
        told = [json.loads(await _said(member)) for member in members]
    for member in members:
        await member.communicate(b"counted\n")
    took = [each for of_member in told for each in of_member["took_s"]]
    cost.client_s = sum(of_member["client_s"] for of_member in told)
    figures = {"pairs_s": len(took) / seconds, **latency(took), **per("pair", len(took), cost)}
    figures["connections"] = (cost.connections - 1) / processes  # the one that prepared the server is none of theirs
    return Outcome(figures)


async def _said(member: Process) -> bytes:
    assert member.stdout is not None
    line = await member.stdout.readline()
    if not line:
        raise RuntimeError("a process of the fleet has ended")
    return line


async def take_part(peer: Peer, *, tasks: int, seconds: float, number: int) -> None:
    """What one process of the fleet does."""
    took: list[float] = []

    async def caller(draws: random.Random) -> None:
        while (began := perf_counter()) < until:
            name = draws.randrange(WANTED if draws.random() < WANTED_SHARE else NAMES)
            async with peer.hold(f"fleet:{name}"):
                pass
            took.append(perf_counter() - began)

    await peer.open()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    client_s, until = time.process_time(), perf_counter() + seconds
    for task in range(tasks):
        peer.callers.start(caller(random.Random(number * tasks + task)))
    errors = await peer.callers.finished()
    assert not errors, errors[0]
    sys.stdout.write(json.dumps({"took_s": took, "client_s": time.process_time() - client_s}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)  # until its parent has counted the connections
    await peer.close()


FLEET = {
    "fleet": Workload(
        "8 processes of 64 tasks, 200 names, some of them wanted by many",
        fleet,
        {"processes": 8, "tasks": 64, "seconds": 3.0},
        TERMS,
        library_only=True,
    ),
}


if __name__ == "__main__":
    peer_key, url, its_size, its_number = sys.argv[1:]
    asyncio.run(take_part(PEERS[peer_key](url, TERMS), **json.loads(its_size), number=int(its_number)))
