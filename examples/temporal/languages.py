"""Workflows in Go and in Python and a service in TypeScript call a vendor in one queue: at most two at once.

make example-languages, which builds the two programs that are its arguments
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator

from shared import CALLS, SECONDS, Order, call
from temporalio.api.nexus.v1 import EndpointSpec, EndpointTarget
from temporalio.api.operatorservice.v1 import CreateNexusEndpointRequest
from temporalio.client import Client
from temporalio.worker import Worker

from redlease import Redlease
from redlease_temporal.worker import RedleasePlugin

from local import redis_server, run, temporal_server
from show import Turn, arrivals, console, in_order, most_inside, timeline, verdict

EACH = 4  # of workflows in Go, of workflows in Python, and of requests to the service
REST = 0.05  # between those who ask
ENDED = 10.0  # how long a program may take to end


@contextlib.asynccontextmanager
async def program(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a program beside the block."""
    process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), ENDED)


async def opened(client: Client, name: str, task_queue: str) -> None:
    """Creates the endpoint by which workflows find the lock service."""
    target = EndpointTarget(worker=EndpointTarget.Worker(namespace=client.namespace, task_queue=task_queue))
    await client.operator_service.create_nexus_endpoint(
        CreateNexusEndpointRequest(spec=EndpointSpec(name=name, target=target))
    )


async def in_go(client: Client, resource: str, number: int) -> Turn:
    """Runs a workflow in Go, whose id is shown as its holder's name."""
    name, asked_at = f"Go workflow {number}", time.time()
    words = [resource, resource, CALLS, round(SECONDS * 1e9)]
    told = await client.execute_workflow("Order", args=words, id=f"{name} of {resource}", task_queue=f"{resource}-go")
    return Turn(name, asked_at, told["BeganMs"] / 1000, told["EndedMs"] / 1000, told["Fence"])


async def in_python(client: Client, resource: str, number: int) -> Turn:
    """Runs a workflow in Python, with a worker that has the Redis."""
    name, asked_at = f"Python workflow {number}", time.time()
    began, ended, fence = await client.execute_workflow(
        Order.run, args=[resource, name], id=f"{name} of {resource}", task_queue=f"{resource}-python"
    )
    return Turn(name, asked_at, began, ended, fence)


async def in_typescript(service: asyncio.subprocess.Process) -> list[Turn]:
    """Reads what the service tells of its requests, until it ends."""
    output, _ = await service.communicate()
    told = [json.loads(line) for line in output.splitlines()]
    return [
        Turn(one["name"], one["asked"] / 1000, one["began"] / 1000, one["ended"] / 1000, one["fence"]) for one in told
    ]


async def main() -> bool:
    """Whether the promises were kept."""
    go_worker, node, service = sys.argv[1:]
    resource = f"vendor-{secrets.token_hex(2)}"
    async with contextlib.AsyncExitStack() as stack:
        redis_url = await stack.enter_async_context(redis_server())
        address = await stack.enter_async_context(temporal_server())
        plugin = RedleasePlugin(redis_url)
        client = await Client.connect(address, plugins=[plugin])
        await stack.enter_async_context(plugin.nexus_worker(client, f"{resource}-locks"))
        await opened(client, resource, f"{resource}-locks")
        worker = Worker(client, task_queue=f"{resource}-python", workflows=[Order], activities=[call])
        await stack.enter_async_context(worker)
        await stack.enter_async_context(program(go_worker, address, f"{resource}-go"))
        redlease = await stack.enter_async_context(Redlease.from_url(redis_url))
        vendor = redlease.semaphore(resource, capacity=CALLS)
        console.print(
            f"{EACH} workflows in Go, {EACH} in Python, {EACH} requests to a service, {CALLS} calls at once\n"
        )
        async with arrivals(vendor, 3 * EACH) as seen:
            numbers = [str(number) for number in (CALLS, EACH, round(SECONDS * 1000), round(2 * REST * 1000))]
            serving = await stack.enter_async_context(program(node, service, redis_url, resource, *numbers))
            assert serving.stdout
            await serving.stdout.readline()  # it is there
            requests = asyncio.create_task(in_typescript(serving))
            workflows = []
            for number in range(1, EACH + 1):
                for language in (in_go, in_python):
                    workflows.append(asyncio.create_task(language(client, resource, number)))
                    await asyncio.sleep(REST)
            turns = [*await asyncio.gather(*workflows), *await requests]
    seen = [owner.removesuffix(f" of {resource}") for owner in seen]
    console.print(timeline(turns, seen))
    return verdict(
        (most_inside(turns) <= CALLS, f"at most {CALLS} inside at any moment", f"{most_inside(turns)} at the most"),
        (in_order(turns, seen), "granted in the order of arrival, in one queue", f"{len(turns)} grants"),
        (len(turns) == 3 * EACH, "everybody was served", ""),
    )


if __name__ == "__main__":
    run(main)
