"""How costs grow: a grant with long queues and large capacities, memory with waiters, keys with names."""

from __future__ import annotations

import asyncio
import os
import resource
from contextlib import AsyncExitStack
from pathlib import Path
from time import perf_counter

from meter import Meter
from peers import Peer, Terms
from workloads import MICRO, Outcome, Workload

QUEUES = (10, 100, 1_000, 10_000, 100_000)
CAPACITIES = (1, 10, 100, 1_000, 10_000)

# So many hold at once while a resource is filled: more would only wait in the client.
FILL_AT_ONCE = 200


async def grants(peer: Peer, meter: Meter, *, waiters: int, grants: int) -> Outcome:
    """All but one unit stay held; the last goes from waiter to waiter, each of whom queues again behind all others."""
    entered = 0
    closed = False
    moments = {"warm": asyncio.Event(), "measured": asyncio.Event()}

    async def caller() -> None:
        nonlocal entered
        while not closed:
            async with peer.hold("grants"):
                entered += 1
                if entered == grants // 4:
                    moments["warm"].set()
                if entered == grants // 4 + grants:
                    moments["measured"].set()

    async with AsyncExitStack() as rest:
        await _fill(peer, rest, peer.terms.capacity - 1)
        async with peer.hold("grants"):
            before = meter.scripts()
            for _ in range(waiters):
                peer.callers.start(caller())
            # Nobody is told that he is queued, so the server is asked how many have come.
            while meter.scripts() - before < waiters:
                await peer.callers.sleep(0.05)
        await moments["warm"].wait()
        began = entered
        with meter.measuring() as cost:
            await moments["measured"].wait()
        count = entered - began
        closed = True
        # Letting a hundred thousand go would take longer than all else, and shows nothing.
        rest.pop_all()
    per = MICRO / count
    return Outcome({"server_us_grant": cost.server_s * per, "client_us_grant": cost.client_s * per})


async def _fill(peer: Peer, stack: AsyncExitStack, count: int) -> None:
    for start in range(0, count, FILL_AT_ONCE):
        holds = [peer.hold("grants") for _ in range(start, min(count, start + FILL_AT_ONCE))]
        await asyncio.gather(*(stack.enter_async_context(one) for one in holds))


async def memory(peer: Peer, meter: Meter, *, waiters: int, bare: bool) -> Outcome:
    """What a waiting task takes in this process, itself included; `bare`, one that waits for nothing but a future."""

    async def caller() -> None:
        async with asyncio.timeout(3600):
            if bare:
                await asyncio.get_running_loop().create_future()
            async with peer.hold("memory"):
                pass

    async with peer.hold("memory"):
        scripts, before = meter.scripts(), _resident_bytes()
        for _ in range(waiters):
            peer.callers.start(caller())
        await peer.callers.sleep(0.1)
        while not bare and meter.scripts() - scripts < waiters:
            await peer.callers.sleep(0.05)
        each = (_resident_bytes() - before) / waiters
        return Outcome({"waiter_bytes": each})


async def names(peer: Peer, meter: Meter, *, names: int, tasks: int, within_s: float) -> Outcome:
    """Names are taken once each; then nothing is left of them when `idle_ttl` is over."""
    numbers = iter(range(names))

    async def caller() -> None:
        for number in numbers:
            async with peer.hold(f"name:{number}"):
                pass

    for _ in range(tasks):
        peer.callers.start(caller())
    errors = await peer.callers.finished()
    assert not errors, errors[0]
    ended, most = perf_counter(), meter.keys()
    # Expiry sends no message; the server removes what has expired bit by bit.
    while meter.keys() and perf_counter() < ended + peer.terms.idle_ttl + within_s:
        await peer.callers.sleep(0.05)
    return Outcome({"keys_most": most, "keys_left": meter.keys(), "gone_after_s": perf_counter() - ended})


def _resident_bytes() -> float:
    """What this process has in memory now; where the system does not tell, the most that it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.0


def _grants(waiters: int, capacity: int) -> Workload:
    # A lease outlasts the filling and the queueing.
    terms = Terms(capacity=capacity, callers=waiters, lease=120.0)
    about = f"a grant with {waiters:,} waiters, capacity {capacity:,}"
    return Workload(about, grants, {"waiters": waiters, "grants": 4000}, terms)


def _memory(*, bare: bool) -> Workload:
    about = "5,000 tasks that wait for a future" if bare else "5,000 waiters in one process"
    return Workload(about, memory, {"waiters": 5000, "bare": bare}, library_only=True)


GROWTH = {
    **{f"queue{count}": _grants(count, 1) for count in QUEUES},
    **{f"capacity{count}": _grants(10, count) for count in CAPACITIES},
    "memory": _memory(bare=False),
    "bare": _memory(bare=True),
    "names": Workload(
        "100,000 names taken once each",
        names,
        {"names": 100_000, "tasks": 512, "within_s": 10.0},
        Terms(callers=512, lease=5.0, idle_ttl=5.0),
        once=True,
        library_only=True,
    ),
}
