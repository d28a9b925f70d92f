"""`redlease top`: what it shows, what keys do, what it costs the server, and how it leaves the terminal."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest
import redis.asyncio

from redlease import HistoryEntry, Permit, Redlease, Snapshot
from redlease._cli.top.command import Top
from redlease._cli.top.screen import draw
from redlease._cli.top.terminal import keys_in
from redlease._cli.top.view import Detail, View
from redlease._core.primitives.overview import Summary

from command_line import HARMLESS, HOSTILE, run_async
from helpers import cancel, eventually, queue_up
from on_terminal import PATIENCE_S, OnTerminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import OwnServer, Servers


def summary(name: str, *, in_use: int = 0, waiting: int = 0, wait_ms: int | None = None, history: int = 0) -> Summary:
    """Make a line."""
    return Summary(name, 3, in_use, waiting, 1000 if in_use else None, wait_ms, 1, history)


def pressed(view: View, *keys: str) -> View:
    """Press the keys, and draw as the command does."""
    for key in keys:
        view.press(key)
        draw(view, 80, 12)
    return view


def names(view: View) -> list[str]:
    """Return the resources in order."""
    return [each.resource for each in view.listed()]


@pytest.fixture
def view() -> View:
    """Three resources, of which one is waited for longest, one by most, and one is held by most."""
    return pressed(
        View(
            [
                summary("long", in_use=1, waiting=1, wait_ms=9000),
                summary("many", in_use=2, waiting=7, wait_ms=100),
                summary("held", in_use=3),
            ]
        ),
        "w",
        "w",
    )


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        (["w"], ["held", "many", "long"]),
        (["n"], ["many", "long", "held"]),
        (["n", "n"], ["held", "long", "many"]),
        (["u"], ["held", "many", "long"]),
        (["r"], ["held", "long", "many"]),
        (["r", "r"], ["many", "long", "held"]),
    ],
)
def test_keys_sort(keys: list[str], order: list[str]) -> None:
    """Each column has a key; pressing it again reverses the order."""
    first = View(
        [
            summary("long", in_use=1, waiting=1, wait_ms=9000),
            summary("many", in_use=2, waiting=7, wait_ms=100),
            summary("held", in_use=3),
        ]
    )
    assert names(pressed(first, *keys)) == order


def test_a_filter_is_typed(view: View) -> None:
    """Letters that are commands elsewhere are text, a backspace takes the last one back, and escape shows all again."""
    pressed(view, "/", "Q", "backspace", "L", "d", "backspace", "o", "enter")
    assert (view.pattern, view.typing, names(view)) == ("Lo", False, ["long"])
    assert names(pressed(view, "escape")) == ["long", "many", "held"]
    pressed(view, "/", "x", "escape")
    assert (view.pattern, view.typing, view.ended) == ("", False, False)
    assert pressed(view, "q").ended


def test_a_resource_stays_selected_when_the_order_changes(view: View) -> None:
    """It is opened, scrolled and closed, and is the selected one still."""
    pressed(view, "down")
    view.summaries = [summary("many", wait_ms=1), summary("new", wait_ms=50), summary("long", wait_ms=9000)]
    assert pressed(view, "enter").opened == "many"
    pressed(view, "down", "down", "escape")
    assert view.opened is None
    assert pressed(view, "enter").opened == "many"


def test_the_selected_one_is_in_the_window() -> None:
    """However many there are, and however few rows."""
    view = View([summary(f"r{number:03}") for number in range(300)])
    for keys, selected in ((["end"], "r299"), (["page up"], "r291"), (["home", "up"], "r000"), (["page down"], "r008")):
        pressed(view, *keys)
        shown, at = view.window(8)
        assert (shown[at].resource, len(shown), [each.resource for each in shown]) == (selected, 8, view.shown)
    view.summaries = view.summaries[:3]
    assert [each.resource for each in view.window(8)[0]] == ["r000", "r001", "r002"]
    view.summaries = []
    assert view.window(8) == ([], 0)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (30, 6), (200, 50), (1, 1)])
def test_the_screen_is_as_large_as_the_terminal(width: int, height: int) -> None:
    """No line is longer, there are no more, and nothing of a name is obeyed by the terminal."""
    permit = Permit(HOSTILE, HOSTILE, 7, 1, 3, 30_000, 0, 30_000, HOSTILE)
    entry = HistoryEntry("1-0", 1, "lost", HOSTILE, HOSTILE, 7, 1, held_ms=5)
    listed = View([summary(HOSTILE + "ü漢" * 60, in_use=1, history=10)], trouble="")
    opened = View([], opened=HOSTILE, detail=Detail(Snapshot(HOSTILE, 3, (permit,) * 40, (), 7, 1), [entry]))
    failed = View([], trouble=f"no server\n{HOSTILE}")
    for view in (listed, opened, failed, View()):
        text = draw(view, width, height)
        assert text.plain.count("\n") == height - 1
        assert all(line.cell_len <= width for line in text.split("\n"))
        assert not {"\x1b", "\x9b", "\u202e"} & set(text.plain)
    assert HARMLESS in draw(listed, 300, 24).plain


def test_keys_are_told_apart() -> None:
    """Those that send several characters come as one, with those typed before and after; unknown ones do not come."""
    assert [*keys_in("a\x1b[A\x1bOB\x1b[5~\x1b[1;5Cü\r\x7f\x1b")] == [
        *("a", "up", "down", "page up", "ü", "enter", "backspace", "escape"),
    ]


async def test_a_refresh_costs_a_script_for_each_resource_that_is_shown(own_server: OwnServer, prefix: str) -> None:
    """And a history is read only if its resource has changed; nothing takes the keys as a whole."""
    server = own_server("valkey9")
    async with Redlease.from_url(server.url, prefix=prefix, history=10) as client:
        for number in range(40):
            await client.lock(f"r{number:02}").acquire()
        top = Top(client, "*", 1)

        async def refresh() -> dict[str, int]:
            server.cli("CONFIG", "RESETSTAT")
            top._overview._all_at_ms = float("inf") if top.view.summaries else 0.0  # the others are not due
            await top.read()
            draw(top.view, 80, 14)
            async with redis.asyncio.Redis.from_url(server.url) as raw:
                stats = await raw.info("commandstats")
            return {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}

        assert (await refresh())["evalsha"] == 40
        assert (await refresh())["evalsha"] == 10 + 10  # now their histories are read
        calls = await refresh()
        assert calls["evalsha"] == 10
        assert not calls.keys() & {"keys", "scan", "xrevrange"}
        assert await client.lock("r03").release_all() == 1
        assert (await refresh())["xrevrange"] == 1
        assert top.view.losses["r03"] == (0, 1)


async def test_one_that_cannot_be_read_hides_no_other(own_server: OwnServer, prefix: str) -> None:
    """Its line has the error, opened it says why, and the others are read and their losses counted."""
    server = own_server("valkey9")
    async with (
        Redlease.from_url(server.url, prefix=prefix, history=10) as client,
        redis.asyncio.Redis.from_url(server.url) as raw,
    ):
        for name in ("good", "unlogged"):
            await client.lock(name).acquire()
            await client.lock(name).release_all()
        await raw.set(f"{prefix}:{{bad}}:state", "x")
        await raw.delete(f"{prefix}:{{unlogged}}:history")
        await raw.set(f"{prefix}:{{unlogged}}:history", "x")
        top = Top(client, "*", 1)
        await top.read()
        draw(top.view, 400, 14)  # only now it is known what is shown, of which losses are counted
        await top.read()
        shown = draw(top.view, 400, 14).plain
        assert re.search(r"-  bad  \(.*WRONGTYPE", shown)
        assert re.search(r" 0  +1  good", shown)
        assert re.search(r"\?  +\?  unlogged", shown)
        assert top.view.trouble == ""
        pressed(top.view, "enter")
        await top.read()
        assert "WRONGTYPE" in draw(top.view, 100, 14).plain
        pressed(top.view, "escape")
        await top.read()
        assert top.view.trouble == ""


@pytest.fixture
def place(servers: Servers, prefix: str) -> tuple[str, ...]:
    """The options that name server and prefix."""
    return ("--url", servers["valkey9"].url, "--prefix", prefix)


@pytest.mark.slow
async def test_on_a_terminal(servers: Servers, prefix: str, place: tuple[str, ...]) -> None:
    """Resources come and go, are sorted, filtered and opened by keys, and q ends it with the terminal as it was."""
    async with (
        Redlease.from_url(servers["valkey9"].url, prefix=prefix, lease=600, waiter_lease=60, history=50) as client,
        OnTerminal("top", *place, "--every", "0.1", columns=140) as terminal,
    ):
        await terminal.shows("0 resources, 0 of them held, 0 waiting", "q quit")
        gpu, other = client.semaphore("gpu", capacity=2), client.lock(HOSTILE)
        await other.acquire(ticket=HOSTILE)
        await gpu.acquire(weight=2)
        waiting = await queue_up(gpu, 2)
        await terminal.shows("2 resources, 2 of them held, 2 waiting", "2 of 2        2", HARMLESS)
        terminal.press("/order\r")
        assert "gpu" not in await terminal.shows("filter: order")
        terminal.press("\r")
        await terminal.shows("holds", HARMLESS, "history, the newest first", "granted", "escape back")
        await other.release(HOSTILE)
        await terminal.shows("forced", "0 of 1 held")
        terminal.press("\x1b")
        terminal.press("\x1b")
        screen = await terminal.shows("gpu", HARMLESS)
        assert screen.index("gpu") < screen.index(HARMLESS)
        terminal.press("rr")
        await eventually(lambda: terminal.screen.index(HARMLESS) < terminal.screen.index("gpu"), within=PATIENCE_S)
        terminal.resize(10, 60)
        os.kill(terminal.process.pid, signal.SIGWINCH)
        await eventually(lambda: terminal.screen.count("\n") == 9, within=PATIENCE_S)
        assert not {"\x9b", "\u202e"} & set(terminal.written)
        terminal.press("q")
        assert await terminal.status() == 0
        await eventually(lambda: terminal.is_restored, within=PATIENCE_S)
        await cancel(*waiting)


@pytest.mark.slow
async def test_a_thousand_resources_cost_little(own_server: OwnServer, prefix: str) -> None:
    """With 5,000 waiters a redraw takes less than 100 ms of processor time, and the server is asked for what is shown.

    Counted, not timed, for the server: a script a resource that is shown and reading, and all others every ten seconds.
    """
    server, rows = own_server("valkey9"), 40
    async with Redlease.from_url(server.url, prefix=prefix, lease=600, waiter_lease=600) as client:
        locks = [client.lock(f"resource-{number:04}") for number in range(1000)]
        await asyncio.gather(*(lock.acquire() for lock in locks))
        waiting = [asyncio.create_task(lock.acquire()) for lock in locks for _ in range(5)]
        place = ("--url", server.url, "--prefix", prefix)
        async with OnTerminal("top", *place, rows=rows) as terminal:
            await terminal.shows("1000 resources, 1000 of them held, 5000 waiting")
            server.cli("CONFIG", "RESETSTAT")
            began_s, cpu_s, drawn = time.monotonic(), terminal.cpu_s, terminal.drawn
            await eventually(lambda: terminal.drawn >= drawn + 4, within=PATIENCE_S)
            redraws = terminal.drawn - drawn
            assert (terminal.cpu_s - cpu_s) / redraws < 0.1
            async with redis.asyncio.Redis.from_url(server.url) as raw:
                calls = {name: stats["calls"] for name, stats in (await raw.info("commandstats")).items()}
            rounds = 1 + (time.monotonic() - began_s) // 10
            assert calls["cmdstat_evalsha"] <= (redraws + 1) * rows + rounds * len(locks)
            assert not calls.keys() & {f"cmdstat_{name}" for name in ("keys", "hgetall", "smembers", "xrevrange")}
        await cancel(*waiting)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda terminal: terminal.press("\x03"), 130),
        (lambda terminal: terminal.process.send_signal(signal.SIGTERM), 128 + signal.SIGTERM),
    ],
    ids=["Ctrl-C", "SIGTERM"],
)
async def test_the_terminal_is_restored(end: Callable[[OnTerminal], None], status: int, place: tuple[str, ...]) -> None:
    """However it ends, and while it is suspended by Ctrl-Z, the terminal is as it was before."""
    async with OnTerminal("top", *place) as terminal:
        await terminal.shows("q quit")
        assert not terminal.is_restored
        terminal.press("\x1a")
        await eventually(lambda: terminal.is_restored, within=PATIENCE_S)
        terminal.process.send_signal(signal.SIGCONT)
        await eventually(lambda: not terminal.is_restored, within=PATIENCE_S)
        end(terminal)
        assert await terminal.status() == status
        await eventually(lambda: terminal.is_restored, within=PATIENCE_S)


@pytest.mark.slow
async def test_a_server_that_goes_is_told_on_the_screen(own_server: OwnServer, prefix: str) -> None:
    """Keys work meanwhile, and the resources are shown again when it is back."""
    server = own_server("valkey9")
    async with Redlease.from_url(server.url, prefix=prefix) as client:
        await client.lock("invoice").acquire()
    async with OnTerminal("top", "--url", server.url, "--prefix", prefix, "--every", "0.2") as terminal:
        await terminal.shows("invoice")
        server.kill()
        await terminal.shows("invoice", "the Redis server was not reached")
        terminal.press("q")
        assert await terminal.status() == 0
        await eventually(lambda: terminal.is_restored, within=PATIENCE_S)


@pytest.mark.slow
async def test_without_a_terminal_it_lists_once(servers: Servers, prefix: str, place: tuple[str, ...]) -> None:
    """As `redlease ls` does, and says so; with --json it says nothing else."""
    async with Redlease.from_url(servers["valkey9"].url, prefix=prefix) as client:
        await client.lock("invoice").acquire()
        plainly, as_json = await run_async("top", *place), await run_async("top", "--json", *place)
    assert plainly.returncode == as_json.returncode == 0
    assert plainly.stdout.endswith("  invoice\n")
    assert "no terminal" in plainly.stderr
    assert '"resource": "invoice"' in as_json.stdout
    assert as_json.stderr == ""
