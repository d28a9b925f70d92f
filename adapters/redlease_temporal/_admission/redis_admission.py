"""Places of workflows with `@concurrency`, in Redis: reserved before a start, and taken by each run.

A place is a permit whose ticket is the workflow ID, so every start of that ID finds the same place and takes no other.
The place has a record in the registry of the relays; the relay that owns the record frees the place when the last run
has closed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from typing import NamedTuple

from redlease._core import limits
from redlease._core.operations import Granted, Operations, Resource, Status, label
from redlease.models import Permit, Snapshot
from redlease_temporal._backends.redis.registry import Registry, TicketRecord, digest
from redlease_temporal._common.run_monitor import RunMonitor, RunStatus
from redlease_temporal._payloads.locks import ResourceTerms

from .replacing import TakenSlot
from .rule import AdmissionRequest

PROVISIONAL_MS = 30_000  # how long a reserved place is kept if nothing confirms the start
SLOT_LEASE_MS = 24 * 3600 * 1000  # how long a run's place outlives the last relay
EXTRA_SLOTS = 100  # how many places over the limit, from before it was lowered, a start knows of
REQUESTED_AT = (
    "requested_at_ms"  # when the start asked for its place, by the clock of Redis, if it was not granted at once
)
WORKFLOW_ID = "workflow_id"  # of a place whose ticket, which usually contains it, would be too long
RELAY_LOSS_MS = 4500  # how soon another relay continues a dead one's work: the relay's lease is a third


class _SlotGrant(NamedTuple):
    fence: int
    fresh: bool  # whether the place was free until now


class RedisAdmission:
    """Takes and frees places.

    Args:
        tickets: Of the Redis client.
        registry: Of the relays that track the places.
        monitor: Asks for the status of workflows.
        namespace: The workflows' namespace.
        idle_ttl_ms: See `Settings`.
    """

    def __init__(
        self, operations: Operations, registry: Registry, monitor: RunMonitor, *, namespace: str, idle_ttl_ms: int
    ) -> None:
        self._operations = operations
        self._registry = registry
        self._monitor = monitor
        self._namespace = namespace
        self._idle_ttl_ms = idle_ttl_ms

    def record_of(self, request: AdmissionRequest) -> TicketRecord:
        """The record of a place that nobody has taken yet."""
        ticket = f"{self._namespace}/{request.workflow_id}"
        metadata = {"workflow_type": request.workflow_type}
        if len(ticket.encode()) > limits.TICKET_BYTES_MAX:
            ticket, metadata = digest(ticket), {**metadata, WORKFLOW_ID: request.workflow_id}
        owner = limits.shortened(request.workflow_id, limits.OWNER_BYTES_MAX)
        record = TicketRecord(
            ResourceTerms(request.resource, request.limit, RELAY_LOSS_MS),
            *(ticket, secrets.token_hex(8), request.workflow_id, "", request.chain, 0, "", ""),
            *(label(owner, metadata), owner),
            metadata=metadata,
            admission=True,
        )
        if request.requested_at:
            _set_requested_at(record, request.requested_at)
        return record

    async def reserve(self, request: AdmissionRequest) -> TicketRecord | None:
        """Takes a place for a start that is to follow; None if the workflow runs already, and needs none.

        Raises:
            WorkflowConcurrencyLimitExceeded: No place is free.
        """
        if request.replaces and await self._status_of(request) is RunStatus.OPEN:
            return None  # to take its place again would change when that was asked for
        record = self.record_of(request)
        while True:
            grant = await self._take(record, PROVISIONAL_MS)
            if grant is None:
                if await self._status_of(request) is RunStatus.OPEN:
                    return None
                raise request.refusal()
            if grant.fresh:
                record.fence = grant.fence
                break
            if await self._status_of(request) is not RunStatus.CLOSED:
                return None
            # The last run has just closed, and a relay is about to free its place. A new fence prevents that.
            record.fence = await self._adopt(request, record, grant.fence, PROVISIONAL_MS)
            if record.fence:
                break
        await self._registry.drop(record.id, any_owner=True)  # an earlier run may have left a record
        return record

    async def confirm(self, record: TicketRecord, chain: str) -> None:
        """The workflow was started: keeps its place until a relay tracks it, however long that takes.

        With an empty `chain` the start is uncertain, and the relay finds out.
        """
        record.chain = chain
        calls: list[Awaitable[object]] = [self._registry.add_unowned(record)]
        if chain:
            held = (self._resource(record), record.ticket, record.fence)
            calls.append(self._operations.renew(*held, SLOT_LEASE_MS, idle_ttl_ms=self._idle_ttl_ms))
        await asyncio.gather(*calls)

    async def cancel_reservation(self, request: AdmissionRequest, record: TicketRecord | None = None) -> None:
        """The workflow was not started: frees its place, unless the ID has an open run that it belongs to."""
        if await self._status_of(request) is not RunStatus.CLOSED:
            if record is not None:  # another start of that ID, whose place this one took over, may have been faster
                await self.confirm(record, "")
            return
        stored = await self._registry.drop(self.record_of(request).id, any_owner=True)
        if (record := record or stored) is not None and record.fence:
            await self.free(record)

    async def admit(self, request: AdmissionRequest) -> TicketRecord | None:
        """Takes the place of a run, or finds the one that it has; None if no place is free."""
        record = self.record_of(request)
        stored = await self._registry.claim(record)
        is_own_chain = stored.chain in {"", request.chain}
        if is_own_chain and request.replaces:
            await self._copy_requested_at(record)
        while True:
            grant = await self._take(record, SLOT_LEASE_MS)
            if grant is None:
                await self._registry.drop(record.id)
                return None
            record.fence = grant.fence
            if (
                not is_own_chain and not grant.fresh
            ):  # an earlier workflow of that ID had it, and a relay may be freeing it
                record.fence = await self._adopt(request, record, grant.fence, SLOT_LEASE_MS)
            if record.fence:
                if not await self._registry.save(
                    record
                ):  # a relay that freed an earlier run's place dropped the record
                    await self._registry.claim(record)
                return record

    async def taken_slots(self, request: AdmissionRequest) -> tuple[list[TakenSlot], float]:
        """The places that other workflows have, and the time, in ms."""
        own_record, namespace = self.record_of(request), f"{self._namespace}/"
        snapshot = await self._inspect(own_record, request.limit + EXTRA_SLOTS)
        taken = [
            TakenSlot(
                each.metadata.get(WORKFLOW_ID) or each.ticket.removeprefix(namespace),
                each.ticket,
                _requested_at(each),
                each.fence,
                is_reserved=each.expires_at_ms <= snapshot.server_time_ms + PROVISIONAL_MS,
            )
            for each in snapshot.holders
            if each.ticket != own_record.ticket
        ]
        return taken, float(snapshot.server_time_ms)

    async def free_if_closed(self, request: AdmissionRequest, taken: TakenSlot) -> bool:
        """Frees a place whose workflow has closed, should its relay not have done so yet; returns whether it has."""
        # A reserved place belongs to a workflow that is about to start, whether or not an earlier one of its ID closed.
        if taken.is_reserved or (await self._monitor.poll((taken.workflow_id, ""))).status is not RunStatus.CLOSED:
            return False
        resource = self._operations.resource(request.resource)
        await self._operations.free(resource, taken.slot_id, taken.fence, idle_ttl_ms=self._idle_ttl_ms)
        return True

    async def take_again(self, record: TicketRecord) -> int:
        """Takes a place for a run that has lost its own; returns the fence, 0 if no place is free."""
        await self._copy_requested_at(record)
        grant = await self._take(record, SLOT_LEASE_MS)
        return 0 if grant is None else grant.fence

    async def free(self, record: TicketRecord) -> None:
        """Frees the place, if it still has this fence."""
        await self._operations.free(self._resource(record), record.ticket, record.fence, idle_ttl_ms=self._idle_ttl_ms)

    # Implementation

    def _resource(self, record: TicketRecord) -> Resource:
        return self._operations.resource(record.terms.resource)

    async def _inspect(self, record: TicketRecord, max_items: int) -> Snapshot:
        return await self._operations.inspect(self._resource(record), declared=record.terms.capacity, limit=max_items)

    async def _copy_requested_at(self, record: TicketRecord) -> None:
        """Copies when the start asked from the place that it has reserved, so that taking that place keeps the time.

        Otherwise the place would count from its grant, and starts that asked in between would not replace it.
        """
        if REQUESTED_AT in record.metadata:
            return
        for holder in (await self._inspect(record, record.terms.capacity + EXTRA_SLOTS)).holders:
            if holder.ticket == record.ticket:
                _set_requested_at(record, _requested_at(holder))

    async def _status_of(self, request: AdmissionRequest) -> RunStatus:
        return (await self._monitor.poll((request.workflow_id, ""))).status

    async def _take(self, record: TicketRecord, lease_ms: int) -> _SlotGrant | None:
        while True:
            outcome = await self._operations.try_acquire(
                *(self._resource(record), record.ticket, record.request),
                lease_ms=lease_ms,
                capacity=record.terms.capacity,
                idle_ttl_ms=self._idle_ttl_ms,
                label=record.label,
            )
            if isinstance(outcome, Granted):
                if REQUESTED_AT not in record.metadata:  # if the place is lost, it is taken again with this time
                    _set_requested_at(record, outcome.granted_at_ms)
                return _SlotGrant(outcome.fence, outcome.expires_at_ms - lease_ms == outcome.granted_at_ms)
            if outcome is not Status.WITHDRAWN:
                return None
            record.request = secrets.token_hex(8)  # an operator released it by its ticket: make a new request

    async def _adopt(self, request: AdmissionRequest, record: TicketRecord, fence: int, lease_ms: int) -> int:
        """Takes the place over from an earlier workflow of that ID, with a new fence; returns 0 if it is gone."""
        _set_requested_at(record, request.requested_at or (await self._inspect(record, 0)).server_time_ms)
        record.request = secrets.token_hex(8)  # with the request that shares the place now, it would keep its fence
        adopted = await self._operations.adopt(
            *(self._resource(record), record.ticket, fence, record.request, lease_ms),
            idle_ttl_ms=self._idle_ttl_ms,
            label=record.label,
        )
        return 0 if adopted is None else adopted.fence


def _requested_at(holder: Permit) -> float:
    """When the start of a workflow that has a place asked for it."""
    return float(holder.metadata.get(REQUESTED_AT, holder.granted_at_ms))


def _set_requested_at(record: TicketRecord, requested_at_ms: float) -> None:
    """Writes into a record when its start asked for the place."""
    record.metadata[REQUESTED_AT] = f"{requested_at_ms:.0f}"
    record.label = label(record.owner, record.metadata)
