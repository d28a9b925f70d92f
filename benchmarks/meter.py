"""What a stretch of work costs: time, CPU of the client and of the server, commands, connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

# What the meter itself calls.
OWN_COMMANDS = {"info"}


@dataclass(slots=True)
class Cost:
    """Times in seconds; complete when the stretch has ended."""

    wall_s: float = 0.0
    client_s: float = 0.0
    server_s: float = 0.0
    commands: dict[str, int] = field(default_factory=dict)  # by name; those that scripts call are counted too
    connections: int = 0  # open at the end, the meter's own left out

    @property
    def commands_all(self) -> int:
        """All commands that the server ran."""
        return sum(self.commands.values())


class Meter:
    """Reads a server's counters on a connection of its own, and this process's CPU clock.

    It blocks: while it reads, this process does nothing else that it would measure.
    """

    def __init__(self, url: str) -> None:
        self._redis = redis.Redis.from_url(url, decode_responses=True)
        self._redis.ping()

    @contextmanager
    def measuring(self) -> Iterator[Cost]:
        """Measures the block. CPU is read last before it and first after it, so that reading is not measured."""
        cost = Cost()
        commands = self.commands()
        server_s, client_s, wall_s = self._server_s(), time.process_time(), time.perf_counter()
        yield cost
        cost.wall_s, cost.client_s = time.perf_counter() - wall_s, time.process_time() - client_s
        cost.server_s = self._server_s() - server_s
        now = self.commands()
        cost.commands = {name: calls - commands.get(name, 0) for name, calls in now.items()}
        cost.commands = {name: calls for name, calls in cost.commands.items() if calls}
        cost.connections = int(self._info("clients")["connected_clients"]) - 1

    def close(self) -> None:
        """Ends its connection."""
        self._redis.close()

    def commands(self) -> dict[str, int]:
        """How often each command ran since the server started."""
        stats = self._info("commandstats")
        calls = {name.removeprefix("cmdstat_"): int(one["calls"]) for name, one in stats.items()}
        return {name: count for name, count in calls.items() if name not in OWN_COMMANDS}

    def scripts(self) -> int:
        """How often a script ran since the server started."""
        return self.commands().get("evalsha", 0)

    def empty(self) -> None:
        """Deletes all that the server keeps."""
        self._redis.flushall()

    def keys(self) -> int:
        """How many keys there are, those included that have expired and are not removed yet."""
        return int(self._info("keyspace").get("db0", {}).get("keys", 0))

    def _server_s(self) -> float:
        cpu = self._info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    def _info(self, section: str) -> dict[str, Any]:
        info: dict[str, Any] = self._redis.info(section)
        return info
