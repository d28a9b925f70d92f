"""The examples of the how-to pages run as they stand, and do what the pages say."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from temporal_tools import Place, names_of
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from helpers import cancel, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from conftest import MakeClient

PAGES = Path(__file__).parent.parent.parent / "docs" / "how-to"


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Makes a module of a page's so-manieth block, with some words replaced that must stand there."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def load(page: str, block: int = 0, **replaced: str) -> ModuleType:
        blocks = re.findall(r"^```python\n(.*?)^```$", (PAGES / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL)
        text = blocks[block]
        for name, value in replaced.items():
            text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
            assert count == 1
        name = page.replace("-", "_") + (f"_{block}" if block else "")
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return importlib.import_module(name)

    yield load
    for name in names:
        del sys.modules[name]


def test_every_page_is_run() -> None:
    """There is a test for each page about workflows; the others are tested in tests/integrations."""
    tested = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert {page.stem for page in PAGES.glob("*.md") if "temporalio" in page.read_text()} <= tested


async def test_debounce(place: Place, loaded: Callable[..., ModuleType]) -> None:
    """Ten saves in quick succession are one round, and one while it is indexed makes another."""
    page, service = loaded("debounce"), loaded("debounce", 1)
    async with place.serving([page.Reindex], [page.index]) as client:
        handles = [await service.save(client, place.task_queue, place.prefix) for _ in range(10)]
        await eventually(lambda: is_indexed(handles[0]))
        again = await service.save(client, place.task_queue, place.prefix)
        assert again.result_run_id == handles[0].result_run_id
        assert await again.result() == 2
        assert await (await service.save(client, place.task_queue, place.prefix)).result() == 1


async def is_indexed(handle: WorkflowHandle[Any, Any]) -> bool:
    """Tell whether the document is being indexed, or was."""
    return "ACTIVITY_TASK_SCHEDULED" in await names_of(handle)


async def test_batch_collector(place: Place, loaded: Callable[..., ModuleType]) -> None:
    """Rows that come at once are loaded in full batches, and what is left when nothing more comes."""
    page, service = loaded("batch-collector"), loaded("batch-collector", 1)
    async with place.serving([page.Collector], [page.load]) as client:
        handles = [await service.add(client, place.task_queue, place.prefix, str(row)) for row in range(25)]
        assert len({handle.result_run_id for handle in handles}) == 1
        loads = await handles[0].result()
        assert (sum(loads), loads[-1]) == (25, 5)
        assert loads[:2] == [10, 10]


async def test_pipeline(
    place: Place, loaded: Callable[..., ModuleType], redis_url: str, make_client: MakeClient
) -> None:
    """Of six breads two are in the oven at most, and one is mixed or waits for it."""
    page = loaded("pipeline")
    outside = await make_client(url=redis_url)
    mixer, oven = outside.lock("mixer"), outside.semaphore("oven", 2)
    most = {"mixer": 0, "oven": 0}

    async def look() -> None:
        while True:
            for station in (mixer, oven):
                held = len((await station.inspect()).holders)
                most[station.name] = max(most[station.name], held)
            await asyncio.sleep(0.005)

    async with place.serving([page.Bread], [page.mix, page.bake]) as client:
        looking = asyncio.create_task(look())
        names = [f"bread-{number}" for number in range(6)]
        baked = await asyncio.gather(*(run(client, place, page.Bread.run, name) for name in names))
        await cancel(looking)
    assert baked == names
    assert most == {"mixer": 1, "oven": 2}


async def run(client: Client, place: Place, workflow: Any, argument: str) -> Any:
    """Run a workflow that is named by its argument."""
    return await client.execute_workflow(
        workflow, argument, id=f"{place.task_queue}-{argument}", task_queue=place.task_queue
    )


async def test_circuit_breaker(place: Place, loaded: Callable[..., ModuleType]) -> None:
    """After three failures the vendor is not called until the circuit's lease has ended."""
    page = loaded("circuit-breaker", OPEN_FOR="timedelta(seconds=2)")
    async with place.serving([page.Order], [page.call]) as client:
        assert await run(client, place, page.Order.run, "good 1") == "good 1 done"
        with pytest.raises(WorkflowFailureError):
            await run(client, place, page.Order.run, "bad 2")
        assert await run(client, place, page.Order.run, "good 3") == "refused: the vendor is left alone"
        assert page.calls == ["good 1", "bad 2", "bad 2", "bad 2"]

        async def is_served() -> bool:
            return str(await run(client, place, page.Order.run, "good 4")).endswith("done")

        await eventually(is_served)
