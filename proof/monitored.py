"""A model of its own over MONITOR, which judges each grant; `proof/oracle.py` runs the load.

The model knows what the processes declare and what the operator orders. All else it reads off what the scripts write:
who is a holder, until when, with what weight and fence. It shares nothing with redlease but the digests of the scripts.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from redlease._core.protocol import scripts

from servers import Server

ALL = 2**31 - 1
WORD = re.compile(rb'"((?:[^"\\]|\\.)*)"')
HEAD = re.compile(rb"\+?(\d+\.\d+) \[\d+ (\S+)\] ")
KEY = re.compile(rb".*\{(.*)\}:(state|holders)$")


@dataclass
class Held:
    """A permit. `deadline`: in ms of the server's clock."""

    weight: int = 0
    fence: int = 0
    deadline: float = 0
    key: str = ""


@dataclass
class Resource:
    """What the model knows of a resource; `limits`: units and end, by the name under which the limit is held."""

    capacity: int
    per_key: int
    held: dict[str, Held] = field(default_factory=dict)
    limits: dict[str, tuple[int, float]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    fence: int = 0

    def units(self, now: float, key: str | None = None) -> int:
        """Return how many units are held, of all or of a key."""
        live = (each for each in self.held.values() if each.deadline > now)
        return sum(each.weight for each in live if key in (None, each.key))

    def allowed(self, now: float) -> int:
        """Return how many units may be held."""
        return min([self.capacity, *self._limits(now, r"\xfflimit", r"\xffpause", r"\xffback")])

    def allowed_of(self, key: str, now: float) -> int:
        """Return how many units of a key may be held."""
        own = self._limits(now, rf"\xfflimit {key}") or self._limits(now, r"\xffeach")
        return min([self.per_key, *own, *self._limits(now, rf"\xffback {key}")])

    def _limits(self, now: float, *names: str) -> list[int]:
        return [self.limits[name][0] for name in names if name in self.limits and self.limits[name][1] > now]


class Oracle:
    """Reads MONITOR line by line, and judges what each script has done when the next command begins."""

    def __init__(self, capacities: dict[str, int], per_key: dict[str, int]) -> None:
        self._resources = {name: Resource(units, per_key.get(name, ALL)) for name, units in capacities.items()}
        self._order: dict[str, int] = {}  # what the operator's command that runs gives each limit
        self._granted: dict[str, list[tuple[str, float]]] = {}
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def read(self, line: bytes) -> None:
        """Take one line of MONITOR."""
        head = HEAD.match(line)
        if head is None:
            return
        words = [word.decode() for word in WORD.findall(line)]
        if head[2] == b"lua":
            self._written(words)
        else:
            self._judge()
            if words[0].upper() == "EVALSHA":
                self._called(words)

    def _called(self, words: list[str]) -> None:
        found = KEY.match(words[3].encode())
        resource = self._resources.get(found[1].decode()) if found else None
        sha, args = words[1], words[8:]
        self._order = {}
        if resource is None:
            return
        if sha == scripts.ACQUIRE.sha:
            resource.keys[args[0]] = args[11] if len(args) > 11 else ""
        elif sha == scripts.RESIZE.sha and resource.capacity not in (1, ALL):
            resource.capacity = int(args[0])
        elif sha == scripts.LIMIT.sha and args[2]:
            self._order = {rf"\xff{args[0]}" + (f" {args[1]}" if args[1] else ""): int(args[2])}

    def _written(self, words: list[str]) -> None:
        found = KEY.match(words[1].encode()) if len(words) > 1 else None
        resource = self._resources.get(found[1].decode()) if found else None
        if resource is None or found is None:
            return
        command, name, of_holders = words[0].upper(), found[1].decode(), found[2] == b"holders"
        if of_holders and command == "ZADD":
            self._lives_until(resource, words[-1], float(words[-2]))
        elif of_holders and command == "ZREM":
            for ticket in words[2:]:
                resource.held.pop(ticket, None)
                resource.limits.pop(ticket, None)
        elif not of_holders and command == "HSET":
            for key, text in zip(words[2::2], words[3::2], strict=True):
                if key.startswith("t") and not key.startswith(r"t\xff"):
                    self._recorded(resource, name, key[1:], text)

    def _lives_until(self, resource: Resource, ticket: str, deadline: float) -> None:
        if not ticket.startswith(r"\xff"):
            resource.held.setdefault(ticket, Held()).deadline = deadline
        elif ticket in self._order:
            of_keys = " " in ticket or ticket == r"\xffeach"
            resource.limits[ticket] = self._order[ticket], deadline - 2**52 * of_keys

    def _recorded(self, resource: Resource, name: str, ticket: str, text: str) -> None:
        weight, fence, _, since, _ = text.split(" ", 4)
        held = resource.held.get(ticket)
        if int(fence) == 0 or held is None:
            return
        if int(fence) != held.fence:
            adopted = held.fence > 0
            self.counts["adopted" if adopted else "granted"] += 1
            if int(fence) <= resource.fence:
                self.violations.append(f"{name}: {ticket} has fence {fence} after {resource.fence}")
            resource.fence = max(resource.fence, int(fence))
            held.fence, held.key = int(fence), resource.keys.get(ticket, "")
            if not adopted:
                self._granted.setdefault(name, []).append((ticket, float(since)))
        held.weight = int(weight)

    def _judge(self) -> None:
        """Judge the grants of the script that has ended, all at once: nobody else saw the steps between."""
        granted, self._granted = self._granted, {}
        for name, tickets in granted.items():
            resource = self._resources[name]
            for ticket, now in tickets:
                held = resource.held.get(ticket)
                if held is None:
                    continue
                units, allowed = resource.units(now), resource.allowed(now)
                if units > allowed:
                    self.violations.append(f"{name}: {ticket} makes it {units} of {allowed}")
                units, allowed = resource.units(now, held.key), resource.allowed_of(held.key, now)
                if held.key and units > allowed:
                    self.violations.append(f"{name}: {ticket} makes key {held.key} {units} of {allowed}")


@contextlib.contextmanager
def watching(server: Server, oracle: Oracle) -> Iterator[None]:
    """Have the oracle read MONITOR meanwhile, in a thread, and all of it at the end."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"MONITOR\r\n")
        lines = connection.makefile("rb")
        assert lines.readline() == b"+OK\r\n"

        def read() -> None:
            for line in lines:
                if b'"the end of the oracle"' in line:
                    return
                oracle.read(line)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield
        finally:
            server.cli("ECHO", "the end of the oracle")
            reader.join()
