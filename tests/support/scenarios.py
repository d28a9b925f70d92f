"""What the golden vectors tell of the protocol: scenarios, each a list of calls.

A call is the ms at which it is made, counted from the first, its name, and its arguments without the tag.
"""

from __future__ import annotations

from typing import Any

from redlease._core.limits import CAPACITY_MAX

LABEL = '["o",{}]'
IDLE = 60_000
LEASE, WAITS = 30_000, 10_000
Call = list[Any]


def acquire(
    ms: int,
    ticket: str,
    *,
    request: str = "",
    place: str = "",
    arrival: str = "0",
    weight: int | str = 1,
    lease: int = LEASE,
    capacity: int = 1,
    waits: int = WAITS,
    most: int = -1,
    key: str = "",
) -> Call:
    """Request a permit; by default each ticket is one client's, which waits for it."""
    terms = (weight, lease, capacity, waits, most, IDLE, LABEL)
    its = [key] if key else []
    return [ms, "acquire", ticket, request or f"h{ticket}", place or f"client-{ticket}|0", arrival, *terms, *its]


def release(
    ms: int, ticket: str, *, request: str = "", fence: int | str = "", tombstone: int = 0, notify: int = 0
) -> Call:
    """Release: a permit as its own client does, or whatever the request or anybody has."""
    return [ms, "release", ticket, request or (f"h{ticket}" if fence else ""), fence, tombstone, notify, IDLE]


def renew(ms: int, ticket: str, fence: int, lease: int = LEASE, shorten: str = "0") -> Call:
    """Renew."""
    return [ms, "renew", ticket, fence, lease, shorten, IDLE]


def beat(ms: int, ticket: str, place: str = "") -> Call:
    """Keep a place."""
    return [ms, "beat", place or f"client-{ticket}|0", WAITS, ticket, IDLE]


def adopt(ms: int, ticket: str, fence: int, request: str, refence: int = 1) -> Call:
    """Take a permit over."""
    return [ms, "adopt", ticket, fence, request, f"client-{request}|0", LEASE, refence, IDLE, LABEL]


def inspect(ms: int) -> Call:
    """Look at everything."""
    return [ms, "inspect", 1000, 1000, 500_000, "", "", "", 5000]


def first(ms: int = 0, number: int = 0) -> int:
    """Return the fence that is granted at that ms by the call of that number, which is made so many µs later."""
    return (1_700_000_000_000 + ms) * 1000 + number


SCENARIOS: dict[str, list[Call]] = {
    "a lock is granted, renewed, checked and released": [
        acquire(0, "a"),
        inspect(1),
        [2, "check", "a", first()],
        [3, "check", "a", first() + 1],
        renew(10_000, "a", first()),
        renew(10_001, "a", first() + 1),
        [10_002, "position", "a"],
        release(20_000, "a", fence=first()),
        release(20_001, "a", fence=first()),
        [20_002, "check", "a", first()],
        [20_003, "position", "a"],
        inspect(20_004),
    ],
    "requests are granted in the order of arrival": [
        acquire(0, "a"),
        acquire(1, "b"),
        acquire(2, "c"),
        acquire(3, "d", waits=0),
        [4, "position", "c"],
        inspect(5),
        release(6, "a", fence=first()),
        release(7, "b", fence=first(6, 6)),
        release(8, "c", fence=first(7, 7)),
        acquire(9, "d", waits=0),
    ],
    "a repeated request gets the same permit or the same place": [
        acquire(0, "a"),
        acquire(5, "a"),
        acquire(6, "b"),
        acquire(7, "b"),
        acquire(8, "b", weight=2, capacity=2, arrival="+1"),
        release(9, "a", fence=first()),
        acquire(10, "b"),
        acquire(11, "b", request="h-other", place="other|0"),
        inspect(12),
    ],
    "an expired permit passes on at the very ms in which its lease ends": [
        acquire(0, "a", lease=1000),
        acquire(500, "b", lease=1000),
        beat(999, "b"),
        [999, "check", "a", first()],
        [1000, "check", "a", first()],
        renew(1000, "a", first()),
        beat(1000, "b"),
        acquire(1001, "b", lease=1000),
        release(1002, "a", fence=first()),
        inspect(1003),
        inspect(2001),
        acquire(2002, "c", waits=0),
    ],
    "a waiter whose place has lapsed is passed over": [
        acquire(0, "a", lease=60_000),
        acquire(1, "dead", waits=100),
        acquire(2, "b"),
        beat(101, "dead"),
        acquire(102, "late", place="client-dead|0"),
        [103, "position", "b"],
        release(104, "a", fence=first()),
        acquire(105, "dead", place="client-dead|1", arrival="+1"),
        inspect(106),
    ],
    "a waiter that returns takes its former position": [
        acquire(0, "a", lease=60_000),
        acquire(1, "b", waits=100),
        acquire(2, "c", waits=60_000),
        acquire(200, "b", place="client-b|1", arrival="+1"),
        [201, "position", "b"],
        [201, "position", "c"],
        release(202, "a", fence=first()),
    ],
    "a withdrawn request leaves a tombstone against late copies": [
        acquire(0, "a"),
        acquire(1, "b"),
        release(2, "b", request="hb", tombstone=5000),
        acquire(3, "b"),
        acquire(4, "b", request="hb-new"),
        release(5, "never", request="hnever", tombstone=5000),
        acquire(6, "never"),
        acquire(5010, "never"),
        inspect(5011),
    ],
    "weights: the head is not passed by lighter requests": [
        acquire(0, "a", weight=2, capacity=3),
        acquire(1, "heavy", weight=3, capacity=3),
        acquire(2, "light", capacity=3),
        acquire(3, "try", capacity=3, waits=0),
        acquire(4, "misfit", weight=4, capacity=3),
        [5, "position", "light"],
        release(6, "a", fence=first()),
        [7, "reduce", "heavy", first(6, 6), 1, IDLE],
        [8, "reduce", "heavy", first(6, 6), 2, IDLE],
        [9, "reduce", "heavy", first(), 1, IDLE],
        inspect(10),
    ],
    "a newer request replaces a waiter and a holder": [
        acquire(0, "old"),
        acquire(1, "other"),
        acquire(2, "waits"),
        acquire(3, "new"),
        [4, "supersede", "new", "hother", 1, 60_000, 2000, IDLE, ""],
        [5, "supersede", "new", "hnew", 0, 60_000, 2000, IDLE, ""],
        [6, "supersede", "new", "hnew", 1, 60_000, 2000, IDLE, ""],
        [7, "supersede", "new", "hnew", 1, 60_000, 2000, IDLE, ""],
        acquire(8, "waits"),
        acquire(9, "old"),
        renew(10, "old", first()),
        adopt(11, "old", first(), "h1"),
        [12, "check", "old", first()],
        [13, "reduce", "old", first(), 1, IDLE],
        inspect(14),
        release(15, "old", fence=first()),
        acquire(16, "newest"),
        [17, "supersede", "newest", "hnewest", 1, 60_000, 1000, IDLE, ""],
        beat(1017, "newest"),
        inspect(1018),
    ],
    "a permit is adopted with a new fence, once": [
        acquire(0, "a"),
        adopt(1, "a", first(), "h1"),
        adopt(2, "a", first(), "h1"),
        adopt(3, "a", first(), "h2"),
        renew(4, "a", first()),
        renew(5, "a", first(1, 1)),
        adopt(6, "a", first(1, 1), "h3", refence=0),
        [7, "check", "a", first(1, 1)],
        inspect(8),
        adopt(60_000, "a", first(1, 1), "h4"),
    ],
    "the capacity is declared, and resized without a declaration": [
        acquire(0, "a", capacity=2),
        acquire(1, "b", capacity=2),
        acquire(2, "c", capacity=2),
        [3, "resize", 3, IDLE],
        [4, "resize", 1, IDLE],
        acquire(5, "d", capacity=2),
        acquire(6, "heavy", weight=2, capacity=2),
        release(7, "a", fence=first()),
        release(8, "b", fence=first(1, 1)),
        acquire(9, "e", capacity=4),
        [10, "resize", 9, IDLE],
        inspect(11),
    ],
    "a lock and a read-write lock are not resized, whatever was set before they were used": [
        [0, "resize", 3, IDLE],
        acquire(1, "a"),
        acquire(2, "b"),
        [3, "resize", 3, IDLE],
        [4, "resize", 1, IDLE],
        acquire(5, "c", capacity=CAPACITY_MAX),
        [6, "resize", 3, IDLE],
        inspect(7),
    ],
    "a full queue refuses, and counts live waiters": [
        acquire(0, "a", lease=60_000),
        acquire(1, "b", waits=100, most=2),
        acquire(2, "c", most=2),
        acquire(3, "d", most=2),
        acquire(101, "d", most=2),
        acquire(102, "e", most=2),
        inspect(103),
    ],
    "priorities pass a bounded number of earlier requests": [
        acquire(0, "a", lease=60_000),
        *(acquire(ms, f"b{ms}", waits=60_000) for ms in range(1, 13)),
        acquire(20, "first", weight="1 1 ", waits=60_000),
        [21, "position", "first"],
        [21, "position", "b2"],
        [21, "position", "b3"],
        release(22, "a", fence=first()),
    ],
    "units of an expired permit stay in use for the lock delay": [
        acquire(0, "a", lease=1000, weight="1 0 500"),
        acquire(1, "b", waits=10_000),
        beat(1000, "b"),
        inspect(1001),
        beat(1499, "b"),
        beat(1500, "b"),
        release(1600, "b", fence=first(1500, 5)),
        acquire(1601, "c"),
    ],
    "a ticket is shared by the requests of two clients": [
        acquire(0, "a"),
        acquire(1, "s", request="h1", place="one|0"),
        acquire(2, "s", request="h2", place="two|0"),
        release(3, "s", request="h1"),
        acquire(4, "s", request="p3", place="three|0"),
        release(5, "a", fence=first()),
        inspect(6),
        renew(7, "s", first(5, 5), 1000, "1"),
        release(8, "s", request="h2"),
        release(9, "s", fence=first(5, 5)),
        inspect(10),
    ],
    "a lease is shortened, and its holder is told": [
        acquire(0, "a"),
        acquire(1, "b"),
        renew(2, "a", first(), 1000, "told"),
        renew(3, "a", first(), 500, "0"),
        renew(4, "a", first(), 500, "1"),
        beat(504, "b"),
    ],
    "others release by ticket, and those concerned are told": [
        acquire(0, "a"),
        acquire(1, "b"),
        acquire(2, "c"),
        release(3, "b", notify=1),
        release(4, "a", notify=1),
        release(5, "c", tombstone=1000, notify=1),
        acquire(6, "c"),
        release(7, "", notify=0),
    ],
    "a resource is forgotten when it is idle, and its fences go on": [
        acquire(0, "a", lease=1000),
        release(1, "a", fence=first()),
        inspect(60_000),
        inspect(61_000),
        acquire(61_001, "a", lease=1000),
        [61_002, "watch", 1000],
        release(61_003, "a", fence=first(61_001, 4)),
        [200_000, "watch", 1000],
    ],
    "grants of one call have different fences": [
        acquire(0, "a", capacity=4, weight=2),
        acquire(1, "b", capacity=4, weight=2),
        acquire(2, "c", capacity=4, weight=2),
        acquire(3, "d", capacity=4, weight=2),
        [4, "resize", 8, IDLE],
        inspect(5),
    ],
    "a key waits for a token of its own, and holds up no other": [
        acquire(0, "a", weight="1 0    1  100000:2", capacity=9, key="k"),
        acquire(1, "b", capacity=9, key="k"),
        acquire(2, "c", capacity=9, key="k", waits=0),
        acquire(3, "c", capacity=9, key="k"),
        acquire(4, "d", capacity=9, key="k"),
        acquire(5, "e", capacity=9, key="l"),
        inspect(6),
        release(7, "b", fence=first(1, 1)),
        beat(100, "c"),
        beat(200, "d"),
        acquire(201, "f", capacity=9, key="k"),
        acquire(202, "g", weight="1 0    1  1000:1", capacity=9, key="l"),
        beat(203, "f"),
        acquire(204, "h", weight="1 0    1  3600000000:1", capacity=9, key="m"),
        acquire(205, "i", capacity=9, key="m"),
        acquire(206, "j", weight="1 0    1  0", capacity=9, key="n"),
        inspect(207),
        inspect(400),
    ],
    "a grant needs a token where there is a rate": [
        acquire(0, "a", weight="1 0     100000:2", capacity=9),
        acquire(1, "b", capacity=9),
        acquire(2, "c", capacity=9, waits=0),
        acquire(3, "c", capacity=9),
        acquire(4, "d", capacity=9),
        acquire(5, "e", capacity=9),
        inspect(6),
        beat(99, "c"),
        beat(100, "c"),
        beat(200, "d"),
        release(201, "a", fence=first()),
        acquire(202, "b", weight="1 0     1000:1", capacity=9),
        beat(205, "e"),
        acquire(400, "f", weight="1 0     3600000000:1", capacity=9),
        acquire(401, "g", capacity=9),
        acquire(402, "h", weight="1 0     0", capacity=9),
        inspect(403),
    ],
    "a copy of a request declares nothing": [
        acquire(0, "a", weight="1 0   5  100000:2 100000:2", capacity=9, key="k"),
        acquire(1, "b", weight="1 0   1  1000000:1 1000000:1", capacity=3, key="k"),
        acquire(2, "a", weight="1 0   5  100000:2 100000:2", capacity=9, key="k"),
        acquire(3, "c", weight="1 0   2  2000000:1 2000000:1", capacity=4, key="k"),
        acquire(4, "b", weight="1 0   1  1000000:1 1000000:1", capacity=3, key="k"),
        inspect(5),
    ],
    "who is granted next learns when to call": [
        acquire(0, "a", weight="1 0     100000:1", capacity=2),
        acquire(1, "b", capacity=2),
        acquire(2, "c", capacity=2),
        release(3, "b", request="hb"),
        release(4, "a", fence=first()),
        beat(100, "c"),
        acquire(101, "d", capacity=2),
        acquire(102, "e", capacity=2),
        beat(200, "d"),
        inspect(201),
    ],
}
