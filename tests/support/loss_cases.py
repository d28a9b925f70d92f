"""What a resource may lose, and what must be so afterwards: shared by the tests, and by those that plant bugs."""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING, Any

import redis
from losses import (
    CAPACITY,
    IDLE_MS,
    LEASE_MS,
    Client,
    DrawnCalls,
    Lossy,
    check_capacity,
    clients,
    release_all,
    serve,
    try_acquire,
)

from redlease._core.protocol.replies import Status

from against_model import LABEL
from set_clock import KEYS

if TYPE_CHECKING:
    from set_clock import FakeEngine, RealEngine

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


def users(lossy: Lossy, kind: str) -> list[Client]:
    """Return clients of which one or two hold, and others wait; limits are set."""
    requests, limits = KINDS[kind]
    heavy = (5, LEASE_MS, CAPACITY, LEASE_MS, -1, IDLE_MS, LABEL)
    lossy.call("acquire", "heavy", "heavy", "heavy|0", "0", *heavy)
    asked = enumerate((*requests, *requests), 1)
    asking = [Client(lossy, -number, int(text[0]), key, text[2:]) for number, (text, key) in asked]
    for client in asking:
        client.step()
    for limit in limits:
        lossy.call("limit", *limit, IDLE_MS, LABEL)
    return asking


def check_after_loss(lossy: Lossy, asking: list[Client]) -> None:
    """See that no call fails, and that all are served, those who come later too."""
    lossy.look()
    serve(lossy, [*asking, *clients(lossy, 6, ("k", "l", ""), 0)], 2 * LEASE_MS + 30)
    lossy.now_us += 2 * LEASE_MS * 1000
    check_capacity(lossy, ("k", "l"), 1)


def lose_each(engine: FakeEngine | RealEngine, kind: str) -> None:
    """Lose each field and each member in turn."""
    for number in itertools.count():
        engine.clear()
        lossy = Lossy(engine, Random(0))
        asking = users(lossy, kind)
        if number == len(stored := lossy.stored()):
            return
        try:
            lossy.lose_one(*stored[number])
            check_after_loss(lossy, asking)
        except (AssertionError, redis.ResponseError) as error:
            raise AssertionError("\n".join([f"{kind}, {stored[number]}: {error!r}", *lossy.log])) from None


def lose_a_limit(engine: RealEngine) -> None:
    """Lose a limit that is no unit in use."""
    engine.clear()
    lossy = Lossy(engine, Random(0))
    terms = (1, LEASE_MS, 2, 0, -1, IDLE_MS, LABEL)
    lossy.call("acquire", "a", "ha", "c|0", "0", *terms)
    lossy.call("limit", "limit", "", 5, "30", IDLE_MS, LABEL)
    lossy.lose_one(KEYS[1], b"\xfflimit")
    assert lossy.call("acquire", "b", "hb", "c|0", "0", *terms)[0] == Status.GRANTED
    assert lossy.call("acquire", "c", "hc", "c|0", "0", *terms)[0] == Status.BUSY


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
        serves_again(lossy, drawn, random, is_cleared=is_cleared)
    except (AssertionError, redis.ResponseError) as error:
        raise AssertionError("\n".join([f"history {number}: {error!r}", *lossy.log])) from None


def serves_again(lossy: Lossy, drawn: DrawnCalls, random: Random, *, is_cleared: bool) -> None:
    """See that a resource serves; where the calls left nothing that outlives their leases, without being cleared."""
    keys, per_key = drawn.keys, random.choice([0, 3])
    if not is_cleared:
        release_all(lossy)
        assert try_acquire(lossy, "y0", keys[1] if keys else "", 0)[0] == Status.GRANTED
    serve(lossy, list(clients(lossy, 5, keys, per_key)), 2 * LEASE_MS + 30)
    lossy.now_us += 2 * LEASE_MS * 1000
    check_capacity(lossy, keys, per_key)
    serve(lossy, list(clients(lossy, 8, keys, per_key)), 6 * LEASE_MS, per_key, is_exact=True)
