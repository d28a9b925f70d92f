"""How activities use the relay of their process: queue, wait, release, adopt, renew, check and inspect."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets

from temporalio import activity

from redlease import RedleaseError, Semaphore, Superseded, Withdrawn
from redlease._core import limits
from redlease._core.operations import GONE, label, lease_lost
from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import locks

from .caller_tracker import tracker_for
from .registry import ReleaseNote, TicketRecord, digest
from .relay import LEAVE_TIMEOUT_MS, Relay
from .tracker import TicketTracker

LOCAL_CALL_TIMEOUT_S = 0.7  # how long a local activity waits for Redis, out of one second in all


class Requests:
    """Carries out the requests that runs send as activities. The relay tracks the tickets from then on."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def enqueue(self, call: locks.AcquireCall) -> locks.AcquireStatus:
        """Queues a request and returns its status. Waits less than a second for Redis."""
        is_settled = await self._release_recorded(call.terms.resource)
        if call.settles and not is_settled:
            return locks.AcquireStatus(unsettled=True)
        if not call.spec.queue:
            return await self._try(call)
        async with asyncio.timeout(LOCAL_CALL_TIMEOUT_S):
            try:
                return await self._enqueue(call)
            except Superseded:
                raise
            except Withdrawn:
                # Temporal executes this workflow task again: an earlier execution reached the release and was not
                # recorded. Its request stays withdrawn; this execution makes a new one.
                return await self._enqueue(dataclasses.replace(call, salt=secrets.token_hex(4)))

    async def _enqueue(self, call: locks.AcquireCall) -> locks.AcquireStatus:
        record = self._new_record(call)
        record = await self._claim(record, limit_ms=None)
        tracker = self._tracker_of(record, at_once=True)
        self._relay.track(tracker)
        return dataclasses.replace(await tracker.status(), salt=call.salt)

    async def _try(self, call: locks.AcquireCall) -> locks.AcquireStatus:
        record = self._new_record(call)
        permit = await self._relay.semaphore(call.terms).try_acquire(
            ticket=call.spec.ticket,
            weight=call.spec.weight,
            owner=record.owner,
            metadata=call.spec.metadata,
            key=call.spec.key or None,
        )
        return locks.AcquireStatus(permit)

    async def _release_recorded(self, resource: str) -> bool:
        """Carries out the releases of a resource that are recorded by now: the next request need not wait for them.

        Returns whether nothing is left that the activity's run has released.
        """
        releases, run_id = self._relay.releases, activity.info().workflow_run_id
        noted = [each for each in releases if each.resource == resource]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCAL_CALL_TIMEOUT_S / 2):
                await asyncio.gather(*(each.attempt() for each in noted))
        return not any(each in releases and each.run_id == run_id for each in noted)

    async def wait(self, call: locks.AcquireCall, token: bytes) -> None:
        """Has the relay complete the activity of this token when the request is granted."""
        record = self._new_record(call)
        # The local activity's marker records that the request was queued; only this activity's completion records the
        # grant.
        record.local_id = record.wait_id
        await self._claim(record, limit_ms=LEAVE_TIMEOUT_MS)
        tracker = self._tracker_of(record)
        tracker.attach(token)
        self._relay.track(tracker)
        await self._relay.registry.save(record)

    async def release(
        self, call: locks.ReleaseCall, *, answer_within_ms: float = LOCAL_CALL_TIMEOUT_S * 1000
    ) -> locks.ReleaseResult:
        """Releases a permit, or withdraws a request from the queue."""
        semaphore = self._relay.semaphore(call.terms)
        try:
            async with asyncio.timeout(answer_within_ms / 1000):
                if call.administrative:
                    return locks.ReleaseResult(await semaphore.release(call.ticket))
                release_record = self._release_record(call)
                if call.local_id and not self._relay.settings.by_signal:
                    if await self._note_release(release_record):
                        fence = call.fence
                        held = fence is None or await self.held(call.terms.resource, call.ticket, fence)
                        return locks.ReleaseResult(held)
                else:
                    await self._forget(release_record.id)
                released = await self._relay.try_release(release_record, answer_within_ms=answer_within_ms)
        except TimeoutError:
            return locks.ReleaseResult(released=False, pending=True)
        if isinstance(released, RedleaseError):
            raise released
        if self._relay.settings.by_signal:
            await self._await_notified_holders(semaphore)
        return locks.ReleaseResult(bool(released), pending=released is None)

    async def _forget(self, record_id: str) -> None:
        tracker = self._relay.trackers.get(record_id)
        if tracker is not None:
            self._relay.forget(tracker)
        await self._relay.registry.drop(record_id, any_owner=True)

    async def _note_release(self, release_record: TicketRecord) -> bool:
        """Notes a release until the history records it; returns False if the record is of another request, or none is.

        The relay that owns the record then carries the release out, and that is this one from now on.
        """
        relay, tracker = self._relay, self._relay.trackers.get(release_record.id)
        if isinstance(tracker, TicketTracker) and tracker.record.keep_note(release_record):
            tracker.release.start()
            if await relay.registry.save(tracker.record):
                return True
            relay.forget(tracker)  # another relay has taken it over
        stored = await relay.claim(release_record)
        if not stored.fence and not stored.wait_id:  # it is new, and was never asked for
            await relay.registry.drop(release_record.id)
            return False
        relay.track_record(stored)
        return stored.release == release_record.release and not stored.admission

    async def _await_notified_holders(self, semaphore: Semaphore) -> None:
        """Waits until the relay has signalled the new holders.

        A time-skipping test server skips time as soon as no workflow task is under way. If all other workflows wait for
        a signal, it would skip to their timeouts.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOCAL_CALL_TIMEOUT_S):
                holders = {permit.ticket for permit in (await semaphore.inspect()).holders}
                for tracker in list(self._relay.trackers.values()):
                    record = tracker.record
                    if not isinstance(tracker, TicketTracker) or not record.token:
                        continue
                    if record.ticket in holders and record.terms.resource == semaphore.name:
                        await tracker.from_queue.wait()

    def _release_record(self, call: locks.ReleaseCall) -> TicketRecord:
        spec = locks.AcquireSpec(call.ticket)
        acquire_call = locks.AcquireCall(call.terms, spec, "", 0, call.acquire_id, "", salt=call.salt)
        record = self._new_record(acquire_call)
        if call.fence is not None:  # the fence names the permit; its request must not be granted again
            record.fence, record.request = call.fence, ""
        # Of a permit that is plain data no relay has a record: one that has its release alone.
        record.renewed, record.on_close, record.recorded = False, "lease", True
        if call.local_id:
            record.release = ReleaseNote(call.local_id, call.event_id, call.fence or 0)
        return record

    async def adopt(self, call: locks.AdoptCall) -> Permit:
        """Takes a permit over for a run: with a new fence, unless it comes from the same chain of runs."""
        permit, record = call.permit, self._new_record(call.acquire)
        resource = self._relay.operations.resource(permit.resource)
        async with asyncio.timeout(LOCAL_CALL_TIMEOUT_S):
            stored = await self._relay.claim(record)
            # When the next run of a chain starts, the previous one has ended and cannot use the fence. (An equal
            # request is a repeat of this one.)
            before = stored if stored.request != record.request else None
            same = before is not None and (before.workflow_id, before.chain) == (record.workflow_id, record.chain)
            refence = not same if call.refence is None else call.refence
            adopted = await self._relay.operations.adopt(
                *(resource, permit.ticket, permit.fence, record.request, record.terms.lease_ms),
                refence=refence,
                idle_ttl_ms=self._relay.settings.idle_ttl_ms,
                label=record.label,
                limit_ms=None,
            )
            if adopted is None:
                await self._relay.registry.drop(record.id)
                raise lease_lost(permit.resource, permit.ticket, permit.fence, GONE)
            record.fence, record.granted_at_ms, _, record.weight, record.capacity, _ = adopted
            record.recorded = call.resumes
            record.keep_note(stored)
            tracker = self._tracker_of(record, at_once=True)
            self._relay.track(tracker)
            await self._relay.registry.save(record)
        return tracker.permit

    async def renew(self, call: locks.RenewCall) -> Permit:
        """Renews a permit for a lease of that length."""
        return await self._relay.semaphore(call.terms).renew(call.permit, lease=call.lease_ms / 1000)

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """Gives back all but one unit of a permit; returns whether it is held."""
        held = await self._relay.operations.reduce(
            *(self._relay.operations.resource(call.terms.resource), call.ticket, call.fence, 1),
            idle_ttl_ms=self._relay.settings.idle_ttl_ms,
        )
        if self._relay.settings.by_signal:
            await self._await_notified_holders(self._relay.semaphore(call.terms))
        return held

    async def held(self, resource: str, ticket: str, fence: int) -> bool:
        """Whether the permit with this fence is held now."""
        return await self._relay.operations.check(self._relay.operations.resource(resource), ticket, fence)

    async def position(self, call: locks.PositionCall) -> Position | None:
        """The position of a ticket in the queue."""
        return await self._relay.semaphore(call.terms).position(call.ticket)

    async def inspect(self, call: locks.InspectCall) -> Snapshot:
        """The current state of the resource."""
        return await self._relay.semaphore(call.terms).inspect(max_items=call.limit)

    async def _claim(self, record: TicketRecord, *, limit_ms: float | None) -> TicketRecord:
        """Makes the relay the owner of the record, and copies the state of an earlier copy of the request."""
        stored = await self._relay.claim(record, limit_ms=limit_ms)
        if stored.release is not None and stored.request != record.request:
            # The run has released what it had with this ticket, and the next request may not share that permit.
            tracker = tracker_for(self._relay, stored)
            self._relay.track(tracker)
            if await tracker.release.attempt() is None:
                raise TimeoutError  # until it is recorded; the waiting activity is retried
            stored = await self._relay.claim(record, limit_ms=limit_ms)
        # A run that was reset to before it asked asks again for what it had before its downgrade.
        gives_back = stored.run_id != record.run_id and await self._relay.is_reduced(stored)
        if gives_back and not isinstance(await self._relay.try_release(stored), bool):
            raise TimeoutError  # the activity is retried
        record.arrival = stored.arrival
        record.keep_note(stored)  # this may be a late copy: what its task has released since is still to be released
        if stored.request == record.request and stored.fence:
            record.fence, record.granted_at_ms, record.capacity = stored.fence, stored.granted_at_ms, stored.capacity
        return record

    def _tracker_of(self, record: TicketRecord, *, at_once: bool = False) -> TicketTracker:
        """The next tracker of a record, to be given it at once: the last one may have got a release meanwhile."""
        before = self._relay.trackers.get(record.id)
        if before is not None:
            record.keep_note(before.record)
        return tracker_for(self._relay, record, at_once=at_once)

    def _new_record(self, call: locks.AcquireCall) -> TicketRecord:
        """The initial record for a request of the activity's workflow run."""
        info = activity.info()
        workflow_id, run_id = info.workflow_id or "", info.workflow_run_id or ""
        holder = call.caller.workflow_id if call.caller else workflow_id
        spec = call.spec
        owner = spec.owner or limits.shortened(holder, limits.OWNER_BYTES_MAX)
        return TicketRecord(
            call.terms,
            spec.ticket,
            digest(call.terms.resource, spec.ticket, run_id, call.local_id, call.salt),
            *(workflow_id, run_id, call.chain, call.event_id, call.local_id, call.wait_id),
            label(owner, spec.metadata, spec.key),
            owner,
            weight=spec.weight,
            metadata=spec.metadata,
            renewed=spec.renewed,
            on_close=spec.on_close,
            max_hold_ms=spec.max_hold_ms,
            caller=call.caller,
            key=spec.key,
            share=spec.share,
            full=spec.full,
            grace_ms=spec.grace_ms,
        )
