"""A lock service beside a namespace of callers, on one server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from google.protobuf.duration_pb2 import Duration
from nexus_flows import ENDPOINT
from temporalio.api.nexus.v1 import EndpointSpec, EndpointTarget
from temporalio.api.operatorservice.v1 import CreateNexusEndpointRequest
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from redlease.embedded import ProcessGroup
from redlease_temporal._payloads.nexus import ACQUIRE_WORKFLOW
from redlease_temporal.worker import RedleasePlugin

import foreign_workers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from temporal_tools import Place

    from temporal_server import TemporalServer

CALLERS = "callers"
SERVICE_QUEUE = "locks"
RETENTION = Duration(seconds=86_400)
KNOWN_WITHIN = 60.0  # a new namespace is not known to every part of the server at once


class Callers:
    """The namespace of callers of a server, and the endpoint of its lock service."""

    def __init__(self, address: str) -> None:
        """Both are there already."""
        self.address = address

    @contextlib.asynccontextmanager
    async def service(self, place: Place, **options: Any) -> AsyncIterator[Client]:
        """Serve locks in the default namespace, with a plugin that has these options."""
        await self._end_what_is_left()
        plugin = place.plugin(**options)
        client = await Client.connect(self.address, plugins=[plugin])
        async with plugin.nexus_worker(client, SERVICE_QUEUE):
            yield client

    @contextlib.asynccontextmanager
    async def calling(
        self, place: Place, workflows: Sequence[type], activities: Sequence[Any] = ()
    ) -> AsyncIterator[Client]:
        """Run workflows in the namespace of callers; their worker has no Redis."""
        await self._end_what_is_left()
        client = await Client.connect(self.address, namespace=CALLERS, plugins=[RedleasePlugin()])
        async with Worker(client, task_queue=place.task_queue, workflows=workflows, activities=activities):
            yield client

    async def _end_what_is_left(self) -> None:
        """End the workflows of earlier tests: this test's service would serve what they left."""
        for namespace, kind in ((CALLERS, ""), ("default", f"WorkflowType = '{ACQUIRE_WORKFLOW}' AND ")):
            client = await Client.connect(self.address, namespace=namespace)
            async for left in client.list_workflows(f"{kind}ExecutionStatus = 'Running'"):
                with contextlib.suppress(RPCError):  # it has ended since
                    await client.get_workflow_handle(left.id, run_id=left.run_id).terminate()

    @contextlib.asynccontextmanager
    async def foreign(self, language: str, place: Place) -> AsyncIterator[str]:
        """Run the workflows of a language's own worker in the namespace of callers; yields their task queue."""
        task_queue = f"{place.task_queue}-{language}"
        words = await asyncio.to_thread(foreign_workers.command, language)
        group = ProcessGroup()
        with tempfile.TemporaryFile() as log:
            try:
                group.spawn([*words, self.address, CALLERS, task_queue], output=log, env=dict(os.environ))
                yield task_queue
            finally:
                group.end()
                for pause in group.ending():
                    await asyncio.sleep(pause)
                log.seek(0)
                sys.stdout.write(log.read().decode(errors="replace"))  # which is shown if the test fails


async def with_callers(server: TemporalServer) -> Callers:
    """Register the namespace, and create the endpoint."""
    client = await Client.connect(server.address)
    await client.workflow_service.register_namespace(
        RegisterNamespaceRequest(namespace=CALLERS, workflow_execution_retention_period=RETENTION)
    )
    worker = EndpointTarget.Worker(namespace=client.namespace, task_queue=SERVICE_QUEUE)
    spec = EndpointSpec(name=ENDPOINT, target=EndpointTarget(worker=worker))
    await client.operator_service.create_nexus_endpoint(CreateNexusEndpointRequest(spec=spec))
    callers = await Client.connect(server.address, namespace=CALLERS)
    async with asyncio.timeout(KNOWN_WITHIN):
        while not await _is_known(callers):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return Callers(server.address)


async def _is_known(client: Client) -> bool:
    try:
        await client.start_workflow("none", id="none", task_queue="none", execution_timeout=timedelta(seconds=1))
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return False
    return True
