"""The least rights under which redlease runs: they are enough, each is needed, and nothing else is touched."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import redlease
import redlease_temporal
from redlease import Durability, Hold, NotReplicated, Redlease, RedleaseError
from redlease._cli.doctor.examination import examine
from redlease._cli.doctor.findings import Level
from redlease._core.primitives.overview import UNDECLARED, Overview
from redlease._core.protocol import rights

from helpers import until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import OwnServer
    from servers import Server

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "acl" / "redlease.acl"
USERS = {"client": rights.CLIENT, "reader": rights.READER}


SHIPPED_DEFAULT = "user default off resetchannels"


@pytest.fixture
def acl_file(tmp_path: Path) -> str:
    """The file, in which the default user is an administrator, for the test itself."""
    file = tmp_path / "redlease.acl"
    file.write_text(FILE.read_text().replace(SHIPPED_DEFAULT, "user default on nopass ~* &* +@all"))
    return str(file)


@pytest.fixture
def server(own_server: OwnServer, real_engine: str, acl_file: str) -> Server:
    """A server that has loaded the file, for one test alone."""
    return own_server(real_engine, "--aclfile", acl_file)


def admit(server: Server, user: str, *without: str) -> str:
    """Give a user of the file a password, and take some of its commands away; return the URL of database 3 for it."""
    commands = tuple(each for each in USERS[user] if each not in without)
    server.cli(
        "ACL",
        "SETUSER",
        f"redlease-{user}",
        "reset",
        "resetchannels",
        "on",
        ">pw",
        *rights.rules("redlease", commands).split(),
    )
    server.cli("ACL", "LOG", "RESET")
    return f"redis://redlease-{user}:pw@127.0.0.1:{server.port}/3"


async def use_locks(client: Redlease) -> None:
    """Contend for a lock that keeps a history, watch it, and pass its permit on."""
    lock = client.lock("r", history=10)
    async with contextlib.aclosing(lock.watch()) as snapshots:
        await anext(snapshots)
        async with lock.hold():
            waiting = asyncio.create_task(lock.acquire())
            await until_waiting(lock, 1)
        hold = await lock.adopt(await lock.renew(await waiting))
    assert await lock.is_held(hold.permit)
    assert await hold.release()
    assert {"granted", "adopted", "released"} <= {entry.event for entry in await lock.history()}
    with pytest.raises(NotReplicated):
        await client.lock("kept", durability=Durability(1, timeout=0.01)).acquire()


async def use_all(client: Redlease) -> None:
    """Use each primitive, with what it adds to a lock."""
    await use_locks(client)
    pool, rw, guard = client.semaphore("pool", capacity=2), client.rwlock("rw"), client.guard("r")
    async with pool, rw.read.hold(), client.all(client.lock("a"), pool.weighted(1)) as holds:
        await guard.check(holds[0].fence)
        assert await guard.run(holds[0].fence, "return 7") == 7
        assert len((await pool.inspect()).holders) == 2
    await pool.resize(3)
    async with rw.write.hold() as hold:
        await hold.downgrade()

    async def twice(item: int, _: Hold) -> int:
        return 2 * item

    assert await client.sequence("ledger", [1, 2], twice, id="s") == [2, 4]
    async with contextlib.aclosing(client.leader("l").terms()) as terms:
        assert (await anext(terms)).number > 0
    short = client.lock("short", lease=0.02)
    await short.acquire()
    async with client.lock("short").hold(timeout=5):  # granted when the lease before has ended: that one is reaped
        pass
    assert await client.semaphore("pool", capacity=3).release_all(queue=True) == 0


async def look_at_all(client: Redlease, url: str) -> None:
    """Read what the commands and the web view read, of a resource that is held and waited for."""
    assert [each.resource for each in await Overview(client._operations).look()] == ["r"]
    lock = client.semaphore("r", capacity=UNDECLARED)
    snapshot = await lock.inspect()
    assert len(snapshot.holders) == len(snapshot.waiters) == 1
    assert await lock.position(snapshot.waiters[0].ticket) is not None
    assert await lock.history()
    findings = [finding for finding in await examine(url, "redlease") if finding.check != "persistence"]
    assert {finding.level for finding in findings} == {Level.OK}, findings


@contextlib.asynccontextmanager
async def in_use(server: Server) -> AsyncIterator[None]:
    """Hold the lock `r`, and wait for it, as a client."""
    async with Redlease.from_url(admit(server, "client")) as client:
        lock = client.lock("r", history=10)
        async with lock.hold():
            waiting = asyncio.create_task(lock.acquire())
            await until_waiting(lock, 1)
            yield
        await lock.release(await waiting)


def denied(server: Server) -> list[str]:
    """Return what the server has refused, as its log of the ACL has it, save that redis-py tells it its name."""
    log = [entry for entry in server.cli("ACL", "LOG") if entry["object"] not in {"client", "client|setinfo"}]
    return [f"{entry['reason']} {entry['object']}" for entry in log]


async def test_a_client_does_everything_and_asks_for_nothing_else(server: Server) -> None:
    """The server's log of what it refused is empty after all primitives were used, and every key is of the prefix."""
    url = admit(server, "client")
    async with Redlease.from_url(url) as client:
        await use_all(client)
    assert denied(server) == []
    assert server.cli("DBSIZE") == 0  # it is all in database 3


async def test_a_reader_sees_everything_and_writes_nothing(server: Server) -> None:
    """It lists, inspects and examines, and asks for no other right; it takes nothing and frees nothing."""
    async with in_use(server):
        url = admit(server, "reader")
        async with Redlease.from_url(url) as reader:  # the probe tries to write, which is refused
            server.cli("ACL", "LOG", "RESET")
            lock = reader.lock("r")
            await lock.inspect()
            assert denied(server) == []
            for change in (lock.acquire, lock.release_all, lambda: reader.semaphore("pool", capacity=3).resize(2)):
                with pytest.raises(RedleaseError, match="lacks a right"):
                    await change()
            await look_at_all(reader, url)
            # `doctor` tries what an administrator may see.
            assert not {said.split()[-1] for said in denied(server)} - rights.WRITES_PROBED - {"config", "config|get"}


@pytest.mark.slow
@pytest.mark.parametrize("user", USERS)
async def test_every_right_is_needed(own_server: OwnServer, acl_file: str, user: str) -> None:
    """Without any one of them something fails, and the server names what it has refused."""
    server, needless = own_server("valkey9", "--aclfile", acl_file), []
    for command in USERS[user]:
        async with in_use(server) if user == "reader" else contextlib.nullcontext():
            url = admit(server, user, command)
            with contextlib.suppress(RedleaseError, AssertionError, TimeoutError):
                async with asyncio.timeout(2), Redlease.from_url(url, call_timeout=0.5) as client:
                    await (use_all(client) if user == "client" else look_at_all(client, url))
        if f"command {command}" not in denied(server):
            needless.append(command)
    assert needless == []


def test_the_scripts_call_nothing_else() -> None:
    """Each command in a script, of the Temporal adapter too, is among the rights."""
    lua = [
        file for package in (redlease, redlease_temporal) for file in Path(str(package.__file__)).parent.rglob("*.lua")
    ]
    called = {name.lower() for file in lua for name in re.findall(r"\b(?:p?call|try)\('([A-Z]+)'", file.read_text())}
    assert len(called) > 20
    assert called - {"spublish"} <= {*rights.CLIENT, *rights.WORKER}
    assert set(rights.WORKER) <= called


def test_the_file_is_of_the_rights_that_errors_advise() -> None:
    """Page, file and advice are one: what `redlease._core.protocol.rights` has."""
    lines = [f"user redlease-{user} off resetchannels {rights.rules('redlease', USERS[user])}" for user in USERS]
    assert FILE.read_text().splitlines() == [SHIPPED_DEFAULT, *lines]
    page = (ROOT / "docs" / "security.md").read_text()
    for user, commands in USERS.items():
        assert f"ACL SETUSER redlease-{user} on '>PASSWORD' resetchannels {rights.rules('redlease', commands)}" in page


def test_a_prefix_is_no_pattern() -> None:
    """A prefix of characters that mean something in a pattern gives no right to other keys."""
    assert rights.rules("a*", ("get",)) == r"~a\*:* &a\*:* +get"
