"""Workers, converters, queues and namespaces as users have them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from deployment_flows import Collecting, Imported, RoundTrip, echo
from google.protobuf.duration_pb2 import Duration
from lock_flows import Locked, Plain, Use, plain, work
from temporal_tools import Place
from temporalio.api.common.v1 import Payload
from temporalio.api.workflowservice.v1 import (
    DescribeWorkerDeploymentVersionRequest,
    RegisterNamespaceRequest,
    SetWorkerDeploymentCurrentVersionRequest,
)
from temporalio.client import BuildIdOpAddNewDefault, Client, WorkflowFailureError
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.converter import DataConverter, DefaultPayloadConverter, PayloadCodec
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import UnsandboxedWorkflowRunner, Worker, WorkerDeploymentConfig
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions
from temporalio.workflow import SandboxImportNotificationPolicy
from waiting_flows import Wait, Waiter

from redlease import Semaphore
from redlease_temporal._workflow_side.requests import original_run_of

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from quiet import Quiet
    from temporal.conftest import OwnTemporalServer

WORKFLOWS = [Collecting, Imported, Locked, Plain, RoundTrip, Waiter]
ACTIVITIES = [echo, plain, work]


class OwnConverter(DefaultPayloadConverter):
    """A converter that users have written."""


class Secret(PayloadCodec):
    """A codec whose output says nothing to whoever has not the key."""

    key = 0x5A

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Encrypt."""
        return [
            Payload(metadata={"encoding": b"binary/secret"}, data=bytes(b ^ self.key for b in one.SerializeToString()))
            for one in payloads
        ]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Decrypt."""
        return [Payload.FromString(bytes(b ^ self.key for b in one.data)) for one in payloads]


CONVERTERS = {
    "default": DataConverter.default,
    "pydantic": pydantic_data_converter,
    "own": DataConverter(payload_converter_class=OwnConverter, payload_codec=Secret()),
}


def worker(place: Place, client: Client, **options: Any) -> Worker:
    """Return a worker for everything, save as the options say."""
    served: dict[str, Any] = {"task_queue": place.task_queue, "workflows": WORKFLOWS, "activities": ACTIVITIES}
    return Worker(client, **served | options)


async def contend(place: Place, client: Client, pool: Semaphore, name: str = "", task_queue: str = "") -> int:
    """Let a workflow wait for a permit that is held outside, and return its fence."""
    handle = await client.start_workflow(
        Waiter.run,
        Wait(pool.name),
        id=f"{place.task_queue}-contends{name}",
        task_queue=task_queue or place.task_queue,
    )
    return (await handle.result()).fence


async def served_after(pool: Semaphore, *waiting: Any) -> list[int]:
    """Hold the resource until so many wait, and return the fences that they get, in the order of `waiting`."""
    permit = await pool.acquire()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in waiting]
        await until_waiting(pool, len(tasks), 15)
        await pool.release(permit)
    assert all(task.result() > permit.fence for task in tasks)
    return [task.result() for task in tasks]


@pytest.mark.parametrize("name", CONVERTERS)
async def test_the_data_converter_is_the_users(place: Place, pool: Semaphore, name: str) -> None:
    """Under the default, pydantic's and a user's encrypting converter permits travel, and who waits is told."""
    client = await place.client(data_converter=CONVERTERS[name])
    async with worker(place, client):
        permit = await client.execute_workflow(
            RoundTrip.run, "r", id=f"{place.task_queue}-trip", task_queue=place.task_queue
        )
        assert permit.metadata == {"why": "test"}
        await served_after(pool, contend(place, client, pool))


async def test_workers_of_two_converters_serve_their_own(place: Place, pool: Semaphore) -> None:
    """What one worker's codec has encrypted no other's relay has to read, though all share the resource."""
    plain_client = await place.client()
    secret_client = await place.client(data_converter=CONVERTERS["own"])
    other = f"{place.task_queue}-secret"
    async with worker(place, plain_client), worker(place, secret_client, task_queue=other):
        fences = await served_after(
            pool,
            *(contend(place, plain_client, pool, f"-plain{number}") for number in range(3)),
            *(contend(place, secret_client, pool, f"-secret{number}", other) for number in range(3)),
        )
    assert len(set(fences)) == 6


async def test_split_workers(place: Place) -> None:
    """A worker for workflows takes no activity from the worker for activities beside it, in twenty runs."""
    for_workflows, for_activities = await place.client(), await place.client()
    async with worker(place, for_workflows, activities=[]), worker(place, for_activities, workflows=[]):
        for number in range(20):
            run = await for_workflows.execute_workflow(
                Locked.run, Use("r"), id=f"{place.task_queue}-{number}", task_queue=place.task_queue
            )
            assert len(run) == 1
        await for_workflows.execute_workflow(Plain.run, id=f"{place.task_queue}-plain", task_queue=place.task_queue)


async def test_a_versioned_worker(place: Place, pool: Semaphore) -> None:
    """A worker of a deployment version works, and the internal one beside it is not versioned."""
    client = await place.client()
    version = WorkerDeploymentVersion(deployment_name=place.task_queue, build_id="1")
    config = WorkerDeploymentConfig(
        version=version, use_worker_versioning=True, default_versioning_behavior=VersioningBehavior.PINNED
    )
    async with worker(place, client, deployment_config=config):
        await eventually(lambda: is_known(client, version), 20)
        await client.workflow_service.set_worker_deployment_current_version(
            SetWorkerDeploymentCurrentVersionRequest(
                namespace="default", deployment_name=version.deployment_name, build_id=version.build_id
            )
        )
        permit = await client.execute_workflow(
            RoundTrip.run, "r", id=f"{place.task_queue}-trip", task_queue=place.task_queue
        )
        assert permit.fence
        await served_after(pool, contend(place, client, pool))


async def is_known(client: Client, version: WorkerDeploymentVersion) -> bool:
    """Tell whether the server has heard of a version."""
    request = DescribeWorkerDeploymentVersionRequest(
        namespace="default",
        deployment_version={"deployment_name": version.deployment_name, "build_id": version.build_id},  # type: ignore[arg-type]
    )
    with contextlib.suppress(RPCError):
        await client.workflow_service.describe_worker_deployment_version(request)
        return True
    return False


async def test_the_older_versioning(
    own_temporal_server: OwnTemporalServer, task_queue: str, redis_url: str, prefix: str, pool: Semaphore
) -> None:
    """A worker may have a build id in the way before deployments, where the server allows that."""
    allowed = ("frontend.workerVersioningDataAPIs=true", "frontend.workerVersioningWorkflowAPIs=true")
    server = await own_temporal_server(*(word for one in allowed for word in ("--dynamic-config-value", one)))
    place = Place(server, task_queue, redis_url, prefix)
    client = await place.client()
    await client.update_worker_build_id_compatibility(task_queue, BuildIdOpAddNewDefault("1"))
    async with worker(place, client, build_id="1", use_worker_versioning=True):
        await served_after(pool, contend(place, client, pool))


async def test_two_queues_of_one_client(place: Place, pool: Semaphore) -> None:
    """Two workers of one client on two queues, in one process, share a relay, which outlives the first to end."""
    plugin = place.plugin()
    client = await place.client(plugins=[plugin])
    other = f"{place.task_queue}-other"
    async with worker(place, client, task_queue=other):
        async with worker(place, client):
            assert len(plugin._runtimes) == 1
            fences = await served_after(
                pool,
                contend(place, client, pool, "-one"),
                contend(place, client, pool, "-other", other),
            )
            assert len(set(fences)) == 2
        await served_after(pool, contend(place, client, pool, "-again", other))


async def test_the_plugin_given_to_the_worker_only(place: Place, pool: Semaphore) -> None:
    """The client needs no plugin where the worker has it."""
    client = await place.client(plugins=[])
    async with worker(place, client, plugins=[place.plugin()]):
        await served_after(pool, contend(place, client, pool))


async def test_the_plugin_given_to_client_and_worker(place: Place, pool: Semaphore, quiet: Quiet) -> None:
    """The same plugin given twice is there once; another one is refused, with what to do."""
    quiet.allow("The same plugin type")  # the SDK warns of it
    plugin = place.plugin()
    client = await place.client(plugins=[plugin])
    with pytest.warns(UserWarning, match="same plugin type"):
        served = worker(place, client, plugins=[plugin])
    async with served:
        await served_after(pool, contend(place, client, pool))
    with pytest.warns(UserWarning, match="same plugin type"), pytest.raises(ValueError, match="drop it from"):
        worker(place, client, plugins=[place.plugin()])


@pytest.mark.parametrize(("most", "warned"), [(0, True), (1, True), (2, False), (None, False)])
async def test_a_cache_that_is_too_small(
    place: Place, pool: Semaphore, caplog: pytest.LogCaptureFixture, most: int | None, warned: bool
) -> None:
    """A worker whose cache drops runs in the middle of their calls is warned of, as nothing else shows it."""
    options = {} if most is None else {"max_cached_workflows": most}
    client = await place.client()
    async with worker(place, client, **options):
        await served_after(pool, contend(place, client, pool))
    assert ("max_cached_workflows" in caplog.text) == warned


async def test_two_namespaces_on_one_redis(place: Place, pool: Semaphore) -> None:
    """Workflows of the same ids in two namespaces contend for one resource, each told by its own relay."""
    client = await place.client()
    namespace = f"ns-{place.prefix}"
    await client.workflow_service.register_namespace(
        RegisterNamespaceRequest(namespace=namespace, workflow_execution_retention_period=Duration(seconds=86400))
    )
    other = await place.client(namespace=namespace)
    await eventually(lambda: is_there(other), 20)
    async with worker(place, client), worker(place, other):
        fences = await served_after(
            pool,
            *(contend(place, one, pool, f"-{number}") for number in range(3) for one in (client, other)),
        )
    assert len(set(fences)) == 6


async def is_there(client: Client) -> bool:
    """Tell whether the server has opened the client's namespace everywhere."""
    with contextlib.suppress(RPCError):
        await client.count_workflows()
        await client.start_workflow("None", id="probe", task_queue="none", execution_timeout=timedelta(seconds=1))
        return True
    return False


@pytest.mark.parametrize("module", ["redlease_temporal", "redlease_temporal._workflow_side.run"])
def test_workflow_code_needs_no_redis(module: str) -> None:
    """In a fresh process the import of what workflows use imports neither redis nor the client."""
    code = f"import sys, {module}; print(*(name for name in sys.modules if name.startswith('redis')), end=' ')"
    code += "; print('redlease._core.client' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False"]


STRICT = SandboxImportNotificationPolicy.RAISE_ON_UNINTENTIONAL_PASSTHROUGH
WARNING = SandboxImportNotificationPolicy.WARN_ON_DYNAMIC_IMPORT
PASSING_ALL = SandboxRestrictions.default.with_passthrough_modules(
    "children", "chaos_flows", "deployment_flows", "helpers", "lock_flows", "waiting_flows", "pydantic", "pydantic_core"
)
RUNNERS = {
    "default": SandboxedWorkflowRunner(),
    "warning": SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_import_notification_policy(
            WARNING | SandboxImportNotificationPolicy.WARN_ON_UNINTENTIONAL_PASSTHROUGH
        )
    ),
    "strict": SandboxedWorkflowRunner(restrictions=PASSING_ALL.with_import_notification_policy(WARNING | STRICT)),
    "passing nothing": SandboxedWorkflowRunner(
        restrictions=dataclasses.replace(
            SandboxRestrictions.default,
            passthrough_modules=SandboxRestrictions.default.passthrough_modules - {"pydantic", "pydantic_core"},
        )
    ),
}


@pytest.mark.parametrize("name", RUNNERS)
async def test_the_sandbox(place: Place, pool: Semaphore, quiet: Quiet, name: str) -> None:
    """Workflows with locks run in the sandbox, however strict it is about imports, and no import of redis is theirs."""
    if name == "warning":
        # The modules of the tests are imported in the sandbox, and told of; this library's are not.
        quiet.allow(r"Module (?!redlease)\w[\w.]* was imported")
        quiet.allow(r"Module (?!redlease)\w[\w.]* was not intentionally passed through")
    client = await place.client()
    runner = RUNNERS[name]
    async with worker(place, client, workflow_runner=runner):
        found = await client.execute_workflow(
            Imported.run, "r", id=f"{place.task_queue}-imports", task_queue=place.task_queue
        )
        assert found == []
        await served_after(pool, contend(place, client, pool))


@pytest.mark.parametrize("kind", [redis.asyncio.ConnectionPool, redis.asyncio.BlockingConnectionPool])
async def test_garbage_that_is_collected_in_a_workflow(place: Place, kind: Any) -> None:
    """A pool of redis-py imports modules as it is collected; a workflow whose thread does so is not warned of them."""
    client = await place.client()
    async with worker(place, client):
        gc.collect()
        gc.disable()
        try:
            pool = kind()
            pool._available_connections.append(pool)  # a pool with a connection, in a circle
            del pool
            collected = await client.execute_workflow(
                Collecting.run, id=f"{place.task_queue}-collecting", task_queue=place.task_queue
            )
        finally:
            gc.enable()
    assert collected


async def test_without_the_sandbox(place: Place, pool: Semaphore) -> None:
    """Workflows with locks run without the sandbox."""
    client = await place.client()
    async with worker(place, client, workflow_runner=UnsandboxedWorkflowRunner()):
        permit = await client.execute_workflow(
            RoundTrip.run, "r", id=f"{place.task_queue}-trip", task_queue=place.task_queue
        )
        assert permit.fence
        await served_after(pool, contend(place, client, pool))


async def test_the_block_of_a_worker_ends_after_its_relay(place: Place) -> None:
    """With any SDK the relay has left, and closed its connection, when the block of the last worker is left."""
    plugin = place.plugin()
    client = await place.client(plugins=[plugin])
    async with worker(place, client):
        await client.execute_workflow(Plain.run, id=place.task_queue, task_queue=place.task_queue)
    assert not plugin._runtime_of(client).relay()._tasks


@pytest.mark.parametrize(
    ("told", "original"),
    [
        ({"original_execution_run_id": "a", "continued_run_id": None}, "a"),
        ({"original_execution_run_id": "b", "continued_run_id": "a"}, "b"),
        ({"continued_run_id": None}, "a"),
        ({"continued_run_id": "a"}, "c"),
    ],
)
def test_the_run_before_a_reset(told: dict[str, Any], original: str) -> None:
    """Run c is of a chain that a began, and an SDK may not tell what it was before a reset."""
    info: Any = SimpleNamespace(run_id="c", first_execution_run_id="a", **told)
    assert original_run_of(info) == original


async def test_a_worker_without_the_plugin(place: Place) -> None:
    """The run fails at once with a message that names the plugin."""
    client = await place.client(plugins=[])
    async with worker(place, client):
        with pytest.raises(WorkflowFailureError) as caught:
            await client.execute_workflow(Locked.run, Use("r"), id=place.task_queue, task_queue=place.task_queue)
    assert isinstance(caught.value.cause, ApplicationError)
    assert "RedleasePlugin" in caught.value.cause.message
