"""The server's description of a run, with its status as a number: the SDK raises for one that its enum does not name.

A paused run has such a status, and is open. So no other file reads statuses, or calls `WorkflowHandle.describe()`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.workflowservice.v1 import DescribeWorkflowExecutionRequest, DescribeWorkflowExecutionResponse
from temporalio.client import Client, WorkflowQueryRejectedError
from temporalio.converter import WorkflowSerializationContext

T = TypeVar("T")

CONTINUED_AS_NEW, PAUSED = 6, 8
# Completed, failed, cancelled, terminated, continued as new, timed out. Listed, since newer servers add open statuses.
CLOSED = frozenset({2, 3, 4, 5, 6, 7})


class Description:
    """The server's description of a run."""

    def __init__(self, client: Client, raw: DescribeWorkflowExecutionResponse) -> None:
        self.info = raw.workflow_execution_info
        self.reset_run_id = raw.workflow_extended_info.reset_run_id
        self._client = client

    @property
    def is_open(self) -> bool:
        """Whether the run may continue: it runs, is paused, or has a newer server's status without a close time."""
        return self.info.status not in CLOSED and not self.info.HasField("close_time")

    @property
    def run_id(self) -> str:
        """The run id, also if the latest run was asked for."""
        return self.info.execution.run_id

    @property
    def started(self) -> datetime:
        """When the run started, by the server's clock."""
        return self.info.start_time.ToDatetime(UTC)

    @property
    def closed(self) -> datetime | None:
        """When the run closed, by the server's clock."""
        return self.info.close_time.ToDatetime(UTC) if self.info.HasField("close_time") else None

    async def memo(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The memo's value for a key.

        Raises:
            KeyError: There is none, and no default.
        """
        payload = self.info.memo.fields.get(key)
        if payload is None:
            if default is None:
                raise KeyError(key)
            return default
        context = WorkflowSerializationContext(
            namespace=self._client.namespace, workflow_id=self.info.execution.workflow_id
        )
        decoded: list[Any] = await self._client.data_converter.with_context(context).decode([payload], [kind])
        value: T = decoded[0]
        return value


async def describe(
    client: Client, workflow_id: str, run_id: str = "", *, timeout: timedelta | None = None, retry: bool = True
) -> Description:
    """Describes a run; without `run_id`, the latest run of the workflow.

    Raises:
        RPCError: There is no such run, or the server did not answer.
    """
    request = DescribeWorkflowExecutionRequest(
        namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow_id, run_id=run_id)
    )
    reply = await client.workflow_service.describe_workflow_execution(request, retry=retry, timeout=timeout)
    return Description(client, reply)


def refused_in(error: WorkflowQueryRejectedError | ValueError) -> int:
    """The status of a run for which the server rejected a query; a paused run answers none.

    Raises:
        ValueError: The given error, if it has another cause.
    """
    if isinstance(error, WorkflowQueryRejectedError):
        return error.status or 0
    unnamed = re.match(r"(\d+) is not a valid WorkflowExecutionStatus", str(error))
    if unnamed is None:
        raise error
    return int(unnamed[1])
