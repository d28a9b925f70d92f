"""Redis loses keys, fields or members of a resource: it serves again within a lease, and nobody holds what is left."""

from __future__ import annotations

import contextlib
import itertools
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import redis
from losses import (
    IDLE_MS,
    LEASE_MS,
    DrawnCalls,
    Lossy,
    check_capacity,
    clients,
    release_all,
    serve,
    try_acquire,
)

from redlease.protocol.replies import Status

from against_model import LABEL
from servers import find_binary
from set_clock import KEYS, FakeEngine, RealEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Servers
    from servers import Server

# What three requests ask for, each with its key, and what is set beside them: each stores something more.
KINDS: dict[str, tuple[tuple[tuple[str, str], ...], tuple[tuple[Any, ...], ...]]] = {
    "plain": ((("1", ""), ("1", ""), ("1", "")), ()),
    "weights": ((("2", ""), ("1", ""), ("2", "")), ()),
    "keys": ((("1", "k"), ("1", "k"), ("1", "l")), ()),
    "limited keys": ((("1 0   1", "k"), ("1 0   1", "k"), ("1 0   1", "l")), ()),
    "rate": ((("1 0     5000:1", ""), ("1", ""), ("1", "")), ()),
    "rate of keys": ((("1 0      20000:1", "k"), ("1 0      20000:2", "k"), ("1", "l")), ()),
    "lock delay": ((("1 0 20", "k"), ("1", "k"), ("1", "")), ()),
    "priorities": ((("1 3", ""), ("1 1", ""), ("1", "k")), ()),
    "limit": ((("1", ""), ("1", ""), ("1", "")), (("limit", "", 0, "30"), ("pause", "", 0, "20"))),
    "limits of keys": (
        (("1", "k"), ("1", "k"), ("1", "l")),
        (("limit", "k", 1, "30"), ("each", "", 1, "30"), ("back", "l", 0, "30")),
    ),
}
NEWER = [engine for engine in ("redis7", "valkey9") if find_binary(engine)]  # which have PEXPIRETIME
CLUSTERS = ("cluster7",) if find_binary("redis7") else ()
LOST = [keys for count in range(1, 5) for keys in itertools.combinations(range(4), count)]


def used(lossy: Lossy, kind: str) -> None:
    """Let one hold or two, others wait, and set limits."""
    requests, limits = KINDS[kind]
    for number, (asked, key) in enumerate((*requests, *requests)):
        terms = (asked, LEASE_MS, 2, LEASE_MS, -1, IDLE_MS, LABEL, *([key] if key else []))
        lossy.call("acquire", f"t{number}", f"h{number}", f"c{number}|0", "0", *terms)
    for limit in limits:
        lossy.call("limit", *limit, IDLE_MS, LABEL)


@pytest.mark.parametrize("lost", LOST, ids=lambda lost: "+".join(KEYS[part].rsplit(":")[-1] for part in lost))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("real_engine", NEWER)
def test_a_resource_without_some_of_its_keys(server: Server, kind: str, lost: tuple[int, ...]) -> None:
    """Whatever a resource is used for and whichever keys it loses, no call fails, and it serves within its leases."""
    with RealEngine(server) as engine:
        engine.clear()
        lossy = Lossy(engine, Random(0))
        used(lossy, kind)
        lossy.lose(*(KEYS[part] for part in lost))
        lossy.look()
        lossy.call("release", "t0", "", 1, 0, 0, IDLE_MS)
        serve(lossy, list(clients(lossy, 6, ("k", "l", ""), 0)), 2 * LEASE_MS + 30)
        lossy.now_us += 2 * LEASE_MS * 1000
        check_capacity(lossy, ("k", "l"), 1)


def play(engine: FakeEngine | RealEngine, seed: int | str, number: int) -> None:
    """Make random calls while Redis loses parts of the resource; then see that it serves."""
    random = Random(f"{seed} {number}")
    drawn = DrawnCalls.of_kind(random, number, IDLE_MS)
    is_cleared = drawn.has_delays = number % 2 == 1
    if not is_cleared:
        drawn.is_limited = drawn.has_rates = drawn.has_delays = False
    engine.clear()
    lossy = Lossy(engine, random)
    try:
        lossy.run(drawn, 30, 0.1)
        keys, per_key = drawn.keys, random.choice([0, 3])
        if not is_cleared:
            release_all(lossy)
            assert try_acquire(lossy, "y0", keys[1] if keys else "", 0)[0] == Status.GRANTED
        serve(lossy, list(clients(lossy, 5, keys, per_key)), 2 * LEASE_MS + 30)
        lossy.now_us += 2 * LEASE_MS * 1000
        check_capacity(lossy, keys, per_key)
        serve(lossy, list(clients(lossy, 8, keys, per_key)), 6 * LEASE_MS, per_key, is_exact=True)
    except (AssertionError, redis.ResponseError) as error:
        raise AssertionError("\n".join([f"history {number}: {error!r}", *lossy.log])) from None


@contextlib.contextmanager
def opened(servers: Servers, engine: str) -> Iterator[FakeEngine | RealEngine]:
    """Run scripts on an engine; of a cluster on the master that has the resource."""
    if engine == "fakeredis":
        yield FakeEngine()
    else:
        server = servers.cluster.master_of(KEYS[0]) if engine in CLUSTERS else servers[engine]
        with RealEngine(server) as real:
            yield real


@pytest.mark.parametrize("engine", ["fakeredis", *NEWER])
def test_histories_in_which_something_is_lost(servers: Servers, engine: str, seed: int) -> None:
    """Whichever keys, fields and members are lost at whatever moment, a resource serves within its leases."""
    with opened(servers, engine) as running:
        for number in range(8 if engine == "fakeredis" else 50):
            play(running, seed, number)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("engine", ["fakeredis", *NEWER, *CLUSTERS])
def test_many_histories_in_which_something_is_lost(servers: Servers, engine: str, seed: int, *, is_long: bool) -> None:
    """So it is in other histories."""
    count = {(True, True): 20_000, (True, False): 200, (False, True): 2_000, (False, False): 500}
    with opened(servers, engine) as running:
        for number in range(count[engine == "fakeredis", is_long]):
            play(running, f"many {seed}", number)
