"""Permits of callers, which are runs of any namespace: given, kept while the caller is open, taken over, given back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from urllib.parse import parse_qs, unquote, urlsplit

from nexusrpc import Link
from temporalio.service import RPCError, RPCStatusCode

from redlease._core import limits
from redlease._core.operations import GONE, label, lease_lost
from redlease.models import Permit
from redlease_temporal._backends.redis.caller_tracker import tracker_for
from redlease_temporal._backends.redis.registry import TicketRecord, digest
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._common.run_monitor import RunStatus
from redlease_temporal._payloads.locks import Caller, ResourceTerms
from redlease_temporal._payloads.nexus import AcquireInput, AdoptInput, ReleaseInput

from .acquire_workflow import terms_of

WORKFLOW_EVENT = "temporal.api.common.v1.Link.WorkflowEvent"
SHOWN_BYTES = 100  # of the resource's name in a workflow id


def waiting_workflow_id(resource: str, ticket: str) -> str:
    """The id of the workflow that waits for this ticket: a repeated request finds it."""
    return f"acquire:{limits.shortened(resource, SHOWN_BYTES)}:{digest(resource, ticket)}"


def caller_from_links(links: Iterable[Link]) -> Caller | None:
    """The run that started an operation, as the server names it in the operation's links."""
    for link in links:
        url = urlsplit(link.url)
        parts = url.path.strip("/").split("/")
        if link.type == WORKFLOW_EVENT and len(parts) >= 5 and (parts[0], parts[2]) == ("namespaces", "workflows"):
            event_id = int(parse_qs(url.query).get("eventID", ["0"])[0])
            return Caller(unquote(parts[1]), unquote(parts[3]), unquote(parts[4]), event_id)
    return None


class CallerPermits:
    """Calls for callers. It uses the relay of its process, whose trackers keep the permits from then on."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def open_caller(self, caller: Caller | None) -> Caller | None:
        """The caller, after a reset with its new run; None if this Temporal cluster has no such open run.

        The run that continues a caller as new does not know of the request.
        """
        if caller is None:
            return None
        state = await self._relay.monitor_of(caller.namespace).poll((caller.workflow_id, caller.run_id))
        if state.status is RunStatus.CLOSED:
            return None
        if state.status is RunStatus.RESET:
            return dataclasses.replace(caller, run_id=state.open_run_id, event_id=0)
        return caller

    async def try_acquire(self, call: AcquireInput) -> Permit | None:
        """Acquires a permit if one is free and nobody waits, and keeps it for the caller.

        Raises:
            ValueError: A parameter is wrong.
        """
        limits.checked_share(call.share, call.key or None)
        owner = call.owner or (call.caller.workflow_id if call.caller else "")
        permit = await self._relay.semaphore(terms_of(call)).try_acquire(
            ticket=call.ticket,
            weight=call.weight,
            owner=limits.shortened(owner, limits.OWNER_BYTES_MAX) or None,
            metadata=call.metadata,
            key=call.key or None,
        )
        if permit is not None and call.renewed:
            await self._keep(permit, call, terms_of(call))
        return permit

    async def adopt(self, call: AdoptInput) -> Permit:
        """Takes a permit over for a caller.

        Raises:
            LeaseLost: It is no longer held with its fence.
        """
        caller, relay = call.caller, self._relay
        limits.checked_permit(call.permit, call.permit.resource)
        owner = limits.shortened(caller.workflow_id, limits.OWNER_BYTES_MAX) if caller else call.permit.owner
        permit = dataclasses.replace(call.permit, owner=owner)
        terms = ResourceTerms(permit.resource, permit.capacity, permit.lease_ms)
        resource = relay.operations.resource(permit.resource)
        record = _record(permit, call, terms)
        stored = await relay.claim(record)
        same = None not in (stored.caller, caller) and _workflow(stored.caller) == _workflow(caller)
        adopted = await relay.operations.adopt(
            *(resource, permit.ticket, permit.fence, record.request, permit.lease_ms),
            refence=not same if call.refence is None else call.refence,
            idle_ttl_ms=relay.settings.idle_ttl_ms,
            label=record.label,
        )
        if adopted is None:
            if stored.request == record.request:
                await relay.registry.drop(record.id)
            else:  # the record is of whoever holds the permit now, and is this relay's since the claim
                relay.track(tracker_for(relay, stored))
            raise lease_lost(permit.resource, permit.ticket, permit.fence, GONE)
        fence, granted_at_ms, expires_at_ms, weight, capacity, _ = adopted
        permit = dataclasses.replace(
            permit,
            fence=fence,
            weight=weight,
            capacity=capacity,
            granted_at_ms=granted_at_ms,
            expires_at_ms=expires_at_ms,
        )
        if caller is None:
            await relay.registry.drop(record.id)
        else:
            await self._keep(permit, call, terms)
        return permit

    async def release(self, call: ReleaseInput) -> bool:
        """Releases a permit; without a fence, ends the wait for it too."""
        relay, workflow_id = self._relay, waiting_workflow_id(call.resource, call.ticket)
        record_id = digest(call.resource, call.ticket, workflow_id)
        resource = relay.operations.resource(call.resource)
        if call.fence is None:
            try:
                await relay.temporal.get_workflow_handle(workflow_id).cancel()
            except RPCError as error:
                if error.status != RPCStatusCode.NOT_FOUND:
                    raise
        elif not await relay.operations.check(resource, call.ticket, call.fence):
            return False
        tracker = relay.trackers.get(record_id)
        if tracker is not None:
            relay.forget(tracker)
        await relay.registry.drop(record_id, any_owner=True)
        return await self._release_all(call)

    async def _release_all(self, call: ReleaseInput) -> bool:
        relay = self._relay
        freed, more = False, True
        while more:
            released, more = await relay.operations.free(
                *(relay.operations.resource(call.resource), call.ticket, "" if call.fence is None else call.fence),
                idle_ttl_ms=relay.settings.idle_ttl_ms,
                notify=call.fence is None,
            )
            freed = freed or released
        return freed

    async def _keep(self, permit: Permit, call: AcquireInput | AdoptInput, terms: ResourceTerms) -> None:
        """Has the relays renew a permit while its caller is open."""
        record = _record(permit, call, terms)
        await self._relay.claim(record)
        await self._relay.registry.save(record)
        self._relay.track(tracker_for(self._relay, record))


def _record(permit: Permit, call: AcquireInput | AdoptInput, terms: ResourceTerms) -> TicketRecord:
    """The record of a permit that its caller has: no workflow waits for it."""
    run_id = call.caller.run_id if call.caller else ""
    return TicketRecord(
        terms,
        permit.ticket,
        digest(permit.resource, permit.ticket, run_id, "nexus"),
        *(waiting_workflow_id(permit.resource, permit.ticket), "", "", 0, "", ""),
        label(permit.owner, permit.metadata, permit.key or ""),
        permit.owner,
        weight=permit.weight,
        metadata=permit.metadata,
        on_close=call.on_close,
        max_hold_ms=call.max_hold_ms,
        fence=permit.fence,
        granted_at_ms=permit.granted_at_ms,
        capacity=permit.capacity,
        recorded=True,
        caller=call.caller,
        key=permit.key or "",
    )


def _workflow(caller: Caller | None) -> tuple[str, str] | None:
    return None if caller is None else (caller.namespace, caller.workflow_id)
