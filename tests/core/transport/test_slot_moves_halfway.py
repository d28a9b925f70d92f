"""A slot begins to move, and a script takes the last holder or waiter out of a key, which it can touch no more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis.crc import key_slot

from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.replies import Status

from clusters import Cluster
from servers import REAL_ENGINES, available_engines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Server

pytestmark = pytest.mark.slow

ENGINES = [engine for engine in available_engines() if engine in REAL_ENGINES]
CAPACITY, LEASE_MS, IDLE_MS, LABEL = 10, 600_000, 1_000_000, '["o",{}]'


@pytest.fixture(scope="module", params=ENGINES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two masters of each real engine in turn."""
    with Cluster(request.param, masters=2) as running:
        yield running


class Moving:
    """A resource in a slot that begins to move, and then arrives with all its keys."""

    def __init__(self, cluster: Cluster, prefix: str) -> None:
        self._cluster = cluster
        self.keys = Resource(prefix, "r").keys
        self._slot = key_slot(self.keys[0].encode())
        self._source = cluster.master_of(self.keys[0])
        self._target = next(node for node in cluster.masters if node is not self._source)
        self.serving: Server = self._source

    def begin(self) -> None:
        """Begin."""
        self._cluster.begin_move(self._slot, self._source, self._target)

    def arrive(self) -> None:
        """Move the keys, and serve them there."""
        self._cluster.move_keys(self._slot, self._source, self._target)
        self._cluster.end_move(self._slot, self._target)
        self.serving = self._target

    def call(self, script: scripts.Script, *args: Any) -> list[Any]:
        """Make a call; return the reply without its tag, or what the server said."""
        with redis.Redis.from_url(self.serving.unix_url) as client:
            try:
                reply: list[Any] = client.eval(script.text, 4, *self.keys, 0, *args)
            except redis.ResponseError as error:
                return [str(error)]
        return reply[1:]

    def ask(self, ticket: str, weight: int, waits_ms: int = LEASE_MS, arrival: str = "0") -> list[Any]:
        """Request a permit."""
        terms = (weight, LEASE_MS, CAPACITY, waits_ms, -1, IDLE_MS, LABEL)
        return self.call(scripts.ACQUIRE, ticket, f"h{ticket}", f"c{ticket}|0", arrival, *terms)

    def release(self, ticket: str) -> list[Any]:
        """Release a permit."""
        return self.call(scripts.RELEASE, ticket, "", "", 0, 0, IDLE_MS)


@pytest.fixture
def moving(cluster: Cluster, prefix: str) -> Iterator[Moving]:
    """A resource, whose slot stays with nobody between two masters."""
    moving = Moving(cluster, prefix)
    yield moving
    moving.arrive()


def in_use(moving: Moving) -> int:
    """Return how many units are in use."""
    units: int = moving.call(scripts.INSPECT, 100, 100, 99_999, "", "", "", 100)[3]
    return units


@pytest.mark.parametrize("heavy", [1, 5, 10])
def test_the_last_holder_leaves_while_others_wait(moving: Moving, heavy: int) -> None:
    """Whatever became of the call, no more is granted afterwards than there is, and no unit is lost."""
    moving.ask("a", CAPACITY)
    for ticket in "bc":
        assert moving.ask(ticket, heavy)[0] == Status.QUEUED
    moving.begin()
    moving.release("a")
    moving.arrive()
    moving.release("a")
    believed = {ticket: reply for ticket in "bc" if (reply := moving.ask(ticket, heavy))[0] == Status.GRANTED}
    assert len(believed) == min(2, CAPACITY // heavy)
    assert in_use(moving) == heavy * len(believed)


@pytest.mark.parametrize("operation", ["reduce", "release", "resize"])
def test_the_last_waiter_is_granted(moving: Moving, operation: str) -> None:
    """It holds its whole weight, whichever call grants it, and that call has its reply."""
    fence = moving.ask("a", 6)[1]
    moving.ask("b", 2)
    assert moving.ask("waits", 5)[0] == Status.QUEUED
    moving.begin()
    reply = {
        "reduce": lambda: moving.call(scripts.REDUCE, "a", fence, 1, IDLE_MS),
        "release": lambda: moving.release("a"),
        "resize": lambda: moving.call(scripts.RESIZE, 13, IDLE_MS),
    }[operation]()
    assert all(isinstance(number, int) for number in reply), reply
    moving.arrive()
    free = {"reduce": 2, "release": 3, "resize": 0}[operation]
    for number in range(free + 1):
        status = moving.ask(f"later {number}", 1, 0, "+0")[0]
        assert status == (Status.GRANTED if number < free else Status.BUSY)
    assert moving.ask("waits", 5)[0] == Status.GRANTED


def test_a_request_that_is_stopped_has_granted_the_one_before_it(moving: Moving) -> None:
    """The call of another finds an expired permit: what it grants to the last waiter is counted, though it fails."""
    moving.ask("a", 8)
    moving.ask("b", 1)
    assert moving.ask("heavy", 5)[0] == Status.QUEUED
    with redis.Redis.from_url(moving.serving.unix_url) as client:
        client.zadd(moving.keys[1], {"a": 1})  # its lease is over
        heard = client.pubsub(ignore_subscribe_messages=True)
        heard.subscribe("cheavy")
        heard.get_message(timeout=1)
        moving.begin()
        assert "non local key" in moving.ask("x", 6)[0]
        message = heard.get_message(timeout=5)
        assert message
        assert message["data"].startswith(b"g hheavy ")
        heard.close()
    moving.arrive()
    assert moving.ask("x", 6, 0)[0] == Status.BUSY
    assert moving.ask("heavy", 5)[0] == Status.GRANTED
    assert in_use(moving) == 6
