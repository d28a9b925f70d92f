"""What is done with a library while it is measured. Each workload returns its figures by name."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from meter import Cost, Meter
from peers import Peer, Terms

MICRO = 1e6


@dataclass(slots=True)
class Outcome:
    """What one trial showed: figures, and for plots the latencies at every hundredth of the callers' luck, in us."""

    figures: dict[str, float] = field(default_factory=dict)
    percentiles_us: list[float] = field(default_factory=list)


async def pairs(peer: Peer, meter: Meter, *, tasks: int, seconds: float, fresh: bool) -> Outcome:
    """Each caller enters and leaves empty blocks of its own: one name again and again, or a fresh one each time."""
    took: list[float] = []

    async def caller(number: int, until: float, era: str) -> None:
        for turn in itertools.count():
            began = perf_counter()
            if began >= until:
                return
            async with peer.hold(f"{era}:{number}:{turn if fresh else 0}"):
                pass
            took.append(perf_counter() - began)

    async def all_callers(lasting: float, era: str) -> None:
        for number in range(tasks):
            peer.callers.start(caller(number, perf_counter() + lasting, era))
        _expect_none(await peer.callers.finished())

    await all_callers(min(0.3, seconds / 4), "warm" if fresh else "pairs")
    took.clear()
    with meter.measuring() as cost:
        await all_callers(seconds, "pairs")
    return Outcome(
        {"pairs_s": len(took) / cost.wall_s, **latency(took), **per("pair", len(took), cost)}, _percentiles(took)
    )


async def handoffs(peer: Peer, meter: Meter, *, waiters: int, turns: int, locks: int) -> Outcome:
    """All want a lock again and again, and do nothing with it: a hand-off is from leaving to the next entering."""
    took: list[float] = []
    left: list[list[tuple[float, int]]] = [[] for _ in range(locks)]

    async def caller(number: int) -> None:
        of_lock = left[number % locks]
        for _ in range(turns):
            async with peer.hold(f"handoffs:{number % locks}"):
                if of_lock:
                    took.append(perf_counter() - of_lock[-1][0])
                of_lock.append((perf_counter(), number))

    async with peer.hold("warm"):
        pass
    with meter.measuring() as cost:
        for number in range(waiters):
            peer.callers.start(caller(number))
        _expect_none(await peer.callers.finished())
    retaken = sum(one[1] == other[1] for of_lock in left for one, other in itertools.pairwise(of_lock))
    figures = {"handoffs_s": len(took) / cost.wall_s, **latency(took), "retaken_pct": 100 * retaken / len(took)}
    return Outcome(figures | per("handoff", len(took), cost), _percentiles(took))


async def makespan(peer: Peer, meter: Meter, *, waiters: int, hold_s: float, apart_s: float) -> Outcome:
    """Waiters arrive one after the other at a full resource; once it is let go each holds it for a moment."""
    capacity = peer.terms.capacity
    entered: list[int] = []
    left: list[float] = []

    async def caller(number: int) -> None:
        async with peer.hold("makespan"):
            entered.append(number)
            await peer.callers.sleep(hold_s)
        left.append(perf_counter())

    with meter.measuring() as cost:
        async with AsyncExitStack() as full:
            for _ in range(capacity):
                await full.enter_async_context(peer.hold("makespan"))
            began = perf_counter()
            for number in range(waiters):
                peer.callers.start(caller(number))
                await peer.callers.sleep(max(0.0, began + (number + 1) * apart_s - perf_counter()))
            await peer.callers.sleep(0.2)
            assert not entered, "somebody entered a full resource"
            began = perf_counter()
        _expect_none(await peer.callers.finished())
    ideal_s = math.ceil(waiters / capacity) * hold_s
    inverted = sum(one > other for one, other in itertools.combinations(entered, 2))
    figures = {
        "makespan_x": (max(left) - began) / ideal_s,
        "inverted_pct": 100 * inverted / math.comb(waiters, 2),
    }
    return Outcome(figures | per("grant", waiters, cost))


async def idle(peer: Peer, meter: Meter, *, waiters: int, seconds: float, settle_s: float) -> Outcome:
    """A crowd waits for a lock that stays held."""

    async def caller() -> None:
        async with peer.hold("idle"):
            pass

    # It is never left: some libraries would need minutes to let the crowd through.
    held = peer.hold("idle")
    await held.__aenter__()
    for _ in range(waiters):
        peer.callers.start(caller())
    await peer.callers.sleep(settle_s)
    with meter.measuring() as cost:
        await peer.callers.sleep(seconds)
    if peer.callers.running() < waiters:
        raise RuntimeError("not all of the crowd still wait")
    return Outcome(_rest(cost))


async def renewals(peer: Peer, meter: Meter, *, leases: int, seconds: float, settle_s: float) -> Outcome:
    """Many locks are held, each with a short lease that the library renews."""

    async def caller(number: int) -> None:
        async with peer.hold(f"renewed:{number}"):
            entered.append(number)
            # They leave together, long after the measuring: leaving early would be measured.
            await peer.callers.sleep(ends - perf_counter())

    entered: list[int] = []
    ends = perf_counter() + 2 * settle_s + seconds + 1
    for number in range(leases):
        peer.callers.start(caller(number))
    while len(entered) < leases and perf_counter() < ends - seconds - 1:
        await peer.callers.sleep(0.01)
    await peer.callers.sleep(ends - perf_counter() - seconds - 0.5)
    with meter.measuring() as cost:
        await peer.callers.sleep(seconds)
    lost = len(await peer.callers.finished())
    return Outcome(_rest(cost) | {"lost": lost + leases - len(entered)})


def _expect_none(errors: list[BaseException]) -> None:
    if errors:
        raise errors[0]


def latency(took: list[float]) -> dict[str, float]:
    """The median and the 99th percentile, in us."""
    hundredths = _percentiles(took)
    return {"p50_us": hundredths[50], "p99_us": hundredths[99]}


def _percentiles(took: list[float]) -> list[float]:
    """The least, the 1st to the 99th percentile, and the most, in us."""
    return [us * MICRO for us in (min(took), *statistics.quantiles(took, n=100, method="inclusive"), max(took))]


def per(what: str, count: int, cost: Cost) -> dict[str, float]:
    """What so many pairs, hand-offs or grants have cost, each."""
    return {
        f"server_us_{what}": cost.server_s * MICRO / count,
        f"client_us_{what}": cost.client_s * MICRO / count,
        f"commands_{what}": cost.commands_all / count,
        "connections": cost.connections,
    }


def _rest(cost: Cost) -> dict[str, float]:
    """What a crowd costs that does nothing."""
    return {
        "commands_s": cost.commands_all / cost.wall_s,
        "client_pct": 100 * cost.client_s / cost.wall_s,
        "server_pct": 100 * cost.server_s / cost.wall_s,
        "connections": cost.connections,
    }


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload and its size.

    Attributes:
        about: What it is, in some words.
        run: The function.
        size: Its arguments by name; a trial may change some.
        terms: What the library is asked for.
        once: It is its own average over a long time, so that it needs no rounds.
        library_only: It is about this library alone.
    """

    about: str
    run: Callable[..., Awaitable[Outcome]]
    size: dict[str, Any]
    terms: Terms = field(default_factory=Terms)
    once: bool = False
    library_only: bool = False

    def fits(self, peer: type[Peer]) -> bool:
        """Whether the library can do this."""
        return (self.terms.capacity == 1 or not peer.only_locks) and (peer.renews or not self.terms.renewed)


def _pairs(tasks: int, *, fresh: bool, about: str) -> Workload:
    return Workload(about, pairs, {"tasks": tasks, "seconds": 1.0, "fresh": fresh}, Terms(callers=tasks))


def _handoffs(waiters: int, *, turns: int, locks: int, about: str) -> Workload:
    size = {"waiters": waiters, "turns": turns, "locks": locks}
    return Workload(about, handoffs, size, Terms(callers=waiters, blocked=True))


def _makespan(capacity: int) -> Workload:
    size = {"waiters": 200, "hold_s": 0.002, "apart_s": 0.001}
    terms = Terms(capacity=capacity, callers=200, blocked=True)
    return Workload(f"200 waiters of 2 ms, capacity {capacity}", makespan, size, terms)


WORKLOADS = {
    "w1": _pairs(1, fresh=True, about="one caller, a fresh name each time"),
    "w1same": _pairs(1, fresh=False, about="one caller, one name"),
    "w2": _pairs(512, fresh=True, about="512 tasks, fresh names"),
    "w2same": _pairs(512, fresh=False, about="512 tasks, a name each"),
    "w3": _handoffs(64, turns=20, locks=1, about="64 waiters, one lock"),
    "w3many": _handoffs(512, turns=20, locks=64, about="512 waiters, 64 locks"),
    "w4c1": _makespan(1),
    "w4c8": _makespan(8),
    "w5": Workload(
        "200 waiters of a lock that stays held",
        idle,
        {"waiters": 200, "seconds": 10.0, "settle_s": 1.5},
        Terms(callers=200, blocked=True, lease=60.0),
        once=True,
    ),
    "w6": Workload(
        "1,000 leases of 3 s, renewed",
        renewals,
        {"leases": 1000, "seconds": 10.0, "settle_s": 1.0},
        Terms(callers=64, lease=3.0, renewed=True),
        once=True,
    ),
    "holds": Workload(
        "10,000 leases of 10 s, renewed",
        renewals,
        {"leases": 10_000, "seconds": 20.0, "settle_s": 5.0},
        Terms(lease=10.0, renewed=True),
        once=True,
        library_only=True,
    ),
}

# Throughput against the number of tasks.
TASKS = (1, 2, 8, 32, 128, 512)
SCALING = {f"tasks{tasks}": _pairs(tasks, fresh=False, about=f"{tasks} tasks, a name each") for tasks in TASKS}
