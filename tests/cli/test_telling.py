"""`redlease history` and `bench`: what they print, and that nothing stays."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import redis.asyncio

from redlease import HistoryEntry, Redlease
from redlease._cli.history import lines_of
from redlease._cli.plain import plain

from command_line import HARMLESS, HOSTILE, run_async
from helpers import keys_of

if TYPE_CHECKING:
    from conftest import Servers


def test_an_entry_is_a_line() -> None:
    """Columns stand below each other, and nothing in a ticket or owner is obeyed by the terminal."""
    lost = HistoryEntry("1-0", 1_700_000_000_123, "lost", HOSTILE, HOSTILE, 7, 2, held_ms=61_000)
    resized = HistoryEntry("2-0", 1_700_000_001_000, "resized", "", "", 0, 0, capacity=5)
    head, first, second = (line.plain for line in lines_of([lost, resized]))
    assert head.split() == ["time", "event", "ticket", "owner", "weight", "fence", "waited", "held"]
    assert first.count(HARMLESS) == 2
    assert first.endswith("       2      7       -  1 min 1 s")
    assert second[head.index("event") :].startswith("resized to 5  -")
    assert second.endswith("-      -       -          -")


@pytest.mark.slow
async def test_the_history_is_printed(servers: Servers, prefix: str) -> None:
    """The newest last, as a table or a line of JSON each; status 1 tells that there is none."""
    place = ("--url", servers["valkey9"].url, "--prefix", prefix)
    async with Redlease.from_url(servers["valkey9"].url, prefix=prefix) as client:
        lock = client.lock("ledger", history=10)
        await lock.acquire(ticket="t")
        await lock.release("t")
    table = await run_async("history", "ledger", *place)
    lines = await run_async("history", "ledger", "--json", "--count", "1", *place)
    none = await run_async("history", "unknown", *place)
    assert [line.split()[2] for line in table.stdout.splitlines()[1:]] == ["granted", "forced"]
    assert json.loads(lines.stdout)["event"] == "forced"
    assert (none.returncode, none.stdout) == (1, "")
    assert "there is no history of 'unknown'" in none.stderr


@pytest.mark.slow
async def test_a_measurement_leaves_nothing(servers: Servers, prefix: str) -> None:
    """Every figure is there, in JSON and for people; what it used is gone soon after it, without being deleted."""
    url = servers["valkey9"].url
    done = await run_async("bench", "--seconds", "0.3", "--json", "--url", url, "--prefix", prefix)
    measured = json.loads(done.stdout)
    for what in ("round_trip", "pair", "pairs", "hand_off"):
        assert 0 < measured[what]["median_ms"] <= measured[what]["slowest_hundredth_ms"]
        assert measured[what]["per_second"] > 1
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as raw:
        for key in await keys_of(raw, f"{prefix}:*"):
            assert 0 < await raw.pttl(key) < 11_000
    told = await run_async("bench", "--seconds", "0.3", "--url", url, "--prefix", prefix)
    assert [line.split("  ")[0] for line in told.stdout.splitlines()] == [
        *("server", "round trip", "one lock", "many locks", "hand-off"),
    ]


def test_no_two_names_look_alike() -> None:
    """A line break is not shown as a name with a backslash and an n in it is."""
    names = ["a\nb", r"a\nb", r"a\\nb", "a\\\nb", "a\x1b", r"a\x1b"]
    assert len({plain(name) for name in names}) == len(names)
