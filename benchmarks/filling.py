"""Fills a server with what other clients leave behind: waiters, keys, the dead, metadata of the greatest size."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import redis

from redlease._core.limits import METADATA_JSON_BYTES_MAX, OWNER_BYTES_MAX, REASON_BYTES_MAX
from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.scripts import Script

SMALL = json.dumps(["worker-1", {}], separators=(",", ":"))
LARGE = json.dumps(["o" * OWNER_BYTES_MAX, {"m": "x" * (METADATA_JSON_BYTES_MAX - 8)}], separators=(",", ":"))
REASON = json.dumps(["o" * OWNER_BYTES_MAX, {"reason": "x" * REASON_BYTES_MAX}], separators=(",", ":"))
HELD_MS = 3_600_000  # longer than any of this takes
IDLE_MS = 86_400_000
SENT_AT_ONCE = 200

Call = list[Any]


class Filling:
    """Makes calls of the scripts, by a plain connection.

    Args:
        url: Of the server.
    """

    def __init__(self, url: str) -> None:
        self.redis = redis.Redis.from_url(url)
        self._numbers = itertools.count(1)
        for script in scripts.SCRIPTS:
            self.redis.script_load(script.text)

    def call(self, name: str, script: Script, *args: Any) -> Call:
        """Returns one call on the resource of that name."""
        return ["EVALSHA", script.sha, 4, *Resource("redlease", name).keys[:4], 0, *args]

    def acquire(
        self,
        name: str,
        *,
        ticket: str = "",
        key: str = "",
        weight: int | str = 1,
        capacity: int = 1,
        most: int | str = -1,
        place: str = "alive|1",
        label: str = SMALL,
        waits_ms: int = HELD_MS,
    ) -> Call:
        """Returns a request; a ticket is drawn if none is given."""
        ticket = ticket or f"{next(self._numbers):032d}"
        terms = (weight, HELD_MS, capacity, waits_ms, most, IDLE_MS, label, *([key] if key else []))
        return self.call(name, scripts.ACQUIRE, ticket, f"h{ticket}", place, "0", *terms)

    def release(self, name: str, ticket: str = "") -> Call:
        """Returns a release of whatever has the ticket; without one, it goes on with what is left to do."""
        return self.call(name, scripts.RELEASE, ticket, "", "", 0, 0, IDLE_MS)

    def make(self, calls: Iterable[Call]) -> list[Any]:
        """Makes calls, many in one write, and returns the replies."""
        replies: list[Any] = []
        for batch in _batches(calls):
            with self.redis.pipeline(transaction=False) as pipeline:
                for call in batch:
                    pipeline.execute_command(*call)  # type: ignore[no-untyped-call]
                replies += pipeline.execute()
        return replies

    def hold(self, name: str, capacity: int = 1, **options: Any) -> None:
        """Takes all units, so that who asks waits."""
        (reply,) = self.make([self.acquire(name, ticket="holder", weight=capacity, capacity=capacity, **options)])
        assert reply[1] == 1, reply

    def wait(self, name: str, keys: Iterable[str], **options: Any) -> None:
        """Makes a request for each of these keys, for "" one without; those wait that are not granted at once."""
        self.make(self.acquire(name, key=key, **options) for key in keys)

    def held(self, name: str, count: int) -> list[str]:
        """Returns the tickets of some holders."""
        found: Any = self.redis.zrange(Resource("redlease", name).keys[1], 0, count - 1)
        return [ticket.decode() for ticket in found]

    def waiting(self, name: str) -> str:
        """Returns the ticket of the last in the queue."""
        found: Any = self.redis.zrange(Resource("redlease", name).keys[2], -1, -1)
        last: bytes = found[0]
        return (last[18:] if last.startswith(b"\xff") else last).decode()

    def die(self, name: str, place: str = "alive|1") -> None:
        """Ends the place of a process, as if that had ended some seconds ago."""
        self.redis.zadd(Resource("redlease", name).keys[3], {place: int(time.time() * 1000) - 5000})

    def lapse(self, name: str) -> None:
        """Ends the leases of all holders."""
        key = Resource("redlease", name).keys[1]
        holders: Any = self.redis.zrange(key, 0, -1)
        for batch in _batches(holders):
            self.redis.zadd(key, dict.fromkeys(batch, int(time.time() * 1000) - 5000))

    def close(self) -> None:
        """Ends the connection."""
        self.redis.close()


def _batches(calls: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(calls)
    while batch := list(itertools.islice(rest, SENT_AT_ONCE)):
        yield batch
