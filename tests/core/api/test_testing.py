"""What users get for their own tests: clients without a server, and the pytest fixture."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import fakeredis
import pytest

from redlease import Redlease
from redlease.testing import fake_client

from helpers import queue_up

if TYPE_CHECKING:
    from pathlib import Path

# What users write, under each of the ways to run a coroutine in a test. Each leaves something undone on purpose: the
# fixture must end it without a word.
PLAIN = """
import asyncio

def test_plain(redlease_client):
    async def body():
        async with redlease_client.lock("invoice:42") as hold:
            assert hold.fence > 0
        await redlease_client.lock("left held").hold()

    asyncio.run(body())
"""
ASYNCIO = """
import asyncio

async def test_one(redlease_client):
    lock = redlease_client.lock("invoice:42")
    async with lock:
        assert await lock.locked()
    await lock.hold()
    waiting = asyncio.create_task(lock.acquire())
    await asyncio.sleep(0.01)
    assert len((await lock.inspect()).waiters) == 1

async def test_another_begins_with_nothing(redlease_client):
    assert not await redlease_client.lock("invoice:42").locked()

async def test_entered(redlease_client):
    async with redlease_client as client:
        async with client.semaphore("gpu", capacity=3).hold() as hold:
            assert hold.permit.capacity == 3
"""
# As anyio's plugin and others do it: one runner, several runs on its loop.
RUNNER = """
import asyncio

def test_runner(redlease_client):
    lock = redlease_client.lock("invoice:42")

    async def hold():
        return await lock.hold()

    async def release(hold):
        assert await hold.release()
        waiting = await lock.hold()

    with asyncio.Runner() as runner:
        runner.run(release(runner.run(hold())))
"""


def run_pytest(directory: Path, test: str, *options: str) -> str:
    """Run one test file as a user does, every warning an error and every resource accounted for."""
    (directory / "test_user.py").write_text(test)
    # Where redlease is not installed its entry point is missing, and the plugin is named instead.
    plugin = () if is_installed() else ("-p", "redlease.testing.plugin")
    command = (
        sys.executable,
        "-X",
        "dev",
        "-W",
        "error",
        "-m",
        "pytest",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:valkey",
    )
    done = subprocess.run(
        [*command, *plugin, *options, "."], check=False, capture_output=True, text=True, cwd=directory, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
    assert "Task was destroyed" not in done.stderr
    return done.stdout


def is_installed() -> bool:
    """Tell whether the distribution, not only its source tree, is there."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    return any(point.value == "redlease.testing.plugin" for point in entry_points(group="pytest11"))


@pytest.mark.slow
def test_the_fixture_serves_a_plain_event_loop(tmp_path: Path) -> None:
    """No asyncio plugin is needed."""
    assert "1 passed" in run_pytest(tmp_path, PLAIN, "-p", "no:asyncio")


@pytest.mark.slow
def test_the_fixture_serves_with_pytest_asyncio(tmp_path: Path) -> None:
    """Holds, waiters and tasks that a test leaves behind end with its loop, and the next test has a new server."""
    settings = ("-o", "asyncio_mode=auto", "-o", "asyncio_default_fixture_loop_scope=function")
    assert "3 passed" in run_pytest(tmp_path, ASYNCIO, *settings)


@pytest.mark.slow
def test_the_fixture_serves_a_loop_that_runs_more_than_once(tmp_path: Path) -> None:
    """What is held lives on from one run of a loop to the next."""
    assert "1 passed" in run_pytest(tmp_path, RUNNER, "-p", "no:asyncio")


def test_the_plugin_costs_nothing_where_nobody_asks_for_it() -> None:
    """Loading the plugin imports neither fakeredis nor a client."""
    code = "import sys, redlease.testing.plugin as p; print('fakeredis' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


async def test_clients_of_one_fake_server_exclude_each_other() -> None:
    """Two clients that share a server are as two processes."""
    server = fakeredis.FakeServer()
    async with fake_client(server=server, owner="svc-a") as one, fake_client(server=server, owner="svc-b") as other:
        async with one.lock("invoice:42"):
            assert await other.lock("invoice:42").try_acquire() is None
        permit = await other.lock("invoice:42").acquire(timeout=1)
        assert permit.owner == "svc-b"


async def test_clients_without_a_common_server_know_nothing_of_each_other() -> None:
    """By default a client has a server of its own."""
    async with fake_client() as one, fake_client() as other, one.lock("invoice:42"), other.lock("invoice:42"):
        assert await one.lock("invoice:42").locked()


async def test_a_waiter_is_woken_across_clients() -> None:
    """Messages travel on fakeredis too."""
    server = fakeredis.FakeServer()
    async with fake_client(server=server) as one, fake_client(server=server) as other:
        hold = await one.lock("invoice:42").hold()
        (waiting,) = await queue_up(other.lock("invoice:42"), 1, timeout=5)
        await hold.release()
        assert (await waiting).fence > hold.fence


async def test_settings_go_to_the_client() -> None:
    """What `Redlease` takes, `fake_client` takes."""
    async with fake_client(lease=5, owner="svc-a") as client:
        assert isinstance(client, Redlease)
        permit = await client.lock("invoice:42").acquire()
        assert (permit.lease_ms, permit.owner) == (5000, "svc-a")
