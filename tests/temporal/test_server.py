"""What the adapter's tests stand on: the servers serve, worker processes die, and noise is heard."""

from __future__ import annotations

import asyncio
import logging
import signal
import warnings
from typing import TYPE_CHECKING, Any

import pytest
from temporalio.api.enums.v1 import EventType
from temporalio.api.workflowservice.v1 import GetSystemInfoRequest
from temporalio.client import Client, WorkflowFailureError
from temporalio.testing import WorkflowEnvironment
from temporalio.worker import Worker

from helpers import eventually
from quiet import Quiet
from temporal_flows import Broken, Sleep, Stay, Steps, step
from temporal_server import NEWEST, chosen_version

if TYPE_CHECKING:
    from temporal.conftest import OwnTemporalServer, StartWorkerProcess
    from temporal_server import TemporalServer

PLAIN: dict[str, Any] = {"plugin": False}


async def test_the_server_is_the_one_that_was_chosen(
    temporal_server: TemporalServer, newest_temporal_server: TemporalServer
) -> None:
    """The tests run on the newest server where REDLEASE_TEMPORAL names it, and those that need it have it always."""
    assert (temporal_server is newest_temporal_server) == (chosen_version() == NEWEST)
    client = await Client.connect(newest_temporal_server.address)
    told = await client.workflow_service.get_system_info(GetSystemInfoRequest())
    assert told.server_version == NEWEST


def test_a_version_that_there_is_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slip in the name does not run all tests on another server."""
    monkeypatch.setenv("REDLEASE_TEMPORAL", "1.32")
    with pytest.raises(ValueError, match=r"1\.29\.1 and 1\.32\.0"):
        chosen_version()


async def test_tasks_are_dispatched_at_once(temporal_client: Client, task_queue: str) -> None:
    """The server's limit of some 20 tasks a second is lifted: past the first burst, tasks do not wait 50 ms each."""
    async with Worker(temporal_client, task_queue=task_queue, workflows=[Steps], activities=[step]):
        handle = await temporal_client.start_workflow(Steps.run, 25, id=task_queue, task_queue=task_queue)
        assert await handle.result() == 25
    scheduled, waited = 0, []
    async for event in handle.fetch_history_events():
        if event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_SCHEDULED:
            scheduled = event.event_time.ToMilliseconds()
        elif event.event_type == EventType.EVENT_TYPE_ACTIVITY_TASK_STARTED:
            waited.append(event.event_time.ToMilliseconds() - scheduled)
    # Under the limit all of the last ones wait; on a busy machine a few may.
    assert len([one for one in waited[-15:] if one >= 35]) < 8, waited


async def test_another_process_finishes_what_a_killed_one_began(
    worker_process: StartWorkerProcess, temporal_client: Client, task_queue: str
) -> None:
    """The first worker dies by SIGKILL amid an activity, and the second runs the next attempt to its end."""
    soon = PLAIN | {"worker": {"sticky_queue_schedule_to_start_timeout": 0.5}}
    first = await worker_process("temporal_flows", **soon)
    handle = await temporal_client.start_workflow(Stay.run, id=task_queue, task_queue=task_queue)
    assert (await first.event("stays"))["attempt"] == 1
    first.kill()
    assert await first.ended() == -signal.SIGKILL
    second = await worker_process("temporal_flows", **soon)
    assert (await second.event("stays"))["attempt"] == 2
    assert await handle.result() == 2


async def test_a_terminated_worker_ends_as_a_deployed_one(worker_process: StartWorkerProcess) -> None:
    """SIGTERM shuts the worker down, and its process ends with status 0."""
    worker = await worker_process("temporal_flows", **PLAIN)
    worker.terminate()
    assert await worker.next() == {"event": "ended"}
    assert await worker.ended() == 0


async def test_a_stopped_worker_goes_on(
    worker_process: StartWorkerProcess, temporal_client: Client, task_queue: str
) -> None:
    """A worker stopped by SIGSTOP does nothing, and works again after SIGCONT."""
    worker = await worker_process("temporal_flows", **PLAIN)
    worker.pause()
    handle = await temporal_client.start_workflow(Steps.run, 1, id=task_queue, task_queue=task_queue)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle.result(), 0.3)
    worker.resume()
    assert await handle.result() == 1


async def test_a_restarted_server_keeps_what_it_is_told_to_keep(own_temporal_server: OwnTemporalServer) -> None:
    """A killed server comes back on its port with its workflows, and a stopped one answers once it goes on."""
    server = await own_temporal_server(keep=True)
    client = await Client.connect(server.address)
    handle = await client.start_workflow(Steps.run, 1, id="kept", task_queue="kept")
    await server.restart()
    assert (await handle.describe()).run_id == handle.result_run_id
    server.pause()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle.describe(), 0.3)
    server.resume()
    async with Worker(client, task_queue="kept", workflows=[Steps], activities=[step]):
        assert await handle.result() == 1


async def test_an_hour_is_skipped(time_skipping: dict[str, Any], task_queue: str) -> None:
    """A workflow that sleeps an hour by its own clock is over in seconds of ours."""
    async with (
        await WorkflowEnvironment.start_time_skipping(**time_skipping) as environment,
        Worker(environment.client, task_queue=task_queue, workflows=[Sleep]),
    ):
        slept = await environment.client.execute_workflow(Sleep.run, id=task_queue, task_queue=task_queue)
    assert slept >= 3600


async def test_a_failing_workflow_task_is_noise(quiet: Quiet, temporal_client: Client, task_queue: str) -> None:
    """The run is open and nothing has failed for its client: that something is wrong is only heard."""
    quiet.expect("Failed activation on workflow Broken")
    # The core tells the same in its own words, and of every attempt.
    quiet.allow("Broken|[Ff]ailed|broken")
    async with Worker(temporal_client, task_queue=task_queue, workflows=[Broken]):
        handle = await temporal_client.start_workflow(Broken.run, id=task_queue, task_queue=task_queue)
        await eventually(lambda: not quiet.problems(), within=10)
        await handle.terminate()
        with pytest.raises(WorkflowFailureError):
            await handle.result()


async def test_noise_is_told(quiet: Quiet) -> None:
    """Warnings, log records and what threads log are heard, and reported unless they were expected."""
    quiet.allow("destroyed|Ignoring this")
    listener = Quiet()
    with listener.listening():
        warnings.warn("by the way", UserWarning, stacklevel=1)
        logging.getLogger("temporalio.worker").error("Task was destroyed but it is pending!")
        await asyncio.to_thread(logging.getLogger("anywhere").warning, "Ignoring %s", "this")
        logging.getLogger("anywhere").warning("all is well")
    assert len(listener.problems()) == 3
    listener.expect("UserWarning: by the way")
    listener.allow("destroyed|Ignoring this|not heard")
    assert listener.problems() == []
    listener.expect("not heard")
    assert listener.problems() == ["expected, and not heard: not heard"]


async def test_noise_in_a_worker_process_is_told(worker_process: StartWorkerProcess, quiet: Quiet) -> None:
    """What a worker process writes to its standard error counts as the test's own noise."""
    quiet.expect("No module named 'no_such_module'")
    worker = await worker_process("no_such_module", wait=False, **PLAIN)
    assert await worker.ended() == 1
