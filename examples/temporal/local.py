"""What the examples stand on: a Temporal server, a Redis, a worker with the plugin, and a clean end.

`TEMPORAL_ADDRESS` and `REDIS_URL` name servers that run already. Otherwise an example brings its own and ends them with
itself: Temporal's development server, by `temporal` on PATH or else the SDK's own download, and the embedded Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable

from temporalio.client import Client
from temporalio.runtime import LoggingConfig, Runtime, TelemetryConfig, TelemetryFilter
from temporalio.testing import WorkflowEnvironment

from redlease.embedded import EmbeddedServer
from redlease_temporal.worker import RedleasePlugin

# By default the development server hands out some 20 tasks a second, as it has one shard where others have hundreds.
POLL_RATES = ("transferProcessorMaxPollRPS", "timerProcessorMaxPollRPS", "outboundProcessorMaxPollRPS")


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[str]:
    """The URL of a Redis."""
    if url := os.environ.get("REDIS_URL"):
        yield url
        return
    server = EmbeddedServer()
    try:
        yield await server.start_async()
    finally:
        await server.stop_async()


@contextlib.asynccontextmanager
async def temporal_server() -> AsyncIterator[str]:
    """The address of a Temporal server."""
    if address := os.environ.get("TEMPORAL_ADDRESS"):
        yield address
        return
    rates = [word for name in POLL_RATES for word in ("--dynamic-config-value", f"history.{name}=2000")]
    server = await WorkflowEnvironment.start_local(
        dev_server_existing_path=shutil.which("temporal"),
        dev_server_extra_args=["--output", "none", *rates],
        dev_server_log_level="never",
    )
    async with server:
        yield server.client.service_client.config.target_host


@contextlib.asynccontextmanager
async def servers() -> AsyncIterator[tuple[Client, str]]:
    """A client with the plugin, and the URL of the Redis that the plugin uses."""
    async with redis_server() as redis_url, temporal_server() as address:
        yield await Client.connect(address, plugins=[RedleasePlugin(redis_url)]), redis_url


def run(main: Callable[[], Awaitable[bool]]) -> None:
    """Runs an example, and ends the process: with status 0 if every promise was kept."""
    # An activity that outlives its workflow, as one of the examples wants it, is a warning to the SDK's core.
    errors = LoggingConfig(filter=TelemetryFilter(core_level="ERROR", other_level="ERROR"))
    Runtime.set_default(Runtime(telemetry=TelemetryConfig(logging=errors)))
    kept = False
    try:
        kept = asyncio.run(_awaited(main))
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    # On Python 3.11 a thread of the SDK's core that is still about may crash the interpreter as it goes down
    # (temporalio/sdk-python#300), so a process that used it does not go down that way.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if kept else 1)


async def _awaited(main: Callable[[], Awaitable[bool]]) -> bool:
    return await main()
