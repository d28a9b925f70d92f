"""What docs/guide/workflows.md shows runs as it stands, on the tests' servers."""

from __future__ import annotations

import asyncio
import importlib
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

    import pytest
    from temporal_tools import Place

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


TAKES = """

@workflow.defn(sandboxed=False)
class Takes:
    @workflow.run
    async def run(self, seconds: float) -> tuple[str, int]:
        async with any_gpu(timedelta(minutes=1)) as (name, hold):
            await workflow.sleep(seconds)
            return name, hold.fence
"""


async def test_any_free_one_of_several(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/migrating/temporal-samples.md shows gives each run a name of its own, and the next one that is free."""
    shown = next(each.text for each in python_blocks("docs/migrating/temporal-samples.md") if "any_gpu" in each.text)
    (tmp_path / "any_gpu.py").write_text(shown + TAKES)
    monkeypatch.syspath_prepend(tmp_path)
    takes = importlib.import_module("any_gpu").Takes
    async with place.serving([takes], []) as client:
        runs = [
            await client.start_workflow(
                takes.run, 1.0, id=f"{place.task_queue}-{number}", task_queue=place.task_queue, result_type=tuple
            )
            for number in range(4)
        ]
        told = [await each.result() for each in runs]
    names = [name for name, _ in told]
    assert set(names) == {"gpu-a", "gpu-b", "gpu-c"}
    (twice,) = {name for name in names if names.count(name) == 2}
    assert len({fence for name, fence in told if name == twice}) == 2


def test_every_setting_of_the_plugin_is_in_the_docs() -> None:
    """The table of settings names them all, with their defaults where these are durations."""
    section = SETTINGS.split("\n## The plugin's settings\n")[1].split("\n## ")[0]
    stated = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    parameters = inspect.signature(redlease_temporal.worker.RedleasePlugin).parameters
    assert stated == {name for name in parameters if name != "redis_options"}
