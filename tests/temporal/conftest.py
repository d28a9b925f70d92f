"""Temporal servers, clients and worker processes, and the check that nothing made noise."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import pytest_asyncio
from lock_service import Callers, with_callers
from temporal_tools import Place
from temporalio.client import Client

import garbage
from quiet import CORE_TELLS_WITHIN, Quiet, hear_the_core
from temporal_children import WORKER, WorkerProcess, start_worker
from temporal_cli import cli_at_hand
from temporal_server import NEWEST, TemporalServer, chosen_version
from tiers import QUICK
from time_skipping import time_skipping_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease import Redlease, Semaphore

    from conftest import MakeClient, Servers


class OwnTemporalServer(Protocol):
    """Starts a Temporal server for one test alone, which may kill, pause or restart it."""

    async def __call__(self, *arguments: str, keep: bool = False) -> TemporalServer: ...


class StartWorkerProcess(Protocol):
    """Starts a process with a worker for a module's workflows and activities; it ends with the test, if not before.

    The configuration is that of `temporal_worker.py`, where the test's server, queue, Redis and prefix stand already.
    """

    async def __call__(self, module: str, *, wait: bool = True, **config: Any) -> WorkerProcess: ...


def pytest_configure() -> None:
    """Hear the SDK's core, before there is a first client."""
    hear_the_core()


def pytest_report_header() -> str:
    """Name the server."""
    return f"Temporal {chosen_version()}"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def temporal_server(pytestconfig: pytest.Config) -> AsyncIterator[TemporalServer]:
    """The server that all tests of this process share; for the quick tier alone none is fetched or built."""
    if pytestconfig.getoption("tier") == QUICK and cli_at_hand() is None:
        pytest.skip("there is no Temporal server here yet: `make test-rest` gets one")
    async with TemporalServer() as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def newest_temporal_server(temporal_server: TemporalServer) -> AsyncIterator[TemporalServer]:
    """The newest server, for what no older one does: the shared one, or one beside it."""
    if temporal_server.version == NEWEST:
        yield temporal_server
        return
    async with TemporalServer(version=NEWEST) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def callers(temporal_server: TemporalServer) -> Callers:
    """The namespace of those who call the lock service by Nexus."""
    return await with_callers(temporal_server)


@pytest.fixture
async def own_temporal_server() -> AsyncIterator[OwnTemporalServer]:
    """A factory of private servers."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(*arguments: str, keep: bool = False) -> TemporalServer:
            return await stack.enter_async_context(TemporalServer(*arguments, keep=keep))

        yield make


@pytest.fixture
async def temporal_client(temporal_server: TemporalServer) -> Client:
    """A client without plugins."""
    return await Client.connect(temporal_server.address)


@pytest.fixture
def task_queue(prefix: str) -> str:
    """A task queue that no other test uses."""
    return f"queue-{prefix}"


@pytest.fixture
def redis_url(servers: Servers) -> str:
    """The Redis that all tests share; each keeps to its own `prefix`. To kill one, ask for `own_server("valkey9")`."""
    return servers["valkey9"].url


@pytest.fixture
async def worker_process(
    temporal_server: TemporalServer, task_queue: str, redis_url: str, prefix: str, quiet: Quiet
) -> AsyncIterator[StartWorkerProcess]:
    """A factory of processes with a worker, whose noise counts as the test's own."""
    usual = {
        "address": temporal_server.address,
        "task_queue": task_queue,
        "redis_url": redis_url,
        "prefix": prefix,
    }
    async with contextlib.AsyncExitStack() as stack:

        async def listen_to_the_end(worker: WorkerProcess) -> None:
            await worker.end()
            for line in worker.errors().splitlines():
                quiet.hear(line)

        async def start(module: str, *, wait: bool = True, **config: Any) -> WorkerProcess:
            worker = await stack.enter_async_context(start_worker(WORKER, usual | {"module": module} | config))
            stack.push_async_callback(listen_to_the_end, worker)
            if wait:
                await worker.ready()
            return worker

        yield start


@pytest.fixture(scope="session")
def time_skipping() -> dict[str, Any]:
    """How `WorkflowEnvironment.start_time_skipping` is to start its server: a busy machine takes its time."""
    path = time_skipping_server()
    return {
        "test_server_existing_path": None if path is None else str(path),
        "test_server_startup_timeout": timedelta(seconds=30),
    }


@pytest.fixture(autouse=True)
async def quiet() -> AsyncIterator[Quiet]:
    """Fail a test that made noise, unless it said by `quiet.expect()` or `quiet.allow()` that it would."""
    listener = Quiet()
    with listener.listening():
        yield listener
        # A task that nobody awaited is told of when it is collected, and the core tells what it logs a moment later.
        garbage.collect()
        await asyncio.sleep(CORE_TELLS_WITHIN)
    if problems := listener.problems():
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.fixture
def place(temporal_server: TemporalServer, task_queue: str, redis_url: str, prefix: str) -> Place:
    """The shared servers."""
    return Place(temporal_server, task_queue, redis_url, prefix)


@pytest.fixture
def pausing_place(newest_temporal_server: TemporalServer, task_queue: str, redis_url: str, prefix: str) -> Place:
    """The shared servers, with one that can pause runs."""
    return Place(newest_temporal_server, task_queue, redis_url, prefix)


@pytest.fixture
async def outside(redis_url: str, make_client: MakeClient) -> Redlease:
    """A service that shares the resource."""
    return await make_client(url=redis_url)


@pytest.fixture
def pool(outside: Redlease) -> Semaphore:
    """The resource as that service sees it."""
    return outside.lock("r")
