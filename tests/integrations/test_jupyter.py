"""Jupyter: the page's cells in a real kernel, one after the other, and a cell that is interrupted."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, cast

import pytest
from nbclient import NotebookClient
from nbformat import v4

from helpers import eventually
from how_to import blocks

if TYPE_CHECKING:
    from redlease import Redlease

    from servers import Server

FAILS = """
async with gpu.hold(timeout=5) as failing:
    raise RuntimeError("out of memory")
"""
# A kernel notices an interrupt when its event loop next wakes up, which nothing else may do for seconds.
INTERRUPTED = """
async with gpu.hold(timeout=5):
    while True:
        await asyncio.sleep(0.05)
"""
TAKEN = """
import asyncio

other = await gpu.acquire(metadata={"notebook": "experiment 8"})
"""
GIVEN_BACK = "await gpu.release(other);"


@pytest.mark.slow
@pytest.mark.timeout(180)  # a kernel starts, which on a busy machine takes long
async def test_the_cells_of_the_page(server: Server, observer: Redlease) -> None:
    """Each cell does what the page says; the GPU is free after one that raises, and after one that is interrupted."""
    connect, block, keep, release, blocking, close = blocks("jupyter")
    cells = [connect, block, blocking, keep, release, TAKEN, keep, GIVEN_BACK, FAILS, INTERRUPTED, close]
    make: Any = v4
    notebook = make.new_notebook(cells=[make.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=120, allow_errors=True)
    gpu = observer.semaphore("gpu", capacity=1, lease=30)
    shown = []
    async with client.async_setup_kernel(env=os.environ | {"REDIS_URL": server.url}):
        for number, cell in enumerate(notebook.cells):
            running = asyncio.create_task(client.async_execute_cell(cell, number))
            if cell.source == INTERRUPTED:
                await eventually(gpu.locked)
                assert client.km is not None
                await cast("Any", client.km.interrupt_kernel())
            await running
            shown.append("".join(output.get("text") or output.get("ename", "") for output in cell.outputs))
            assert await gpu.locked() == (cell.source in {keep, TAKEN})
    fences = [int(text.split()[-1]) for text in shown[1:3]]
    assert fences == sorted(set(fences))
    assert "experiment 8" in shown[6]
    assert shown[8:] == ["RuntimeError", "CancelledError", ""]
    assert [*shown[3:6], shown[7]] == ["", "", "", ""]
