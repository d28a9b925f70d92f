"""Turns of many keys: who waits how long, how even they are, and what they cost the server."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import redis

from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource

from crowd import Crowd
from set_clock import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Server

CAPACITY = 20
AGES_MS = 3_600_000  # nothing ends by itself


class Pool:
    """A semaphore, called through its scripts; a round is as long as a hold: all holders release, and others begin."""

    def __init__(self, client: redis.Redis, prefix: str) -> None:
        self.client = client
        self.keys = Resource(prefix, "r").keys
        self.arrived = 0
        client.script_load(scripts.ACQUIRE.text)
        client.script_load(scripts.RELEASE.text)

    def ask(self, keys: list[str], share: dict[str, float] | None = None) -> None:
        """Request a unit for each of these keys, in this order."""
        with self.client.pipeline(transaction=False) as pipeline:
            for key in keys:
                self.arrived += 1
                ticket = f"{key} {self.arrived}"
                asked = f"1 0    {(share or {}).get(key, 1):g}"
                terms = (asked, AGES_MS, CAPACITY, AGES_MS, -1, AGES_MS, '["o",{}]', key)
                pipeline.evalsha(scripts.ACQUIRE.sha, 4, *self.keys, 0, ticket, f"r{self.arrived}", "c|1", "0", *terms)
                if self.arrived % 1000 == 0:
                    pipeline.execute()
            pipeline.execute()

    def holders(self) -> list[str]:
        """Return the keys that hold, one for each unit."""
        return [ticket.decode().split(" ")[0] for ticket in self._operations()]

    def _operations(self) -> list[bytes]:
        found: Any = self.client.zrange(self.keys[1], 0, -1)
        return list(found)

    def release(self) -> list[str]:
        """End a round, and return who holds in the next one."""
        with self.client.pipeline(transaction=False) as pipeline:
            for ticket in self._operations():
                pipeline.evalsha(scripts.RELEASE.sha, 4, *self.keys, 0, ticket, "", "", 0, 0, AGES_MS)
            pipeline.execute()
        return self.holders()

    def commands(self) -> int:
        """Return how many commands the server has run, those in scripts among them."""
        stats: Any = self.client.info("commandstats")
        return sum(row["calls"] for row in stats.values())


@pytest.fixture
def pool(server: Server, prefix: str) -> Iterator[Pool]:
    """A pool of 20 units."""
    with redis.Redis.from_url(server.unix_url) as client:
        yield Pool(client, prefix)


@pytest.mark.slow
@pytest.mark.parametrize("real_engine", ["valkey9", "redis62"])
def test_ten_thousand_of_one_key_keep_nobody_waiting(pool: Pool) -> None:
    """Of 99 keys that come after ten thousand requests of another, each begins within six rounds; no unit is idle."""
    pool.ask(["heavy"] * 10_000)
    pool.ask([f"light{number}" for number in range(99)])
    begun: set[str] = set()
    for _ in range(6):
        held = pool.release()
        assert len(held) == CAPACITY
        begun |= set(held) - {"heavy"}
    assert len(begun) == 99


@pytest.mark.slow
@pytest.mark.parametrize("real_engine", ["valkey9"])
def test_equal_keys_have_equal_turns(pool: Pool) -> None:
    """Fifty keys that always wait: Jain's index of the units that they had is at least 0.99 after any 20 rounds."""
    keys = [f"k{number}" for number in range(50)]
    pool.ask([key for key in keys for _ in range(60)])
    had: Counter[str] = Counter()  # the first of all have had what was idle
    for number in range(100):
        had.update(pool.release())
        assert sum(had.values()) == CAPACITY * (number + 1)
        if number % 20 == 19:
            assert sum(had.values()) ** 2 / (50 * sum(count**2 for count in had.values())) >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("real_engine", ["valkey9"])
def test_shares_are_kept(pool: Pool) -> None:
    """Keys with the shares 1, 2 and 4 have units in that proportion, within 5 percent."""
    share = {"a": 1.0, "b": 2.0, "c": 4.0}
    pool.ask(list("abc") * 900, share)
    had: Counter[str] = Counter()
    while sum(had.values()) < 1400:
        had.update(pool.release())
    for key, its in share.items():
        assert had[key] / sum(had.values()) == pytest.approx(its / 7, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("real_engine", ["valkey9"])
def test_a_grant_costs_as_many_commands_however_many_wait(pool: Pool) -> None:
    """With 1,000 waiters in 100 keys and with 20,000 more in 2,000; each command takes O(log n)."""
    costs = []
    for keys in (100, 2000):
        pool.ask([f"k{number}" for number in range(keys) for _ in range(10)])
        before = pool.commands()
        for _ in range(10):
            assert len(pool.release()) == CAPACITY
        costs.append(pool.commands() - before)
    assert costs[1] <= 1.02 * costs[0]


@pytest.mark.parametrize("real_engine", ["valkey9"])
def test_nothing_is_kept_of_keys_that_are_gone(pool: Pool) -> None:
    """When the last request has been served, no field of the state is about a key or a ticket."""
    pool.ask([f"k{number % 30}" for number in range(100)])
    while pool.release():
        pass
    fields: Any = pool.client.hkeys(pool.keys[0])
    assert {field for field in fields if len(field) > 1} == set()
    assert b"g" not in fields


@pytest.fixture
def crowd(servers: dict[str, Server]) -> Iterator[Crowd]:
    """A resource without state."""
    crowd = Crowd(servers["valkey9"])
    yield crowd
    crowd.close()


def granted(crowd: Crowd, count: int) -> Counter[str]:
    """Let one after another hold; return how often it was the turn of each key."""
    ticket, found = crowd.holders()[0], Counter[str]()
    for _ in range(count):
        crowd.release(ticket)
        (ticket,) = crowd.holders()
        found[crowd.key_of(ticket)] += 1
    return found


@pytest.mark.parametrize(
    ("capacity", "share"), [(2**22, 1), (2**27, 4), (2**31 - 2, 0.001), (2**31 - 2, 4), (2**31 - 1, 1)]
)
def test_great_weights_take_turns_by_their_weight(crowd: Crowd, capacity: int, share: float) -> None:
    """In a pool of bytes each key gets as many of them as its share says, however great its requests are."""
    crowd.hold(capacity)
    whole = capacity - 1  # all of the greatest capacity is what a writer has
    crowd.wait(["a"] * 12, weight=f"{whole} 0    {share}", capacity=capacity)
    crowd.wait(["b"] * 60, weight=f"{capacity // 2 + 1} 0    {4 * share}", capacity=capacity)
    assert granted(crowd, 45)["a"] in range(4, 7)  # one turn of nine


@pytest.mark.parametrize("virtual", [2**50 - 10_000, 2**51 - 4000], ids=["before its half", "before its end"])
def test_the_virtual_time_begins_again(crowd: Crowd, virtual: int) -> None:
    """Keys take turns by their shares however long they have waited without a break, and so do those without one."""
    crowd.hold()
    crowd.wait(["a"] * 40 + [""] * 40, weight="1 0")
    crowd.wait(["b"] * 80, weight="1 0    2")
    fields: Any = crowd.client.hget(KEYS[0], "g")
    count, _, _, *rest = fields.decode().split(" ")
    crowd.client.hset(KEYS[0], "g", " ".join((count, str(virtual), str(virtual), *rest)))
    heads: Any = crowd.client.zrangebyscore(KEYS[2], 2**51, f"({2**52}")
    for head in heads:
        crowd.client.zincrby(KEYS[2], virtual, head)
    turns = granted(crowd, 80)
    assert all(abs(turns[key] - due) <= 1 for key, due in (("a", 20), ("", 20), ("b", 40))), turns
    fields = crowd.client.hget(KEYS[0], "g")
    assert int(fields.decode().split(" ")[1]) < 2**50
