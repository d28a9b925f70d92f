"""What the calls and replies of one resource tell, and what in them breaks a promise.

The judge knows neither scripts nor model: it reads what clients asked, what the server replied and published, and when.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from redlease._core.limits import FENCE_MAX
from redlease._core.protocol.replies import Status, read_message


def _fence_in(payload: str) -> int:
    """Return the fence of the grant that a message tells of; 0 if it tells of none."""
    message = read_message(payload.encode()) if payload else None
    return message.numbers[0] if message and message.kind == "g" else 0


@dataclass
class Held:
    """A permit; `until_ms` by the server's clock.

    Attributes:
        has_expired: Whether it had expired at some call, which may have removed it: a clock that is set back then does
            not bring it back.
    """

    fence: int
    weight: int
    until_ms: int
    has_expired: bool = False

    def prolong(self, until_ms: int) -> None:
        """It is held until then, so it was not removed."""
        self.until_ms, self.has_expired = until_ms, False


@dataclass
class Waiting:
    """A queued ticket, and the places of those who wait with it."""

    sequence: int
    weight: int
    places: dict[str, None]


@dataclass
class Ledger:
    """One resource, as the calls of it tell.

    Attributes:
        held: The permits that were granted and not released; some of them may have expired.
        waiting: The tickets that were queued and not granted.
        places: When the place of each client expires.
        keys: The key of each ticket that was asked for with one: the order is that of the tickets of one key.
        fence: The last one granted.
        has_lost: Whether the server has lost data since then.
        taken: The tickets that an adoption or a release by their ticket has taken from their holders.
    """

    capacity: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    waiting: dict[str, Waiting] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    request_ids: dict[str, str] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    fence: int = 0
    has_lost: bool = False
    now_us: int = 0

    @property
    def now(self) -> int:
        """The server's time in ms."""
        return self.now_us // 1000

    def forget(self) -> None:
        """The server has lost everything but the order of the fences."""
        for known in (self.held, self.waiting, self.places):
            known.clear()
        self.has_lost = True

    def holds(self, ticket: str, fence: int) -> Held | None:
        """Return an unexpired permit."""
        held = self.held.get(ticket)
        return held if held and held.fence == fence and held.until_ms > self.now else None

    def live(self) -> list[str]:
        """Return the tickets that hold an unexpired permit, or wait with a place that has not expired."""
        held = [ticket for ticket, held in self.held.items() if held.until_ms > self.now]
        return held + [ticket for ticket, waits in self.waiting.items() if self._lasts(waits) > self.now]

    def _lasts(self, waits: Waiting) -> int:
        """Return when the last place of a waiter expires."""
        return max((self.places.get(place, 0) for place in waits.places), default=0)

    def read(
        self, now_us: int, name: str, args: list[str], reply: Sequence[Any], messages: Sequence[tuple[str, str]]
    ) -> Iterator[str]:
        """Read a call, and yield what it breaks."""
        self.now_us = now_us
        for held in self.held.values():
            held.has_expired = held.has_expired or held.until_ms <= self.now
        reader = getattr(self, f"_{name}", None)
        own = reader(args, reply) if reader is not None else ()
        before = 0  # the fence below which it granted to others before it did what it was asked to
        if name == "acquire" and reply[0] in {Status.QUEUED, Status.GRANTED}:
            before = reply[1] if reply[0] == Status.GRANTED else FENCE_MAX
        earlier = [payload for _, payload in messages if _fence_in(payload) < before]
        yield from self._judge_messages(earlier)
        yield from own
        yield from self._judge_messages(payload for _, payload in messages if payload not in earlier)

    def _judge_messages(self, payloads: Iterable[str]) -> Iterator[str]:
        for payload in payloads:
            message = read_message(payload.encode()) if payload else None
            if message and message.kind == "g":
                fence, _, until_ms, self.capacity = message.numbers
                ticket = self.request_ids.get(message.about, "")
                if ticket not in self.held or self.held[ticket].fence != fence:
                    yield from self._granted(ticket, fence, until_ms, None)

    def _granted(self, ticket: str, fence: int, until_ms: int, position: tuple[float, str] | None) -> Iterator[str]:
        """P1, P2, P3 and P5 of a new grant; `position`: of a request that was not queued."""
        weight = self.weights.get(ticket, 1)
        if fence <= self.fence:
            if not (self.has_lost and self.now_us <= self.fence):
                yield f"fences (P3): {ticket} gets {fence} after {self.fence}"
            self.fence = (
                0  # the clock at the first grant after a loss is before that of the last grant: nothing is promised
            )
        if self.holds(ticket, self.held[ticket].fence if ticket in self.held else 0):
            yield f"repeats (P5): {ticket} holds a permit and gets another"
        # The server forgets what has expired before it grants: a step of its clock does not bring that back.
        self.held = {other: held for other, held in self.held.items() if held.until_ms > self.now}
        self.waiting = {other: waits for other, waits in self.waiting.items() if self._lasts(waits) > self.now}
        others = [held for other, held in self.held.items() if other != ticket and not held.has_expired]
        if sum(held.weight for held in others) + weight > self.capacity:
            yield f"exclusion (P1): {ticket} is granted beside {others}, capacity {self.capacity}"
        own = self.waiting.pop(ticket, None)
        position = (own.sequence, ticket) if own else position
        if position is not None:
            for other, waits in self.waiting.items():
                is_before = (waits.sequence, other) < position and self.keys.get(other) == self.keys.get(ticket)
                if is_before and waits.weight <= self.capacity:
                    yield f"order (P2): {ticket} passes {other}, which waits at {waits.sequence}"
        self.fence, self.has_lost = max(fence, self.fence), False
        self.held[ticket] = Held(fence, weight, until_ms)

    def _acquire(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        ticket, request_id, place, arrival, asked = args[:5]
        if ticket not in self.live():
            self.keys[ticket] = args[11] if len(args) > 11 else ""
        weight, _, rest = asked.partition(" ")
        status, *values = reply
        if status == Status.GRANTED:
            fence, _, until_ms, self.capacity = values[:4]
            self.request_ids[request_id], self.weights[ticket] = ticket, int(weight)
            known = self.held.get(ticket)
            if known and known.fence == fence:
                if known.until_ms <= self.now:
                    yield f"strict expiry (P8): {ticket} had expired and is held again under {fence}"
                known.prolong(until_ms)
                self.waiting.pop(ticket, None)
            else:
                has_priority = rest[:1] not in {"", "0"}
                at = (float("inf"), ticket) if int(arrival) <= 0 else (float(arrival), ticket)
                yield from self._granted(ticket, fence, until_ms, None if has_priority else at)
        elif status == Status.QUEUED:
            self.request_ids[request_id], self.weights[ticket] = ticket, int(weight)
            waits = self.waiting.setdefault(ticket, Waiting(values[0], int(weight), {}))
            waits.sequence = values[0]
            waits.places[place] = None
            self.capacity = values[3]
            self.places[place] = max(self.places.get(place, 0), self.now + int(args[7]))

    def _beat(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        if reply[0] != Status.LAPSED:
            if self.places.get(args[0], 0) <= self.now:
                yield f"strict expiry (P8): the place {args[0]} had expired and is alive again"
            self.places[args[0]] = max(self.places.get(args[0], 0), self.now + int(args[1]))

    def _renew(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        if reply[0]:
            if not self.holds(args[0], int(args[1])):
                yield f"strict expiry (P8): {args[0]} is renewed and was not held under {args[1]}"
            else:
                self.held[args[0]].prolong(reply[0])

    def _release(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        ticket, request_id, fence, *_ = args
        if reply[0]:
            held = self.held.get(ticket)
            if held and (not fence or held.fence == int(fence)):
                del self.held[ticket]
            elif fence:
                yield f"release: {ticket} is released under {fence}, which it did not have"
            self.waiting.pop(ticket, None)
            if not fence and not request_id:
                self.taken.add(ticket)

    def _adopt(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        ticket = args[0]
        if reply[0]:
            held = self.held.get(ticket)
            if held is None or held.until_ms <= self.now:
                yield f"strict expiry (P8): {ticket} is adopted and was not held"
                return
            if reply[0] != held.fence:
                if reply[0] <= self.fence:
                    yield f"fences (P3): {ticket} gets {reply[0]} after {self.fence}"
                self.fence = reply[0]
                self.taken.add(ticket)
            held.fence = reply[0]
            held.prolong(reply[2])

    def _reduce(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        if reply[0] and args[0] in self.held:
            self.held[args[0]].weight = min(self.held[args[0]].weight, int(args[2]))
        yield from ()

    def _resize(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        if len(reply) == 1:
            self.capacity = int(args[0])
        yield from ()

    def _check(self, args: list[str], reply: Sequence[Any]) -> Iterator[str]:
        if bool(reply[0]) != bool(self.holds(args[0], int(args[1]))):
            yield f"check: {args[0]} under {args[1]} is said to be {'held' if reply[0] else 'lost'}, and is not"
