"""The commands on resources of which a part was deleted or overwritten: each goes on, and says what it saw."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from redlease import Redlease
from redlease._cli.doctor.examination import examine
from redlease._cli.doctor.findings import Finding, Level
from redlease._cli.top.command import Top
from redlease._cli.top.screen import draw
from redlease._core.protocol.encoding import Resource

from command_line import run_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import Servers
    from servers import Server


@pytest.fixture
def server(servers: Servers) -> Server:
    """The server of the commands."""
    return servers["valkey9"]


@pytest.fixture
async def client(server: Server, prefix: str) -> AsyncIterator[Redlease]:
    """Holds five resources; a part of the state of four of them is deleted or overwritten."""
    async with Redlease.from_url(server.url, prefix=prefix) as client:
        for name in ("foreign", "garbled", "no-record", "no-state", "sound"):
            await client.lock(name).acquire(ticket=f"held {name}")
        server.cli("SET", Resource(prefix, "foreign").keys[0], "something else")
        server.cli("HSET", Resource(prefix, "garbled").keys[0], "theld garbled", "1 x")
        server.cli("HDEL", Resource(prefix, "no-record").keys[0], "theld no-record")
        server.cli("DEL", Resource(prefix, "no-state").keys[0])
        yield client


@pytest.mark.usefixtures("client")
async def test_doctor_names_the_damage_and_goes_on(server: Server, prefix: str) -> None:
    """What cannot be read of each resource is one finding that says what to do; leases of the others are judged."""
    findings: dict[str, Finding] = {each.check: each for each in await examine(server.url, prefix)}
    damage = findings["damage"]
    assert damage.level == Level.ERROR
    for text in (
        "4 cannot be read: ",
        "holder held garbled of garbled (its record is unreadable)",
        "holder held no-record of no-record (its record is missing)",
        "holder held no-state of no-state (its record is missing)",
        "resource 'foreign': one of its keys holds something that redlease did not write",
    ):
        assert text in damage.detail
    assert "redlease release NAME --all" in damage.advice
    assert findings["leases"].detail == "1 permit on 4 resources, none overdue for renewal"


async def test_doctor_says_that_all_can_be_read(server: Server, prefix: str) -> None:
    """With nothing damaged the finding is no warning."""
    async with Redlease.from_url(server.url, prefix=prefix) as client, client.lock("sound").hold():
        findings = {each.check: each for each in await examine(server.url, prefix)}
    assert findings["damage"] == Finding("damage", Level.OK, "1 resource, of which all entries can be read")


@pytest.mark.slow
@pytest.mark.usefixtures("client")
async def test_commands_show_and_release_what_is_damaged(server: Server, prefix: str) -> None:
    """`ls` lists all five, `inspect` names the entry, and `release` frees it by its ticket and with all others."""
    place = ("--url", server.url, "--prefix", prefix)
    listed = await run_async("ls", "--json", *place)
    held = {
        each["resource"]: (each["in_use"], bool(each["error"])) for each in map(json.loads, listed.stdout.splitlines())
    }
    assert held == {
        "foreign": (0, True),
        "garbled": (1, False),
        "no-record": (1, False),
        "no-state": (1, False),
        "sound": (1, False),
    }
    shown = await run_async("inspect", "no-record", *place)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "damaged holder held no-record: its record is missing; ends in 2" in shown.stdout
    as_json = json.loads((await run_async("inspect", "garbled", "--json", *place)).stdout)
    assert [each["reason"] for each in as_json["damaged"]] == ["its record is unreadable"]
    released = await run_async("release", "no-record", "held no-record", *place)
    assert (released.returncode, released.stdout) == (0, "held no-record is taken out of no-record.\n")
    for name in ("garbled", "no-state"):
        released = await run_async("release", name, "--all", "--yes", *place)
        assert (released.returncode, released.stdout) == (0, f"1 released of {name}.\n"), released.stderr


async def test_top_shows_what_is_damaged(client: Redlease) -> None:
    """An opened resource has a line for the entry, and one that cannot be read at all says why."""
    top = Top(client, "*", 1)
    await top.read()
    assert top.view.listed()[0].resource == "foreign"
    assert len(top.view.listed()) == 5
    for name, text in (
        ("no-record", "damaged holder held no-record: its record is missing"),
        ("foreign", "Delete that"),
    ):
        top.view.opened, top.view.detail = name, None
        await top.read()
        assert text in draw(top.view, 200, 30).plain
