"""How a relay notifies a run that its request was granted."""

from __future__ import annotations

import base64

from temporalio.client import Client

from redlease.models import Permit
from redlease_temporal.payloads.locks import GRANTED_SIGNAL, Granted

from .registry import Watch

BY_SIGNAL_TOKEN = "signal"  # noqa: S105  in place of a task token


async def tell_of_grant(temporal: Client, watch: Watch, token: str, permit: Permit) -> None:
    """Completes the waiting activity, or signals the run.

    Raises:
        AsyncActivityCancelledError: The activity was asked to cancel.
        RPCError: The server did not accept it.
    """
    if token == BY_SIGNAL_TOKEN:
        handle = temporal.get_workflow_handle(watch.workflow_id, run_id=watch.run_id)
        await handle.signal(GRANTED_SIGNAL, Granted(permit))
    elif token:
        await temporal.get_async_activity_handle(task_token=base64.b64decode(token)).complete(permit)
    else:  # no token is known, perhaps since its worker died: complete the attempt that is running
        waits = temporal.get_async_activity_handle(
            workflow_id=watch.workflow_id, run_id=watch.run_id, activity_id=watch.wait_id
        )
        await waits.complete(permit)
