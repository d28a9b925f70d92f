"""What workers and clients use: the plugin, and the decorator for activities."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
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
from redlease._core.limits import Duration

from ._admission.start_interceptor import AdmissionInterceptor
from ._common.settings import checked
from ._exclusive.decorator import current_hold, exclusive
from ._nexus.acquire_workflow import AcquireWorkflow
from ._nexus.service import LockServiceHandler
from ._plugin.runtime import LIBRARY_WORKFLOWS, Runtime
from ._plugin.worker_interceptor import WorkerInterceptor
from ._workflow_side.metrics import ResourceLabel

__all__ = ["RedleasePlugin", "current_hold", "exclusive"]

logger = logging.getLogger("redlease.temporal")

# With fewer cached workflows, the SDK drops a run while a local activity of it is under way: it cancels that, and does
# not complete the workflow task, which the server hands out again after its timeout.
CACHED_LEAST = 2

# When redis-py's connection pool is garbage collected it imports modules, in any thread, so also in a workflow's.
PASSED_THROUGH = ("redlease", "redlease_temporal", "redis")
# An SDK before 1.35 cancels `run_worker` of a plugin when the worker has shut down.
SDK_AWAITS_PLUGINS = "plugin_shutdown_timeout" in WorkerConfig.__annotations__


class RedleasePlugin(temporalio.client.Plugin, temporalio.worker.Plugin):
    """Adds `lock` and `semaphore` to workflows. Give it to the client, whose workers then have it too.

    It adds local activities and interceptors to each worker with workflows, and runs, beside each client's workers, one
    relay and one internal worker on a task queue of its own. The data converter stays the user's. It connects to Redis
    when a worker runs; replaying needs no Redis. Durations are seconds or a `timedelta`.

    Args:
        redis: A URL as `Redlease.from_url` takes it, or a function that makes a `Redlease` client when called in the
            event loop of the workers; None if only backends are used that need no Redis.
        prefix: The prefix of all keys and channels in Redis; services that share resources use the same one. It does
            not apply to slots, the coordinator and sequences: there a name is one resource per namespace.
        group: By default, workers whose data converters are alike serve each other's waiting workflows in a namespace.
            Name a group to keep setups apart, above all those on different Redis servers.
        waiter_lease: How long waiting workflows keep their queue entries when no worker is left. They keep their order
            of arrival longer: when workers return, they queue again where they stood.
        idle_ttl: See `Redlease`.
        unknown_grace: How long permits are renewed while the Temporal server does not report whether their run is open.
        adopt_window: How long a run that was continued as new has to adopt the permits of its predecessor.
        wait_attempt: How long one attempt of a waiting activity lasts. A new attempt restores what Redis has lost.
        polls_per_second: The most calls per second by which a relay asks for the status of runs.
        resource_label: Gets the name of a resource and returns what stands for it in the metrics of workflows: few
            different values, such as the part before a colon. Without it they do not say which resource it was.
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
        polls_per_second: float = 50.0,
        resource_label: ResourceLabel | None = None,
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
            polls_per_second=polls_per_second,
        )
        if resource_label is not None and not callable(resource_label):
            raise ValueError(f"resource_label must be a function of a name, not {resource_label!r:.80}")
        self._resource_label = resource_label
        self._runtimes: dict[Client, Runtime] = {}
        self._making = threading.Lock()

    # Client

    def configure_client(self, config: ClientConfig) -> ClientConfig:
        """Adds the interceptor that checks workflow starts. The data converter is the user's."""
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
        """Adds the interceptor and, to a worker with workflows, the local activities."""
        client, task_queue = config["client"], config["task_queue"]
        internal_queue = self._settings.task_queue_of(client)
        if task_queue == internal_queue:
            return config
        runtime, interceptors = self._runtime_of(client), config.get("interceptors", ())
        before = next((each for each in interceptors if isinstance(each, WorkerInterceptor)), None)
        if before is not None:
            if before.runtime is runtime:  # this very plugin was given to the client and to the worker
                return config
            raise ValueError(
                f"the worker of task queue {task_queue!r} has two RedleasePlugins. A client's workers have its plugin: "
                "give it to the client, and drop it from `Worker(plugins=[...])`"
            )
        interceptor = WorkerInterceptor(runtime, internal_queue, self._settings.wait_attempt_s, self._resource_label)
        config["interceptors"] = [*interceptors, interceptor]
        if config.get("workflows"):
            _warn_of_small_cache(task_queue, config.get("max_cached_workflows", CACHED_LEAST))
            activities = list(config.get("activities", ()))
            if not activities:
                # The worker did not poll for activities, and must not start to take those of other workers on its
                # queue.
                config["no_remote_activities"] = True
            config["activities"] = [*activities, *runtime.local_activities()]
            config["workflow_runner"] = _passing_through(config.get("workflow_runner"))
        return config

    async def run_worker(self, worker: Worker, next: Callable[[Worker], Awaitable[None]]) -> None:  # noqa: A002
        """Runs the relay and the internal worker beside the worker."""
        client = worker.client
        if worker.task_queue == self._settings.task_queue_of(client):
            await next(worker)
            return
        shutdown = worker.shutdown
        async with contextlib.AsyncExitStack() as stack:
            if not SDK_AWAITS_PLUGINS:
                stack.enter_context(_shutdown_awaits_this(worker))
            try:
                await stack.enter_async_context(self._runtime_of(client).running())
            except Exception:
                logger.exception("the worker of task queue %r cannot run", worker.task_queue)
                # The exit of `async with worker:` waits until the worker has run, so run it, already shut down.
                ending = asyncio.create_task(shutdown())
                try:
                    with contextlib.suppress(Exception):
                        await next(worker)
                        await ending
                finally:
                    ending.cancel()
                raise
            await next(worker)

    def internal_queue(self, client: Client) -> str:
        """The task queue of the internal worker that the plugin runs beside a client's workers."""
        return self._settings.task_queue_of(client)

    def nexus_worker(self, client: Client, task_queue: str, **options: Any) -> Worker:
        """A worker that serves locks to workflows of any language and namespace, as the Nexus service `redlease`.

        Run any number of them, in the same way as your other workers. Callers need an endpoint whose target is this
        client's namespace and task queue.

        Args:
            client: A client with this plugin.
            task_queue: A task queue of its own.
            **options: Further options of a `Worker`.

        Example:
            >>> async with plugin.nexus_worker(client, "locks"):  # doctest: +SKIP
            ...     await asyncio.Event().wait()
        """
        return Worker(
            client,
            task_queue=task_queue,
            workflows=[AcquireWorkflow],
            nexus_service_handlers=[LockServiceHandler(self._runtime_of(client).relay)],
            workflow_runner=UnsandboxedWorkflowRunner(),  # the library's own workflow needs no sandbox
            **options,
        )

    def _runtime_of(self, client: Client) -> Runtime:
        with self._making:
            return self._runtimes.setdefault(client, Runtime(client, self._settings))

    # Replayer

    def configure_replayer(self, config: ReplayerConfig) -> ReplayerConfig:
        """Adds what workflow code needs, and the library's own workflows. A replay has no side effects."""
        interceptor = WorkerInterceptor(None, "redlease", self._settings.wait_attempt_s, None)
        config["interceptors"] = [*config.get("interceptors", ()), interceptor]
        given = list(config.get("workflows", ()))
        config["workflows"] = [*given, *(own for own in (*LIBRARY_WORKFLOWS, AcquireWorkflow) if own not in given)]
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
        """Runs the replayer unchanged."""
        async with next(replayer, histories) as results:
            yield results


def _maker(
    redis: str | Callable[[], Redlease] | None, prefix: str, redis_options: dict[str, Any]
) -> Callable[[], Redlease] | None:
    if isinstance(redis, str):
        Redlease.from_url(redis, prefix=prefix, **redis_options)  # raises now if the URL or an option is wrong
        return lambda: Redlease.from_url(redis, prefix=prefix, **redis_options)
    if redis is not None and not callable(redis):
        raise ValueError(f"RedleasePlugin takes a URL, or what makes a Redlease client when called, not {redis!r}")
    if redis_options:
        raise ValueError(
            f"options of a connection go with a URL, and these are for no other: {', '.join(redis_options)}"
        )
    return redis


@contextlib.contextmanager
def _shutdown_awaits_this(worker: Worker) -> Iterator[None]:
    """Makes `worker.shutdown()`, which ends the worker's block, wait until this block has ended too."""
    shutdown, ended = worker.shutdown, asyncio.Event()

    async def shut_down() -> None:
        await shutdown()
        await ended.wait()

    worker.shutdown = shut_down  # type: ignore[method-assign]
    try:
        yield
    finally:
        ended.set()


def _warn_of_small_cache(task_queue: str, most: int) -> None:
    if most < CACHED_LEAST:
        logger.warning(
            "the worker of task queue %r has max_cached_workflows=%d: when it works on several workflows, the SDK "
            "drops them while they ask for a lock, and each time the workflow task is repeated after its timeout of "
            "10 s. To test replays, use temporalio.worker.Replayer",
            *(task_queue, most),
        )


def _passing_through(runner: Any) -> Any:
    """Passes this library and its Redis client through the sandbox: imported once, not for each workflow."""
    if isinstance(runner, SandboxedWorkflowRunner):
        restrictions = runner.restrictions.with_passthrough_modules(*PASSED_THROUGH)
        return dataclasses.replace(runner, restrictions=restrictions)
    return runner
