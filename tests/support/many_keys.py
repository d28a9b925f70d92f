"""Random calls on a resource with more keys than one call looks at, judged by what the server stores."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from redlease._core.protocol.replies import Status

from against_model import LABEL
from set_clock import BEGINS_US, KEYS, RealEngine

CAPACITY, KEY_COUNT = 12, 60
AGES_MS = 3_600_000  # nothing ends by itself
HEADS, REST = 2**51, 2**52
ROUNDS, ROUNDS_PASSED_OVER = 40, 25


@dataclass
class Waiter:
    """What is stored of one.

    Attributes:
        key: Its key, "" if it has none.
        weight: How many units it asks for.
        order: Its place among those of its key.
        tag: When it is its turn, if it has a tag.
    """

    key: str
    weight: int
    order: bytes
    tag: float | None


def ticket_of(entry: bytes) -> bytes:
    """Return the ticket of an entry of the queue."""
    return entry[18:] if entry.startswith(b"\xff") else entry


class Stored:
    """The resource as the server stores it."""

    def __init__(self, engine: RealEngine) -> None:
        client: Any = engine.client
        self.state: dict[bytes, bytes] = client.hgetall(KEYS[0])
        self.holders: dict[bytes, float] = dict(client.zrange(KEYS[1], 0, -1, withscores=True))
        queue = client.zrange(KEYS[2], 0, -1, withscores=True)
        self.waiters = [self._waiter(entry, score) for entry, score in queue]
        self.capacity = int(self.state.get(b"c", 0))
        self.used = sum(self.weight(name) for name in self.holders)
        self._held = Counter[str]()
        for name in self.holders:
            self._held[self.key(name)] += self.weight(name)

    def _waiter(self, entry: bytes, score: float) -> Waiter:
        ticket = ticket_of(entry)
        tag = score - HEADS if HEADS <= score < REST else None
        return Waiter(self.key(ticket), self.weight(ticket), entry, tag)

    def key(self, ticket: bytes) -> str:
        """Return the key of a ticket."""
        return self.state.get(b"p" + ticket, b"1 0 ").decode("latin-1").split(" ", 2)[2]

    def weight(self, ticket: bytes) -> int:
        """Return how many units a ticket has, or asks for."""
        return int(self.state[b"t" + ticket].split(b" ", 1)[0])

    def units(self, name: bytes) -> int | None:
        """Return how many units an operator's limit allows, if there is that limit."""
        return int(self.state[b"t" + name].split(b" ")[2]) if name in self.holders else None

    def may_have(self, waiter: Waiter) -> bool:
        """Tell whether no limit is against a waiter: of the resource, of its key, for each key, or declared."""
        of_all = self.units(b"\xfflimit")
        if of_all and waiter.weight > of_all:
            return False
        names = [b"\xffback " + waiter.key.encode(), b"\xfflimit " + waiter.key.encode(), b"\xffeach"]
        declared = int(self.state.get(b"b", b"0").split(b" ")[0]) or None
        most = next((units for units in map(self.units, names) if units is not None), declared)
        return most is None or self._held[waiter.key] + waiter.weight <= most

    def passed_over(self) -> list[Waiter]:
        """Return the first waiters of keys that may have more, and have no tag."""
        firsts: dict[str, Waiter] = {}
        for waiter in sorted(self.waiters, key=lambda waiter: waiter.order):
            firsts.setdefault(waiter.key, waiter)
        return [first for key, first in firsts.items() if key and first.tag is None and self.may_have(first)]

    def idle(self) -> Waiter | None:
        """Return the waiter with the lowest tag if it fits."""
        tagged = [waiter for waiter in self.waiters if waiter.tag is not None and self.may_have(waiter)]
        first = min(tagged, key=lambda waiter: (waiter.tag, waiter.order), default=None)
        return first if first and self.used + first.weight <= self.capacity else None


class ManyKeys:
    """Makes random calls, and after each that leaves nothing to do judges what it left."""

    def __init__(self, engine: RealEngine, seed: object) -> None:
        engine.clear()
        self._engine, self._random = engine, Random(f"{seed}")
        self._numbers = itertools.count()
        self._keys = [f"k{number}" for number in range(KEY_COUNT)]
        self._weights = self._random.choice([[1], [1, 1, 2, 3]])
        self._declared = self._random.choice([("", ""), ("5", "6")])  # limits of a key, before each release
        self._crowd = self._random.choice([0, 9])  # how many keys that are held back ask before each release

    def play(self, calls: int) -> int:
        """Make so many calls, then raise a limit or several; return for how many rounds a key was passed over."""
        self._ask("k0", "1 0   3")
        for _ in range(calls):
            self._draw()
        self._park_all()
        return self._raise_in_turn()

    def _call(self, name: str, *args: Any) -> list[Any]:
        return self._engine.run(name, args, BEGINS_US)[1][1:]

    def _do(self, name: str, *args: Any) -> None:
        """Make a call as a client does, which goes on until nothing is left to do."""
        reply = self._call(name, *args)
        while reply[-1]:
            reply = self._call("release", "", "", "", 0, 0, AGES_MS)
        self._judge()

    def _ask(self, key: str, weight: str) -> None:
        reply = self._ask_once(key, weight)
        if reply[0] in {Status.GRANTED, Status.QUEUED} and any(reply[6:7]):
            self._do("release", "", "", "", 0, 0, AGES_MS)
        self._judge()

    def _limit(self, kind: str, key: str, units: str) -> None:
        self._do("limit", kind, key, units, "", AGES_MS, LABEL)

    def _release(self) -> bool:
        """Release a permit; return whether there was one."""
        held = sorted(name for name in Stored(self._engine).holders if not name.startswith(b"\xff"))
        if held:
            self._do("release", self._random.choice(held), "", "", 0, 0, AGES_MS)
        return bool(held)

    def _leave(self) -> None:
        """Take a waiter out."""
        waiting = sorted(waiter.order for waiter in Stored(self._engine).waiters)
        if waiting:
            self._do("release", ticket_of(self._random.choice(waiting)), "", "", 0, 0, AGES_MS)

    def _judge(self) -> None:
        stored = Stored(self._engine)
        assert stored.used >= stored.capacity or not stored.passed_over(), "units are free, and a key may have them"
        assert not stored.idle(), "the waiter whose turn it is fits"

    def _draw(self) -> None:
        """Make one call."""
        draw, kind = self._random, self._random.random()
        if kind < 0.5:
            settings = draw.choice(["", "", "", f" 0   {draw.choice([0, 3, 4, 5])}"])
            self._ask(draw.choice(self._keys), f"{draw.choice(self._weights)}{settings}")
        elif kind < 0.8:
            self._release()
        elif kind < 0.84:
            self._leave()
        elif kind < 0.85:
            self._do("resize", draw.choice([CAPACITY - 3, CAPACITY, CAPACITY + 3]), AGES_MS)
        elif kind < 0.95:
            self._limit("each", "", draw.choice(["0", "1", "2", "", ""]))
        elif kind < 0.98:
            self._limit("limit", draw.choice(self._keys), draw.choice(["0", "2", ""]))
        else:
            self._limit("limit", "", draw.choice(["2", f"{CAPACITY}", ""]))

    def _park_all(self) -> None:
        """Let requests of all keys wait under a limit, which ends after the first keys have been looked at."""
        for key in self._keys:
            self._limit("limit", key, "")
        self._limit("limit", "", "")
        self._limit("each", "", "0")
        while self._release():  # all who wait are found to be at this limit
            pass
        self._ask("", f"{CAPACITY} 0   0")
        for key in self._keys * 2:
            self._ask_once(key, "1")
        for units in (0, ""):
            self._call("limit", "each", "", units, "", AGES_MS, LABEL)

    def _raise_in_turn(self) -> int:
        """Let new keys ask, perhaps processes declare two limits in turn, and holders release."""
        rounds, most = Counter[str](), 0
        for number in range(ROUNDS):
            stored = Stored(self._engine)
            passed_over = {waiter.key for waiter in stored.passed_over()}
            rounds = Counter({key: rounds[key] + 1 for key in passed_over})
            most = max(most, *rounds.values(), 0)
            assert most <= ROUNDS_PASSED_OVER, f"keys are passed over again and again: {sorted(passed_over)}"
            for index in range(self._crowd):
                self._call("limit", "back", f"back{number} {index}", 0, "", AGES_MS, LABEL)
                self._ask_once(f"back{number} {index}", "1")
            lower, higher = self._declared
            self._ask_once("", f"1 0   {lower}", waits_ms=0)
            self._ask_once(f"new{number}", f"1 0   {higher}")
            held = sorted(name for name in stored.holders if not name.startswith(b"\xff"))
            self._call("release", self._random.choice(held), "", "", 0, 0, AGES_MS)
        return most

    def _ask_once(self, key: str, weight: str, waits_ms: int = AGES_MS) -> list[Any]:
        ticket = f"t{next(self._numbers)}"
        terms = (AGES_MS, CAPACITY, waits_ms, -1, AGES_MS, LABEL, *([key] if key else []))
        return self._call("acquire", ticket, f"h{ticket}", "c|1", "0", weight, *terms)
