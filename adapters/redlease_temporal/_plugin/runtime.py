"""What runs beside the workers of one client: the relay, if Redis is configured, and the internal worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from typing import Any

from temporalio.client import Client
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from redlease_temporal._admission.activities import AdmissionActivities
from redlease_temporal._admission.redis_tracker import AdmissionTracker
from redlease_temporal._admission.slot_admission import SlotAdmission
from redlease_temporal._admission.slot_workflow import AdmissionSlotWorkflow
from redlease_temporal._backends.coordinator.activities import CoordinatorActivities, StatusActivities
from redlease_temporal._backends.coordinator.contended import ContendedHolders
from redlease_temporal._backends.coordinator.workflow import Coordinator
from redlease_temporal._backends.redis.activities import RedisActivities
from redlease_temporal._backends.redis.caller_tracker import tracker_for
from redlease_temporal._backends.redis.registry import TicketRecord
from redlease_temporal._backends.redis.relay import Relay, Tracker
from redlease_temporal._backends.slots.activities import SlotActivities
from redlease_temporal._backends.slots.notifier import SlotNotifier
from redlease_temporal._backends.slots.workflow import Slot
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal._common.settings import Settings
from redlease_temporal._exclusive.attempts import Attempts
from redlease_temporal._sequence.workflow import SequenceWorkflow
from redlease_temporal.errors import usage_error

from .permit_check import PermitChecks
from .workflow_interceptor import ResourceWorkflowInterceptor

INTERNAL_STICKY = timedelta(seconds=2)  # how long a dead worker delays the tasks of the workflows it had cached
INTERNAL_POLLS = 4  # pollers of the internal worker: few, as its tasks are short
LIBRARY_WORKFLOWS: list[type] = [
    Coordinator,
    Slot,
    AdmissionSlotWorkflow,
    SequenceWorkflow,
]  # they run on the internal worker, never on a user's


class Runtime:
    """Runs the relay and the internal worker as long as any worker of the client runs.

    Args:
        temporal: The client of the workers.
        settings: The plugin's settings.
    """

    def __init__(self, temporal: Client, settings: Settings) -> None:
        self.temporal = temporal
        self.settings = settings
        self.attempts = Attempts(self.relay)
        self.checks = PermitChecks(temporal)
        self._users = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting: asyncio.Lock
        self._relay: Relay | None = None
        self._monitor: RunMonitor
        self._permit_headers: contextlib.AsyncExitStack

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts with the first user and stops with the last."""
        loop = asyncio.get_running_loop()
        if self._users == 0 and self._loop is not loop:
            self._loop, self._starting = loop, asyncio.Lock()
        async with self._starting:
            if self._users == 0:
                await self._start()
            self._users += 1
        try:
            yield
        finally:
            async with self._starting:
                self._users -= 1
                if self._users == 0:
                    await self._permit_headers.aclose()

    async def _start(self) -> None:
        self._monitor = RunMonitor(self.temporal, self.settings.polls_per_second)
        async with contextlib.AsyncExitStack() as stack:
            monitor = asyncio.create_task(self._monitor.run(), name="redlease looks at workflow runs")
            stack.push_async_callback(_cancel_and_wait, monitor)
            if self.settings.make_client is not None:
                self._relay = await Relay.create(self.temporal, self.settings, self._monitor, tracker_of)
                stack.callback(self.attempts.close)
                await stack.enter_async_context(self._relay.running())
            await stack.enter_async_context(self._internal_worker())
            self._permit_headers = stack.pop_all()

    @contextlib.asynccontextmanager
    async def _internal_worker(self) -> AsyncIterator[None]:
        notifier, slots = SlotNotifier(self.temporal), SlotActivities(self.temporal)
        contended = ContendedHolders(self.temporal, self._monitor)
        worker = Worker(
            self.temporal,
            task_queue=self.settings.task_queue_of(self.temporal),
            workflows=LIBRARY_WORKFLOWS,
            activities=[
                *RedisActivities(self.relay).remote,
                *AdmissionActivities(self.relay, self.slots).remote,
                StatusActivities(self._monitor).poll,
                slots.idle,
                notifier.notify,
            ],
            interceptors=[ResourceWorkflowInterceptor(contended)],
            # The library's workflows are known to be deterministic; a sandbox would only slow down their start.
            workflow_runner=UnsandboxedWorkflowRunner(),
            max_concurrent_workflow_task_polls=INTERNAL_POLLS,
            max_concurrent_activity_task_polls=INTERNAL_POLLS,
            sticky_queue_schedule_to_start_timeout=INTERNAL_STICKY,
        )
        async with notifier.running(), contended.running(), worker:
            yield

    def local_activities(self) -> list[Callable[..., Any]]:
        """The local activities for workers that run users' workflows."""
        queue = self.settings.task_queue_of(self.temporal)
        return [
            *RedisActivities(self.relay).local,
            *AdmissionActivities(self.relay, self.slots).local,
            *CoordinatorActivities(self.temporal, queue).local,
            *SlotActivities(self.temporal).local,
        ]

    def relay(self) -> Relay:
        """The relay; raises a misuse error if the plugin was given no Redis."""
        if self._relay is None:
            message = (
                "redlease: the plugin was given no Redis, which backend='redis', @exclusive and @concurrency need: "
                "RedleasePlugin('redis://...'), or take backend='coordinator' or 'slots'"
            )
            raise usage_error(message)
        return self._relay

    def slots(self) -> SlotAdmission:
        """Acquires and releases the places of workflows without Redis."""
        return SlotAdmission(self.temporal, self.settings.task_queue_of(self.temporal), self._monitor)

    def closing(self, workflow_id: str) -> None:
        """A run of the workflow is about to close. May be called from the workflow's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the runtime has ended
                self._loop.call_soon_threadsafe(self._monitor.poll_soon, (workflow_id, ""))


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def tracker_of(relay: Relay, record: TicketRecord) -> Tracker:
    """Makes the tracker for a record: of a place, or of a ticket."""
    return AdmissionTracker(relay, record) if record.admission else tracker_for(relay, record)
