"""Servers that users have, which are not among the engines of the other tests: the primitives one by one."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from redlease import Durability, NotReplicated, Redlease, RedleaseError
from redlease._cli.doctor.examination import examine
from redlease._core.transport.opening import dialects

from clusters import until
from command_line import run_async
from dialects import DialectProxy, lacks
from other_servers import MINIREDIS, OTHER_SERVERS, WHEELS
from primitive_checks import CHECKS, Check, check_everything
from servers import Server, running_other
from web_view import served

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redlease._cli.doctor.findings import Finding

pytestmark = pytest.mark.slow

# What is chosen by itself: miniredis grants RESP3, and takes no commands on it after SUBSCRIBE.
PROTOCOLS = {"redis8": 3, "valkey8": 3, MINIREDIS: 2}

# What the documentation of managed services forbids, and what proxies do not pass on (docs/servers.md).
MANAGED = "ACL BGREWRITEAOF BGSAVE CLUSTER COMMAND CONFIG DEBUG LASTSAVE MONITOR REPLICAOF ROLE SAVE SLAVEOF SYNC"
PROXY = "HELLO SCRIPT SUBSCRIBE UNSUBSCRIBE INFO CONFIG SCAN WAIT"
POLL_S = 0.2


@pytest.fixture(params=OTHER_SERVERS, scope="module")
def other(request: pytest.FixtureRequest) -> str:
    """Each of the servers in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def url(other: str) -> Iterator[str]:
    """Its address."""
    with running_other(other) as url:
        yield url
    dialects.forget_all()


async def examined(url: str, prefix: str) -> dict[str, Finding]:
    """Return what the doctor finds, by the name of the check."""
    return {finding.check: finding for finding in await examine(url, prefix)}


@pytest.mark.parametrize("check", CHECKS)
async def test_primitives(url: str, prefix: str, check: Check) -> None:
    """Every primitive works, with the protocol that the client finds by itself."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        await check(client)


async def test_what_is_found(url: str, prefix: str, other: str) -> None:
    """The client and the doctor say which protocol works, and that messages arrive."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        manner = await client._connection.found_manner()
        assert (manner.protocol, manner.silence) == (PROTOCOLS[other], None)
        assert f"RESP{PROTOCOLS[other]}" in repr(client)
    detail = (await examined(url, prefix))["messages"].detail
    assert detail.startswith(f"they arrive; RESP{PROTOCOLS[other]}")


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_protocol_that_the_user_asks_for(url: str, prefix: str, other: str, protocol: int) -> None:
    """Every primitive works with it; where RESP3 does not work, an error says so before anything is asked for."""
    client = Redlease.from_url(url, prefix=prefix, protocol=protocol)
    if protocol > PROTOCOLS[other]:
        with pytest.raises(RedleaseError, match="does not work with RESP3"):
            async with client:
                pass
        return
    async with client:
        await check_everything(client)


async def test_durability(url: str, prefix: str, other: str) -> None:
    """A grant that too few replicas have is given back; with a replica, where a server can have one, it is granted."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        lock = client.lock("r", durability=Durability(replicas=1, timeout=0.1))
        with pytest.raises(NotReplicated, match="0 of 1 replicas"):
            await lock.acquire()
        if other not in WHEELS:
            return
        primary, port = url.removeprefix("redis://").split("/")[0].split(":")
        with Server(other, "--replicaof", primary, port) as replica:
            until(lambda: replica.cli("INFO", "replication")["master_link_status"] == "up")
            async with client.lock("s", durability=Durability(replicas=1, timeout=30)).hold() as hold:
                (held,) = (await client.lock("s").inspect()).holders
                assert held.fence == hold.fence


async def test_the_command(url: str, prefix: str) -> None:
    """`ls`, `inspect` and `doctor` show what is there."""
    options = ("--json", "--url", url, "--prefix", prefix)
    async with Redlease.from_url(url, prefix=prefix) as client, client.lock("r").hold(owner="one"):
        listed = await run_async("ls", *options)
        assert [json.loads(line)["resource"] for line in listed.stdout.splitlines()] == ["r"], listed
        inspected = await run_async("inspect", "r", *options)
        assert [holder["owner"] for holder in json.loads(inspected.stdout)["holders"]] == ["one"], inspected
        examination = await run_async("doctor", *options)
    found = {line["check"]: line for line in map(json.loads, examination.stdout.splitlines())}
    assert found["messages"]["level"] == "ok", examination
    assert found["damage"]["detail"].startswith("1 resource"), examination


async def test_the_web_view(url: str, prefix: str) -> None:
    """It streams the resources as JSON."""
    async with (
        Redlease.from_url(url, prefix=prefix) as client,
        client.lock("r").hold(),
        served("--url", url, "--prefix", prefix) as view,
        httpx.AsyncClient() as browser,
    ):
        base = httpx.URL(view.url).copy_with(path="/", query=None, fragment=None)
        facts = (await browser.get(base.join("/facts"))).json()
        assert facts["prefix"] == prefix
        async with browser.stream("GET", base.join("/events")) as stream, asyncio.timeout(20):
            lines = stream.aiter_lines()
            while '"r"' not in await anext(lines):
                pass


# What a server lacks


@pytest.fixture(scope="module")
def valkey() -> Iterator[int]:
    """The port of a server, of which a proxy forbids something."""
    with Server("valkey8") as server:
        yield server.port
    dialects.forget_all()


@pytest.mark.parametrize("names", [MANAGED, "SCAN", "WAIT", PROXY], ids=["managed", "SCAN", "WAIT", "proxy"])
async def test_commands_that_are_forbidden(valkey: int, prefix: str, names: str) -> None:
    """Every primitive works without them, and the doctor names those that an option or the command wants."""
    async with DialectProxy(valkey, lacks(*names.split())) as proxy:
        async with Redlease.from_url(proxy.url, prefix=prefix, poll_interval=POLL_S) as client:
            await check_everything(client)
            if "WAIT" in names:
                with pytest.raises(RedleaseError, match="`durability` needs WAIT"):
                    await client.lock("r", durability=Durability(1, 0.1)).acquire()
                assert not await client.lock("r").locked()
        found = await examined(proxy.url, prefix)
        if names == MANAGED:
            assert "does not see the settings of the server" in found["rights"].detail
        elif names == PROXY:
            assert "refused INFO" in found["rights"].detail
            assert "none arrive" in found["messages"].detail
        else:
            assert f"lacks +{names.lower()}" in found["rights"].detail
        if "SCAN" in names:
            assert "refused SCAN" in found["keys"].detail
            listed = await run_async("ls", "--url", proxy.url, "--prefix", prefix)
            assert listed.returncode != 0
            assert "SCAN" in listed.stderr


async def test_scripts_that_are_forbidden(valkey: int, prefix: str) -> None:
    """Without scripts there is nothing, and an error says so at once."""
    async with DialectProxy(valkey, lacks("SCRIPT", "EVAL", "EVALSHA")) as proxy:
        client = Redlease.from_url(proxy.url, prefix=prefix)
        with pytest.raises(RedleaseError, match="disabled or renamed a command that redlease needs"):
            async with client:
                pass
        assert "EVAL" in (await examined(proxy.url, prefix))["connection"].detail
