"""No call does more than a bounded amount of work, whatever others have left; what is left is done by further calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from redlease._core.protocol.replies import Status
from redlease._core.protocol.snapshots import Reading

from crowd import GONE_MS, IDLE_MS, LABEL, LEASE_MS, Crowd

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import Server

MOST_COMMANDS = 450  # some 3 µs each
MANY = 1000


@pytest.fixture
def crowd(servers: dict[str, Server]) -> Iterator[Crowd]:
    """A resource without state."""
    crowd = Crowd(servers["valkey9"])
    yield crowd
    crowd.close()


def keys(count: int, most: int = MANY) -> list[str]:
    """Return the keys of so many requests, of which each key has the same number."""
    return [f"k{number % count}" if count else "" for number in range(most)]


@pytest.mark.parametrize("count", [0, 1, 30, 1000], ids=["no keys", "one key", "30 keys", "a key each"])
def test_dead_waiters_are_removed_bit_by_bit(crowd: Crowd, count: int) -> None:
    """A release finds a thousand of them, in however many keys; the calls that follow come to the one that lives."""
    crowd.hold()
    crowd.wait_and_die(keys(count))
    assert crowd.ask("alive", key="last" if count else "")[0] == Status.QUEUED
    crowd.now_ms += GONE_MS
    commands = crowd.all_of("release", "holder", "", "", 0, 0, IDLE_MS)
    assert max(commands) < MOST_COMMANDS
    assert (crowd.waiting(), crowd.holders()) == ([], ["alive"])


@pytest.mark.parametrize("by", ["release", "beat", "expiry", "limit", "supersede"])
def test_a_killed_process_with_many_keys_is_removed_bit_by_bit(crowd: Crowd, by: str) -> None:
    """It left 50 waiters of each of 50 keys that are at their limits: one budget a call is for all that it does."""
    names = keys(50, 50 * 50)
    options: dict[str, Any] = {"weight": "1 0 1000 100 1", "capacity": 51}
    for key in names[:50]:
        assert crowd.ask(f"holds {key}", key=key, **options)[0] == Status.GRANTED
    crowd.ask("last", key="last", **options)
    crowd.wait_and_die(names, **options)
    assert crowd.ask("alive", key="k0", **options)[0] == Status.QUEUED
    crowd.now_ms += LEASE_MS + 1 if by == "expiry" else GONE_MS
    first: Any = {
        "release": ("release", "holds k0", "", "", 0, 0, IDLE_MS),
        "beat": ("beat", "alive|1", LEASE_MS, "alive", IDLE_MS),
        "expiry": ("release", "", "", "", 0, 0, IDLE_MS),
        "limit": ("limit", "each", "", 3, "", IDLE_MS, '["o",{}]'),
        "supersede": ("supersede", "alive", "halive", 1, 60_000, 1, IDLE_MS, ""),
    }[by]
    crowd.call(*first)
    commands = [crowd.commands, *crowd.all_of("release", "", "", "", 0, 0, IDLE_MS)]
    for ticket in [f"holds {key}" for key in dict.fromkeys(names)]:
        commands += crowd.all_of("release", ticket, "", "", 0, 0, IDLE_MS)
    crowd.now_ms += 1000  # the lock delay
    commands += crowd.all_of("release", "", "", "", 0, 0, IDLE_MS)
    assert max(commands) < MOST_COMMANDS
    assert crowd.waiting() == []
    assert not [field for field in crowd.fields() if field.startswith("pdead")]


@pytest.mark.parametrize("count", [0, 1, 30, 1000], ids=["no keys", "one key", "30 keys", "a key each"])
def test_many_are_granted_bit_by_bit(crowd: Crowd, count: int) -> None:
    """A release of a thousand units lets a thousand waiters begin, some in each call."""
    crowd.hold(MANY)
    crowd.wait(keys(count), capacity=MANY)
    commands = crowd.all_of("release", "holder", "", "", 0, 0, IDLE_MS)
    assert max(commands) < MOST_COMMANDS
    assert (crowd.waiting(), len(crowd.holders())) == ([], MANY)


@pytest.mark.parametrize("count", [0, 1, 30, 1000], ids=["no keys", "one key", "30 keys", "a key each"])
def test_expired_permits_are_removed_bit_by_bit(crowd: Crowd, count: int) -> None:
    """A request of all units meets a thousand of them, with a lock delay and a history, and has what they had."""
    for key in keys(count):
        assert crowd.ask(key=key, weight="1 0 1000 100", capacity=MANY)[0] == Status.GRANTED
    crowd.now_ms += LEASE_MS + 1
    commands, replies = [], [[Status.BUSY, 1]]
    for _ in range(2):  # first their leases end, and then their delays
        crowd.now_ms += 1000
        while len(replies) == 1 or replies[-1] == [Status.BUSY, 1]:
            replies.append(crowd.ask("all", weight=MANY, capacity=MANY, waits_ms=0))
            commands.append(crowd.commands)
        replies = replies[-1:]
    assert max(commands) < MOST_COMMANDS
    assert replies[0][0] == Status.GRANTED


def test_keys_are_raised_bit_by_bit(crowd: Crowd) -> None:
    """A limit for each of a thousand keys that all wait at theirs is raised: grants begin with the first call."""
    names = keys(MANY)
    for key in (*names, *names):
        crowd.ask(key=key, weight="1 0   1", capacity=3 * MANY)
    assert (len(crowd.holders()), len(crowd.waiting())) == (MANY, MANY)
    crowd.call("limit", "each", "", 2, "", IDLE_MS, '["o",{}]')
    assert len(crowd.holders()) > MANY
    commands = crowd.all_of("release", "", "", "", 0, 0, IDLE_MS)
    assert max(commands) < MOST_COMMANDS
    assert crowd.waiting() == []


def limit_keys(crowd: Crowd, units: int | str) -> None:
    """Set an operator's limit for each key, or lift it with "", and do what is left to do."""
    assert max(crowd.all_of("limit", "each", "", units, "", IDLE_MS, LABEL)) < MOST_COMMANDS


def park(crowd: Crowd, count: int) -> list[str]:
    """Let two requests of each of so many keys wait under an operator's limit of 0, and lift that in one call."""
    names = [f"k{number}" for number in range(count)]
    limit_keys(crowd, 0)
    crowd.wait([*names, *names])
    crowd.call("limit", "each", "", "", "", IDLE_MS, LABEL)
    return names


def rounds_until(crowd: Crowd, names: list[str], most: int, newcomers: list[str]) -> tuple[int, int]:
    """Let newcomers, each with its key, ask for these weights, and the holder release, until each name was granted.

    Returns how many rounds that took, and how many newcomers were granted.
    """
    missing, new = set(names), 0
    for number in range(most):
        for index, weight in enumerate(newcomers):
            crowd.ask(key=f"new{number} {index}", weight=weight)
        for ticket in crowd.holders():
            key = crowd.key_of(ticket)
            new += key.startswith("new")
            missing.discard(key)
        if not missing:
            return number, new
        crowd.release(crowd.holders()[0])
    pytest.fail(f"{len(missing)} keys were not granted in {most} rounds")


def test_newcomers_pass_keys_briefly(crowd: Crowd) -> None:
    """While the keys that waited at their limit are found bit by bit, few new ones pass the last of them."""
    crowd.hold()
    rounds, new = rounds_until(crowd, park(crowd, 100), 150, ["1"])
    assert rounds <= 100 + 13
    assert new <= 13


def test_raises_in_turn_starve_no_key(crowd: Crowd) -> None:
    """Processes declare a limit of 5 and of 6 in turn; each 6 is a raise, and the search for keys goes on."""
    crowd.hold()
    names = park(crowd, 100)
    rounds, new = rounds_until(crowd, names, 150, ["1 0   5", "1 0   6"])
    assert rounds <= 100 + 2 * 13
    assert new <= 2 * 13


def test_a_raise_reaches_keys_that_were_looked_at(crowd: Crowd) -> None:
    """Those that were found still at their limit are found again, however many keys come to theirs meanwhile."""
    names, capacity = [f"k{number}" for number in range(40)], 41
    for key in (*names, *names):
        crowd.ask(key=key, weight="1 0   1", capacity=capacity)
    crowd.ask("first", capacity=capacity)
    crowd.call("limit", "each", "", 1, "", IDLE_MS, LABEL)
    crowd.call("limit", "each", "", 2, "", IDLE_MS, LABEL)
    before, ticket = set(crowd.holders()), "first"
    for number in range(40):
        for key in [f"new{number} {index}" for index in range(9)]:
            crowd.call("limit", "back", key, 0, "", IDLE_MS, LABEL)
            assert crowd.ask(key=key, capacity=capacity)[0] == Status.QUEUED
        crowd.release(ticket)
        (ticket,) = set(crowd.holders()) - before
    assert len(crowd.waiting()) == 9 * 40


def test_a_heavy_first_waiter_leaves_no_key_below_its_limit(crowd: Crowd) -> None:
    """The first keys that are found after a raise are too heavy for what is free: the light ones are found too."""
    crowd.ask("holder", weight=20, capacity=30)
    limit_keys(crowd, 0)
    crowd.wait([f"heavy{number}" for number in range(20)], weight=15, capacity=30)
    crowd.wait([f"light{number}" for number in range(20)], capacity=30)
    limit_keys(crowd, "")
    assert sorted(crowd.key_of(ticket)[:5] for ticket in crowd.holders() if ticket != "holder") == ["light"] * 10
    for number in range(20):  # they came later, and pass no heavy one for longer than its turn lasts
        assert crowd.ask(key=f"new{number}", capacity=30)[0] == Status.QUEUED
    for ticket in crowd.holders():
        crowd.all_of("release", ticket, "", "", 0, 0, IDLE_MS)
    assert len(crowd.holders()) == 30


@pytest.mark.parametrize("key", ["", "k"])
def test_older_requests_are_replaced_bit_by_bit(crowd: Crowd, key: str) -> None:
    """The newest of a thousand of a key takes the place of all, and of their holder."""
    crowd.ask("holder", key=key)
    crowd.wait([key] * MANY)
    assert crowd.ask("newest", key=key)[0] == Status.QUEUED
    asked = ("newest", "hnewest", 1, 60_000, 1000, IDLE_MS, "")
    reply, commands = crowd.call("supersede", *asked), [crowd.commands]
    while reply[1]:
        reply = crowd.call("supersede", *asked)
        commands.append(crowd.commands)
    assert max(commands) < MOST_COMMANDS
    assert crowd.waiting() == ["newest"]


@pytest.mark.parametrize("of_key", [False, True], ids=["no keys", "a key each"])
def test_holders_are_found_bit_by_bit(crowd: Crowd, of_key: bool) -> None:
    """The newest request finds the holders of its key among a thousand, wherever they stand; the oldest of them end."""
    own = keys(3)[2] if of_key else ""
    for number in range(MANY):
        crowd.ask(f"other{number}", key=f"other{number}" if of_key else "", capacity=MANY + 2)
    crowd.now_ms += 1
    held = [f"own{number}" for number in range(2)]
    assert [crowd.ask(ticket, key=own, capacity=MANY + 2)[0] for ticket in held] == [Status.GRANTED] * 2
    weight = 1 if of_key else 300
    crowd.ask("newest", key=own, weight=weight, capacity=MANY + 2)
    after: str | bytes = ""
    commands, superseded = [], 0
    while True:
        reply = crowd.call("supersede", "newest", "hnewest", 1, 60_000, 1000, IDLE_MS, after)
        commands.append(crowd.commands)
        superseded, after = superseded + reply[0], reply[2]
        if not reply[1] and not after:
            break
    assert max(commands) < MOST_COMMANDS
    assert superseded == weight
    if of_key:
        assert crowd.call("supersede", "newest", "hnewest", 1, 60_000, 1000, IDLE_MS, "")[0] == 0
    crowd.now_ms += 1000
    crowd.all_of("release", "", "", "", 0, 0, IDLE_MS)
    assert "newest" in crowd.holders()
    assert ("own0" in crowd.holders(), "own1" in crowd.holders()) == (not of_key, True)


def read(crowd: Crowd, limit: int, counted: int = 5000) -> tuple[Any, list[int]]:
    """Return a snapshot, and the commands of each page."""
    reading, commands = Reading("r", 1, limit, counted), []
    while (args := reading.args) is not None:
        reading.add(crowd.call("inspect", *args))
        commands.append(crowd.commands)
    return reading.snapshot(), commands


@pytest.mark.parametrize("count", [0, 1, 1000], ids=["no keys", "one key", "a key each"])
def test_a_snapshot_is_read_bit_by_bit(crowd: Crowd, count: int) -> None:
    """It lists and counts who lives among thousands that are dead, and no page looks at more than a few of them."""
    for number in range(MANY):
        crowd.ask(f"expired{number}", weight=2, capacity=2 * MANY + 500)
    crowd.now_ms += LEASE_MS + 1
    for number in range(500):
        assert crowd.ask(f"held{number}", capacity=2 * MANY + 500)[0] == Status.GRANTED
    crowd.call("limit", "pause", "", 0, "", IDLE_MS, '["o",{}]')
    crowd.wait_and_die(keys(count), capacity=2 * MANY + 500)
    crowd.wait(keys(count, 500), capacity=2 * MANY + 500)
    crowd.now_ms += GONE_MS
    snapshot, commands = read(crowd, 400)
    assert max(commands) < MOST_COMMANDS
    assert (len(snapshot.holders), len(snapshot.waiters)) == (400, 400)
    assert (snapshot.in_use, snapshot.waiting) == (500, 500)
    few, commands = read(crowd, 1, 0)
    assert (len(few.holders), few.in_use) == (1, 500)
    assert few.waiting >= 500


def test_a_page_of_large_records_has_few_of_them(crowd: Crowd) -> None:
    """What a page looks at is measured in bytes too."""
    crowd.hold()
    crowd.wait([""] * 200, label=f'["o",{{"m":"{8000 * "x"}"}}]')
    snapshot, commands = read(crowd, 200)
    assert len(snapshot.waiters) == snapshot.waiting == 200
    assert max(commands) < 60


@pytest.mark.parametrize(("dead", "alive", "place"), [(1000, 0, 1), (0, 1000, 1001), (500, 500, 501)])
def test_a_position_far_behind_is_a_sample(crowd: Crowd, dead: int, alive: int, place: int) -> None:
    """It is exact where all ahead live, or all are dead, and an estimate in between; it looks at few of them."""
    crowd.hold()
    crowd.wait_and_die([""] * dead)
    crowd.wait([""] * alive)
    crowd.ask("last")
    crowd.now_ms += GONE_MS
    assert crowd.call("position", "last")[0] == pytest.approx(place, abs=0 if not dead or not alive else 30)
    assert crowd.commands < MOST_COMMANDS
