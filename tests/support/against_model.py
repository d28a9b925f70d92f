"""Random calls on a real server, each compared with the model: its reply, and all that it leaves behind.

Leases last some milliseconds, so that they end by themselves. The scripts note the time that they have read, and the
model goes by that.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from random import Random
from typing import TYPE_CHECKING, Any

import hiredis

from redlease.limits import CAPACITY_MAX
from redlease.protocol import scripts
from redlease.protocol.encoding import Resource, pack, plain
from redlease.protocol.replies import Status
from redlease.protocol.scripts import Script

from model import Entry, Model, Reply
from random_calls import IDLE_MS, LABEL, Args, RandomCalls

if TYPE_CHECKING:
    from servers import Server

READS_TIME = "local clock = call('TIME')\n"
NOTES_TIME = "call('SET', KEYS[1] .. ':clock', clock[1] .. ' ' .. clock[2] .. ' ' .. call('EXISTS', KEYS[1]))\n"
BATCH = 10  # how many calls are sent at once, without knowing each other's replies
CALLS_EACH = 500  # on one resource, before the next one with other terms
EVERYTHING = (1000, 1000, 1_000_000, "", "", "", 1000)  # that inspect may tell


def noting_time(script: Script) -> Script:
    """Return a script that also stores the time that it goes by, and whether the resource exists then."""
    head, reads, rest = script.text.partition(READS_TIME)
    assert reads, script.name
    return Script(script.name, " ".join(script.args[1:]), head + reads + NOTES_TIME + rest)


NOTING = {script.name: noting_time(script) for script in scripts.SCRIPTS}


class Line:
    """A connection on which commands go out in batches."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(server.unix_url.removeprefix("unix://"))
        self._reader = hiredis.Reader()
        for script in NOTING.values():
            assert self.send([plain("SCRIPT", "LOAD", script.text)], 1) == [script.sha.encode()]

    def send(self, commands: list[bytes], replies: int) -> list[Any]:
        """Send some commands, and return their replies."""
        self._socket.sendall(b"".join(commands))
        found: list[Any] = []
        while len(found) < replies:
            reply = self._reader.gets()
            if reply is False:
                self._reader.feed(self._socket.recv(1 << 16))
            else:
                assert not isinstance(reply, Exception), reply
                found.append(reply)
        return found

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Comparison:
    """Makes random calls, and compares.

    Args:
        server: Where they go.
        prefix: The prefix of their keys.
        seed: The same seed draws the same calls for as long as leases end at the same moments.

    Attributes:
        seen: How often each operation had each outcome: the status of an acquire or a beat, or whether the reply of
            another begins with a number above 0.
        forgotten: How often the server had deleted an idle resource.
    """

    def __init__(self, server: Server, prefix: str, seed: int) -> None:
        self.seen: Counter[tuple[str, int]] = Counter()
        self.forgotten = 0
        self._server, self._prefix, self._seed = server, prefix, seed
        self._random = Random(seed)
        self._log: deque[str] = deque(maxlen=30)

    def run(self, calls: int) -> None:
        """Make so many calls."""
        line = Line(self._server)
        try:
            for number, done in enumerate(range(0, calls, CALLS_EACH)):
                self._begin(number)
                self._use(line, min(CALLS_EACH, calls - done), pauses=number % 4 == 0)
        finally:
            line.close()

    def _begin(self, number: int) -> None:
        """Turn to a new resource: a lock, a semaphore, one with weights, or a read-write lock."""
        self._resource = Resource(self._prefix, f"r{number}")
        self._model = Model()
        terms = ((1, [1]), (3, [1]), (4, [1, 1, 2, 3, 5]), (CAPACITY_MAX, [1, 1, CAPACITY_MAX]))
        capacity, weights = terms[number % len(terms)]
        longest = self._random.choice([3, 20, 60])
        self._calls = RandomCalls(self._random, self._model, capacity, weights, [1 + longest // 4, longest])

    def _use(self, line: Line, calls: int, *, pauses: bool) -> None:
        """Make so many calls of the resource; in a pause everything in it expires, and the server may delete it."""
        keys = self._resource.packed_keys
        after = plain("GET", f"{self._resource.keys[0]}:clock") + NOTING["inspect"].head + keys + pack(0, *EVERYTHING)
        for first in range(0, calls, BATCH):
            if pauses and first % 200 == 100:
                # Now and then until the very moment at which the server deletes the resource.
                left_ms = self._model.kept_until - time.time() * 1000 + self._random.uniform(-1, 4)
                time.sleep(self._random.choice([2 * IDLE_MS, max(0, left_ms)]) / 1000)
            drawn = [self._calls.call() for _ in range(min(BATCH, calls - first))]
            commands = [NOTING[name].head + keys + pack(0, *args) + after for name, args in drawn]
            replies = iter(line.send(commands, 3 * len(drawn)))
            for name, args in drawn:
                self._compare(name, args, next(replies), next(replies), next(replies))

    def _compare(self, name: str, args: Args, reply: Reply, noted: bytes, state: Reply) -> None:
        """Do in the model what the server has done."""
        seconds, micros, exists = map(int, noted.split())
        self._model.clock = seconds * 1_000_000 + micros
        if not exists and self._model.kept_until:
            self._forget()
        before = self._model.fence
        expected = getattr(self._model, name)(*(args[:-1] if args[-1] == LABEL else args))
        got = reply[1:]
        if name == "acquire" and got[0] == Status.GRANTED and len(got) < len(expected):
            got = [*got, 0]  # the usual case spares the declaration
        self._log.append(f"{self._model.clock} {name}{args} -> {got}")
        assert got == expected, self._told(expected)
        self.seen[name, int(got[0]) if name in {"acquire", "beat"} else min(1, int(got[0]))] += 1
        self._learn(name, args, got, before)
        self._compare_state(state)

    def _compare_state(self, state: Reply) -> None:
        """See that inspect tells what the model has, at the moment at which it looked."""
        _, now, _, capacity, *_ = state
        self._model.clock = max(self._model.clock, now * 1000)
        if not capacity and self._model.capacity:
            self._forget()
        expected = snapshot(self._model)
        assert state[2:8] == expected, self._told([*expected, state[2:8]])

    def _forget(self) -> None:
        """The server has deleted the resource, which it may do when nothing is left of it and its time is over."""
        assert self._model.now >= self._model.kept_until, self._told(["P3: deleted too early"])
        self.forgotten += 1
        self._model = self._calls.model = self._model.forgotten()

    def _learn(self, name: str, args: Args, got: Reply, before: int) -> None:
        """Remember what a later call may be about."""
        if self._model.fence > before:
            granted = [held for held in self._model.held.values() if held.fence > before]
            self._calls.granted.extend((held.ticket, held.fence) for held in granted)
        if name == "acquire" and got[0] == Status.QUEUED:
            self._calls.left[str(args[0])] = got[1]
        if name in {"acquire", "beat"} and got[0] == Status.LAPSED:
            channel, _, epoch = str(args[2] if name == "acquire" else args[0]).partition("|")
            self._calls.epochs[channel] = max(self._calls.epochs[channel], int(epoch) + 1)

    def _told(self, expected: Reply) -> str:
        return "\n".join(
            [f"seed {self._seed}, {self._resource.name}; the last calls:", *self._log, f"model: {expected}"]
        )


def snapshot(model: Model) -> Reply:
    """Return what inspect tells: the last fence, the capacity, how much is in use, who holds and who waits."""
    held = [(each.deadline, each.ticket.encode(), record(each)) for each in model.held.values() if model.is_live(each)]
    delays = [delay for delay in model.delays if delay.until > model.now]
    held += [(each.until, each.name, b"%d 0 0 %d - - " % (each.weight, each.since)) for each in delays]
    in_use = sum(each.weight for each in model.held.values() if each.deadline + model.lock_delay > model.now)
    waiters = [queued for queued in model.waiters() if model.is_live(queued)]
    return [
        *(model.fence, model.capacity, in_use + sum(delay.weight for delay in delays), len(waiters)),
        [part for deadline, name, text in sorted(held) for part in (name, deadline, text)],
        [part for each in waiters for part in (each.ticket.encode(), record(each))],
    ]


def record(entry: Entry) -> bytes:
    """Return the record of a ticket, as the prelude of the scripts describes it."""
    (place, request), *others = entry.claims
    shared = "0" if others else ""
    requests = request + "".join(f"{{{other}}}{its}" for other, its in others)
    return f"{shared}{entry.weight} {entry.fence} {entry.lease} {entry.since} {place} {requests} {LABEL}".encode()
