"""A server that stops in the middle of a script until everything in the resource has ended."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import redis

from redlease._core.protocol import scripts
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.replies import Status

from servers import find_binary

if TYPE_CHECKING:
    from redlease._core.protocol.scripts import Script

    from servers import Server

READS_TIME = "local clock = call('TIME')\n"
LEASE_MS, IDLE_MS, STOPPED_MS = 30, 10, 60
STOP = """
local function passed()
  local later = call('TIME')
  return (later[1] - clock[1]) * 1000 + (later[2] - clock[2]) / 1000
end
while passed() < %d do end
"""
# Before Redis 7.2, PEXPIREAT goes by the true time, not by that at which the script began.
OLDER = [engine for engine in ("redis62", "redis7") if find_binary(engine)]


class Calls:
    """Runs scripts on a resource; a permit of weight 2 is held by two requests, and another ticket is queued."""

    def __init__(self, server: Server, prefix: str) -> None:
        self.client = redis.Redis.from_url(server.url)
        self.keys = Resource(prefix, "r").keys
        self.fence = self.acquire("held", "h1", "c1|0", 2)[2]
        self.acquire("held", "h2", "c2|0", 2)
        self.acquire("queued", "h3", "c3|0", 1)

    def acquire(
        self, ticket: str, request: str, place: str, weight: int, *, waits_ms: int = LEASE_MS, stops: bool = False
    ) -> list[int]:
        """Request a permit."""
        terms = ("0", weight, LEASE_MS, 2, waits_ms, -1, IDLE_MS, '["o",{}]')
        return self(scripts.ACQUIRE, ticket, request, place, *terms, stops=stops)

    def __call__(self, script: Script, *args: str | int, stops: bool = True) -> list[int]:
        """Run a script on a server that stops when it has read the time, or does not."""
        text = script.text.replace(READS_TIME, READS_TIME + STOP % STOPPED_MS) if stops else script.text
        reply: list[int] = self.client.eval(text, 4, *self.keys, 0, *args)
        return reply


@pytest.mark.parametrize("real_engine", OLDER)
@pytest.mark.parametrize(
    "name", ["repeated", "waits", "release", "shared", "renew", "adopt", "beat", "reduce", "watch"]
)
def test_what_a_stopped_script_writes_expires(server: Server, prefix: str, name: str) -> None:
    """All keys are gone soon after, so no idle resource stays for ever; and the next fence is greater."""
    calls = Calls(server, prefix)
    stopped = {
        "repeated": lambda: calls.acquire("held", "h1", "c1|0", 2, stops=True),
        "waits": lambda: calls.acquire("queued", "h3", "c3|0", 1, stops=True),
        "release": lambda: calls(scripts.RELEASE, "held", "h9", "", 1000, 0, IDLE_MS),
        "shared": lambda: calls(scripts.RELEASE, "held", "h1", "", 0, 0, IDLE_MS),
        "renew": lambda: calls(scripts.RENEW, "held", calls.fence, LEASE_MS + 1, "1", IDLE_MS),
        "adopt": lambda: calls(scripts.ADOPT, "held", calls.fence, "h4", "c1|0", LEASE_MS, 1, IDLE_MS, '["o",{}]'),
        "beat": lambda: calls(scripts.BEAT, "c3|0", LEASE_MS, "queued", IDLE_MS),
        "reduce": lambda: calls(scripts.REDUCE, "held", calls.fence, 1, IDLE_MS),
        "watch": lambda: calls(scripts.WATCH, 1),
    }
    stopped[name]()
    assert -1 not in {calls.client.pttl(key) for key in calls.keys}
    granted = calls.acquire("next", "h5", "c5|0", 1)
    assert granted[1] == Status.GRANTED
    assert granted[2] > calls.fence
    calls.client.close()


@pytest.mark.parametrize("real_engine", OLDER)
def test_a_grant_that_ended_while_the_script_stopped_is_asked_for_anew(server: Server, prefix: str) -> None:
    """A repeated request that is granted and deleted in one script is told that its place is gone, without an error."""
    numbers = itertools.count()
    calls = Calls(server, f"{prefix}{next(numbers)}")
    # On a busy machine the leases of the others may have ended before it asks.
    while calls.acquire("longer", "h6", "c6|0", 2, waits_ms=200)[1] != Status.QUEUED:
        calls = Calls(server, f"{prefix}{next(numbers)}")
    while calls(scripts.INSPECT, 9, 9, 9999, "", "", "", 9, stops=False)[4]:  # until the others' leases have ended
        pass
    text = scripts.ACQUIRE.text.replace(READS_TIME, READS_TIME + STOP % 400)
    terms = ("0", 2, LEASE_MS, 2, 200, -1, IDLE_MS, '["o",{}]')
    assert calls.client.eval(text, 4, *calls.keys, 0, "longer", "h6", "c6|0", *terms) == [b"0", Status.LAPSED]
    assert not calls.client.exists(*calls.keys)
    calls.client.close()
