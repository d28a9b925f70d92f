"""Calls at given times, each compared with the model: they hit the very ms of a deadline, and can be repeated."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, Self
from unittest import mock

import fakeredis
import redis

from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.scripts import Script, read_lua

from against_model import EVERYTHING, Caller, Judge
from random_calls import IDLE_MS, LONG_IDLE_MS, RandomCalls
from real_clock import READS_TIME

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from redlease.testing.model import Model

    from servers import Server

KEYS = Resource("model", "r").keys
BEGINS_US = 4_000_000_000_000_000  # a time ahead of every server's: the keys of a real one do not expire by themselves
TAKES_TIME = """
local micros = table.remove(ARGV)
local clock = {table.remove(ARGV), micros}
for _, key in ipairs(KEYS) do
  local ends = call('PEXPIRETIME', key)
  if ends > 0 and ends < clock[1] * 1000 + math.floor(clock[2] / 1000) then call('DEL', key) end
end
call('SET', KEYS[1] .. ':existed', call('EXISTS', KEYS[1]))
"""
MARGINS_MS = (0, IDLE_MS // 64, LONG_IDLE_MS // 64)  # the scripts keep a resource so much longer than they must


def general(script: Script) -> Script:
    """Return the operation that takes the general path from the start."""

    def read(package: str, name: str) -> str:
        return "" if name.endswith("_usual") else read_lua(package, name)

    with mock.patch.object(scripts, "read_lua", read):
        return scripts.operation(script.name, " ".join(script.args[1:]))


USUAL = {script.name: script for script in scripts.SCRIPTS}
GENERAL = {name: general(script) for name, script in USUAL.items()}
WITH_USUAL_PATH = {"acquire", "release", "renew"}


class Engine(Protocol):
    """Runs scripts at a given time; `run` returns whether the resource existed before, and the reply."""

    def clear(self) -> None: ...

    def run(self, name: str, args: tuple[Any, ...], now_us: int) -> tuple[bool, list[Any]]: ...


class FakeEngine:
    """In this process, with the scripts as they are, or others by name; between calls the clock is everybody's."""

    def __init__(self, scripts: Mapping[str, Script] = USUAL, server: fakeredis.FakeServer | None = None) -> None:
        self._scripts = scripts
        self.client = fakeredis.FakeRedis(server=server or fakeredis.FakeServer())

    def clear(self) -> None:
        """Begin without the resource."""
        self.client.delete(*KEYS)

    def run(self, name: str, args: tuple[Any, ...], now_us: int) -> tuple[bool, list[Any]]:
        """Run a script."""

        def now_s() -> float:
            return now_us / 1_000_000

        with mock.patch.object(time, "time", now_s):  # which is made faster than a mock
            exists = self.client.exists(KEYS[0])
            reply: list[Any] = self.client.eval(self._scripts[name].text, len(KEYS), *KEYS, 0, *args)
        return bool(exists), reply

    def stored(self, now_us: int) -> dict[str, Any]:
        """Return what the keys contain, and when they expire in ms."""
        client: Any = self.client
        found = {}
        now_ms = now_us // 1000  # a part of a ms would be rounded twice
        with mock.patch.object(time, "time", return_value=now_ms / 1000):
            for number, (part, key) in enumerate(zip(Resource.PARTS, KEYS, strict=True)):
                stored = dict(client.zrange(key, 0, -1, withscores=True)) if number else client.hgetall(key)
                contains = {name.decode("latin-1"): as_json(value) for name, value in stored.items()}
                if contains:
                    found[part.decode()] = {"expires_at_ms": now_ms + client.pttl(key), "contains": contains}
        return found


class HeardEngine(FakeEngine):
    """One that hears what the scripts publish.

    As a server before Redis 7, it has no sharded channels: all messages come on ordinary ones.
    """

    def __init__(self) -> None:
        super().__init__(server=fakeredis.FakeServer(version=(6, 2)))
        client: Any = self.client
        self._heard = client.pubsub(ignore_subscribe_messages=True)
        self._heard.psubscribe("*")
        self._heard.get_message()

    def heard(self) -> list[tuple[str, str]]:
        """Return the channel and the text of each message since the last time."""
        messages = []
        while message := self._heard.get_message():
            if not message["channel"].startswith(b"__key"):  # fakeredis tells of every change of a key
                messages.append((message["channel"].decode(), message["data"].decode()))
        return messages


class RealEngine:
    """A server, Redis 7 or newer: its scripts take the time as an argument, and delete what has expired by then."""

    def __init__(self, server: Server, scripts: Mapping[str, Script] = USUAL) -> None:
        texts = {name: script.text.replace(READS_TIME, TAKES_TIME) for name, script in scripts.items()}
        self.client = redis.Redis.from_url(server.unix_url)
        self._shas = {name: str(self.client.script_load(text)) for name, text in texts.items()}

    def __enter__(self) -> Self:
        """Use the connection."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.client.close()

    def clear(self) -> None:
        """Begin without the resource."""
        self.client.delete(*KEYS)

    def run(self, name: str, args: tuple[Any, ...], now_us: int) -> tuple[bool, list[Any]]:
        """Run a script."""
        time_args = divmod(now_us, 1_000_000)
        with self.client.pipeline(transaction=False) as pipeline:
            pipeline.evalsha(self._shas[name], len(KEYS), *KEYS, 0, *args, *time_args)
            pipeline.get(f"{KEYS[0]}:existed")
            reply, exists = pipeline.execute()
        return exists == b"1", reply


class SetClock:
    """Makes calls on a resource at given times, each compared with the model.

    Args:
        caller: What has the model.
        engine: What runs them.

    Attributes:
        made: The calls, each with its time in µs.
    """

    def __init__(self, caller: Caller, engine: Engine) -> None:
        self.judge = Judge()
        self.judge.use(caller)
        self.now_us = BEGINS_US
        self.made: list[tuple[int, str, tuple[Any, ...]]] = []
        self._engine = engine
        engine.clear()

    def call(self, name: str, args: tuple[Any, ...]) -> None:
        """Make a call."""
        self.made.append((self.now_us, name, args))
        exists, reply = self._engine.run(name, args, self.now_us)
        _, state = self._engine.run("inspect", EVERYTHING, self.now_us)
        self.judge.judge(name, args, self.now_us, reply, state, exists=exists)

    def run(self, drawn: RandomCalls, calls: int) -> None:
        """Make so many calls, many of them around the ms in which something ends."""
        for _ in range(calls):
            self.now_us = max(self.now_us, self._next(drawn.random))
            try:
                self.call(*drawn.call())
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self.judge.told()}") from None

    def _next(self, random: Random) -> int:
        """Return the time of the next call: at once, soon, or around the ms in which something ends."""
        if random.random() < 0.8:
            return self.now_us + random.choice([0, 1, random.randrange(2000)])
        ahead = sorted(ends for ends in endings(self.judge.model) if ends * 1000 > self.now_us)
        ends = ahead[min(len(ahead) - 1, int(random.expovariate(1)))] if ahead else self.now_us // 1000 + IDLE_MS
        return (ends + random.choice([-1, 0, 0, 1])) * 1000 + random.choice([0, 999])


def as_json(stored: bytes | float) -> str | float:
    """Return a field or a score as JSON has it."""
    if isinstance(stored, bytes):
        return stored.decode("latin-1")
    return int(stored) if stored == int(stored) else stored


def endings(model: Model) -> set[int]:
    """Return when anything in the model ends, and the ms in which the server deletes it."""
    return {
        *(held.deadline for held in model.held.values()),
        *model.places.values(),
        *model.tombstones.values(),
        *(delay.until for delay in model.delays),
        *(limit.until for limit in model.limits.values()),
        *(model.kept_until + margin for margin in MARGINS_MS),
    }
