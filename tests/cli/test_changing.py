"""`redlease release`, `resize`, `limit` and `pause`: what they change, what they refuse, and when they ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
from typing import TYPE_CHECKING

import pytest

from redlease import Redlease, Withdrawn
from redlease._cli.statuses import Exit
from redlease._core.primitives.overview import UNDECLARED, is_known

from command_line import COMMAND, run_async
from helpers import queue_up

if TYPE_CHECKING:
    from conftest import Servers

# Each runs the command several times.
pytestmark = pytest.mark.slow


@pytest.fixture
def place(servers: Servers, prefix: str) -> tuple[str, ...]:
    """The options that name server and prefix."""
    return ("--url", servers["valkey9"].url, "--prefix", prefix)


@pytest.fixture
def url(servers: Servers) -> str:
    """The same server."""
    return servers["valkey9"].url


def answered(answer: bytes, *arguments: str) -> tuple[int, str]:
    """Run the command at a terminal where somebody types this; return its status and what was shown."""
    terminal, end = pty.openpty()
    command = subprocess.Popen([*COMMAND, *arguments], stdin=end, stdout=end, stderr=end)
    os.close(end)
    os.write(terminal, answer)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal tells that nobody is left to write to it
        while piece := os.read(terminal, 65536):
            shown += piece
    os.close(terminal)
    return command.wait(), shown.decode()


async def test_all_holders_are_released_with_yes(place: tuple[str, ...], url: str, prefix: str) -> None:
    """The waiters move up; with --queue they go first, and the resource is empty."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        pool = client.semaphore("gpu", capacity=2)
        await asyncio.gather(pool.acquire(), pool.acquire())
        waiting = await queue_up(pool, 3)
        done = await run_async("release", "gpu", "--all", "--yes", *place)
        assert (done.returncode, done.stdout) == (0, "2 released of gpu.\n"), done.stderr
        await asyncio.gather(*waiting[:2])
        done = await run_async("release", "gpu", "--all", "--queue", "--yes", "--json", *place)
        assert json.loads(done.stdout) == {"resource": "gpu", "released": 3}
        with pytest.raises(Withdrawn):
            await waiting[2]
        snapshot = await pool.inspect()
        assert (snapshot.in_use, snapshot.waiting) == (0, 0)


async def test_a_script_must_say_yes_to_release_all(place: tuple[str, ...], url: str, prefix: str) -> None:
    """Without a terminal nobody can be asked: it refuses, and nothing is released."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("invoice").acquire()
        done = await run_async("release", "invoice", "--all", *place)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "redlease: this takes invoice from all its holders, and there is no terminal to ask at. Give --yes\n"
        )
        assert await client.lock("invoice").locked()


async def test_a_script_that_names_what_it_changes_is_not_asked(place: tuple[str, ...], url: str, prefix: str) -> None:
    """One ticket is released, and a capacity set, without --yes; JSON tells of both."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.semaphore("gpu", capacity=2).acquire()
        await client.lock("invoice").acquire(ticket="stuck")
        done = await run_async("release", "invoice", "stuck", "--json", *place)
        assert json.loads(done.stdout) == {"resource": "invoice", "ticket": "stuck", "released": True}
        done = await run_async("release", "invoice", "stuck", "--json", *place)
        assert (done.returncode, json.loads(done.stdout)["released"]) == (1, False)
        done = await run_async("resize", "gpu", "4", "--json", *place)
        assert json.loads(done.stdout) == {"resource": "gpu", "capacity": 4}


async def test_locks_are_not_resized(place: tuple[str, ...], url: str, prefix: str) -> None:
    """Neither a lock nor a read-write lock, of which no units can be limited either; each error says which it is."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        await client.lock("mutex").acquire()
        await client.rwlock("rw").read.acquire()
        for words, kind in (
            (("resize", "mutex", "3"), "it is a lock"),
            (("resize", "rw", "3"), "it is a read-write lock"),
            (("set-limit", "rw", "--capacity", "3"), "is a read-write lock"),
        ):
            done = await run_async(*words, "--yes", *place)
            assert (done.returncode, done.stdout) == (1, ""), done.stderr
            assert kind in done.stderr
        assert await client.lock("mutex").try_acquire() is None
        assert (await client.rwlock("rw").inspect()).limits == ()


@pytest.mark.parametrize(
    "words",
    [
        ("pause", "vendro"),
        ("set-limit", "vendro", "--capacity", "1"),
        ("set-limit", "vendro", "--capacity", "1", "--key", "k"),
        ("resize", "vendro", "3"),
    ],
)
async def test_a_mistyped_name_is_refused(
    words: tuple[str, ...], place: tuple[str, ...], url: str, prefix: str
) -> None:
    """With a status of its own, and nothing is made; a terminal is asked, and --create makes it."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        look = client.semaphore("vendro", capacity=UNDECLARED).inspect
        for options in ((), ("--yes",)):
            done = await run_async(*words, *options, *place)
            assert (done.returncode, done.stdout) == (Exit.UNKNOWN, "")
            assert "nothing is known of 'vendro'" in done.stderr
            assert not is_known(await look())
        status, shown = await asyncio.to_thread(answered, b"n\n", *words, *place)
        assert status == 1
        assert "Nothing is known of that name" in shown
        assert not is_known(await look())
        done = await run_async(*words, "--create", *place)
        assert done.returncode == 0, done.stderr
        assert is_known(await look())


@pytest.mark.parametrize(
    "words", [("inspect", "r"), ("pause", "r"), ("resize", "r", "2"), ("release", "r", "t"), ("ls",), ("history", "r")]
)
async def test_a_server_that_is_away_has_a_status_of_its_own(words: tuple[str, ...]) -> None:
    """It is neither that of a name of which nothing is known, nor that of another error."""
    done = await run_async(*words, "--url", "redis://127.0.0.1:1/0")
    assert done.returncode == Exit.UNAVAILABLE, done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "question"),
    [
        (("release", "gpu", "stuck"), "Take stuck out of gpu?"),
        (("release", "gpu", "--all"), "Release all holders of gpu (units in use: 1)?"),
        (("resize", "gpu", "1"), "Set the capacity of gpu to 1, for all processes?"),
    ],
)
async def test_it_asks_at_a_terminal(
    words: tuple[str, ...], question: str, place: tuple[str, ...], url: str, prefix: str
) -> None:
    """No changes nothing and exits with 1; yes does it; with --yes there is no question."""
    async with Redlease.from_url(url, prefix=prefix) as client:
        pool = client.semaphore("gpu", capacity=2)
        await pool.acquire(ticket="stuck")
        before = await pool.inspect()
        status, shown = await asyncio.to_thread(answered, b"n\n", *words, *place)
        assert status == 1
        assert question in shown
        after = await pool.inspect()
        assert (after.capacity, after.holders) == (before.capacity, before.holders)
        status, shown = await asyncio.to_thread(answered, b"y\n", *words, *place)
        assert status == 0, shown
        after = await pool.inspect()
        assert (after.capacity, after.holders) != (before.capacity, before.holders)
        await pool.acquire(ticket="stuck")
        status, shown = await asyncio.to_thread(answered, b"", *words, "--yes", *place)
        assert status == 0, shown
        assert question not in shown


@pytest.mark.parametrize("words", [("gpu",), ("gpu", "ticket", "--all"), ("gpu", "ticket", "--queue")])
async def test_it_is_told_what_to_release(words: tuple[str, ...], place: tuple[str, ...]) -> None:
    """Neither a ticket nor --all, or both, is a wrong use, before anything is asked or sent."""
    done = await run_async("release", *words, "--yes", *place)
    assert done.returncode == 2
    assert "name a ticket, or give --all" in done.stderr
