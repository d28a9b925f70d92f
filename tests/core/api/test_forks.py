"""A process that forks while it holds: the child has a copy of everything, and speaks for nobody."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Servers

PROGRAM = """
import asyncio, os, sys
from redlease import Redlease

async def main():
    async with Redlease.from_url(sys.argv[1], prefix=sys.argv[2]) as client:
        own, other = client.lock("own"), client.lock("other")
        holding, over = asyncio.Event(), asyncio.Event()
        held = []

        async def hold_other():
            async with other as hold:
                held.append(hold)
                holding.set()
                await over.wait()

        task = asyncio.create_task(hold_other())
        await holding.wait()
        async with own as hold:
            child = os.fork()
            if child == 0:
                ENDS
            os.waitpid(child, 0)
            print("own", await own.is_held(hold.permit), "other", await other.is_held(held[0].permit))
        over.set()
        await task

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "ends", ["sys.exit(0)", "raise LookupError('in the child')", "await asyncio.sleep(-1); return"]
)
def test_a_child_that_leaves_its_copies_of_the_blocks(servers: Servers, prefix: str, ends: str) -> None:
    """However a child ends, what its parent holds stays held: the blocks that it unwinds release nothing."""
    program = [sys.executable, "-c", PROGRAM.replace("ENDS", ends), servers.url("valkey9"), prefix]
    said = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert said.stdout.strip().splitlines()[-1] == "own True other True", said
