"""What a worker or client takes: the plugin, and the decorator for its activities."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from typing import Any

import temporalio.client
import temporalio.worker
from temporalio.client import Client, ClientConfig, WorkflowHistory
from temporalio.service import ConnectConfig, ServiceClient
from temporalio.worker import (
    Replayer,
    ReplayerConfig,
    UnsandboxedWorkflowRunner,
    Worker,
    WorkerConfig,
    WorkflowReplayResult,
)
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner

from redlease import Redlease
from redlease.limits import Duration

from .activities import Activities
from .admission_client import AdmissionInterceptor
from .coordinator import Coordinator
from .coordinator_activities import CoordinatorActivities, Looking
from .exclusive import current_hold, exclusive
from .interceptors import RelayInterceptor
from .place_workflow import PlaceWorkflow
from .relay import Relay
from .sequence_workflow import SequenceWorkflow
from .settings import checked
from .slot import Slot
from .slot_activities import SlotActivities
from .usher import Usher

__all__ = ["RedleasePlugin", "current_hold", "exclusive"]

logger = logging.getLogger("redlease.temporal")

PASSED_THROUGH = ("redlease", "redlease_temporal")
INTERNAL_STICKY = timedelta(seconds=2)  # after which another worker goes on with what a dead one had
INTERNAL_POLLS = 4  # of the internal worker: its tasks are short
LIBRARY_WORKFLOWS: list[type] = [
    Coordinator,
    Slot,
    PlaceWorkflow,
    SequenceWorkflow,
]  # which run on the internal worker, never on a user's


class RedleasePlugin(temporalio.client.Plugin, temporalio.worker.Plugin):
    """Gives workers what `lock` and `semaphore` in workflows need. It is for a client, whose workers then have it too.

    It adds local activities and interceptors to each worker with workflows, and runs, beside each client's workers, one
    relay and one internal worker on a task queue of its own. The data converter stays the user's. Redis is connected to
    when a worker runs; replaying needs none. Durations are seconds or a `timedelta`.

    Args:
        redis: A URL as `Redlease.from_url` takes it, or what makes a `Redlease` client when called in the event loop of
            the workers; None where only the backends are used that need no Redis.
        prefix: What all keys and channels begin with; services that are to share resources take the same one.
        group: By default, workers whose data converters are alike serve each other's waiting workflows in a namespace.
            Name a group to keep setups apart, those on different Redis servers above all.
        waiter_lease: How long workflows that wait keep others waiting when no worker is left. Their order of arrival
            outlasts that: they take their places again when workers return.
        idle_ttl: See `Redlease`.
        unknown_grace: How long a permit is renewed while the Temporal server does not say whether its run is open.
        adopt_window: How long a run that was continued as new has to adopt what its predecessor held.
        wait_attempt: How long one attempt of a waiting activity lasts. A new one mends whatever Redis has lost.
        looks_per_second: The most calls a second by which a relay asks how runs stand.
        **redis_options: Further options of a redis-py connection.

    Raises:
        ValueError: A parameter is wrong.

    Example:
        >>> plugin = RedleasePlugin("redis://localhost:6379/0")  # doctest: +SKIP
        >>> client = await Client.connect("localhost:7233", plugins=[plugin])  # doctest: +SKIP
        >>> worker = Worker(client, task_queue="orders", workflows=[Train], activities=[train])  # doctest: +SKIP
    """

    def __init__(
        self,
        redis: str | Callable[[], Redlease] | None = None,
        *,
        prefix: str = "redlease",
        group: str = "",
        waiter_lease: Duration = 10.0,
        idle_ttl: Duration = 86_400.0,
        unknown_grace: Duration = 60.0,
        adopt_window: Duration = 30.0,
        wait_attempt: Duration = 300.0,
        looks_per_second: float = 50.0,
        **redis_options: Any,
    ) -> None:
        self._settings = checked(
            _maker(redis, prefix, redis_options),
            prefix=prefix,
            group=group,
            waiter_lease=waiter_lease,
            idle_ttl=idle_ttl,
            unknown_grace=unknown_grace,
            adopt_window=adopt_window,
            wait_attempt=wait_attempt,
            looks_per_second=looks_per_second,
        )
        self._relays: dict[Client, Relay] = {}
        self._making = threading.Lock()

    # Client

    def configure_client(self, config: ClientConfig) -> ClientConfig:
        """Adds the interceptor of starts. The data converter is the user's."""
        config["interceptors"] = [*config["interceptors"], AdmissionInterceptor(config, self._settings)]
        return config

    async def connect_service_client(
        self,
        config: ConnectConfig,
        next: Callable[[ConnectConfig], Awaitable[ServiceClient]],  # noqa: A002
    ) -> ServiceClient:
        """Leaves the connection as it is."""
        return await next(config)

    # Worker

    def configure_worker(self, config: WorkerConfig) -> WorkerConfig:
        """Adds the interceptor, and to a worker with workflows the local activities."""
        client, task_queue = config["client"], config["task_queue"]
        internal_queue = self._settings.task_queue_of(client)
        if task_queue == internal_queue:
            return config
        relay = self._relay_of(client)
        interceptor = RelayInterceptor(relay, internal_queue, self._settings.wait_attempt_s)
        config["interceptors"] = [*config.get("interceptors", ()), interceptor]
        if config.get("workflows"):
            own = list(config.get("activities", ()))
            if not own:
                # It did not poll for activities, and is not to take those of other workers on its queue now.
                config["no_remote_activities"] = True
            config["activities"] = [
                *own,
                *Activities(relay).local,
                *CoordinatorActivities(client, internal_queue).local,
                *SlotActivities(client).local,
            ]
            config["workflow_runner"] = _passing_through(config.get("workflow_runner"))
        return config

    async def run_worker(self, worker: Worker, next: Callable[[Worker], Awaitable[None]]) -> None:  # noqa: A002
        """Runs the relay and the internal worker beside the worker."""
        client = worker.client
        if worker.task_queue == self._settings.task_queue_of(client):
            await next(worker)
            return
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self._relay_of(client).running())
            except Exception:
                logger.exception("the worker of task queue %r cannot run", worker.task_queue)
                # The end of `async with worker:` waits until the worker has run, so it does, as one that is shut down.
                ending = asyncio.create_task(worker.shutdown())
                try:
                    with contextlib.suppress(Exception):
                        await next(worker)
                        await ending
                finally:
                    ending.cancel()
                raise
            await next(worker)

    def internal_queue(self, client: Client) -> str:
        """The task queue of the worker that the plugin runs beside a client's workers, for the library's own work."""
        return self._settings.task_queue_of(client)

    def _relay_of(self, client: Client) -> Relay:
        with self._making:
            relay = self._relays.get(client)
            if relay is None:
                relay = self._relays[client] = Relay(client, self._settings)
                relay.around = lambda: _internal_worker(client, relay, self._settings.task_queue_of(client))
            return relay

    # Replayer

    def configure_replayer(self, config: ReplayerConfig) -> ReplayerConfig:
        """Adds what workflow code needs; nothing is done for real in a replay."""
        interceptor = RelayInterceptor(None, "redlease", self._settings.wait_attempt_s)
        config["interceptors"] = [*config.get("interceptors", ()), interceptor]
        config["workflow_runner"] = _passing_through(config.get("workflow_runner"))
        return config

    @contextlib.asynccontextmanager
    async def run_replayer(
        self,
        replayer: Replayer,
        histories: AsyncIterator[WorkflowHistory],
        next: Callable[  # noqa: A002
            [Replayer, AsyncIterator[WorkflowHistory]],
            AbstractAsyncContextManager[AsyncIterator[WorkflowReplayResult]],
        ],
    ) -> AsyncIterator[AsyncIterator[WorkflowReplayResult]]:
        """Replays."""
        async with next(replayer, histories) as results:
            yield results


def _maker(
    redis: str | Callable[[], Redlease] | None, prefix: str, redis_options: dict[str, Any]
) -> Callable[[], Redlease] | None:
    if isinstance(redis, str):
        Redlease.from_url(redis, prefix=prefix, **redis_options)  # a wrong URL or option is told at once
        return lambda: Redlease.from_url(redis, prefix=prefix, **redis_options)
    if redis is not None and not callable(redis):
        raise ValueError(f"RedleasePlugin takes a URL, or what makes a Redlease client when called, not {redis!r}")
    if redis_options:
        raise ValueError(
            f"options of a connection go with a URL, and these are for no other: {', '.join(redis_options)}"
        )
    return redis


def _passing_through(runner: Any) -> Any:
    """The sandbox with this library outside it: imported once, not once for each workflow."""
    if isinstance(runner, SandboxedWorkflowRunner):
        restrictions = runner.restrictions.with_passthrough_modules(*PASSED_THROUGH)
        return dataclasses.replace(runner, restrictions=restrictions)
    return runner


@contextlib.asynccontextmanager
async def _internal_worker(client: Client, relay: Relay, task_queue: str) -> AsyncIterator[None]:
    usher, slots = Usher(client), SlotActivities(client)
    worker = Worker(
        client,
        task_queue=task_queue,
        workflows=LIBRARY_WORKFLOWS,
        activities=[*Activities(relay).remote, Looking(relay.owners).look, slots.idle, usher.tell],
        # What the library's workflows do is known: a sandbox would only make each of them slow to begin.
        workflow_runner=UnsandboxedWorkflowRunner(),
        max_concurrent_workflow_task_polls=INTERNAL_POLLS,
        max_concurrent_activity_task_polls=INTERNAL_POLLS,
        sticky_queue_schedule_to_start_timeout=INTERNAL_STICKY,
    )
    async with usher.running(), worker:
        yield
