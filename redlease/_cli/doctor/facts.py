"""Reads what a master says about itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from redlease._core.transport.masters import Master, Refused

ROUND_TRIPS = 21
# Rights that clients do without, and what needs them; each is tried by a command that changes nothing.
OPTIONAL = {
    "scan": (("SCAN", 0, "COUNT", 1), "`redlease ls` and `doctor`"),
    "wait": (("WAIT", 0, 1), "`durability=`"),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a master.

    `info`: the fields of INFO; `config`: some settings, empty unless the user is an administrator, since CONFIG GET
    shows passwords too; `cluster`: the fields of CLUSTER INFO, empty for a single server; `missing`: optional rights
    that the user lacks; `round_trip_ms`: a median;
    `clock_ahead_ms`: how far the server's clock is ahead of this machine's, give or take `clock_error_ms`.
    """

    server: str
    info: dict[str, str]
    config: dict[str, str]
    cluster: dict[str, str]
    missing: list[str]
    round_trip_ms: float
    clock_ahead_ms: float
    clock_error_ms: float

    def number(self, name: str) -> int:
        """Returns a field of INFO as a number, 0 if it is not there."""
        return int(self.info.get(name, "0"))


async def read_facts(master: Master) -> Facts:
    """Asks a master for everything that the checks need.

    Raises:
        Refused: The user may not call INFO.
        Unavailable: The server did not answer.
    """
    info = _fields(await master.ask("INFO"))
    config = await master.ask_all(
        [("CONFIG", "GET", name) for name in ("save", "appendfsync", "min-replicas-to-write")]
    )
    cluster = await master.ask_all([("CLUSTER", "INFO")]) if info.get("cluster_enabled") == "1" else [b""]
    tried = await master.ask_all([command for command, _ in OPTIONAL.values()])
    round_trips, ahead_ms, error_ms = await _timed(master)
    return Facts(
        master.name,
        info,
        _pairs(config),
        {} if isinstance(cluster[0], Refused) else _fields(cluster[0]),
        [name for name, reply in zip(OPTIONAL, tried, strict=True) if isinstance(reply, Refused)],
        round_trips,
        ahead_ms,
        error_ms,
    )


async def _timed(master: Master) -> tuple[float, float, float]:
    """Returns the median round trip, and the clock's offset and error as of the fastest one, in ms."""
    samples = []
    for _ in range(ROUND_TRIPS):
        began, sent_ms = time.monotonic(), _wall_clock_ms()
        seconds, micros = await master.ask("TIME")
        taken_ms = (time.monotonic() - began) * 1000
        # The server has read its clock at some moment of the round trip, so take the middle.
        samples.append((taken_ms, int(seconds) * 1000 + int(micros) / 1000 - sent_ms - taken_ms / 2))
    fastest_ms, ahead_ms = min(samples)
    return median(taken_ms for taken_ms, _ in samples), ahead_ms, fastest_ms / 2


def _wall_clock_ms() -> float:
    """The one reading of the local wall clock: to compare it with the server's for people, not to reckon with it."""
    return time.clock_gettime(time.CLOCK_REALTIME) * 1000


def _fields(text: bytes) -> dict[str, str]:
    """Parses lines `name:value`, as INFO and CLUSTER INFO have them."""
    pairs = (line.partition(":") for line in text.decode(errors="replace").splitlines() if not line.startswith("#"))
    return {name: value.strip() for name, colon, value in pairs if colon}


def _pairs(replies: list[Any]) -> dict[str, str]:
    known = [[each.decode() for each in reply] for reply in replies if not isinstance(reply, Refused)]
    return {name: value for reply in known for name, value in zip(reply[::2], reply[1::2], strict=True)}
