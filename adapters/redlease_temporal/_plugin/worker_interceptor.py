"""The interceptor of users' workers: locks for their workflows, permit checks for their activities."""

from __future__ import annotations

import functools

from temporalio.worker import (
    ActivityInboundInterceptor,
    Interceptor,
    WorkflowInboundInterceptor,
    WorkflowInterceptorClassInput,
)

from redlease_temporal._workflow_side.metrics import ResourceLabel
from redlease_temporal._workflow_side.run import Run

from .activity_interceptor import PermitCheckInterceptor
from .runtime import Runtime
from .workflow_interceptor import LockedWorkflow


class WorkerInterceptor(Interceptor):
    """The interceptor of a worker. `runtime` is None if it only replays histories."""

    def __init__(
        self, runtime: Runtime | None, task_queue: str, wait_attempt_s: float, label: ResourceLabel | None
    ) -> None:
        self.runtime = runtime
        new_run = functools.partial(Run, task_queue, wait_attempt_s, label)
        # The SDK constructs one per workflow with its own arguments only, so these are class attributes.
        members = {
            "new_run": staticmethod(new_run),
            "closing": staticmethod(_ignore if runtime is None else runtime.closing),
        }
        self._workflow_class = type("LockedWorkflow", (LockedWorkflow,), members)

    def intercept_activity(self, next: ActivityInboundInterceptor) -> ActivityInboundInterceptor:  # noqa: A002
        return (
            next
            if self.runtime is None
            else PermitCheckInterceptor(next, self.runtime.checks, self.runtime.attempts, self.runtime.relay)
        )

    def workflow_interceptor_class(self, _: WorkflowInterceptorClassInput) -> type[WorkflowInboundInterceptor]:
        return self._workflow_class


def _ignore(_: str) -> None:
    """Stands in for `Runtime.closing` in a replay."""
