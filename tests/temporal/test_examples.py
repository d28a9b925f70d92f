"""The examples run to their end and keep what they promise: here on the tests' servers, by `make` on their own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import example_programs
from children import running
from temporal_cli import find_cli

if TYPE_CHECKING:
    from temporal_server import TemporalServer

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "temporal"
WITHIN = 45.0

SAY = {
    "gpu_pool": ("at most 3 inside at any moment", "granted in the order of arrival", "everybody was served"),
    "ledger": ("every payment is booked once", "the late writer was refused by its fence"),
    "languages": (
        "at most 2 inside at any moment",
        "granted in the order of arrival, in one queue",
        "everybody was served",
    ),
    "shared": ("at most 2 inside at any moment", "granted in the order of arrival, in one queue"),
}


async def output_of(example: str, *words: str, **environment: str) -> str:
    """Run an example with these words and return what it printed; that has no error, and its status is 0.

    A thread of Temporal's SDK may crash Python as it goes down, with all work done (temporalio/sdk-python#300).
    """
    # A program's own directory is on its path, as for whoever runs it by hand.
    process_environment = os.environ | {"PYTHONSAFEPATH": ""} | environment
    async with running(
        sys.executable,
        str(EXAMPLES / f"{example}.py"),
        *words,
        stderr=asyncio.subprocess.STDOUT,
        env=process_environment,
    ) as process:
        output, _ = await asyncio.wait_for(process.communicate(), WITHIN)
    text = output.decode()
    crashed = process.returncode == -signal.SIGABRT and "PyGILState_Release" in text
    assert process.returncode == 0 or crashed, text
    assert "Traceback" not in text
    return text


def assert_kept(example: str, text: str) -> None:
    """The verdict names each promise as kept."""
    for promise in SAY[example]:
        assert f"✓  {promise}" in text
    assert "✗" not in text


@pytest.fixture
def surroundings(temporal_server: TemporalServer, redis_url: str) -> dict[str, str]:
    """What tells an example which servers to use."""
    return {"TEMPORAL_ADDRESS": temporal_server.address, "REDIS_URL": redis_url}


@pytest.mark.parametrize("example", ["gpu_pool", "ledger", "shared"])
async def test_an_example_keeps_what_it_promises(example: str, surroundings: dict[str, str]) -> None:
    """Its verdict names each promise as kept, and its exit status is 0."""
    assert_kept(example, await output_of(example, **surroundings, DATABASE_URL=""))


@pytest.mark.slow
@pytest.mark.timeout(600)  # the first time on a machine, two programs are built
async def test_three_languages_in_one_queue(surroundings: dict[str, str]) -> None:
    """Workflows in Go and Python and a service in TypeScript take turns."""
    programs = await asyncio.to_thread(example_programs.words)
    assert_kept("languages", await output_of("languages", *programs, **surroundings))


async def test_postgresql_refuses_a_late_writer(surroundings: dict[str, str], postgres: str) -> None:
    """The ledger's guard is SQL that PostgreSQL takes as well."""
    assert_kept("ledger", await output_of("ledger", **surroundings, DATABASE_URL=postgres))


@pytest.mark.slow
async def test_an_example_brings_its_own_servers() -> None:
    """With neither server named it starts both, and ends them."""
    assert_kept("gpu_pool", await output_of("gpu_pool", TEMPORAL_ADDRESS="", REDIS_URL="", PATH=path_with_cli()))


def path_with_cli() -> str:
    """PATH with the Temporal CLI, as `make example-temporal` sets it."""
    return os.pathsep.join((str(find_cli().parent), os.environ["PATH"]))
