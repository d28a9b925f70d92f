"""A process that is stopped for longer than its lease, and then writes: with a guard in the database and without.

    make example-fencing

A writer takes the lock of an account, reads the balance, and is stopped (SIGSTOP) before it writes. Its lease ends, so
this process gets the lock, and pays. Then the first writer goes on, and writes what it had computed.

`REDIS_URL` names a server that runs already; otherwise the example brings its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

from redlease import Redlease, StaleFence
from redlease.embedded import EmbeddedServer
from redlease.guards.sql import FenceTable

LEASE = 1.0  # seconds
OPENING, FIRST_PAYMENT, SECOND_PAYMENT = 100, 10, 40

FENCES = FenceTable()


def say(text: str) -> None:
    """Prints a line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Account:
    """A balance in SQLite, which processes share."""

    def __init__(self, path: str, *, guarded: bool) -> None:
        self._path = path
        self._guarded = guarded

    def open(self) -> None:
        """Creates the tables."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            connection.execute(FENCES.ddl)
            connection.execute("CREATE TABLE account (balance INTEGER)")
            connection.execute("INSERT INTO account VALUES (?)", (OPENING,))

    def balance(self) -> int:
        """Returns the balance."""
        with closing(sqlite3.connect(self._path)) as connection:
            balance: int = connection.execute("SELECT balance FROM account").fetchone()[0]
        return balance

    def write(self, balance: int, fence: int) -> None:
        """Writes the balance; with a guard, not under a fence lower than that of the last write."""
        with closing(sqlite3.connect(self._path)) as connection, connection:
            if self._guarded:
                FENCES.check(connection, "account", fence)
            connection.execute("UPDATE account SET balance = ?", (balance,))


async def write_late(url: str, account: Account) -> None:
    """Pays under the lock, in the process that is stopped."""
    async with (
        Redlease.from_url(url) as client,
        client.lock("account", lease=LEASE).hold(on_lost="signal") as hold,
    ):
        balance = account.balance() - FIRST_PAYMENT
        hold.check()  # it holds the lock; but not for as long as what follows will take
        say("about to write")
        sys.stdin.readline()  # blocks the process, which is stopped here
        try:
            account.write(balance, hold.fence)
        except StaleFence as error:
            say(f"refused: {error}")
        else:
            say(f"wrote {balance} under fence {hold.fence}")


@contextlib.asynccontextmanager
async def late_writer(url: str, path: str, *, guarded: bool) -> AsyncIterator[asyncio.subprocess.Process]:
    """The other process, stopped when it holds the lock and is about to write."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, url, path, "guarded" if guarded else "bare"), stdin=pipe, stdout=pipe
    )
    try:
        assert await line_of(process) == "about to write"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # noqa: ASYNC222  it stops at once
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> str:
    """Returns the next line that a process prints."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().rstrip()


async def show(url: str, path: str, *, guarded: bool) -> int:
    """Tells the story once, and returns the balance at its end."""
    say("With a guard:" if guarded else "Without a guard:")
    account = Account(path, guarded=guarded)
    account.open()
    async with Redlease.from_url(url) as client, late_writer(url, path, guarded=guarded) as process:
        say(f"  process {process.pid} holds the lock, has read {OPENING}, and is stopped")
        async with client.lock("account").hold() as hold:
            account.write(account.balance() - SECOND_PAYMENT, hold.fence)
            say(f"  its lease has ended: process {os.getpid()} wrote {account.balance()} under fence {hold.fence}")
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.send_signal(signal.SIGCONT)
        say(f"  process {process.pid} goes on: {await line_of(process)}")
        await process.wait()
    say(f"  the balance is {account.balance()}")
    return account.balance()


def verdict(kept: bool, what: str) -> bool:
    """Prints whether something is as it is to be, and returns it."""
    say(f"{'✓' if kept else '✗'}  {what}")
    return kept


async def main() -> bool:
    """Returns whether both stories ended as they are to."""
    server = None if os.environ.get("REDIS_URL") else EmbeddedServer()
    try:
        url = await server.start_async() if server is not None else os.environ["REDIS_URL"]
        with tempfile.TemporaryDirectory() as directory:
            bare = await show(url, str(Path(directory) / "bare"), guarded=False)
            guarded = await show(url, str(Path(directory) / "guarded"), guarded=True)
    finally:
        if server is not None:
            await server.stop_async()
    damaged = verdict(bare == OPENING - FIRST_PAYMENT, "without a guard the late write undoes the payment")
    kept = verdict(guarded == OPENING - SECOND_PAYMENT, "with a guard the late write is refused")
    return damaged and kept


if __name__ == "__main__":
    if len(sys.argv) > 1:
        where, file, mode = sys.argv[1:]
        asyncio.run(write_late(where, Account(file, guarded=mode == "guarded")))
    else:
        sys.exit(not asyncio.run(main()))
