"""How a relay notifies a run that its request was granted, or that its permit is lost."""

from __future__ import annotations

import asyncio
import base64
from datetime import timedelta

from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from redlease.models import Permit
from redlease_temporal._common.retrying import LogOnce
from redlease_temporal._payloads.locks import GRANTED_SIGNAL, LOST_SIGNAL, GrantedSignal, LostSignal

from .registry import TicketRecord

BY_SIGNAL_TOKEN = "signal"  # noqa: S105  in place of a task token
SIGNAL_TIMEOUT = timedelta(seconds=5)  # how long the Temporal server may take to answer
RETRY_S = (0.1, 5.0)  # the first and the longest pause after it did not


async def notify_of_grant(temporal: Client, record: TicketRecord, token: str, permit: Permit) -> None:
    """Completes the waiting activity, or signals the run.

    Raises:
        AsyncActivityCancelledError: The activity was asked to cancel.
        RPCError: The server did not accept it.
    """
    if token == BY_SIGNAL_TOKEN:
        handle = temporal.get_workflow_handle(record.workflow_id, run_id=record.run_id)
        await handle.signal(GRANTED_SIGNAL, GrantedSignal(permit))
    elif token:
        await temporal.get_async_activity_handle(task_token=base64.b64decode(token)).complete(permit)
    else:  # no token is known, perhaps since its worker died: complete the attempt that is running
        waits = temporal.get_async_activity_handle(
            workflow_id=record.workflow_id, run_id=record.run_id, activity_id=record.wait_id
        )
        await waits.complete(permit)


async def notify_of_loss(
    temporal: Client, record: TicketRecord, reason: str, once: LogOnce, *, replaced_by: str = ""
) -> None:
    """Signals the loss of a permit to the run, or to the run that continued it, until the server has the signal.

    `replaced_by`: the ticket of the newer request that ended the permit.
    """
    if replaced_by:
        reason = f"the newer request {replaced_by!r} replaced it"
    lost = LostSignal(record.terms.resource, record.ticket, record.fence, reason, bool(replaced_by))
    handle = temporal.get_workflow_handle(record.workflow_id)
    pause_s = RETRY_S[0]
    while True:
        try:
            await handle.signal(LOST_SIGNAL, lost, rpc_timeout=SIGNAL_TIMEOUT)
        except RPCError as error:
            if error.status == RPCStatusCode.NOT_FOUND:
                return
            whose = f"resource {record.terms.resource!r}: workflow {record.workflow_id!r}"
            once.warn(f"{whose} could not be notified of its loss yet", error)
        else:
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, RETRY_S[1])
