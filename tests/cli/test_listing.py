"""`redlease ls`: what it finds, what it says of it, and what that costs the server."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import pytest
import redis.asyncio

from redlease import Redlease, Unavailable
from redlease._cli.listing import lines_of
from redlease._cli.plain import span
from redlease._core.primitives import overview
from redlease._core.primitives.overview import CHECKED_EACH, Overview, Summary
from redlease._core.protocol.globs import matches

from clusters import Watched
from command_line import HARMLESS, HOSTILE, run_async
from helpers import cancel, eventually, queue_up

if TYPE_CHECKING:
    from conftest import MakeClient, OwnServer, Servers

NAMES = ("plain", "with{braces}", "50%7Boff", "a:b c", "ünï", HOSTILE)


@pytest.fixture
def url(servers: Servers) -> str:
    """A server for commands that are given one."""
    return servers["valkey9"].url


async def names_of(client: Redlease, pattern: str = "*") -> list[str]:
    """Return the names that are listed, in order."""
    return [each.resource for each in await Overview(client._operations, pattern).look()]


async def test_every_resource_is_listed_under_the_name_that_it_was_given(client: Redlease) -> None:
    """Braces, percent signs, spaces and control characters come back as they were, on every master of a cluster too."""
    for name in NAMES:
        await client.lock(name).acquire()
    assert await names_of(client) == sorted(NAMES)


async def test_only_the_prefix_is_listed(client: Redlease, make_client: MakeClient, prefix: str) -> None:
    """Neither a longer prefix nor what a glob would make of one is listed, nor guards and other keys."""
    for other in (f"{prefix}x", f"{prefix}:sub", f"{prefix}?"):
        await (await make_client(prefix=other)).lock("other").acquire()
    await client.lock("own").acquire()
    await client.guard("guarded").check(1)
    assert await names_of(client) == ["own"]
    assert await names_of(await make_client(prefix=f"{prefix}?")) == ["other"]


async def test_a_line_tells_what_is_held_and_who_waits(client: Redlease) -> None:
    """Units held and capacity, waiters, the longest hold and wait, and the last fence."""
    pool = client.semaphore("gpu", capacity=3)
    first, second = await pool.acquire(weight=2), await pool.acquire()
    waiting = await queue_up(pool, 2)
    (line,) = await Overview(client._operations).look()
    snapshot = await pool.inspect()
    assert (line.resource, line.capacity, line.in_use, line.waiting, line.fence) == ("gpu", 3, 3, 2, second.fence)
    held_ms, waited_ms = (
        snapshot.server_time_ms - since for since in (first.granted_at_ms, snapshot.waiters[0].queued_at_ms)
    )
    assert line.longest_hold_ms is not None
    assert line.longest_wait_ms is not None
    assert held_ms - 1000 < line.longest_hold_ms <= held_ms
    assert waited_ms - 1000 < line.longest_wait_ms <= waited_ms
    await cancel(*waiting)


async def test_the_longest_wait_comes_first(client: Redlease) -> None:
    """Then those without waiters, by name."""
    for name in ("d", "c", "b", "a"):
        await client.lock(name).acquire()
    waiting = await queue_up(client.lock("c"), 1)
    await asyncio.sleep(0.01)  # by the server's clock, which has whole milliseconds
    waiting += await queue_up(client.lock("b"), 1)
    assert await names_of(client) == ["c", "b", "a", "d"]
    await cancel(*waiting)


@pytest.mark.parametrize(
    ("pattern", "fitting"),
    [
        ("gpu-*", ["gpu-1", "gpu-2"]),
        ("gpu-[^1]", ["gpu-2"]),
        ("GPU*", []),
        (r"\*", ["*"]),
        ("?", ["*"]),
        ("*", ["*", "gpu-1", "gpu-2"]),
    ],
)
def test_a_pattern_fits_the_whole_name(pattern: str, fitting: list[str]) -> None:
    """And minds upper and lower case."""
    assert [name for name in ("*", "gpu-1", "gpu-2") if matches(name, pattern)] == fitting


async def test_a_pattern_is_a_glob_as_redis_has_them(own_server: OwnServer) -> None:
    """A server finds by MATCH the same keys: for sets, ranges, ends that are missing, and what else chance makes."""
    server, chance = own_server("valkey9"), random.Random(1)
    names = sorted({"".join(chance.choices("aabc-]^[\\*!ü", k=chance.randint(1, 4))) for _ in range(200)})
    patterns = ["[!a]", "[^a]", "[a", "[", "[]", "[^]", "[c-a]", "[a-]", "\\", "**a**", "", "??"]
    patterns += ["".join(chance.choices("aabc-]^[[\\*?!", k=chance.randint(1, 7))) for _ in range(1000)]
    async with redis.asyncio.Redis.from_url(server.url, decode_responses=True) as raw:
        await raw.mset(dict.fromkeys(names, ""))
        async with raw.pipeline(transaction=False) as pipeline:
            for pattern in patterns:
                pipeline.scan(0, match=pattern, count=10_000)
            found = await pipeline.execute()
    for pattern, (_, keys) in zip(patterns, found, strict=True):
        assert [name for name in names if matches(name, pattern)] == sorted(keys), pattern


@pytest.mark.slow
async def test_one_that_cannot_be_read_hides_no_other(own_server: OwnServer, prefix: str) -> None:
    """What has keys of another type, or another's state, is named first, with the error; then `ls` exits with 1."""
    server = own_server("valkey9")
    async with (
        Redlease.from_url(server.url, prefix=prefix) as client,
        redis.asyncio.Redis.from_url(server.url) as raw,
    ):
        await client.lock("good").acquire()
        await raw.set(f"{prefix}:{{string}}:state", "x")
        await raw.hset(f"{prefix}:{{words}}:state", mapping={"f": "many", "c": "few"})
        await client.lock("half").acquire()
        await raw.delete(f"{prefix}:{{half}}:holders")
        await raw.set(f"{prefix}:{{half}}:holders", "x")
        *unreadable, good = await Overview(client._operations).look()
        assert [(each.resource, each.resource in (each.error or "")) for each in unreadable] == [
            *(("half", True), ("string", True), ("words", True)),
        ]
        assert (good.resource, good.in_use, good.error) == ("good", 1, None)
        done = await run_async("ls", "--url", server.url, "--prefix", prefix)
        assert done.returncode == 1
        assert len(done.stdout.splitlines()) == 5
        assert "WRONGTYPE" in done.stdout
        await raw.delete(f"{prefix}:{{string}}:state", f"{prefix}:{{words}}:state", f"{prefix}:{{half}}:holders")
        assert [each.error for each in await Overview(client._operations).look()] == [None, None]


async def test_a_long_queue_costs_no_more_than_a_short_one(own_server: OwnServer, prefix: str) -> None:
    """Only the first waiters of a queue are looked at, all are counted, and no command takes the keys as a whole."""
    server = own_server("valkey9")
    async with Redlease.from_url(server.url, prefix=prefix) as client:
        pool = client.lock("busy")
        await pool.acquire()
        waiting = [asyncio.create_task(pool.acquire()) for _ in range(10 * CHECKED_EACH)]

        async def all_wait() -> bool:
            return (await pool.inspect(max_items=1)).waiting == len(waiting)

        await eventually(all_wait)
        server.cli("CONFIG", "RESETSTAT")
        (line,) = await Overview(client._operations).look()
        assert line.waiting == len(waiting)
        async with redis.asyncio.Redis.from_url(server.url) as raw:
            calls = {name: stats["calls"] for name, stats in (await raw.info("commandstats")).items()}
        assert "cmdstat_keys" not in calls
        assert calls["cmdstat_evalsha"] < 10  # one is the listing; the others are beats
        assert calls["cmdstat_hget"] < CHECKED_EACH
        await cancel(*waiting)


async def test_what_is_not_shown_is_read_seldom(
    own_server: OwnServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live view costs the server one script for each resource that it shows, and all others now and then."""
    server = own_server("valkey9")
    names = [f"r{number:02}" for number in range(50)]
    async with Redlease.from_url(server.url, prefix=prefix) as client:
        for name in names:
            await client.semaphore(name, capacity=2).acquire()
        seldom, soon = Overview(client._operations), Overview(client._operations)
        await soon.look(())
        monkeypatch.setattr(overview, "EACH_MS", 10_000)
        first = await seldom.look({"r00", "gone"})
        assert [each.resource for each in first] == names
        for name in ("r00", "r49"):
            await client.semaphore(name, capacity=2).resize(7)
        server.cli("CONFIG", "RESETSTAT")
        again = await seldom.look({"r00", "gone"})
        async with redis.asyncio.Redis.from_url(server.url) as raw:
            calls = {name: stats["calls"] for name, stats in (await raw.info("commandstats")).items()}
        assert calls["cmdstat_evalsha"] == 1
        assert not calls.keys() & {"cmdstat_keys", "cmdstat_scan"}
        assert (again[0].capacity, again[49].capacity) == (7, 2)
        assert (again[49].longest_hold_ms or 0) >= (first[49].longest_hold_ms or 0)

        async def is_read() -> bool:
            return (await soon.look(()))[49].capacity == 7

        await eventually(is_read)


async def test_the_dead_do_not_wait(client: Redlease, make_client: MakeClient) -> None:
    """Waiters of a client that is gone are not counted when their place has lapsed, those of others are."""
    lock = client.lock("r")
    await lock.acquire()
    gone = await make_client(waiter_lease=0.5)
    waiting = [*await queue_up(gone.lock("r"), 3), *await queue_up(lock, 1)]
    seen = Overview(client._operations)
    await gone.abandon()

    async def one_is_left() -> bool:
        return [each.waiting for each in await seen.look()] == [1]

    await eventually(one_is_left)
    (line,), snapshot = await seen.look(), await lock.inspect()
    assert snapshot.waiting == 1
    assert abs((line.longest_wait_ms or 0) - (snapshot.server_time_ms - snapshot.waiters[0].queued_at_ms)) < 1000
    await cancel(*waiting)


async def test_a_unix_socket_leads_to_its_server(servers: Servers, prefix: str) -> None:
    """There is no address in such a URL; doctor names the server by the path."""
    url = servers["valkey9"].unix_url
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("invoice").acquire()
        assert await names_of(client) == ["invoice"]
        async with client._operations.masters() as (master,):
            assert master.name == url.removeprefix("unix://")


async def test_a_server_that_is_gone_is_an_error(own_server: OwnServer, prefix: str) -> None:
    """The listing ends with one that names the server, rather than with a part of the resources."""
    server = own_server("valkey9")
    async with Redlease.from_url(server.url, prefix=prefix, call_timeout=1) as client:
        await client.lock("invoice").acquire()
        async with client._operations.masters() as (master,):
            await master.ask("PING")
            server.kill()
            with pytest.raises(Unavailable, match=f"the server 127.0.0.1:{server.port} did not answer"):
                await master.ask("PING")
        with pytest.raises(Unavailable):
            await Overview(client._operations).look()


@pytest.mark.slow
async def test_sentinels_lead_to_the_primary(prefix: str) -> None:
    """Behind Sentinels the primary is asked."""
    with Watched("valkey9") as watched:
        async with Redlease.from_url(watched.url, prefix=prefix) as client:
            await client.lock("invoice").acquire()
            assert await names_of(client) == ["invoice"]


async def test_a_user_without_the_right_to_scan_is_told_which_right(own_server: OwnServer, prefix: str) -> None:
    """The error names the server, the command, and how to grant it."""
    server = own_server("valkey9")
    server.cli("ACL", "SETUSER", "lists", "on", ">secret", "~*", "&*", "+@all", "-scan")
    url = server.url.replace("redis://", "redis://lists:secret@")
    done = await run_async("ls", "--url", url, "--prefix", prefix)
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    assert f"127.0.0.1:{server.port} refused SCAN" in done.stderr
    assert "ACL SETUSER <user> +scan" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.slow
async def test_ls_prints_a_table_and_json(url: str, prefix: str) -> None:
    """What a name contains is shown letter for letter and in one line; JSON has a line for each resource."""
    place = ("--url", url, "--prefix", prefix)
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.semaphore(HOSTILE, capacity=2).acquire()
        table, lines, none = await asyncio.gather(
            run_async("ls", *place), run_async("ls", "--json", *place), run_async("ls", "nothing*", *place)
        )
        head, row = table.stdout.splitlines()
        assert head.split("  ")[-1] == "resource"
        assert row.startswith("1 of 2        0             -")
        assert row.endswith(f"  {HARMLESS}")
        (line,) = lines.stdout.splitlines()
        told = json.loads(line)
        assert (told["resource"], told["capacity"], told["in_use"], told["longest_wait_ms"]) == (HOSTILE, 2, 1, None)
        assert (none.returncode, none.stderr.count("no resource under the prefix")) == (0, 1)


def test_a_long_name_moves_no_column() -> None:
    """Names come last, so that the numbers stand below each other however long a name is."""
    wide = Summary("n" * 300, 2**31 - 1, 2**31 - 1, 5000, 90_000, 4_000_000, 1, 0)
    idle = Summary("idle", None, 0, 0, None, None, 0, 0)
    assert [line.plain for line in lines_of([wide, idle])] == [
        "held  waiting  longest wait  longest hold  resource",
        " all     5000     1 h 6 min    1 min 30 s  " + "n" * 300,
        "   0        0             -             -  idle",
    ]


@pytest.mark.parametrize(
    ("span_ms", "shown"),
    [(0, "0.0 s"), (59_999, "59.9 s"), (60_000, "1 min 0 s"), (3_600_000, "1 h 0 min"), (183_600_000, "2 d 3 h")],
)
def test_times_have_two_units(span_ms: int, shown: str) -> None:
    """Seconds have tenths up to a minute; all is rounded down."""
    assert span(span_ms) == shown
