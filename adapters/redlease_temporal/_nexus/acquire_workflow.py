"""The workflow of the lock service that waits for one grant on behalf of a caller."""

from __future__ import annotations

from datetime import timedelta

from temporalio import workflow

from redlease.models import Permit
from redlease_temporal._backends.redis.backend import RedisBackend
from redlease_temporal._payloads import locks
from redlease_temporal._payloads.nexus import ACQUIRE_WORKFLOW, AcquireInput
from redlease_temporal._workflow_side.run import current


def terms_of(call: AcquireInput) -> locks.ResourceTerms:
    """What the call declares about its resource."""
    return locks.ResourceTerms(
        *(call.resource, call.capacity, call.lease_ms, call.max_waiters),
        *(call.per_key, call.rate, call.per_key_rate, call.max_waiters_per_key),
    )


@workflow.defn(name=ACQUIRE_WORKFLOW)
class AcquireWorkflow:
    """Requests a permit as any run does, by way of the relays, and returns it. Cancelling it withdraws the request."""

    @workflow.run
    async def run(self, call: AcquireInput) -> Permit:
        """Returns the permit when it is granted."""
        run, info, terms = current(), workflow.info(), terms_of(call)
        spec = locks.AcquireSpec(
            call.ticket,
            call.weight,
            call.owner,
            call.metadata,
            renewed=call.renewed,
            on_close=call.on_close,
            max_hold_ms=call.max_hold_ms,
            key=call.key,
            share=call.share,
        )
        acquire_call = locks.AcquireCall(
            terms,
            spec,
            info.first_execution_run_id,
            info.get_current_history_length(),
            f"redlease:1:{call.resource}",
            f"redlease:1:{call.resource}:wait",
            caller=call.caller,
        )
        timeout = None if call.timeout_ms is None else timedelta(milliseconds=call.timeout_ms)
        with run.requesting():
            return await RedisBackend(terms).acquire(run, acquire_call, timeout)
