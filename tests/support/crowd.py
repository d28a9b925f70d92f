"""A resource with many waiters on a real server, whose scripts run at given times, and how many commands each runs."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import redis

from redlease._core.protocol.replies import Status

from set_clock import BEGINS_US, KEYS, RealEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

    from servers import Server

IDLE_MS = 86_400_000
LEASE_MS = 600_000
LABEL = '["o",{}]'
GONE_MS = 100  # the waiter lease of those whose process is gone


class Crowd:
    """Calls the scripts; `now_ms` is the server's time, from the beginning.

    Attributes:
        now_ms: When the next call is made.
        commands: How many commands the last call ran, those of its script among them.
        dead: The tickets of `wait_and_die`.
    """

    def __init__(self, server: Server) -> None:
        self.engine = RealEngine(server)
        self.client = redis.Redis.from_url(server.unix_url)
        self.engine.clear()
        self.now_ms = 0
        self.commands = 0
        self.dead: set[str] = set()
        self._numbers = itertools.count()

    def close(self) -> None:
        """Delete the resource."""
        self.engine.clear()
        self.engine.__exit__()
        self.client.close()

    def call(self, name: str, *args: Any) -> list[Any]:
        """Call a script; return what it replies behind the tag."""
        before = self._commands()
        reply = self._run(name, args)
        self.commands = self._commands() - before
        return reply

    def _run(self, name: str, args: tuple[Any, ...]) -> list[Any]:
        return self.engine.run(name, args, BEGINS_US + self.now_ms * 1000)[1][1:]

    def ask(self, ticket: str = "", **options: Any) -> list[Any]:
        """Request a permit, for which it may wait; the options are those of `terms`."""
        return self.call("acquire", *self.terms(ticket, **options))

    def terms(
        self,
        ticket: str = "",
        *,
        key: str = "",
        most: int | str = -1,
        arrival: int | str = "0",
        place: str = "alive|1",
        waits_ms: int = LEASE_MS,
        weight: int | str = 1,
        capacity: int = 1,
        label: str = LABEL,
    ) -> tuple[Any, ...]:
        """Return the arguments of an acquire; a ticket is drawn if none is given."""
        ticket = ticket or f"t{next(self._numbers)}"
        terms = (weight, LEASE_MS, capacity, waits_ms, most, IDLE_MS, label, *([key] if key else []))
        return ticket, f"h{ticket}", place, arrival, *terms

    def hold(self, capacity: int = 1) -> None:
        """Take all units, so that who asks waits."""
        assert self.ask("holder", weight=capacity, capacity=capacity, place="holds|1")[0] == Status.GRANTED

    def wait(self, keys: Iterable[str], **options: Any) -> None:
        """Queue a request for each of these keys; for the key "" one without."""
        for key in keys:
            assert self._run("acquire", self.terms(key=key, **options))[0] == Status.QUEUED

    def wait_and_die(self, keys: Iterable[str], place: str = "gone|1", **options: Any) -> None:
        """Do so from a process that is gone `GONE_MS` later."""
        for key in keys:
            ticket = f"dead{next(self._numbers)}"
            self.dead.add(ticket)
            reply = self.ask(ticket, key=key, place=place, waits_ms=GONE_MS, **options)
            assert reply[0] == Status.QUEUED

    def release(self, ticket: str) -> list[Any]:
        """Release a permit, or take a waiter out of the queue."""
        return self.call("release", ticket, "", "", 0, 0, IDLE_MS)

    def all_of(self, name: str, *args: Any, most: int = 10_000) -> list[int]:
        """Call a script, and go on as a client does until nothing is left to do; return the commands of each call."""
        reply, commands = self.call(name, *args), [self.commands]
        while reply[-1] and len(commands) < most:
            reply = self.call("release", "", "", "", 0, 0, IDLE_MS)
            commands.append(self.commands)
        return commands

    def ask_until_told(self, ticket: str = "late", **options: Any) -> tuple[list[Any], list[int]]:
        """Request, and again for as long as the reply says so; return the last reply, and the commands of each call."""
        reply, commands = self.ask(ticket, **options), [self.commands]
        while reply[0] == Status.FULL and reply[2]:
            self.now_ms += reply[4]
            reply = self.ask(ticket, arrival=-reply[2], **options)
            commands.append(self.commands)
        return reply, commands

    def waiting(self) -> list[str]:
        """Return the tickets in the queue, dead ones among them."""
        found: Any = self.client.zrange(KEYS[2], 0, -1)
        return [(entry[18:] if entry.startswith(b"\xff") else entry).decode() for entry in found]

    def holders(self) -> list[str]:
        """Return the tickets that hold, expired ones among them."""
        found: Any = self.client.zrange(KEYS[1], 0, -1)
        return [ticket.decode() for ticket in found if not ticket.startswith(b"\xff")]

    def key_of(self, ticket: str) -> str:
        """Return the key of a ticket, "" if it has none."""
        text: Any = self.client.hget(KEYS[0], f"p{ticket}")
        return text.decode().split(" ", 2)[2] if text else ""

    def fields(self) -> set[str]:
        """Return the names of the fields of the state."""
        found: Any = self.client.hkeys(KEYS[0])
        return {name.decode("latin-1") for name in found}

    def _commands(self) -> int:
        stats: Any = self.client.info("commandstats")
        return sum(row["calls"] for row in stats.values())
