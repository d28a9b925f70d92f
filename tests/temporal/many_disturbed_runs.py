"""Many runs whose workflow tasks are executed again: `make test-long` names this file, and nothing else collects it."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from backend_flows import On
from executed_again_flows import TASK_S, Disturbances, Disturbed, Rival
from temporal_tools import reset

from temporal.test_executed_again import BACKENDS, cache, client, nudge  # noqa: F401  two are fixtures

if TYPE_CHECKING:
    from pathlib import Path

    from temporalio.client import Client, WorkflowHandle

    from quiet import Quiet

LONG_S = 120.0  # a lease that does not end while the machine stands still
log = logging.getLogger("disturbed")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["failed", "timed out", "reset"])
@pytest.mark.parametrize("backend", BACKENDS)
async def test_many_runs_are_disturbed(
    client: Client,  # noqa: F811
    task_queue: str,
    backend: str,
    how: str,
    quiet: Quiet,
    is_long: bool,
    tmp_path: Path,
) -> None:
    """Whatever befalls a run, a rival never writes beside it, and each later grant has a greater fence."""
    quiet.allow("Failed activation on workflow Disturbed|as asked|Failing workflow task")
    count, at_once = 200 if is_long else 8, asyncio.Semaphore(10)

    async def disturb(number: int) -> None:
        async with at_once:
            on = On(backend, f"{task_queue}-{number}", lease=LONG_S)
            try:
                await disturbed(client, on, task_queue, how)
            except BaseException:
                await save_histories(client, on.resource, tmp_path)
                raise

    outcomes = await asyncio.gather(*(disturb(number) for number in range(count)), return_exceptions=True)
    errors = [outcome for outcome in outcomes if outcome is not None]
    log.info("%s, %s: %d of %d runs went wrong, %s: %r", backend, how, len(errors), count, tmp_path, errors)
    assert not errors


async def save_histories(server: Client, resource: str, directory: Path) -> None:
    """Save the histories of the runs that share a resource, and of the workflows that keep it."""
    names = [f"{resource}-run", f"{resource}-rival", f"lock:{resource}", f"permit:{resource}:0"]
    for name in names:
        async for run in server.list_workflows(f'WorkflowId = "{name}"'):
            history = await server.get_workflow_handle(name, run_id=run.run_id).fetch_history()
            number = len(list(directory.iterdir()))
            path = directory / f"{name.replace(':', '-')}-{number}.json"
            path.write_text(history.to_json())


async def disturbed(server: Client, on: On, task_queue: str, how: str) -> None:
    """Disturb a run that has a rival, and see that both have what they want."""
    options: dict[str, Any] = {"task_timeout": timedelta(seconds=TASK_S)} if how == "timed out" else {}
    run = await server.start_workflow(
        Disturbed.run, args=[on, how], id=f"{on.resource}-run", task_queue=task_queue, **options
    )
    latest: WorkflowHandle[Any, Any] = run
    if how == "reset":
        await run.execute_update(Disturbed.until_held)
    rival = await server.start_workflow(Rival.run, on, id=f"{on.resource}-rival", task_queue=task_queue)
    if how == "reset":
        latest = await reset(server, run, await nudge(run))
        await latest.signal(Disturbed.proceed)
    async with asyncio.timeout(120):
        await latest.result()
        await rival.result()
    assert how == "reset" or run.id in Disturbances.again
    fences = Disturbances.fences[on.resource]
    assert fences == sorted(fences)
    assert on.resource not in Disturbances.beside
