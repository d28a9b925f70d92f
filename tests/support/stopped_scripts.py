"""Scripts that stop with an error at one of their commands, and what clients believe to hold after each call."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import redis
from loss_cases import serves_again
from losses import CAPACITY, IDLE_MS, LEASE_MS, DrawnCalls, Lossy

from redlease._core.protocol.replies import Status
from redlease._core.protocol.scripts import Script

from against_model import LABEL
from set_clock import KEYS, USUAL, FakeEngine, RealEngine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from servers import Server

STOPS = """
local made, stops_at = 0, tonumber(table.remove(ARGV))
call = function(...)
  made = made + 1
  return made == stops_at and redis.call('NOTHING') or redis.call(...)
end
"""
BEGINS = "local now = "
CHANGING = ("acquire", "release", "renew", "beat", "adopt", "reduce", "supersede", "resize", "limit", "watch")


def stopping(script: Script) -> Script:
    """Return the operation that takes one more argument: at which of its commands it stops, 0 for none."""
    head, begins, rest = script.text.partition(BEGINS)
    line, end, rest = rest.partition("\n")
    assert begins
    return Script(script.name, " ".join(script.args[1:]), head + begins + line + end + STOPS + rest)


STOPPING: Mapping[str, Script] = {name: stopping(script) for name, script in USUAL.items()}


class FakeStopping(FakeEngine):
    """Runs the scripts in this process."""

    def __init__(self) -> None:
        super().__init__(STOPPING)


class RealStopping(RealEngine):
    """Runs them on a server."""

    def __init__(self, server: Server, scripts: Mapping[str, Script] = STOPPING) -> None:
        super().__init__(server, scripts)


class HeardCalls(DrawnCalls):
    """Random calls of clients whose messages can all be heard: a pattern hears no sharded channel."""

    def channel(self) -> str:
        """Return a client."""
        return self.random.choice(("c1", "c2", "c3"))


@dataclass
class Belief:
    """A permit, as the client has it that was granted it."""

    weight: int
    ends_ms: int


@dataclass
class Stoppable(Lossy):
    """Makes calls of which one stops half-way, and keeps what clients believe; no grant may exceed the capacity.

    Attributes:
        stops_at: The command at which the next call stops, 0 for none.
        stopped: Whether the last call stopped.
        held: What is held, by ticket and fence.
    """

    stops_at: int = 0
    stopped: bool = False
    held: dict[tuple[str, int], Belief] = field(default_factory=dict)
    tickets: dict[str, str] = field(default_factory=dict)
    granted: set[tuple[str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Hear all messages."""
        client: Any = self.engine.client
        self._heard = client.pubsub(ignore_subscribe_messages=True)
        self._heard.psubscribe("*")
        self._heard.ping("ready")
        self._drain("ready")

    def close(self) -> None:
        """Hear no more."""
        self._heard.close()

    def call(self, name: str, *args: Any) -> list[Any]:
        """Make a call; one that stops has no reply."""
        self.now_us += 1
        if name in {"acquire", "adopt"}:
            self.tickets[str(args[1 if name == "acquire" else 2])] = str(args[0])
        self._last_fence = max((fence for _, fence in self.granted), default=0)
        self._give_up(name, args)
        stops_at, self.stops_at, self.stopped = self.stops_at, 0, False
        reply: list[Any] = []
        try:
            reply = super().call(name, *args, stops_at)
        except redis.ResponseError:
            if not stops_at:
                raise
            self.stopped = True
            self.log[-1] += " STOPPED"
        self._hear()
        if self.stopped:
            return []
        self._learn(name, args, reply)
        return reply

    def take_all(self, drawn: DrawnCalls) -> None:
        """Ask for one unit after the other until there is none."""
        terms = (1, LEASE_MS, drawn.capacity, 0, -1, IDLE_MS, LABEL)
        for number in range(2 * CAPACITY):
            key = drawn.keys[number % len(drawn.keys)] if drawn.keys else ""
            self.call("acquire", f"u{number}", f"hu{number}", "u|0", "+0", *terms, *([key] if key else []))

    def _give_up(self, name: str, args: tuple[Any, ...]) -> None:
        """Let clients stop their work before they release, or an operator does."""
        if name == "release":
            for ticket, fence in list(self.held):
                if ticket == args[0] and args[2] in {"", fence}:
                    del self.held[ticket, fence]
        elif name == "reduce" and (args[0], args[1]) in self.held:
            belief = self.held[args[0], args[1]]
            belief.weight = min(belief.weight, args[2])

    def _learn(self, name: str, args: tuple[Any, ...], reply: list[Any]) -> None:
        if name == "acquire" and reply[0] == Status.GRANTED:
            self._granted(str(args[1]), reply[1], reply[3], reply[4])
        elif name in {"renew", "adopt"} and reply[0] == 0:
            self.held.pop((args[0], args[1]), None)
        elif name == "renew" and (belief := self.held.get((args[0], args[1]))):
            belief.ends_ms = reply[0]
        elif name == "adopt":
            for ticket, fence in list(self.held):
                if ticket == args[0]:
                    del self.held[ticket, fence]
            self.held[args[0], reply[0]] = Belief(reply[3], reply[2])
            self.granted.add((args[0], reply[0]))

    def _granted(self, request: str, fence: int, ends_ms: int, capacity: int) -> None:
        ticket = self.tickets[request]
        client: Any = self.engine.client
        record = client.hget(KEYS[0], f"t{ticket}") or b"1"
        belief = Belief(int(record.split(b" ")[0]), ends_ms)
        if (ticket, fence) not in self.granted:
            self.granted.add((ticket, fence))
            self.held = {name: belief for name, belief in self.held.items() if belief.ends_ms > self.now}
            held = sum(belief.weight for belief in self.held.values())
            assert held + belief.weight <= capacity, f"{held} and {belief} of {capacity} units are held: {self.held}"
            assert fence > self._last_fence, f"fence {fence}: {self.held}"
        self.held[ticket, fence] = belief

    def _hear(self) -> None:
        self._heard.ping("end")
        for kind, request, *rest in self._drain("end"):
            if kind == "g":
                self._granted(request, int(rest[0]), int(rest[2]), int(rest[3]))
            elif kind in {"x", "s"} and request in self.tickets:
                self.held = {name: belief for name, belief in self.held.items() if name[0] != self.tickets[request]}

    def _drain(self, until: str) -> list[list[str]]:
        found: list[list[str]] = []
        while True:
            message = self._heard.get_message(timeout=1)
            assert message or not found, "no reply to a ping"
            if message and message["type"] == "pong" and message["data"].decode() == until:
                return found
            if message and message["type"] == "pmessage" and not message["channel"].startswith(b"__key"):
                words = message["data"].decode().split(" ")
                if len(words) > 1:
                    found.append(words)


@dataclass
class History:
    """Calls as clients might make them, and one at their end that stops half-way, now and then in a repair."""

    engine: FakeEngine | RealEngine
    seed: str
    number: int

    def stop_each(self) -> None:
        """Stop the last call at its first command, at its second, and so on, and see that all is served each time."""
        stops_at = 1
        while self.play(stops_at):
            stops_at += 1

    def play(self, stops_at: int) -> bool:
        """Return whether the call had that command."""
        random = Random(f"{self.seed} {self.number}")
        drawn = HeardCalls.of_kind(random, self.number // len(CHANGING), IDLE_MS)
        drawn.has_delays, drawn.leases = self.number % 2 == 1, random.choice([drawn.leases, [50, 60]])
        self.engine.clear()
        calls = Stoppable(self.engine, random, log=deque(maxlen=80))
        try:
            calls.run(drawn, random.randint(1, 40), 0)
            name = CHANGING[self.number % len(CHANGING)]
            args = getattr(drawn, name)()
            calls.now_us += random.choice([0, 0, 1000, 30_000, 70_000])
            if random.random() < 0.25:  # so that the call has to count all, and is stopped in this
                calls.lose_one(KEYS[0], random.choice([b"e", b"g"]))
            calls.stops_at = stops_at
            calls.call(name, *args)
            if not calls.stopped:
                return False
            if random.random() < 0.3:
                calls.call(name, *args)
            if random.random() < 0.7:
                calls.take_all(drawn)
            calls.run(drawn, 8, 0)
            serves_again(calls, drawn, random, is_cleared=True)
        except (AssertionError, redis.ResponseError) as error:
            story = "\n".join([f"history {self.number}, stopped at command {stops_at}: {error!r}", *calls.log])
            raise AssertionError(story) from None
        finally:
            calls.close()
        return True
