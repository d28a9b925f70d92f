"""What attackers try, and that it gets them nowhere: each test is an attempt, in docs/security.md with its result."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from redis import exceptions

from redlease import Permit, Redlease, RedleaseError
from redlease._cli.demo.timeline import text
from redlease._core.hold import lease_of
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.scripts import RESIZE
from redlease._web.gatherer import Gatherer

from command_line import HARMLESS, HOSTILE, run_async
from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from redlease import Hold

    from conftest import MakeClient, Servers
    from servers import Server

WORSE = f'{HOSTILE}<script>alert(1)</script>"]}}\r\n$3\r\nDEL\r\n]] redis.call("FLUSHALL") --{{}}%7B:state'


@pytest.fixture
def server(servers: Servers) -> Server:
    """A server, which all tests share."""
    return servers["valkey9"]


@pytest.fixture
async def client(server: Server, make_client: MakeClient) -> Redlease:
    """The client under attack."""
    return await make_client(url=server.url)


@contextlib.asynccontextmanager
async def user(server: Server, name: str, *rights: str) -> AsyncIterator[Any]:
    """Log in as a user who has these rights and no others."""
    server.cli("ACL", "SETUSER", name, "reset", "on", ">pw", *rights)
    attacker = redis.asyncio.Redis(port=server.port, username=name, password="pw", decode_responses=True)
    try:
        yield attacker
    finally:
        await attacker.aclose()
        server.cli("ACL", "DELUSER", name)


# Who may publish, and has no other right


@dataclass
class Scene:
    """A hold, whoever waits for it, and what there is to know of them.

    `heard` is what an eavesdropper has recorded on the client's channel; `shown` are the secret ids in it. All else
    is for everybody to see: tickets name the client, and so its channel.
    """

    hold: Hold
    state_key: str
    ticket: str
    heard: list[str]
    shown: str
    now_ms: int

    def grant(self, request: str) -> str:
        """Forge a grant with a fence that could be one."""
        return f"g {request} {self.now_ms * 1000} {self.now_ms} {self.now_ms + 60_000} 1"


async def recorded_grant(pubsub: Any) -> list[str]:
    """Return what comes to a channel up to the next grant."""
    heard: list[str] = []
    async with asyncio.timeout(5):
        while not heard or not heard[-1].startswith("g "):
            message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=1)
            heard += [message["data"]] if message else []
    return heard


def tickets_near(scene: Scene) -> list[str]:
    """Return the tickets that the client of this one draws before and after it."""
    client_id = scene.ticket.partition("-")[0]
    return [f"{client_id}-{mark}{number:x}" for mark in ("", "h") for number in range(100)]


PUBLISHED: dict[str, Callable[[Scene], list[str | bytes]]] = {
    "a grant to a ticket that all can see": lambda scene: [scene.grant("waiter"), scene.grant(scene.ticket)],
    "grants to guessed requests": lambda scene: [scene.grant(ticket) for ticket in tickets_near(scene)],
    "a grant to nobody": lambda scene: [scene.grant(""), scene.grant("*"), scene.grant("%s")],
    "a loss by its ticket": lambda scene: [f"x {scene.ticket}", f"x {scene.state_key}"],
    "a shortened lease by its ticket": lambda scene: [f"r {scene.ticket}", "r waiter"],
    "a weight that never fits": lambda scene: ["m waiter 0", f"m {scene.ticket} 0"],
    "a capacity of nothing": lambda scene: [f"c 0 {scene.state_key}"] * 20,
    "a capacity of all": lambda scene: [f"c {2**31 - 1} {scene.state_key}"] * 20,
    "a lease that has ended": lambda scene: [f"l {scene.shown} 0", f"l {scene.ticket} 0"] * 20,
    "another resource's messages": lambda scene: ["c 0 other:{r}:state", "l {} 0", f"c 0 {scene.state_key}:x"],
    "malformed messages": lambda _: [
        "",
        " ",
        "g",
        "g x",
        "x",
        "\N{SNOWMAN} 1",
        b"\xff\x00",
        "g  1 1 1 1",
        "\r\n+OK\r\n",
    ],
    "numbers beyond all bounds": lambda scene: [
        f"g {scene.shown} {'9' * 400} 0 {'9' * 4000} 1",
        f"c {10**400} {scene.state_key}",
    ],
    "a flood": lambda scene: [f"c 0 {scene.state_key}", f"r {scene.shown}"] * 100,
    "a huge message": lambda _: [b"x" * 40_000_000],
    # Who has listened too
    "a shortened lease with the secret id": lambda scene: [f"r {scene.shown}"] * 20,
    "real messages again": lambda scene: [*scene.heard, *reversed(scene.heard)] * 5,
    "a second grant to who holds": lambda scene: [scene.grant(scene.shown)] * 3,
}


@pytest.mark.parametrize("name", PUBLISHED)
async def test_published(
    server: Server, client: Redlease, make_client: MakeClient, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is granted who is not, the hold stays, and the waiter keeps its place and is next."""
    caplog.set_level(logging.CRITICAL, logger="redlease")
    other = await make_client(url=server.url)
    first = await other.lock("r").acquire()
    channel = client._session.connection.channel
    async with user(server, "listener", "&*", "+subscribe") as listener, listener.pubsub() as pubsub:
        await pubsub.subscribe(channel)
        asking = asyncio.create_task(_held(client))
        await until_waiting(other.lock("r"), 1)
        await other.lock("r").release(first)
        hold = await asking
        heard = await recorded_grant(pubsub)
    shown = heard[-1].split()[1]
    waiting = asyncio.create_task(client.lock("r").acquire(ticket="waiter"))
    await until_waiting(other.lock("r"), 1)
    state_key = client.lock("r")._resource.state_key.decode()
    scene = Scene(hold, state_key, hold.ticket, heard, shown, int(time.time() * 1000))
    async with user(server, "publisher", "&*", "+publish") as publisher:
        for payload in PUBLISHED[name](scene):
            await publisher.publish(channel, payload)
            await publisher.publish(f"{state_key}:watch", payload[:100])
        with pytest.raises(exceptions.NoPermissionError):
            await publisher.execute_command("PUBSUB", "CHANNELS")
    assert await client.lock("r").is_held(hold.permit)  # its reply comes behind them
    await asyncio.sleep(0.05)
    hold.check()
    assert not waiting.done()
    snapshot = await other.lock("r").inspect()
    assert [permit.ticket for permit in snapshot.holders] == [hold.ticket]
    assert [waiter.ticket for waiter in snapshot.waiters] == ["waiter"]
    assert await hold.release()
    permit = await waiting
    assert hold.fence < permit.fence < 2**52
    assert await other.lock("r").is_held(permit)


async def _held(client: Redlease) -> Hold:
    return await client.lock("r").hold()


async def test_a_grant_to_a_request_that_an_earlier_message_has_shown(server: Server, client: Redlease) -> None:
    """Who has read the id of a request that still waits forges a grant: the server is asked, and it waits on."""
    held = await client.lock("r").acquire()
    waiting = asyncio.create_task(_held(client))
    await until_waiting(client.lock("r"), 1)
    (request,) = client._session.pending
    now_ms = int(time.time() * 1000)
    channel = client._session.connection.channel
    async with user(server, "publisher", "&*", "+publish") as publisher:
        await publisher.publish(channel, f"x {request}")
        await publisher.publish(channel, f"g {request} {now_ms * 1000} {now_ms} {now_ms + 9000} 1")
    await client.lock("other").locked()
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await client.lock("r").release(held)
    async with await waiting as hold:
        assert held.fence < hold.fence


# Who has all rights on another prefix

REFUSED = r"(?i)permission|can't access|ACL failure"
OTHER = ("~other:*", "&other:*", "+@all", "-@admin", "-@dangerous")


@pytest.mark.parametrize(
    ("name", "command"),
    {
        "read a record": "HGETALL {key}",
        "write a record": "HSET {key} f 9",
        "delete a resource": "DEL {key}",
        "rename one onto it": "RENAME other:x {key}",
        "copy it out": "COPY {key} other:x",
        "reach it from a script": "EVAL return(redis.call('HGETALL','{key}')) 0",
        "call redlease's own script": "EVALSHA {sha} 5 {keys} tag 1000 1000",
        "listen on its channel": "SUBSCRIBE {channel}",
        "listen by a pattern": "PSUBSCRIBE *",
        "publish on its channel": "PUBLISH {channel} hello",
        "publish from a script": "EVAL return(redis.call('PUBLISH','{channel}','hello')) 0",
    }.items(),
)
async def test_from_another_prefix(server: Server, client: Redlease, name: str, command: str) -> None:
    """The server refuses whatever names a key or a channel of the prefix."""
    del name
    resource = client.lock("r")._resource
    async with client.lock("r").hold() as hold, user(server, "neighbour", *OTHER) as neighbour:
        words = {"key": resource.keys[0], "keys": "\0".join(resource.keys), "sha": RESIZE.sha}
        words["channel"] = client._session.connection.channel
        filled = [part for word in command.split() for part in word.format(**words).split("\0")]
        with pytest.raises(exceptions.ResponseError, match=REFUSED):
            await neighbour.execute_command(*filled)
        assert await client.lock("r").is_held(hold.permit)


async def test_another_prefix_flushes_the_scripts(server: Server, client: Redlease) -> None:
    """The scripts are everybody's; without them the client loads them again, and holds and waiters go on."""
    async with user(server, "neighbour", *OTHER) as neighbour, client.lock("r").hold() as hold:
        waiting = asyncio.create_task(client.lock("r").acquire())
        await until_waiting(client.lock("r"), 1)
        await neighbour.script_flush()
        assert await hold.release()
        assert (await waiting).fence > hold.fence


def test_names_that_collide_with_another_prefix() -> None:
    """No name under one prefix gives a key of another one: braces, colons, escapes, hash tags, longer prefixes."""
    parts = (
        "p",
        "p:q",
        "q",
        "{",
        "}",
        "{q}",
        "%7B",
        "%257B",
        "}:state",
        ":q:{x}",
        "x}:state:{y",
        "é",
        "e\u0301",
        "\0",
    )
    prefixes = ("p", "p:q", "pp", "p:client", "P")
    keys = [key for prefix in prefixes for name in parts for key in Resource(prefix, name).keys]
    assert len(keys) == len(set(keys))
    for prefix in prefixes:
        for name in parts:
            key = Resource(prefix, name).state_key
            assert [each for each in prefixes if Resource.named_by(each, key) is not None] == [prefix]
            assert key.count(b"{") == key.count(b"}") == 1


# Who chooses names, tickets, owners and metadata under the same prefix


async def test_text_that_would_be_code(client: Redlease) -> None:
    """Lua, RESP and JSON in every text come back as they were given, and nothing else is on the server."""
    lock = client.lock(WORSE, history=10)
    permit = await lock.acquire(ticket=WORSE, owner=WORSE, metadata={WORSE: WORSE})
    (holder,) = (await lock.inspect()).holders
    assert (holder.ticket, holder.owner, holder.metadata) == (WORSE, WORSE, {WORSE: WORSE})
    assert [entry.owner for entry in await lock.history()] == [WORSE]
    assert not await client.lock("r").locked()
    assert await lock.release(permit)


@pytest.mark.parametrize("ticket", ["f", "tf", "!x", "\0", "a b", "{p|1}r", "x|1", "*", "-1", "'"])
async def test_tickets_named_like_what_redlease_keeps(client: Redlease, ticket: str) -> None:
    """A ticket is a ticket, whatever else has that name: the lock is held once, and passes on."""
    lock = client.lock("r")
    permit = await lock.acquire(ticket=ticket)
    assert await client.lock("r").try_acquire(ticket=f"{ticket}2") is None
    assert await lock.release(permit)
    assert (await lock.acquire(ticket=f"{ticket}2")).fence > permit.fence


async def test_names_that_look_alike(client: Redlease) -> None:
    """Names that differ in a byte are other resources: nothing is normalised, folded, trimmed or decoded."""
    alike = ["é", "e\u0301", "E\u0301", " é", "é ", "é\0", "%C3%A9", "\u212b", "\u00c5", "{é}", "\uff5bé\uff5d"]
    permits = [await client.lock(name).try_acquire() for name in alike]
    assert all(isinstance(permit, Permit) for permit in permits)


async def test_names_that_are_too_long(client: Redlease) -> None:
    """Every text has a bound, and what is beyond it changes nothing."""
    for options in (
        {"ticket": "t" * 257},
        {"owner": "o" * 257},
        {"metadata": {"k": "\x01" * 2000}},
        {"ticket": "\ud800"},
    ):
        with pytest.raises(ValueError, match=r"bytes|UTF-8"):
            await client.lock("r").acquire(**options)
    with pytest.raises(ValueError, match="bytes"):
        client.lock("n" * 513)
    assert not await client.lock("r").locked()


@pytest.mark.slow
async def test_what_a_terminal_would_obey(server: Server, client: Redlease, prefix: str) -> None:
    """`redlease inspect` shows it escaped."""
    async with client.lock("r").hold(ticket=HOSTILE, owner=HOSTILE, metadata={"k": HOSTILE}):
        done = await run_async("inspect", "r", "--url", server.url, "--prefix", prefix)
    assert HARMLESS.split()[0] in done.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", done.stdout)


async def test_what_a_browser_would_obey(client: Redlease) -> None:
    """An event of the web view is one line of JSON, and a picture of the demo has no element that a name made."""
    async with client.lock(WORSE).hold(ticket=WORSE):
        gatherer = Gatherer(client)
        with gatherer.viewer(WORSE) as viewer:
            events = b"".join(await eventually(lambda: len(news := viewer.news()) > 1 and news))
    for event in events.decode().strip("\n").split("\n\n"):
        kind, data = event.split("\n")
        assert kind.startswith("event: ")
        json.loads(data.removeprefix("data: "))
    assert text("name", 1, 2, WORSE).count("<") == 2


async def test_what_a_log_would_believe(client: Redlease, caplog: pytest.LogCaptureFixture) -> None:
    """A name with a line break makes no line of its own in logs and errors."""
    hold = await client.lock(WORSE, lease=30).hold(ticket=WORSE)
    lease_of(hold).lose("for a test", "gone")
    (record,) = [record for record in caplog.records if "lost" in record.message]
    assert "\n" not in record.getMessage()
    with pytest.raises(RedleaseError) as caught:
        hold.check()
    assert "\n" not in str(caught.value)
    assert "\n" not in repr(hold)
