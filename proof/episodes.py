"""Faults of real servers, each of which strikes once in a round of the workload: an episode."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import redis

from proxy import Proxy
from servers import Server

PAST_LEASES_S = (1.1, 1.5)  # longer than a lease and a place of the workload
APPEND = ("--appendonly", "yes", "--appendfsync")


@dataclass
class Scene:
    """What a fault strikes: the server, and the proxy through which the processes reach it, if they do."""

    server: Server
    proxy: Proxy | None
    draw: random.Random

    async def command(self, *words: object) -> None:
        """Send the server a command."""
        await asyncio.to_thread(self.server.cli, *words)

    async def pass_leases(self) -> None:
        """Wait for longer than a lease lasts."""
        await asyncio.sleep(self.draw.uniform(*PAST_LEASES_S))

    @contextlib.asynccontextmanager
    async def setting(self, name: str, during: int, after: int) -> AsyncIterator[redis.Redis]:
        """Change a setting of the server for the block, by a client with one connection."""
        # One connection for both: a server with too many clients takes no further one.
        with redis.Redis.from_url(self.server.unix_url, single_connection_client=True) as client:
            await asyncio.to_thread(client.execute_command, "CONFIG", "SET", name, during)
            try:
                yield client
            finally:
                try:
                    await asyncio.to_thread(client.execute_command, "CONFIG", "SET", name, after)
                except redis.ConnectionError:  # the server closes those that are idle
                    await self.command("CONFIG", "SET", name, after)


async def server_stopped(scene: Scene) -> None:
    """Stop the server with SIGSTOP past all leases."""
    scene.server.pause()
    try:
        await scene.pass_leases()
    finally:
        scene.server.resume()


async def server_killed(scene: Scene) -> None:
    """End the server with SIGKILL, and start it again with what its settings have kept."""
    await asyncio.to_thread(scene.server.kill)
    await asyncio.sleep(scene.draw.uniform(0, 0.5))
    await asyncio.to_thread(scene.server.start)


async def clients_paused(scene: Scene) -> None:
    """CLIENT PAUSE past all leases."""
    await scene.command("CLIENT", "PAUSE", int(scene.draw.uniform(*PAST_LEASES_S) * 1000))
    await asyncio.sleep(PAST_LEASES_S[1])


async def clients_killed(scene: Scene) -> None:
    """CLIENT KILL of all connections, five times within a second."""
    for _ in range(5):
        for kind in ("normal", "pubsub"):
            await scene.command("CLIENT", "KILL", "TYPE", kind)
        await asyncio.sleep(scene.draw.uniform(0, 0.4))


async def scripts_flushed(scene: Scene) -> None:
    """SCRIPT FLUSH, five times within a second."""
    for _ in range(5):
        await scene.command("SCRIPT", "FLUSH")
        await asyncio.sleep(scene.draw.uniform(0, 0.4))


async def data_flushed(scene: Scene) -> None:
    """FLUSHALL."""
    await scene.command("FLUSHALL")


async def memory_full(scene: Scene) -> None:
    """Let the server be out of memory past all leases: it refuses who asks, and takes releases and renewals."""
    async with scene.setting("maxmemory", 1, 0):
        await scene.pass_leases()


async def script_busy(scene: Scene) -> None:
    """Have somebody's endless script stop the server past all leases, until SCRIPT KILL."""

    async def endless() -> None:
        with contextlib.suppress(redis.ResponseError):
            await scene.command("EVAL", "while true do end", 0)

    async with scene.setting("lua-time-limit", 50, 5000):
        running = asyncio.create_task(endless())
        await scene.pass_leases()
        await scene.command("SCRIPT", "KILL")
        await running


async def too_many_clients(scene: Scene) -> None:
    """Close all connections, and refuse new ones past all leases."""
    async with scene.setting("maxclients", 1, 10_000) as client:
        await asyncio.to_thread(client.execute_command, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await scene.pass_leases()


async def idle_closed(scene: Scene) -> None:
    """Have the server close connections that are idle for a second."""
    async with scene.setting("timeout", 1, 0):
        await asyncio.sleep(2 * PAST_LEASES_S[1])


async def partitioned(scene: Scene) -> None:
    """Let nothing pass between processes and server past all leases; connections stay open."""
    assert scene.proxy is not None
    scene.proxy.freeze()
    try:
        await scene.pass_leases()
    finally:
        scene.proxy.thaw()


class Fault(NamedTuple):
    """One fault.

    Attributes:
        strike: Makes it happen.
        arguments: Of the server.
        keeps: Whether the server has its data afterwards, None if that is not sure. If so, all promises hold. If not,
            exclusion holds from one lease later on, and among those who were granted since; and fences grow.
        by_proxy: Whether the processes reach the server by a proxy.
    """

    strike: Callable[[Scene], Awaitable[None]]
    arguments: tuple[str, ...] = ()
    keeps: bool | None = True
    by_proxy: bool = False


FAULTS = {
    "kill -9, appendfsync always": Fault(server_killed, (*APPEND, "always")),
    "kill -9, appendfsync everysec": Fault(server_killed, (*APPEND, "everysec"), keeps=None),
    "kill -9, no persistence": Fault(server_killed, keeps=False),
    "FLUSHALL": Fault(data_flushed, keeps=False),
    "SIGSTOP of the server": Fault(server_stopped),
    "CLIENT PAUSE": Fault(clients_paused),
    "CLIENT KILL": Fault(clients_killed),
    "SCRIPT FLUSH": Fault(scripts_flushed),
    "maxmemory": Fault(memory_full),
    "a BUSY script": Fault(script_busy),
    "maxclients": Fault(too_many_clients),
    "timeout": Fault(idle_closed),
    "partition": Fault(partitioned, by_proxy=True),
}
