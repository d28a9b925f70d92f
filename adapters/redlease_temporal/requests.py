"""What the activities ask of their process's relay: to queue, to wait, to give back, to take over, and to look."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets

from temporalio import activity

from redlease import RedleaseError, Withdrawn, limits, wire
from redlease.hold import lease_lost
from redlease.models import Permit, Snapshot
from redlease.semaphore import GONE, Semaphore

from . import calls
from .admitted import Admitted
from .limited import Entry, WorkflowConcurrencyLimitExceeded
from .registry import Watch, digest
from .relay import LEAVE_MS, Relay
from .watcher import Watcher

AT_ONCE_S = 0.7  # how long a local activity waits for Redis: it has a second in all


class Requests:
    """The requests of workflow runs, by way of activities. What they begin, the relay tends from then on."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    # Locks

    async def enqueue(self, wish: calls.Wish) -> calls.Standing:
        """Queues a request; how it stands. Waits for Redis less than a second."""
        if not wish.queue:
            return await self._try(wish)
        async with asyncio.timeout(AT_ONCE_S):
            try:
                return await self._enqueue(wish)
            except Withdrawn:
                # This workflow task was begun once before, came as far as the release, and was not recorded: what that
                # run of it asked for must not come again, and this one asks for another.
                return await self._enqueue(dataclasses.replace(wish, salt=secrets.token_hex(4)))

    async def _enqueue(self, wish: calls.Wish) -> calls.Standing:
        watch = await self._claim(self._watch(wish), limit_ms=None)
        watcher = Watcher(self._relay, watch, at_once=True)
        self._relay.tend(watcher)
        return dataclasses.replace(await watcher.standing(), salt=wish.salt)

    async def _try(self, wish: calls.Wish) -> calls.Standing:
        watch = self._watch(wish)
        permit = await self._relay.semaphore(wish.terms).try_acquire(
            ticket=wish.ticket, weight=wish.weight, owner=watch.owner, metadata=wish.metadata
        )
        return calls.Standing(permit)

    async def wait(self, wish: calls.Wish, token: bytes) -> None:
        """Sees to it that the activity with this token is completed once the request is granted."""
        watch = self._watch(wish)
        # The marker of the local activity says that it queued: only this activity's completion records the grant.
        watch.local_id = watch.wait_id
        await self._claim(watch, limit_ms=LEAVE_MS)
        watcher = Watcher(self._relay, watch)
        watcher.attach(token)
        await self._relay.registry.put(watch)
        self._relay.tend(watcher)

    async def release(self, giving: calls.Giving, *, patience_ms: float = AT_ONCE_S * 1000) -> calls.Released:
        """Takes a ticket out, as holder or as waiter."""
        semaphore = self._relay.semaphore(giving.terms)
        try:
            async with asyncio.timeout(patience_ms / 1000):
                if giving.administrative:
                    return calls.Released(await semaphore.release(giving.ticket))
                leaving = self._leaving(giving)
                known = self._relay.watchers.get(leaving.id)
                if known is not None:
                    self._relay.forget(known)
                await self._relay.registry.drop(leaving.id, anyones=True)
                released = await self._relay.give_back(
                    wire.Resource(self._relay.prefix, giving.terms.resource), leaving, patience_ms=patience_ms
                )
        except TimeoutError:
            return calls.Released(released=False, pending=True)
        if isinstance(released, RedleaseError):
            raise released
        if self._relay.settings.by_signal:
            await self._tell_holders(semaphore)
        return calls.Released(bool(released), pending=released is None)

    async def _tell_holders(self, semaphore: Semaphore) -> None:
        """Returns when whoever holds it now was told.

        A server that skips time does so as soon as no workflow task is under way, and with all others waiting for a
        signal it would skip to where they time out.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AT_ONCE_S):
                holders = {permit.ticket for permit in (await semaphore.inspect()).holders}
                for watcher in list(self._relay.watchers.values()):
                    watch = watcher.watch
                    if not isinstance(watcher, Watcher) or not watch.token:
                        continue
                    if watch.ticket in holders and watch.terms.resource == semaphore.name:
                        await watcher.handed_over.wait()

    def _leaving(self, giving: calls.Giving) -> Watch:
        wish = calls.Wish(giving.terms, giving.ticket, "", 0, giving.asked, "", salt=giving.salt)
        watch = self._watch(wish)
        if giving.fence is not None:  # the fence names it, and its own request is the one that must not come again
            watch.fence, watch.request = giving.fence, ""
        return watch

    async def adopt(self, adopting: calls.Adopting) -> Permit:
        """Takes a permit over for a run: with a new fence, unless it comes from the same chain of runs."""
        permit, watch = adopting.permit, self._watch(adopting.wish)
        resource = wire.Resource(self._relay.prefix, permit.resource)
        async with asyncio.timeout(AT_ONCE_S):
            known = await self._relay.claim(watch)
            # No ghost of a run is left once the next one of its chain runs. (The same request is a repeated one.)
            before = known if known.request != watch.request else None
            same = before is not None and (before.workflow_id, before.chain) == (watch.workflow_id, watch.chain)
            refence = not same if adopting.refence is None else adopting.refence
            values = await self._relay.call(
                *(resource, wire.ADOPT, permit.ticket, permit.fence, watch.request, self._relay.room.new_name()),
                *(watch.terms.lease_ms, int(refence), self._relay.settings.idle_ttl_ms, watch.label),
            )
            if values[0] == 0:
                await self._relay.registry.drop(watch.id)
                raise lease_lost(permit.resource, permit.ticket, permit.fence, GONE)
            watch.fence, watch.granted_at_ms, _, watch.weight, watch.capacity = values
            await self._relay.registry.put(watch)
        watcher = Watcher(self._relay, watch, at_once=True)
        self._relay.tend(watcher)
        return watcher.permit

    async def renew(self, renewing: calls.Renewing) -> Permit:
        """Gives a permit a lease of that length."""
        return await self._relay.semaphore(renewing.terms).renew(renewing.permit, lease=renewing.lease_ms / 1000)

    async def held(self, resource: str, ticket: str, fence: int) -> bool:
        """Whether a permit is held now, under its fence."""
        answer = await self._relay.room.connection.call(
            wire.Resource(self._relay.prefix, resource), wire.CHECK, ticket, fence, ticket=ticket
        )
        return bool(answer.values[0])

    async def inspect(self, inspecting: calls.Inspecting) -> Snapshot:
        """The resource as it is."""
        return await self._relay.semaphore(inspecting.terms).inspect(limit=inspecting.limit)

    async def _claim(self, watch: Watch, *, limit_ms: float | None) -> Watch:
        """Makes the watch this relay's, with what is known of an earlier copy of the request."""
        known = await self._relay.claim(watch, limit_ms=limit_ms)
        watch.arrival = known.arrival
        if known.request == watch.request and known.fence:
            watch.fence, watch.granted_at_ms, watch.capacity = known.fence, known.granted_at_ms, known.capacity
        return watch

    def _watch(self, wish: calls.Wish) -> Watch:
        """The watch that a request of the activity's workflow run begins with."""
        info = activity.info()
        workflow_id, run_id = info.workflow_id or "", info.workflow_run_id or ""
        owner = wish.owner or limits.shortened(workflow_id, limits.OWNER_BYTES_MAX)
        return Watch(
            wish.terms,
            wish.ticket,
            digest(wish.terms.resource, wish.ticket, run_id, wish.local_id, wish.salt),
            *(workflow_id, run_id, wish.chain, wish.event_id, wish.local_id, wish.wait_id),
            wire.label(owner, wish.metadata),
            owner,
            weight=wish.weight,
            metadata=wish.metadata,
            keep=wish.keep,
            on_close=wish.on_close,
            max_hold_ms=wish.max_hold_ms,
        )

    # Places of workflows whose number is limited

    async def reserve(self, entry: Entry, *, limit_s: float) -> bool:
        """Takes a place for a child that is to be started; whether it may be."""
        try:
            if entry.backend == "slots":
                await self._relay.slots.reserve(entry)
                return True
            async with self._relay.heard_of(), asyncio.timeout(limit_s):
                watch = await self._relay.admission.reserve(entry)
                if watch is not None:
                    await self._relay.registry.claim(watch)
        except WorkflowConcurrencyLimitExceeded:
            return False
        if watch is not None:
            self._relay.tend(Admitted(self._relay, watch))
        return True

    async def forgo(self, entry: Entry) -> bool:
        """The child was not started."""
        if entry.backend == "slots":
            await self._relay.slots.forgo(entry)
            return True
        async with asyncio.timeout(AT_ONCE_S):
            await self._relay.admission.forgo(entry)
        return True

    async def admit(self, entry: Entry, *, limit_s: float) -> bool:
        """Takes the place of a run; whether there is one."""
        if entry.backend == "slots":
            return await self._relay.slots.admit(entry)
        async with self._relay.heard_of(), asyncio.timeout(limit_s):
            watch = await self._relay.admission.admit(entry)
        if watch is not None:
            self._relay.tend(Admitted(self._relay, watch))
        return watch is not None
