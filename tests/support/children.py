"""Processes that hold and wait, for tests that kill and stop them. Run as a program, this file is such a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis.asyncio

from redlease import LeaseLost, Redlease

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Hold


class Child:
    """One such process, as seen by the test that started it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def event(self, name: str, within: float = 45.0) -> dict[str, Any]:
        """Wait for the next thing that the process says, which must be this."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), within)
        said: dict[str, Any] = json.loads(line or b'{"event": "ended"}')
        assert said["event"] == name, said
        return said

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()

    def pause(self) -> None:
        """Stop it with SIGSTOP."""
        freeze(self.process.pid)

    def resume(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)


def freeze(pid: int) -> None:
    """Stop a child process with SIGSTOP, and return when it has stopped: its other threads run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


@contextlib.asynccontextmanager
async def running(*command: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program whose output is read here, and kill it with the block, if it has not ended before."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        # The transport of the pipe closes in a turn of its own.
        transport: asyncio.BaseTransport = process._transport  # type: ignore[attr-defined]
        transport.close()


@contextlib.asynccontextmanager
async def child(what: str, url: str, **options: Any) -> AsyncIterator[Child]:
    """Start a process that does `what`, one of the functions below, and end it with the block."""
    async with running(sys.executable, __file__, what, url, json.dumps(options)) as process:
        yield Child(process)


def say(event: str, **details: Any) -> None:
    """Tell the test; a line is written whole, whichever threads say something at once."""
    sys.stdout.write(json.dumps({"event": event, **details}) + "\n")
    sys.stdout.flush()


async def hold(client: Redlease, ticket: str | None = None) -> None:
    """Hold the lock until that is over."""
    lock = client.lock("r")
    entered = None
    try:
        async with lock.hold(ticket=ticket) as entered:
            say("held", fence=entered.fence)
            await asyncio.sleep(60)
    except LeaseLost:
        assert entered is not None
        say("lost", released=await entered.release(), remaining=entered.remaining())


async def acquire(client: Redlease, ticket: str) -> None:
    """Hold a plain permit."""
    permit = await client.lock("r").acquire(ticket=ticket)
    say("acquired", fence=permit.fence)
    await asyncio.sleep(60)


async def wait(client: Redlease, count: int, ticket: str | None = None) -> None:
    """Let so many tasks wait."""
    lock = client.lock("r")
    already = len((await lock.inspect()).waiters)
    tasks = [asyncio.create_task(lock.acquire(ticket=ticket)) for _ in range(count)]
    while len((await lock.inspect()).waiters) < already + count:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    say("waiting")
    await asyncio.gather(*tasks)


async def take_all(client: Redlease) -> None:
    """Take one resource of each kind and then the lock "d", in that order, as their names are sorted so."""
    pool, catalog = client.semaphore("b", capacity=3), client.rwlock("c")
    async with client.all(client.lock("a"), pool.weighted(2), catalog.write, client.lock("d")):
        say("held")
        await asyncio.sleep(60)


async def press(client: Redlease, prefix: str, clients: int, capacity: int) -> None:
    """Let so many clients hold a unit for a moment, again and again, and say so once one has."""
    begun = asyncio.Event()

    async def one(other: Redlease) -> None:
        pool = other.semaphore("r", capacity=capacity, history=100_000)
        while True:
            async with pool.hold():
                begun.set()
                await asyncio.sleep(0.01)

    async with contextlib.AsyncExitStack() as stack:
        made = [Redlease.from_url(sys.argv[2], prefix=prefix, lease=1, waiter_lease=0.5) for _ in range(clients)]
        others = [await stack.enter_async_context(other) for other in made]
        tasks = [asyncio.create_task(one(other)) for other in others]
        await begun.wait()
        say("pressing")
        await asyncio.gather(*tasks)


async def count(client: Redlease, path: str, times: int) -> None:
    """Add one to the number in a file so many times, in a way that loses some where two do it at once."""
    lock = client.lock("r")
    file = Path(path)
    fences = []
    for _ in range(times):
        async with lock.hold() as entered:
            number = int(file.read_text())
            await asyncio.sleep(0)
            file.write_text(str(number + 1))
            fences.append(entered.fence)
    say("counted", fences=fences)


# Adds a line with the server's time to a list, whose order is that of the server.
LOG = """
local time = redis.call('TIME')
return redis.call('RPUSH', KEYS[1], ARGV[1] .. string.format(' %.0f', time[1] * 1000000 + time[2]))
"""


async def sequence(client: Redlease, count: int, log: str) -> None:
    """Double so many numbers, and write to a list on the server when the handling of each begins and ends."""
    raw = redis.asyncio.Redis.from_url(sys.argv[2])

    async def handle(item: int, hold: Hold) -> int:
        await raw.eval(LOG, 1, log, f"enter {item} {hold.fence}")
        say("handling", item=item)
        await asyncio.sleep(0.02)
        await raw.eval(LOG, 1, log, f"leave {item} {hold.fence}")
        return 2 * item

    say("done", results=await client.sequence("r", range(count), handle, id="s"))
    await raw.aclose()


async def main() -> None:
    """Do what the arguments say."""
    what, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    settings = options.pop("client", {})
    async with Redlease.from_url(url, **settings) as client:
        await globals()[what](client, **options)


if __name__ == "__main__":
    asyncio.run(main())
