"""A Temporal server in this process, as far as a relay asks one: how runs stand, and what they are told."""

from __future__ import annotations

import asyncio
import base64
import time
from types import SimpleNamespace
from typing import Any

from temporalio.api.enums.v1 import WorkflowExecutionStatus
from temporalio.api.workflowservice.v1 import (
    DescribeWorkflowExecutionResponse,
    GetWorkflowExecutionHistoryReverseResponse,
)
from temporalio.converter import DataConverter
from temporalio.service import RPCError, RPCStatusCode


class FakeTemporal:
    """The client of such a server. Runs are known by their workflow id; each token is that of its run's activity."""

    namespace = "default"

    def __init__(self, data_converter: DataConverter = DataConverter.default) -> None:
        self.data_converter = data_converter
        self.statuses: dict[str, Any] = {}
        self.closed_ms: dict[str, float] = {}  # when a run was terminated, by this machine's clock
        self.granted: dict[str, Any] = {}
        self.signalled: list[str] = []
        self.workflow_service = SimpleNamespace(
            get_cluster_info=self._cluster,
            describe_workflow_execution=self._describe,
            get_workflow_execution_history_reverse=self._history,
        )

    def start(self, workflow_id: str) -> None:
        """A run begins."""
        self.statuses[workflow_id] = WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING

    def close(self, workflow_id: str) -> None:
        """A run is terminated."""
        self.closed_ms.setdefault(workflow_id, time.time() * 1000)
        self.statuses[workflow_id] = WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_TERMINATED

    def is_open(self, workflow_id: str) -> bool:
        """Tell whether a run is."""
        return bool(self.statuses[workflow_id] == WorkflowExecutionStatus.WORKFLOW_EXECUTION_STATUS_RUNNING)

    async def _cluster(self, _: Any) -> Any:
        return SimpleNamespace(cluster_id="cluster")

    async def _describe(self, request: Any, **_: Any) -> DescribeWorkflowExecutionResponse:
        await asyncio.sleep(0)  # as long as the call takes
        workflow_id = request.execution.workflow_id
        if workflow_id not in self.statuses:
            raise RPCError("no such workflow", RPCStatusCode.NOT_FOUND, b"")
        reply = DescribeWorkflowExecutionResponse()
        info = reply.workflow_execution_info
        info.execution.workflow_id, info.execution.run_id = workflow_id, f"run of {workflow_id}"
        info.first_run_id, info.type.name = info.execution.run_id, "Flow"
        info.status = self.statuses[workflow_id]
        return reply

    async def _history(self, _: Any, **__: Any) -> GetWorkflowExecutionHistoryReverseResponse:
        """Nothing has come after whatever is asked for: what is told by a token is recorded by that alone."""
        reply = GetWorkflowExecutionHistoryReverseResponse()
        reply.history.events.add().event_id = 100
        return reply

    def get_workflow_handle(self, workflow_id: str, **_: Any) -> Any:
        """Return what signals a run."""

        async def signal(name: str, _: Any, **__: Any) -> None:
            if not self.is_open(workflow_id):
                raise RPCError("closed", RPCStatusCode.NOT_FOUND, b"")
            self.signalled.append(f"{name} {workflow_id}")

        return SimpleNamespace(signal=signal)

    def get_async_activity_handle(self, *, task_token: bytes = b"", workflow_id: str = "", **_: Any) -> Any:
        """Return what completes or fails the activity that waits."""
        waiting = task_token.decode() or workflow_id

        async def complete(permit: Any) -> None:
            if not self.is_open(waiting):
                raise RPCError("closed", RPCStatusCode.NOT_FOUND, b"")
            # A worker decodes it with its own converter: what it cannot read fails its workflow task.
            payloads = await self.data_converter.encode([permit])
            self.granted[waiting] = payloads[0]

        async def fail(_: Any) -> None:
            return None

        return SimpleNamespace(complete=complete, fail=fail)


def token_of(workflow_id: str) -> str:
    """Return the token of a run's activity as a record has it."""
    return base64.b64encode(workflow_id.encode()).decode()
