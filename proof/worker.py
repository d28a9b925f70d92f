"""A process of the workload. It reads rounds from its input, lives them on all their resources at once, and says so."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
from pathlib import Path

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from libraries import LIBRARIES, Library, Plan
from records import MS, Recorder, now

LOOK_S = 0.05
STALL_NS = 200 * MS


async def watch_stalls(url: str, recorder: Recorder) -> None:
    """Record when this process, or the server, stood still; end the process if its clock is not the server's."""
    client = redis.asyncio.Redis.from_url(url, retry=Retry(NoBackoff(), 0))
    last = now()
    while True:
        await asyncio.sleep(LOOK_S)
        since = now()
        try:
            seconds, micros = await client.time()
        except (redis.RedisError, OSError):  # the server is away: the next answer tells for how long
            continue
        at = now()
        if not since - MS <= (seconds * 1_000_000 + micros) * 1000 <= at + MS:
            sys.exit("the clock of this host is not the clock of the server")
        if at - last > STALL_NS:
            recorder.write("stall", "", since=last, at=at)
        last = at


def library_of(name: str) -> type[Library]:
    """Return the library of that name."""
    if name == "redisson":
        from redisson import OfRedisson  # noqa: PLC0415  only `make prove` has what it needs

        return OfRedisson
    return LIBRARIES[name]


async def main(library: str, url: str, path: str, client: int) -> None:
    """Do what the lines of the input say, until it ends."""
    name = f"p{client}"
    logging.disable()  # of the losses that are provoked
    recorder = Recorder(Path(path), client)
    one = library_of(library)(url, recorder)
    await one.open()
    watching = asyncio.create_task(watch_stalls(url, recorder))
    while line := await asyncio.to_thread(sys.stdin.readline):
        order = json.loads(line)
        plans = [Plan(*plan) for plan in order["plans"]]
        lives = (one.live(plan, name, random.Random(f"{order['seed']} {plan.name} {name}")) for plan in plans)
        await asyncio.gather(*lives)
        await asyncio.sleep(3 * LOOK_S)  # a stall that has just ended is recorded
        if watching.done():
            watching.result()
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], client=int(sys.argv[4])))
