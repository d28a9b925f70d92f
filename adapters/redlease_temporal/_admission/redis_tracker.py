"""Tracks the place of one workflow for a relay, until the last run of that workflow has closed."""

from __future__ import annotations

import asyncio
import logging

from redlease._core import clock
from redlease_temporal._backends.redis.registry import TicketRecord
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._common.retrying import retry_until_done
from redlease_temporal._common.run_monitor import CHAIN_UNKNOWN, RunKey, RunState, RunStatus

from .redis_admission import SLOT_LEASE_MS, RedisAdmission

logger = logging.getLogger("redlease.temporal")

POLL_MS = 1000.0  # how often the workflow is looked at while it runs
NOTICE_S = 5.0  # how soon the tracker notices that Redis has lost the place
PROVISIONAL_S = 1.0  # how soon the tracker notices that a start did not follow


class AdmissionTracker:
    """Tracks one place; like a `TicketTracker` it can be stopped at any moment."""

    def __init__(self, relay: Relay, record: TicketRecord) -> None:
        self.record = record
        self._relay = relay
        self._admission = admission_of(relay)
        self._resource = relay.operations.resource(record.terms.resource)
        self._run: RunKey = (record.workflow_id, "")  # an empty run id means the latest run
        self._woken = asyncio.Event()
        self._closed = False
        self._written = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts its task, and the looks at the workflow."""
        # No waiter asks for more frequent looks: a refused workflow retries when it likes, and should find the place
        # free then.
        self._relay.monitor.watch(self._run, self._on_state, every_ms=POLL_MS)
        self._relay.monitor.poll_soon(self._run)
        self._task = self._relay.spawn(retry_until_done(f"{self}: looking after its place", self._track))

    def stop(self) -> None:
        """Stops its task and leaves the state in Redis as it is."""
        self._relay.monitor.unwatch(self._run, self._on_state)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def wake(self) -> None:
        """Does nothing: the workflow is looked at often anyway."""

    def poll_soon(self) -> None:
        """Does nothing: it is looked at soon in any case."""

    async def fill_lease(self) -> None:
        """Does nothing: the place's lease is long."""

    def _on_state(self, state: RunState) -> None:
        record = self.record
        is_same_chain = record.chain in {"", state.chain, CHAIN_UNKNOWN} or state.chain == CHAIN_UNKNOWN
        is_own_run = is_same_chain and state.workflow_type == record.metadata.get("workflow_type")
        if state.status is RunStatus.OPEN and is_own_run:
            if not record.chain:
                record.chain = state.chain
                self._woken.set()
        elif state.status is not RunStatus.UNKNOWN and record.chain:
            self._closed = True
            self._woken.set()

    async def _track(self) -> None:
        while not await self._step():
            await self._pause(NOTICE_S if self.record.chain else PROVISIONAL_S)

    async def _step(self) -> bool:
        """Takes the next step; returns whether it was the last one."""
        if self._closed:
            if not self.record.fence:  # a process may have taken the place and died before it stored the fence
                self.record.fence = await self._admission.take_again(self.record)
            await self._admission.free(self.record)
            return await self._forget()
        if not self.record.chain:  # the start is still to follow
            return not await self._is_held() and await self._forget()
        if not self._written:
            self._written = await self._relay.registry.save(self.record)
            if not self._written:  # another relay has it
                self._relay.forget(self)
                return True
        if self._relay.monitor.unknown_ms(self._run) < self._relay.settings.unknown_grace_ms:
            await self._renew()
        return False

    async def _forget(self) -> bool:
        # The next workflow of that ID may have taken the place by now, and own the stored record.
        await self._relay.registry.drop(self.record.id, chain=self.record.chain)
        self._relay.forget(self)
        return True

    async def _renew(self) -> None:
        record = self.record
        renewed = await self._relay.operations.renew(
            *(self._resource, record.ticket, record.fence, SLOT_LEASE_MS),
            idle_ttl_ms=self._relay.settings.idle_ttl_ms,
            limit_ms=None,
        )
        if not renewed.expires_at_ms:
            # It is lost, or this workflow has closed and the next one of its ID has the place, under another fence.
            state = await self._relay.monitor.poll(self._run)
            if self._closed or state.status is not RunStatus.OPEN:
                return
            record.fence = await self._admission.take_again(record)
            if record.fence:
                await self._relay.registry.save(record)
            else:
                logger.warning("%s: it runs without a place, which was lost and is not free now", self)

    async def _is_held(self) -> bool:
        return await self._relay.operations.check(self._resource, self.record.ticket, self.record.fence, limit_ms=None)

    async def _pause(self, seconds: float) -> None:
        await clock.pause(self._woken, seconds)
        self._woken.clear()

    def __str__(self) -> str:
        return f"resource {self.record.terms.resource!r}: workflow {self.record.workflow_id!r}"


def admission_of(relay: Relay) -> RedisAdmission:
    """The places that a relay can take and free."""
    return RedisAdmission(
        *(relay.operations, relay.registry, relay.monitor),
        namespace=relay.temporal.namespace,
        idle_ttl_ms=relay.settings.idle_ttl_ms,
    )
