"""A resource of which Redis loses keys, fields and members, and clients that ask for it afterwards."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from redlease._core.protocol.replies import Status

from against_model import EVERYTHING, LABEL
from random_calls import RandomCalls
from set_clock import BEGINS_US, KEYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from set_clock import FakeEngine, RealEngine

IDLE_MS = 10_000_000  # the server deletes nothing by itself meanwhile
LEASE_MS, STEP_MS = 1200, 60  # no lease, place, limit, delay or time of grace that is drawn is longer than the lease
CAPACITY = 7  # what no drawn call declares, so that it is a new declaration


class DrawnCalls(RandomCalls):
    """Random calls of a resource that ask for no lock delay, where `has_delays` is not set."""

    has_delays = True

    def asked(self) -> str | int:
        """Return a weight and settings."""
        asked = super().asked()
        if self.has_delays or not isinstance(asked, str):
            return asked
        words = asked.split(" ")
        return " ".join([*words[:2], *(["0"] if len(words) > 2 else []), *words[3:]])


@dataclass
class Lossy:
    """Makes calls at given times, while Redis loses parts of the resource; an error reply is an exception.

    Attributes:
        log: The last calls and losses.
        last_fence: The greatest fence of an acquire.
    """

    engine: FakeEngine | RealEngine
    random: Random
    now_us: int = BEGINS_US
    log: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    last_fence: int = 0

    @property
    def now(self) -> int:
        """The time in ms."""
        return self.now_us // 1000

    def call(self, name: str, *args: Any) -> list[Any]:
        """Make a call; return the reply without its tag."""
        self.log.append(f"{self.now_us} {name}{args}")
        _, reply = self.engine.run(name, args, self.now_us)
        self.log[-1] += f" -> {reply[1:]}"
        if name == "acquire" and reply[1] == Status.GRANTED:
            self.last_fence = max(self.last_fence, reply[2])
        return reply[1:]

    def look(self) -> list[Any]:
        """Call everything that only looks; return what inspect tells."""
        for name, args in (("totals", (1000,)), ("position", ("a",)), ("check", ("a", 1)), ("totals", (2,))):
            self.call(name, *args)
        return self.call("inspect", *EVERYTHING)

    def lose(self, *keys: str) -> None:
        """Lose these keys."""
        self.log.append(f"lost: {keys}")
        self.now_us += 1000  # past the last fence
        self.engine.client.delete(*keys)

    def stored(self) -> list[tuple[str, bytes]]:
        """Return each field and each member, with its key."""
        client: Any = self.engine.client
        members = [(key, sorted(client.zrange(key, 0, -1))) for key in KEYS[1:]]
        return [(key, name) for key, names in [(KEYS[0], sorted(client.hkeys(KEYS[0]))), *members] for name in names]

    def lose_one(self, key: str, name: bytes) -> None:
        """Lose a field or a member."""
        client: Any = self.engine.client
        self.log.append(f"lost: {name!r} of {key}")
        self.now_us += 1000
        (client.hdel if key == KEYS[0] else client.zrem)(key, name)

    def lose_something(self) -> None:
        """Lose some keys, some fields, or some members."""
        if self.random.random() < 0.3:
            self.lose(*self.random.sample(KEYS, self.random.randint(1, 4)))
            return
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            part = self.random.choice(KEYS)
            if names := [name for key, name in self.stored() if key == part]:
                self.lose_one(part, self.random.choice(names))

    def run(self, drawn: RandomCalls, calls: int, losses: float) -> None:
        """Make random calls, with this chance of a loss before each, and one after the last unless it is 0."""
        for _ in range(calls):
            self.now_us += self.random.choice([0, 1, 300, 2000, 9000])
            if self.random.random() < losses:
                self.lose_something()
                self.look()
            name, args = drawn.call()
            drawn.model.clock, before = self.now_us, drawn.model.fence
            getattr(drawn.model, name)(*(arg for arg in args if arg != LABEL))  # so that later calls make sense
            drawn.learn(name, args, self.call(name, *args), before)
        if losses:
            self.lose_something()
        if self.engine.client.hmget(KEYS[0], "c", "d")[1] is None:
            self.call("resize", CAPACITY, IDLE_MS)  # or who declares a capacity first would not set it


@dataclass
class Client:
    """A process that asks for the resource, keeps its place, and holds for a moment."""

    lossy: Lossy
    number: int
    weight: int
    key: str
    settings: str
    epoch: int = 0
    fence: int = 0
    until: int = 0
    is_done: bool = False
    was_queued: bool = False
    is_queued: bool = False

    @property
    def place(self) -> str:
        """Its place."""
        return f"z{self.number}|{self.epoch}"

    def step(self) -> None:
        """Do what is due now."""
        now = self.lossy.now
        if self.fence and now >= self.until:
            self.lossy.call("release", f"z{self.number}", "", self.fence, 0, 0, IDLE_MS)
            self.fence, self.is_done = 0, True
        elif self.is_queued and now >= self.until:
            self.until = now + LEASE_MS // 3
            status, *rest = self.lossy.call("beat", self.place, LEASE_MS, f"z{self.number}", IDLE_MS)
            if status == Status.QUEUED and rest[1] >= 0:
                self.until = min(self.until, now + rest[1] + 1)
            self.epoch += status == Status.LAPSED
            self.is_queued = status == Status.QUEUED
        if not (self.fence or self.is_queued or self.is_done):
            self.ask()

    def ask(self) -> None:
        """Ask, for the first time or again."""
        asked = (f"{self.weight} {self.settings}".rstrip(), LEASE_MS, CAPACITY, LEASE_MS, -1, IDLE_MS, LABEL)
        ids = (f"z{self.number}", f"hz{self.number}", self.place, "+0" if self.was_queued else "0")
        status, *rest = self.lossy.call("acquire", *ids, *asked, *([self.key] if self.key else []))
        if status == Status.GRANTED:
            self.fence, self.is_queued, self.until = rest[0], False, self.lossy.now + STEP_MS
        elif status == Status.QUEUED:
            wait = rest[2]
            self.was_queued = self.is_queued = True
            self.until = self.lossy.now + min(LEASE_MS // 3, wait + 1 if wait >= 0 else LEASE_MS)
        else:
            assert status == Status.LAPSED, f"refused with {status}"
            self.epoch += 1


def clients(lossy: Lossy, count: int, keys: tuple[str, ...], per_key: int) -> Iterator[Client]:
    """Return new clients, which ask for no lock delay and no rates from now on."""
    for _ in range(count):
        number = next(_numbers)
        key = lossy.random.choice(keys) if keys else ""
        yield Client(lossy, number, lossy.random.randint(1, 3), key, f"0 0  {per_key} 1 0 0")


_numbers = itertools.count(1)


def serve(lossy: Lossy, asking: list[Client], within_ms: int, per_key: int = 0, *, is_exact: bool = False) -> None:
    """Let clients ask until all were served, which they must be within that time; check the fences on the way.

    `is_exact`: nobody else holds, so that they must not exceed the capacity, nor what a key may have.
    """
    began, last, fences = lossy.now, lossy.last_fence, set[int]()
    before = {client.fence for client in asking}
    while not all(client.is_done for client in asking):
        for client in asking:
            client.step()
            fences |= {client.fence} - before - {0}
            if is_exact:
                check_units([other for other in asking if other.fence], per_key)
        waiting = [client for client in asking if not client.is_done]
        assert not waiting or lossy.now - began <= within_ms, f"not served in time: {waiting}"
        lossy.now_us += STEP_MS * 1000
    assert min(fences, default=last + 1) > last


def check_units(holding: list[Client], per_key: int) -> None:
    """See that so many clients may hold at once."""
    of_keys = Counter[str]()
    for client in holding:
        of_keys[client.key] += client.weight
    assert of_keys.total() <= CAPACITY, f"more than there is: {holding}"
    assert not per_key or all(units <= per_key for key, units in of_keys.items() if key), f"more of a key: {of_keys}"


def check_capacity(lossy: Lossy, keys: tuple[str, ...], per_key: int) -> None:
    """Nobody holds or waits: see that nothing is in use, and that as much is granted at once as there is."""
    _, _, capacity, in_use, waiting, *_ = lossy.look()
    assert (capacity, in_use, waiting) == (CAPACITY, 0, 0)
    fences = []
    for number in range(CAPACITY + 1):
        key = keys[number % len(keys)] if keys else ""
        status, *rest = try_acquire(lossy, f"y{number}", key, 0)
        assert (status == Status.GRANTED) == (number < CAPACITY), f"{number} of {CAPACITY}: {status}"
        fences += rest[:1] if status == Status.GRANTED else []
    release(lossy, fences)
    if keys and per_key:
        statuses = [try_acquire(lossy, f"y{number}", "k", per_key) for number in range(per_key + 1)]
        assert [status for status, *_ in statuses] == [Status.GRANTED] * per_key + [Status.BUSY]
        release(lossy, [fence for _, fence, *_ in statuses[:-1]])
    assert lossy.look()[3:5] == [0, 0]


def try_acquire(lossy: Lossy, ticket: str, key: str, per_key: int) -> list[Any]:
    """Ask for a unit, without waiting."""
    terms = (f"1 0 0  {per_key} 1 0 0", LEASE_MS, CAPACITY, 0, -1, IDLE_MS, LABEL)
    return lossy.call("acquire", ticket, f"h{ticket}", "y|0", "0", *terms, *([key] if key else []))


def release(lossy: Lossy, fences: list[int]) -> None:
    """Release the permits of the tickets y0, y1 and so on."""
    for number, fence in enumerate(fences):
        assert lossy.call("release", f"y{number}", "", fence, 0, 0, IDLE_MS)[0] == 1


def release_all(lossy: Lossy) -> None:
    """Do what `release_all(queue=True)` does."""
    tickets: list[tuple[Any, Any]] = []
    for _ in range(5):
        held, queued = lossy.look()[5:7]
        tickets = [(ticket, "") for ticket in queued[::2]]
        permits = zip(held[::3], held[2::3], strict=True)
        tickets += [(name, text.split(b" ")[1] if text else "") for name, text in permits if name[:1] != b"\xff"]
        if not tickets:
            return
        for ticket, fence in tickets:
            lossy.call("release", ticket, "", fence, 5, 1, IDLE_MS)
    raise AssertionError(f"still there: {tickets}")
