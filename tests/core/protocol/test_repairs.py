"""What a repair keeps, and how much a check of everything reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from redlease._core.protocol.replies import Status

from crowd import IDLE_MS, Crowd
from set_clock import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Server

MANY = 1500


@pytest.fixture
def crowd(servers: dict[str, Server]) -> Iterator[Crowd]:
    """A resource without state."""
    crowd = Crowd(servers["valkey9"])
    yield crowd
    crowd.close()


@pytest.mark.parametrize("lost", [("e",), ("g",), ("e", "g", "s", "f")], ids="+".join)
@pytest.mark.parametrize("count", [0, 7], ids=["no keys", "7 keys"])
def test_a_long_queue_keeps_its_order_where_only_counts_are_lost(
    crowd: Crowd, count: int, lost: tuple[str, ...]
) -> None:
    """The header is counted again from what holds and waits; nobody has to queue again, and all are granted in turn."""
    crowd.hold()
    crowd.wait([f"k{number % count}" if count else "" for number in range(MANY)])
    before, scores = crowd.waiting(), crowd.client.zrange(KEYS[2], 0, -1, withscores=True)
    crowd.client.hdel(KEYS[0], *lost)
    assert crowd.ask("later", key="k0" if count else "")[0] == Status.QUEUED
    assert [ticket for ticket in crowd.waiting() if ticket != "later"] == before
    assert [entry for entry in crowd.client.zrange(KEYS[2], 0, -1, withscores=True) if entry in scores] == scores
    assert crowd.release("holder")[0] == 1
    assert crowd.holders() == before[:1]


def test_one_waiter_whose_record_is_lost_leaves_alone(crowd: Crowd) -> None:
    """The others keep their places."""
    crowd.hold()
    crowd.wait([""] * MANY)
    before = crowd.waiting()
    crowd.client.hdel(KEYS[0], f"t{before[3]}")
    assert crowd.ask("later")[0] == Status.QUEUED
    assert crowd.waiting() == [*before[:3], *before[4:], "later"]


def test_a_waiter_that_does_not_fit_is_notified(crowd: Crowd) -> None:
    """One whose key was lost leaves the queue, and its client learns at once that it has to ask again."""
    crowd.hold()
    crowd.wait(["k", "k", "l"])
    lost = crowd.waiting()[-1]
    crowd.client.hdel(KEYS[0], f"p{lost}")
    redis: Any = crowd.client  # untyped in part
    heard = redis.pubsub(ignore_subscribe_messages=True)
    heard.subscribe("alive")
    heard.get_message(timeout=5)
    assert crowd.ask("later", key="k")[0] == Status.QUEUED
    message = heard.get_message(timeout=5)
    heard.close()
    assert message
    assert message["data"].decode() == f"x h{lost}"
    assert lost not in crowd.waiting()
    assert len(crowd.waiting()) == 3


def records_read(crowd: Crowd, *call: Any) -> int:
    """Return how often a call reads records with HMGET."""

    def made() -> int:
        stats: Any = crowd.client.info("commandstats")
        return int(stats["cmdstat_hmget"]["calls"])

    before = made()
    crowd.call(*call)
    return made() - before


@pytest.mark.parametrize(("size", "most"), [(0, 20), (8000, 4)])
def test_a_check_of_everything_is_bounded_by_bytes(crowd: Crowd, size: int, most: int) -> None:
    """It ends where records are large, unless something tells of a loss."""
    label = f'["o",{{"m":"{size * "x"}"}}]'
    for _ in range(190):
        assert crowd.ask(capacity=190, label=label)[0] == Status.GRANTED
    crowd.ask("waits", capacity=190)
    crowd.now_ms += 2000
    beat = ("beat", "alive|1", 1000, "waits", IDLE_MS)
    assert 1 < records_read(crowd, *beat) <= most
    assert records_read(crowd, *beat) == 1  # the header: it was checked
    crowd.client.hdel(KEYS[0], "e")
    assert records_read(crowd, *beat) > 4


def test_checks_of_everything_are_a_second_apart(crowd: Crowd) -> None:
    """However short the leases are: a check costs as much as many calls."""
    crowd.hold()
    crowd.ask("waits")
    for after_ms, is_checked in ((20, False), (900, False), (100, True), (500, False)):
        crowd.now_ms += after_ms
        assert (records_read(crowd, "beat", "alive|1", 10, "waits", IDLE_MS) > 1) == is_checked
