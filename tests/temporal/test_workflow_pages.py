"""What docs/guide/workflows.md shows runs as it stands, on the tests' servers."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
from typing import TYPE_CHECKING

import redlease_temporal.worker

from children import running
from pages import DOCS, python_blocks

if TYPE_CHECKING:
    from pathlib import Path

    from temporal_server import TemporalServer

SETTINGS = (DOCS / "temporal.md").read_text()

# A program that ends right after it used the SDK is ended as in tests/support/temporal_worker.py.
RUN = "import os, runpy, sys; runpy.run_path('main.py', run_name='__main__'); sys.stdout.flush(); os._exit(0)"


async def test_the_files_run_as_they_stand(
    tmp_path: Path, temporal_server: TemporalServer, redis_url: str, prefix: str
) -> None:
    """Only the addresses, and names that other tests could use as well, are others."""
    flows, main = (block.text for block in python_blocks("docs/guide/workflows.md"))
    (tmp_path / "train.py").write_text(flows)
    for stated, own in {
        "localhost:7233": temporal_server.address,
        '"redis://localhost:6379/0"': f'"{redis_url}", prefix="{prefix}"',
        'task_queue="gpu"': f'task_queue="{prefix}"',
        'id="train-1"': f'id="{prefix}"',
    }.items():
        assert stated in main
        main = main.replace(stated, own)
    (tmp_path / "main.py").write_text(main)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    async with running(
        *(sys.executable, "-c", RUN),
        stderr=asyncio.subprocess.STDOUT,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    ) as process:
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    assert re.fullmatch(r"job 1 trained under fence \d+\n", output.decode())


def test_every_setting_of_the_plugin_is_in_the_docs() -> None:
    """The table of settings names them all, with their defaults where these are durations."""
    section = SETTINGS.split("\n## The plugin's settings\n")[1].split("\n## ")[0]
    stated = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    parameters = inspect.signature(redlease_temporal.worker.RedleasePlugin).parameters
    assert stated == {name for name in parameters if name != "redis_options"}
