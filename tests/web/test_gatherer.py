"""What the view asks the server, how often, and what browsers are sent of it."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

from redlease import Redlease
from redlease._core import clock
from redlease._core.primitives.overview import Overview
from redlease._core.protocol.encoding import Resource
from redlease._web import gatherer as gathering
from redlease._web.gatherer import Gatherer, Viewer

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from conftest import OwnServer, Servers


def read(events: list[bytes]) -> dict[str, Any]:
    """Return events as a browser reads them, by kind."""
    read: dict[str, Any] = {}
    for event in events:
        first, second, *rest = event.decode().split("\n")
        assert rest == ["", ""]
        read[first.removeprefix("event: ")] = json.loads(second.removeprefix("data: "))
    return read


async def sent(viewer: Viewer, until: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Take what a browser is sent until this is true of the newest state; return that."""
    newest: dict[str, Any] = {}

    async def has_come() -> bool:
        newest.update(read(viewer.news()))
        return bool(until(newest))

    await eventually(has_come, 10)
    return newest


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often than people need."""
    monkeypatch.setattr(gathering, "PERIOD_S", 0.05)


async def test_many_browsers_cost_as_much_as_one(own_server: OwnServer, prefix: str) -> None:
    """Fifty that look at one resource are sent the same bytes, and the server is asked as often as for one."""
    server = own_server("valkey9")
    async with Redlease.from_url(server.url, prefix=prefix) as client:
        await client.lock("invoice").acquire()
        gatherer = Gatherer(client)
        looks = []
        look = gatherer._look_closely

        async def counted() -> float:
            looks.append(1)
            return await look()

        gatherer._look_closely = counted  # type: ignore[method-assign]
        with gatherer.viewer("invoice") as first, gatherer.viewer("invoice") as second:
            await sent(first, lambda newest: newest.keys() >= {"detail", "overview"})
            await sent(second, lambda newest: newest.keys() >= {"detail", "overview"})
            others = [gatherer.viewer("invoice") for _ in range(48)]
            for other in others:
                other.__enter__()
            server.cli("CONFIG", "RESETSTAT")
            looks.clear()
            await eventually(lambda: len(looks) == 10)
            async with redis.asyncio.Redis.from_url(server.url) as raw:
                calls = (await raw.info("commandstats"))["cmdstat_evalsha"]["calls"]
            assert calls <= 4 * len(looks)  # a snapshot, a history and the totals for each look, whoever sees it
            for other in others:
                other.__exit__(None, None, None)
        assert not asks(gatherer)


def tells_of(owner: str, newest: dict[str, Any]) -> bool:
    """Tell whether the details name this owner."""
    return owner in str(newest.get("detail"))


def asks(gatherer: Gatherer) -> bool:
    """Tell whether the server is being asked."""
    return gatherer.is_running


async def test_nothing_is_asked_while_nobody_looks(client: Redlease, gatherer: Gatherer) -> None:
    """The first browser starts the looking, the last one ends it, and the next one is not shown what was."""
    await client.lock("invoice").acquire()
    assert not asks(gatherer)
    with gatherer.viewer(None) as first:
        with gatherer.viewer("invoice") as second:
            await sent(second, lambda newest: "detail" in newest)
        assert asks(gatherer)
        assert "detail" not in await sent(first, lambda newest: "overview" in newest)
    assert not asks(gatherer)
    with gatherer.viewer("invoice") as third:
        assert read(third.news()).keys() == {"status"}


async def test_only_what_a_browser_shows_is_sent_in_full(
    client: Redlease, gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all others there are totals, and of very many resources the first by longest wait."""
    monkeypatch.setattr(gathering, "LISTED_MOST", 20)
    for number in range(25):
        await client.lock(f"lock-{number}").try_acquire(owner="nobody-else", metadata={"k": "v"})
    with gatherer.viewer("lock-7") as viewer:
        newest = await sent(viewer, lambda newest: newest.keys() >= {"detail", "overview", "history"})
    overview = newest["overview"]
    assert (overview["resources"], overview["held"], len(overview["listed"])) == (25, 25, 20)
    assert "nobody-else" not in json.dumps(overview)
    (holder,) = newest["detail"]["snapshot"]["holders"]
    assert (holder["resource"], holder["owner"], holder["metadata"]) == ("lock-7", "nobody-else", {"k": "v"})
    assert [entry["event"] for entry in newest["history"]["entries"]] == ["granted"]


async def test_one_that_cannot_be_read_hides_no_other(
    client: Redlease, gatherer: Gatherer, url: str, prefix: str
) -> None:
    """It is listed with the error, whoever opens it is told why, and the others are shown as ever."""
    await client.lock("good").acquire()
    async with redis.asyncio.Redis.from_url(url) as raw:
        await raw.set(f"{prefix}:{{bad}}:state", "x")
        with gatherer.viewer("bad") as bad, gatherer.viewer("good") as good:
            opened = await sent(bad, lambda newest: newest.keys() >= {"detail", "overview"})
            shown = await sent(good, lambda newest: newest.keys() >= {"detail", "overview", "history"})
        assert "WRONGTYPE" in opened["detail"]["why"]
        assert [(each["resource"], bool(each["error"])) for each in shown["overview"]["listed"]] == [
            *(("bad", True), ("good", False)),
        ]
        assert (shown["detail"]["why"], shown["detail"]["snapshot"]["in_use"]) == ("", 1)
        assert opened["status"] == shown["status"] == {"reachable": True, "why": ""}
        await raw.delete(f"{prefix}:{{bad}}:state")


async def test_a_browser_that_is_slow_gets_the_newest_state(client: Redlease, gatherer: Gatherer) -> None:
    """What has changed again meanwhile is skipped, so that nothing piles up."""
    lock = client.lock("invoice")
    with gatherer.viewer("invoice") as slow, gatherer.viewer("invoice") as quick:
        for number in range(3):
            permit = await lock.acquire(owner=f"owner-{number}")
            await sent(quick, partial(tells_of, permit.owner))
            await lock.release(permit)
        assert len(slow.news()) == 4  # status, overview, history and detail: one each


async def test_an_outage_is_told_and_its_end_too(own_server: OwnServer, prefix: str) -> None:
    """The looking goes on while the server is away, and browsers are told why nothing changes."""
    server = own_server("valkey9")
    async with Redlease.from_url(server.url, prefix=prefix, call_timeout=0.3) as client:
        gatherer = Gatherer(client)
        with gatherer.viewer("invoice") as viewer:
            await sent(viewer, lambda newest: newest["status"]["reachable"] and "detail" in newest)
            server.kill()
            status = (await sent(viewer, lambda newest: newest and not newest["status"]["reachable"]))["status"]
            assert str(server.port) in status["why"] or "reached" in status["why"]
            server.start()
            await sent(viewer, lambda newest: newest.get("status", {}).get("reachable"))
            await client.lock("invoice").acquire(ticket="after")
            await sent(viewer, lambda newest: "after" in str(newest.get("detail")))


async def test_a_search_that_an_outage_stretches_delays_no_other(
    client: Redlease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New names are looked for ten seconds later again, however long the server was away during the last search."""
    now_ms = 1_000_000.0
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
    names = client._operations.names

    async def stretched() -> AsyncGenerator[set[str], None]:
        nonlocal now_ms
        now_ms += 14_000
        async for found in names():
            yield found

    monkeypatch.setattr(client._operations, "names", stretched)
    overview = Overview(client._operations)
    await overview.look()
    await client.lock("after").acquire()
    now_ms += 10_001
    assert [summary.resource for summary in await overview.look()] == ["after"]


async def test_an_error_that_nobody_thought_of_ends_nothing(
    client: Redlease, gatherer: Gatherer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged once with its traceback, the page says so, and the next look that succeeds ends that."""
    failing = True
    look = Overview.look

    async def sometimes(self: Overview, *shown: Any) -> Any:
        if failing:
            raise ZeroDivisionError("a mistake in the code")
        return await look(self, *shown)

    monkeypatch.setattr(Overview, "look", sometimes)
    with caplog.at_level(logging.ERROR, "redlease"), gatherer.viewer(None) as viewer:
        await sent(viewer, lambda newest: "ZeroDivisionError" in newest["status"]["why"])
        await asyncio.sleep(0.2)
        assert len(caplog.records) == 1
        failing = False
        await sent(viewer, lambda newest: newest.get("overview") and newest["status"]["reachable"])


async def test_streams_end_when_the_view_ends(client: Redlease, gatherer: Gatherer) -> None:
    """A browser's stream, which goes on for ever otherwise, wakes up and sees that it is over."""
    del client
    with gatherer.viewer(None) as viewer:
        viewer.news()
        gatherer.close()
        assert gatherer.is_closed
        assert viewer.changed.is_set()


async def test_damage_is_sent_and_other_resources_too(
    client: Redlease, gatherer: Gatherer, servers: Servers, prefix: str
) -> None:
    """A holder without a record is named with the reason; what another browser shows goes on."""
    await client.lock("damaged").acquire(ticket="lost")
    await client.lock("sound").acquire(ticket="held")
    servers["valkey9"].cli("HDEL", Resource(prefix, "damaged").keys[0], "tlost")
    with gatherer.viewer("damaged") as first, gatherer.viewer("sound") as second:
        detail = (await sent(first, lambda newest: "detail" in newest))["detail"]
        assert [(each["name"], each["reason"]) for each in detail["snapshot"]["damaged"]] == [
            ("lost", "its record is missing")
        ]
        assert (detail["known"], detail["why"], detail["snapshot"]["in_use"]) == (True, "", 1)
        detail = (await sent(second, lambda newest: "detail" in newest))["detail"]
        assert [each["ticket"] for each in detail["snapshot"]["holders"]] == ["held"]
