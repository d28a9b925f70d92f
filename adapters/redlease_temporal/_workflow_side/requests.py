"""How a run identifies itself and its requests to the workflows that keep resources."""

from __future__ import annotations

import hashlib

from temporalio import workflow

from redlease_temporal._payloads.coordinator import Adoption, Requester
from redlease_temporal._payloads.locks import AcquireCall, AdoptCall


def original_run_of(info: workflow.Info) -> str:
    """The run's id before any reset; an SDK before 1.34 does not report it for a run that was continued as new."""
    original: str | None = getattr(info, "original_execution_run_id", None)
    return original or (info.run_id if info.continued_run_id else info.first_execution_run_id)


def request_name(call: AcquireCall) -> str:
    """Names a request of this run: the same in replays and after a reset, another in the next run of the chain."""
    number = call.local_id.split(":")[1]
    resource = hashlib.sha256(call.terms.resource.encode()).hexdigest()[:16]
    return f"{original_run_of(workflow.info())}/{number}/{resource}"


def requester_of(call: AcquireCall, name: str) -> Requester:
    """This run as the requester, with the request's name."""
    info = workflow.info()
    return Requester(info.workflow_id, info.run_id, call.chain, name)


def adoption_of(call: AdoptCall) -> Adoption:
    """The message by which this run adopts a permit from the workflow that keeps it."""
    acquire_call, permit = call.acquire, call.permit
    return Adoption(
        permit.ticket,
        permit.fence,
        requester_of(acquire_call, request_name(acquire_call)),
        acquire_call.terms.lease_ms,
        acquire_call.spec.on_close,
        acquire_call.spec.max_hold_ms,
        call.refence,
    )
