"""Random calls on a real server, each compared with the model.

Leases last some milliseconds, so that they end by themselves. The scripts note the time that they have read, and the
model goes by that.
"""

from __future__ import annotations

import itertools
import socket
import time
from random import Random
from typing import TYPE_CHECKING, Any

import hiredis
import redis

from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource, pack, plain
from redlease._core.protocol.scripts import Script

from against_model import EVERYTHING, LABEL, Judge
from random_calls import IDLE_MS, RandomCalls

if TYPE_CHECKING:
    from servers import Server

READS_TIME = "local clock = call('TIME')\n"
NOTES_TIME = "call('SET', KEYS[1] .. ':clock', clock[1] .. ' ' .. clock[2] .. ' ' .. call('EXISTS', KEYS[1]))\n"
BATCH = 10  # how many calls are sent at once, without knowing each other's replies
CALLS_EACH = 500  # on one resource, before the next one with other terms


def noting_time(script: Script) -> Script:
    """Return a script that also stores the time that it goes by, and whether the resource exists then."""
    head, reads, rest = script.text.partition(READS_TIME)
    assert reads, script.name
    return Script(script.name, " ".join(script.args[1:]), head + reads + NOTES_TIME + rest)


NOTING = {script.name: noting_time(script) for script in scripts.SCRIPTS}
NOTING_FOR_KEY = noting_time(scripts.ACQUIRE_FOR_KEY)


def script_of(name: str, args: tuple[str | int, ...]) -> Script:
    """Return the script that a call runs: an acquire may have a key, after the label."""
    return NOTING_FOR_KEY if name == "acquire" and args[-1] != LABEL else NOTING[name]


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


class RealClock:
    """Makes random calls, and compares.

    Args:
        server: Where they go.
        prefix: The prefix of their keys.
        seed: The same seed draws the same calls for as long as leases end at the same moments.

    Attributes:
        judge: What compares.
        stalls: How often the server stood still for as long as it keeps an idle resource, or its clock was set back.
            Before Redis 7.2 it may then have deleted the keys in the middle of a script, so that resource is left.
    """

    def __init__(self, server: Server, prefix: str, seed: int) -> None:
        self.judge = Judge()
        self.stalls = 0
        self._server, self._prefix, self._seed = server, prefix, seed
        self._random = Random(seed)
        self._numbers = itertools.count()

    def run(self, calls: int) -> None:
        """Make calls until there have been so many."""
        line = Line(self._server)
        try:
            while (left := calls - self.judge.seen.total()) > 0:
                number = next(self._numbers)
                self._resource = Resource(self._prefix, f"r{number}")
                self._calls = RandomCalls.of_kind(self._random, number)
                self.judge.use(self._calls)
                self._use(line, min(CALLS_EACH, left), pauses=number % 4 == 0)
        finally:
            line.close()

    def _use(self, line: Line, calls: int, *, pauses: bool) -> None:
        """Make so many calls of the resource; in a pause everything in it expires, and the server may delete it."""
        keys = self._resource.packed_keys
        after = plain("GET", f"{self._resource.keys[0]}:clock") + NOTING["inspect"].head + keys + pack(0, *EVERYTHING)
        for first in range(0, calls, BATCH):
            if pauses and first % 200 == 100:
                # Now and then until the very moment at which the server deletes the resource.
                left_ms = self.judge.model.kept_until - time.time() * 1000 + self._random.uniform(-1, 4)
                time.sleep(self._random.choice([2 * IDLE_MS, max(0, left_ms)]) / 1000)
            drawn = [self._calls.call() for _ in range(min(BATCH, calls - first))]
            commands = [script_of(name, args).head + keys + pack(0, *args) + after for name, args in drawn]
            replies = iter(line.send(commands, 3 * len(drawn)))
            for name, args in drawn:
                reply, noted, state = next(replies), next(replies), next(replies)
                seconds, micros, exists = map(int, noted.split())
                # Or the machine's clock was set back between the call and the look.
                if not 0 <= state[1] - (seconds * 1000 + micros // 1000) < IDLE_MS:
                    self.stalls += 1
                    return
                try:
                    self.judge.judge(name, args, seconds * 1_000_000 + micros, reply, state, exists=bool(exists))
                except AssertionError as error:
                    raise AssertionError(f"{error}\n{self._told()}") from None

    def _told(self) -> str:
        """Return the last calls, the model, and what is on the server, after the rest of the batch."""
        lines = [f"seed {self._seed}, {self._resource.name}", self.judge.told(), "the server, after the whole batch:"]
        with redis.Redis.from_url(self._server.unix_url) as client:
            lines += [f"{client.time()} {client.hgetall(self._resource.keys[0])}"]
            lines += [f"{key} {client.zrange(key, 0, -1, withscores=True)}" for key in self._resource.keys[1:]]
            lines += [f"{key} ends in {client.pttl(key)} ms" for key in self._resource.keys]
        return "\n".join(lines)
