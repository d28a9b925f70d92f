"""`make bench-fairness`: who is served when, with keys and without; hold times are counted, so no clock matters."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from redlease import Permit, Redlease, Semaphore
from redlease.embedded import EmbeddedServer

from plots import PLAIN, STYLE

CAPACITY = 20
CROWD, OTHERS = 10_000, 99  # requests of one customer that wait, when so many others come with one each
SHARES = {"share 4": 4.0, "share 2": 2.0, "share 1": 1.0}
EACH = 600  # requests for each of the shares, all waiting
SHOWN = 40  # hold times, in which none of them runs out

ORANGE, BLUE, GREEN = "#d55e00", "#0072b2", "#009e73"

Request = tuple[str | None, float]  # its key, and the share of that


async def rounds(pool: Semaphore, requests: Sequence[Request]) -> list[list[int]]:
    """The requests, by their numbers, that are served in each hold time; all holds are of equal length.

    All wait in the order given before the first is served. A hold time is over when all that hold have released.
    """
    begun: asyncio.Queue[tuple[int, Permit]] = asyncio.Queue()

    async def ask(number: int, key: str | None, share: float) -> None:
        begun.put_nowait((number, await pool.acquire(key=key, share=share)))

    before = [await pool.acquire() for _ in range(CAPACITY)]
    async with asyncio.TaskGroup() as asking:
        for number, (key, share) in enumerate(requests):
            asking.create_task(ask(number, key, share))
        async for snapshot in pool.watch():
            if snapshot.waiting == len(requests):
                break
        await _released(pool, before)
        served: list[list[int]] = []
        while sum(map(len, served)) < len(requests):
            inside = [await begun.get() for _ in range(min(CAPACITY, len(requests) - sum(map(len, served))))]
            served.append([number for number, _ in inside])
            await _released(pool, [permit for _, permit in inside])
    return served


async def _released(pool: Semaphore, permits: list[Permit]) -> None:
    await asyncio.gather(*(pool.release(permit) for permit in permits))


async def others_begun(client: Redlease, *, keys: bool) -> list[int]:
    """How many of those who come after a crowd of one customer's requests have begun, at each hold time."""
    customers = ["crowd"] * CROWD + [f"customer {number}" for number in range(OTHERS)]
    pool = client.semaphore(f"begun, {keys}", capacity=CAPACITY, waiter_lease=600, lease=600)
    served = await rounds(pool, [(customer if keys else None, 1.0) for customer in customers])
    return list(accumulate(sum(number >= CROWD for number in each) for each in served))


async def units_held(client: Redlease) -> dict[str, list[int]]:
    """How many units each share has had, at each hold time while all of them wait."""
    names = [name for name in SHARES for _ in range(EACH)]
    pool = client.semaphore("shares", capacity=CAPACITY, waiter_lease=600, lease=600)
    served = await rounds(pool, [(name, SHARES[name]) for name in names])
    return {
        name: list(accumulate(sum(names[number] == name for number in each) for each in served[:SHOWN]))
        for name in SHARES
    }


def draw(begun: dict[str, list[int]], shares: dict[str, list[int]], path: Path) -> None:
    """Draws the picture of docs/guide/fairness.md."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for (name, counts), colour in zip(begun.items(), (ORANGE, BLUE), strict=True):
            left.step(range(1, len(counts) + 1), counts, where="post", label=name, color=colour, linewidth=2)
        left.set_xscale("log")
        left.xaxis.set_major_formatter(PLAIN)
        left.set(xlabel="hold times", ylabel="of them have begun", ylim=(0, None))
        left.set_title(f"{OTHERS} customers come after one\nwith {CROWD:,} requests", loc="left", fontsize=10)
        left.legend(loc="center right")
        for (name, counts), colour in zip(shares.items(), (ORANGE, BLUE, GREEN), strict=True):
            right.plot(range(1, len(counts) + 1), counts, label=name, color=colour, linewidth=2)
        right.set(xlabel="hold times", ylabel="units each has had", ylim=(0, None))
        right.set_title("Three keys that always wait\n", loc="left", fontsize=10)
        right.legend(loc="upper left")
        figure.savefig(path, metadata={"Date": None}, facecolor="white")


async def main() -> None:
    """Measures on the embedded server, and draws into the directory that is given."""
    server = EmbeddedServer()
    try:
        async with Redlease.from_url(await server.start_async()) as client:
            begun = {
                "in the order of arrival": await others_begun(client, keys=False),
                "with keys": await others_begun(client, keys=True),
            }
            shares = await units_held(client)
    finally:
        await server.stop_async()
    draw(begun, shares, Path(sys.argv[1]) / "fairness.svg")
    for name, counts in begun.items():
        print(f"{name}: all {OTHERS} have begun in hold time {counts.index(OTHERS) + 1}")  # noqa: T201
    print(f"units after {SHOWN} hold times:", {name: counts[-1] for name, counts in shares.items()})  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
