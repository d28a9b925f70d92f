"""A request that finds too many waiters costs the server about the same however many wait, alive or dead."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from redlease._core.protocol.replies import Status

from crowd import GONE_MS, Crowd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Server

MOST_COMMANDS = 250  # of one refusal
SILENCE_MS = 200  # as parts/room.lua has it


@pytest.fixture(params=["", "k"], ids=["max_waiters", "max_waiters_per_key"])
def key(request: pytest.FixtureRequest) -> str:
    """Whether all waiters are counted, or those of a key."""
    return str(request.param)


@pytest.fixture
def crowd(servers: dict[str, Server]) -> Iterator[Crowd]:
    """A resource whose only unit is held."""
    crowd = Crowd(servers["valkey9"])
    crowd.hold()
    yield crowd
    crowd.close()


def at_most(key: str, count: int) -> int | str:
    """Return the argument that lets so many wait, with the key or in all."""
    return f"-1 {count}" if key else count


@pytest.mark.parametrize("waiters", [50, 5000])
def test_a_refusal_costs_no_more_with_many_waiters(crowd: Crowd, key: str, waiters: int) -> None:
    """A place has lapsed, and its waiter left: a call looks at a few waiters, and at none when all have been seen."""
    crowd.wait([key] * waiters)
    crowd.wait_and_die([""])
    crowd.release(*crowd.dead)
    crowd.now_ms += GONE_MS
    most = at_most(key, waiters)
    while (refusal := crowd.ask(key=key, most=most))[2]:
        assert refusal[:2] == [Status.FULL, waiters]
        assert crowd.commands < MOST_COMMANDS
        crowd.now_ms += 1
    assert crowd.ask(key=key, most=most)[:3] == [Status.FULL, waiters, 0]
    assert crowd.commands < 50


def test_the_dead_behind_thousands_make_room(crowd: Crowd, key: str) -> None:
    """One request looks through the whole queue, a few waiters a call, and waits in the place of a dead one."""
    crowd.wait([key] * 5000)
    crowd.wait_and_die([key])
    crowd.now_ms += GONE_MS
    reply, commands = crowd.ask_until_told(key=key, most=at_most(key, 5001))
    assert (reply[0], max(commands) < MOST_COMMANDS) == (Status.QUEUED, True)
    assert not crowd.dead & set(crowd.waiting())
    assert crowd.ask(key=key, most=at_most(key, 5001))[0] == Status.FULL


def test_many_requests_share_one_look(crowd: Crowd, key: str) -> None:
    """In one ms one of twenty refused requests looks at waiters, and the others come again later."""
    crowd.wait([key] * 1000)
    crowd.now_ms += 1
    costs = []
    for _ in range(20):
        reply = crowd.ask(key=key, most=at_most(key, 1000))
        assert reply[0] == Status.FULL
        costs.append(crowd.commands)
    assert sorted(costs)[-2] < 50 < costs[0]


def test_short_requests_find_the_dead_together(crowd: Crowd, key: str) -> None:
    """Requests that never ask twice go on with one look, and the one that comes to a dead waiter gets its place."""
    crowd.wait([key] * 1000)
    crowd.wait_and_die([key])
    crowd.now_ms += GONE_MS
    replies: list[int] = []
    while len(replies) < 20 and Status.QUEUED not in replies:
        crowd.now_ms += 1
        replies.append(crowd.ask(key=key, most=at_most(key, 1001))[0])
    assert set(replies[:-1]) == {Status.FULL}
    assert replies[-1] == Status.QUEUED


def test_who_asked_long_ago_is_refused(crowd: Crowd, key: str) -> None:
    """A look at waiters with large records takes longer; the next request goes on with it."""
    crowd.wait([key] * 500, label=f'["{50_000 * "o"}",{{}}]')
    most = at_most(key, 500)
    began_ms = crowd.now_ms
    (reply, commands) = crowd.ask_until_told(key=key, most=most)
    assert crowd.now_ms - began_ms == SILENCE_MS
    assert reply[:3] == [Status.FULL, 500, 0]
    (reply, rest) = crowd.ask_until_told(key=key, most=most)
    assert reply[:3] == [Status.FULL, 500, 0]
    assert len(rest) < len(commands)


@pytest.mark.parametrize("seed", range(5))
def test_no_dead_waiter_is_missed(crowd: Crowd, key: str, seed: int) -> None:
    """Others come, leave, return to their place and are granted while a look goes on: it misses none that was dead."""
    draw = random.Random(seed)
    keys = [key, key, "", "other"]
    for _ in range(30):
        crowd.wait(draw.choices(keys, k=20), weight=f"1 {draw.choice([0, 0, 3])}")
        crowd.wait_and_die(draw.choices(keys, k=draw.randint(0, 2)), f"gone|{draw.random()}")
    crowd.now_ms += GONE_MS
    most, large_reads = at_most(key, 1), 0
    reply = crowd.ask("late", key=key, most=most)
    while reply[0] == Status.FULL and reply[2]:
        large_reads += 1
        ticket = draw.choice(crowd.waiting())
        crowd.release(ticket)
        crowd.dead.discard(ticket)
        if draw.random() < 0.5:
            crowd.ask(ticket, key=draw.choice(keys), weight=f"1 {draw.choice([0, 3])}")
        crowd.now_ms += reply[4]
        reply = crowd.ask("late", key=key, most=most, arrival=-reply[2])
    assert large_reads > 2
    assert reply[:1] == [Status.FULL]
    left = crowd.dead & set(crowd.waiting())
    assert not {ticket for ticket in left if not key or crowd.key_of(ticket) == key}


def test_a_look_leaves_no_field_behind(crowd: Crowd) -> None:
    """When nothing of a key is left, nothing says how far a look at its waiters has come."""
    crowd.wait(["k"] * 200)
    assert crowd.ask(key="k", most="-1 200")[2]
    assert "lk" in crowd.fields()
    for ticket in crowd.waiting():
        crowd.release(ticket)
    assert not {name for name in crowd.fields() if name.startswith("l")}


def test_dead_waiters_whose_places_are_forgotten(crowd: Crowd, key: str) -> None:
    """A minute after a place lapsed nothing is left of it: its waiters make room all the same."""
    crowd.wait_and_die([key] * 3)
    crowd.now_ms += 61_000
    crowd.wait([key])
    assert crowd.client.zscore("model:{r}:waiters", "gone|1") is None
    assert crowd.ask(key=key, most=at_most(key, 4))[0] == Status.QUEUED
