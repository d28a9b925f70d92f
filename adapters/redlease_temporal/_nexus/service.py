"""The handler of the Nexus service `redlease`: locks for workflows of any language and namespace."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import NoReturn, TypeVar

from nexusrpc import HandlerError, HandlerErrorType, OperationError, OperationErrorState
from nexusrpc.handler import (
    CancelOperationContext,
    OperationHandler,
    StartOperationContext,
    StartOperationResultAsync,
    StartOperationResultSync,
    operation_handler,
    service_handler,
    sync_operation,
)
from temporalio import nexus
from temporalio.common import WorkflowIDConflictPolicy
from temporalio.service import RPCError, RPCStatusCode

from redlease import AcquireTimeout, RedleaseError, Unavailable
from redlease.models import Permit, Snapshot
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.requests import Requests
from redlease_temporal._payloads import nexus as calls
from redlease_temporal._payloads.locks import InspectCall, ResourceTerms
from redlease_temporal.errors import failure

from .callers import CallerPermits, caller_from_links, waiting_workflow_id

T = TypeVar("T")

OPERATION_TIMEOUT_S = 5.0  # how long an operation waits for Redis: the server allows a handler ten seconds
ANY_LEASE_MS = 30_000  # of terms that declare nothing


async def with_operation_errors(work: Awaitable[T]) -> T:
    """Awaits the work; raises its error as that of a Nexus operation, which the server retries if it may."""
    try:
        async with asyncio.timeout(OPERATION_TIMEOUT_S):
            return await work
    except (Unavailable, TimeoutError) as error:
        if isinstance(error, AcquireTimeout):
            refuse(error)
        raise HandlerError(f"Redis did not answer in time: {error}", type=HandlerErrorType.UNAVAILABLE) from error
    except (RedleaseError, ValueError) as error:
        refuse(error)


def refuse(error: Exception) -> NoReturn:
    """Fails the operation for good. The cause of its failure has the error's name as its type."""
    raise OperationError(str(error), state=OperationErrorState.FAILED) from failure(error)


class AcquireHandler(OperationHandler[calls.AcquireInput, Permit]):
    """Grants at once where that is possible, else by a workflow that waits."""

    def __init__(self, relay: Callable[[], Relay]) -> None:
        self._relay = relay

    async def start(
        self,
        ctx: StartOperationContext,
        input: calls.AcquireInput,  # noqa: A002
    ) -> StartOperationResultSync[Permit] | StartOperationResultAsync:
        """Tries, and if there is nothing free starts the workflow that waits."""
        permits = CallerPermits(self._relay())
        call, permit = await with_operation_errors(try_acquire_for(permits, ctx, input))
        if permit is not None:
            return StartOperationResultSync(permit)
        if call.timeout_ms is not None and call.timeout_ms <= 0:
            message = f"resource {call.resource!r}: no permit is free, and the request was not to wait"
            refuse(AcquireTimeout(message, resource=call.resource, ticket=call.ticket))
        fields = {each.name: getattr(ctx, each.name) for each in dataclasses.fields(ctx)}
        handle = await nexus.WorkflowRunOperationContext(**fields).start_workflow(
            calls.ACQUIRE_WORKFLOW,
            call,
            id=waiting_workflow_id(call.resource, call.ticket),
            result_type=Permit,
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            static_summary=f"waiting for {call.resource}",
        )
        return StartOperationResultAsync(handle.to_token())

    async def cancel(self, ctx: CancelOperationContext, token: str) -> None:  # noqa: ARG002
        """Cancels the workflow, which withdraws the request."""
        waiting: nexus.WorkflowHandle[Permit] = nexus.WorkflowHandle.from_token(token)
        try:
            await nexus.client().get_workflow_handle(waiting.workflow_id).cancel()
        except RPCError as error:
            if error.status != RPCStatusCode.NOT_FOUND:
                raise


async def try_acquire_for(
    permits: CallerPermits, ctx: StartOperationContext, asked: calls.AcquireInput
) -> tuple[calls.AcquireInput, Permit | None]:
    """The call with what it leaves to the service, and its permit if one was free."""
    call = await with_caller(permits, ctx, asked)
    return call, await permits.try_acquire(call)


async def with_caller(
    permits: CallerPermits, ctx: StartOperationContext, call: calls.AcquireInput
) -> calls.AcquireInput:
    """The call with its ticket, and with the run that is to have the permit."""
    caller = await permits.open_caller(call.caller or caller_from_links(ctx.inbound_links))
    renewed = call.renewed and caller is not None
    return dataclasses.replace(call, ticket=call.ticket or ctx.request_id, renewed=renewed, caller=caller)


@service_handler(service=calls.LockService)
class LockServiceHandler:
    """The operations of the service `redlease`.

    Args:
        relay: Returns the relay of the process.
    """

    def __init__(self, relay: Callable[[], Relay]) -> None:
        self._relay = relay

    @operation_handler
    def acquire(self) -> OperationHandler[calls.AcquireInput, Permit]:
        """Completes when the permit is granted."""
        return AcquireHandler(self._relay)

    @sync_operation
    async def try_acquire(self, ctx: StartOperationContext, input: calls.AcquireInput) -> calls.TryAcquireResult:  # noqa: A002
        """Acquires a permit if one is free and nobody waits."""
        permits = CallerPermits(self._relay())
        _, permit = await with_operation_errors(try_acquire_for(permits, ctx, input))
        return calls.TryAcquireResult(permit)

    @sync_operation
    async def renew(self, ctx: StartOperationContext, input: calls.RenewInput) -> Permit:  # noqa: A002, ARG002
        """Renews a permit."""
        permit = input.permit
        pool = self._relay().semaphore(ResourceTerms(permit.resource, permit.capacity, permit.lease_ms))
        lease_ms = permit.lease_ms if input.lease_ms is None else input.lease_ms
        return await with_operation_errors(pool.renew(permit, lease=lease_ms / 1000))

    @sync_operation
    async def release(self, ctx: StartOperationContext, input: calls.ReleaseInput) -> calls.ReleaseResult:  # noqa: A002, ARG002
        """Releases a permit, or ends the wait for it."""
        return calls.ReleaseResult(await with_operation_errors(CallerPermits(self._relay()).release(input)))

    @sync_operation
    async def adopt(self, ctx: StartOperationContext, input: calls.AdoptInput) -> Permit:  # noqa: A002
        """Takes a permit over for the caller's run."""
        permits = CallerPermits(self._relay())

        async def adopted() -> Permit:
            caller = await permits.open_caller(input.caller or caller_from_links(ctx.inbound_links))
            # The caller knows the permit already, whether or not this answer reaches it.
            caller = caller and dataclasses.replace(caller, event_id=0)
            return await permits.adopt(dataclasses.replace(input, caller=caller))

        return await with_operation_errors(adopted())

    @sync_operation
    async def check(self, ctx: StartOperationContext, input: calls.CheckInput) -> calls.CheckResult:  # noqa: A002, ARG002
        """Tells whether a permit is held."""
        held = Requests(self._relay()).held(input.resource, input.ticket, input.fence)
        return calls.CheckResult(await with_operation_errors(held))

    @sync_operation
    async def inspect(self, ctx: StartOperationContext, input: calls.InspectInput) -> Snapshot:  # noqa: A002, ARG002
        """Shows the holders and the waiters."""
        call = InspectCall(ResourceTerms(input.resource, 1, ANY_LEASE_MS), input.limit)
        return await with_operation_errors(Requests(self._relay()).inspect(call))
