"""A lock service beside a namespace of callers, on one server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import tempfile
from datetime import timedelta
from pathlib import Path
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
from redlease_temporal.worker import RedleasePlugin

import golang
from caches import cached

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from temporal_tools import Place

    from temporal_server import TemporalServer

CALLERS = "callers"
SERVICE_QUEUE = "locks"
GO = Path(__file__).parents[2] / "adapters" / "languages" / "go"
RETENTION = Duration(seconds=86_400)
KNOWN_WITHIN = 60.0  # a new namespace is not known to every part of the server at once


class Callers:
    """The namespace of callers of a server, and the endpoint of its lock service."""

    def __init__(self, address: str) -> None:
        """Both are there already."""
        self.address = address

    @contextlib.asynccontextmanager
    async def service(self, place: Place, **options: Any) -> AsyncIterator[Client]:
        """Serve locks in the default namespace."""
        plugin = place.plugin()
        client = await Client.connect(self.address, plugins=[plugin])
        async with plugin.nexus_worker(client, SERVICE_QUEUE, **options):
            yield client

    @contextlib.asynccontextmanager
    async def calling(
        self, place: Place, workflows: Sequence[type], activities: Sequence[Any] = ()
    ) -> AsyncIterator[Client]:
        """Run workflows in the namespace of callers; their worker has no Redis."""
        client = await Client.connect(self.address, namespace=CALLERS, plugins=[RedleasePlugin()])
        async with Worker(client, task_queue=place.task_queue, workflows=workflows, activities=activities):
            yield client

    @contextlib.asynccontextmanager
    async def go(self, place: Place) -> AsyncIterator[None]:
        """Run the workflows of the Go package's own worker in the namespace of callers."""
        program = str(await asyncio.to_thread(go_worker))
        group = ProcessGroup()
        with tempfile.TemporaryFile() as log:
            try:
                group.spawn([program, self.address, CALLERS, place.task_queue], output=log, env=dict(os.environ))
                yield
            finally:
                group.end()
                for pause in group.ending():
                    await asyncio.sleep(pause)


@functools.cache
def go_worker() -> Path:
    """Return the worker of the Go package, built once from the same source."""
    files = sorted(path for path in GO.rglob("*") if path.is_file())
    source = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

    def make(directory: Path) -> None:
        golang.build(["build", "-o", str(directory / "worker"), "./worker"], directory, {}, source=GO)

    return cached(f"go-caller-{source[:12]}", make) / "worker"


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
