"""Starts through a client with the plugin: those of workflows with `@concurrency` take a place first."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

from temporalio.api.workflowservice.v1 import StartWorkflowExecutionResponse
from temporalio.client import (
    Client,
    ClientConfig,
    Interceptor,
    OutboundInterceptor,
    StartWorkflowInput,
    StartWorkflowUpdateWithStartInput,
    UpdateWithStartStartWorkflowInput,
    WorkflowHandle,
    WorkflowUpdateHandle,
)
from temporalio.service import RPCError

from redlease import Redlease, RedleaseError
from redlease_temporal._backends.redis.registry import SCRIPTS, Registry, relay_group
from redlease_temporal._common.resource_workflows import UNSURE
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal._common.settings import Settings

from .redis_admission import RedisAdmission
from .replacing import replacing
from .rule import Rule, rule_of
from .slot_admission import SlotAdmission


class StartGate:
    """Takes places before starts. It is connected to Redis only while starts are under way."""

    def __init__(self, config: ClientConfig, settings: Settings) -> None:
        # A client of the same connection without interceptors.
        self._temporal = Client(
            config["service_client"], namespace=config["namespace"], data_converter=config["data_converter"]
        )
        self._settings = settings
        self._users = 0
        self._opening = asyncio.Lock()
        self._redis: Redlease
        self._admission: RedisAdmission
        self._group = ""

    @contextlib.asynccontextmanager
    async def reserved_slot(
        self, rule: Rule, start: StartWorkflowInput | UpdateWithStartStartWorkflowInput
    ) -> AsyncIterator[Callable[[str], None]]:
        """Reserves a place for a start in the block, which passes the id of the started run to the yielded function.

        Raises:
            WorkflowConcurrencyLimitExceeded: No place is free.
            Unavailable: Redis could not be reached: nothing was started.
        """
        request = rule.request(start.id, start.args)
        chain = ""

        def started(run_id: str) -> None:
            nonlocal chain
            chain = run_id

        async with self._admission_for(rule) as admission:
            if request.replaces:
                reserved = await replacing(self._temporal, admission, request, admission.reserve)
            else:
                reserved = await admission.reserve(request)
            if reserved is None:
                yield started
                return
            try:
                yield started
            except Exception as error:
                # If this fails, the reservation expires, or the run itself takes the place.
                with contextlib.suppress(RedleaseError, RPCError):
                    if isinstance(error, RPCError) and error.status in UNSURE:
                        await admission.confirm(reserved, chain)
                    else:
                        await admission.cancel_reservation(request, reserved)
                raise
            with contextlib.suppress(RedleaseError, RPCError):
                await admission.confirm(reserved, chain)

    def _admission_for(self, rule: Rule) -> contextlib.AbstractAsyncContextManager[Any]:
        """The `RedisAdmission` or `SlotAdmission` for such workflows."""
        if rule.backend == "slots":
            queue = self._settings.task_queue_of(self._temporal)
            monitor = RunMonitor(self._temporal, self._settings.polls_per_second)
            return contextlib.nullcontext(SlotAdmission(self._temporal, queue, monitor))
        if self._settings.make_client is None:
            raise ValueError(
                f"workflow {rule.workflow_type!r}: its @concurrency needs Redis, and the client's plugin has none: "
                "RedleasePlugin('redis://...'), or take backend='slots'"
            )
        return self._open()

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[RedisAdmission]:
        async with self._opening:
            if self._users == 0:
                await self._connect()
            self._users += 1
        redis = self._redis
        try:
            yield self._admission
        finally:
            self._users -= 1
            if self._users == 0:
                await asyncio.shield(redis.abandon())

    async def _connect(self) -> None:
        settings = self._settings
        assert settings.make_client is not None
        if not self._group:
            self._group = await relay_group(self._temporal, settings)
        self._redis = settings.make_client()
        operations = self._redis._operations
        operations.connect(*SCRIPTS)
        # It is no relay and sends no beats: a relay takes over what it stores within seconds.
        registry = Registry(operations, settings.prefix, self._group, secrets.token_hex(8))
        self._admission = RedisAdmission(
            *(operations, registry, RunMonitor(self._temporal, settings.polls_per_second)),
            namespace=self._temporal.namespace,
            idle_ttl_ms=settings.idle_ttl_ms,
        )


class AdmissionInterceptor(Interceptor):
    """The interceptor of a client."""

    def __init__(self, config: ClientConfig, settings: Settings) -> None:
        self._gate = StartGate(config, settings)

    def intercept_client(self, next: OutboundInterceptor) -> OutboundInterceptor:  # noqa: A002
        return _Admitting(next, self._gate)


class _Admitting(OutboundInterceptor):
    def __init__(self, next: OutboundInterceptor, gate: StartGate) -> None:  # noqa: A002
        super().__init__(next)
        self._gate = gate

    async def start_workflow(self, input: StartWorkflowInput) -> WorkflowHandle[Any, Any]:  # noqa: A002
        rule = rule_of(input.workflow)
        if rule is None:
            return await super().start_workflow(input)
        async with self._gate.reserved_slot(rule, input) as started:
            handle = await super().start_workflow(input)
            started(handle.first_execution_run_id or "")
        return handle

    async def start_update_with_start_workflow(
        self,
        input: StartWorkflowUpdateWithStartInput,  # noqa: A002
    ) -> WorkflowUpdateHandle[Any]:
        start = input.start_workflow_input
        rule = rule_of(start.workflow)
        if rule is None:
            return await super().start_update_with_start_workflow(input)
        try:
            async with self._gate.reserved_slot(rule, start) as started:
                report = input._on_start

                def on_start(response: StartWorkflowExecutionResponse) -> None:
                    started(response.run_id)
                    report(response)

                input._on_start = on_start
                return await super().start_update_with_start_workflow(input)
        except (RedleaseError, ValueError) as error:
            input._on_start_error(error)  # notifies the code that waits for the workflow's handle, too
            raise
