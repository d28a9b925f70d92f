"""The places of workflows whose number is limited, in Redis: taken before the start, provisionally, and by each run.

A place is a permit whose ticket is the workflow ID, so that whatever starts that ID again finds it, and takes no other.
What is written of it in the registry of the relays comes to whichever of them lives: it frees the place when the last
run is closed.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from typing import NamedTuple

from redlease import limits, wire
from redlease.waiting import Room
from redlease.wire import Status

from .calls import Terms
from .limited import Entry
from .owners import Fate, Owners
from .registry import Registry, Watch, digest

PROVISIONAL_MS = 30_000  # how long a place is kept for a start of which nothing more is heard
KEPT_MS = 24 * 3600 * 1000  # how long a run's place outlives the last relay
MISSED_MS = 4500  # within which another relay goes on with what a dead one had: a third of it is that one's lease


class _Grant(NamedTuple):
    fence: int
    fresh: bool  # whether it was free until now


class Admission:
    """What takes and gives places.

    Args:
        room: Of the Redis client.
        registry: Of the relays that are to look after the places.
        owners: Ask how workflows stand.
        namespace: That the workflows are in.
        idle_ttl_ms: See `Settings`.
    """

    def __init__(
        self, room: Room, registry: Registry, owners: Owners, *, prefix: str, namespace: str, idle_ttl_ms: int
    ) -> None:
        self._room = room
        self._registry = registry
        self._owners = owners
        self._prefix = prefix
        self._namespace = namespace
        self._idle_ttl_ms = idle_ttl_ms

    def watch_of(self, entry: Entry) -> Watch:
        """A place as it is written; nobody has it yet."""
        ticket = f"{self._namespace}/{entry.workflow_id}"
        if len(ticket.encode()) > limits.TICKET_BYTES_MAX:
            ticket = digest(ticket)
        owner = limits.shortened(entry.workflow_id, limits.OWNER_BYTES_MAX)
        metadata = {"workflow_type": entry.workflow_type}
        return Watch(
            Terms(entry.resource, entry.limit, MISSED_MS),
            *(ticket, secrets.token_hex(8), entry.workflow_id, "", entry.chain, 0, "", ""),
            *(wire.label(owner, metadata), owner),
            metadata=metadata,
            admission=True,
        )

    async def reserve(self, entry: Entry) -> Watch | None:
        """Takes a place for a start that is to follow; None when the workflow runs already, and needs none.

        Raises:
            WorkflowConcurrencyLimitExceeded: There is none.
        """
        watch = self.watch_of(entry)
        while True:
            grant = await self._take(watch, PROVISIONAL_MS)
            if grant is None:
                if await self._fate(entry) is Fate.OPEN:
                    return None
                raise entry.refusal()
            if grant.fresh:
                watch.fence = grant.fence
                break
            if await self._fate(entry) is not Fate.CLOSED:
                return None
            # The last run has just closed, and its place is about to be freed: under a new fence it is not.
            watch.fence = await self._adopt(watch, grant.fence, PROVISIONAL_MS)
            if watch.fence:
                break
        await self._registry.drop(watch.id, anyones=True)  # what an earlier run may have left
        return watch

    async def confirm(self, watch: Watch, chain: str) -> None:
        """The workflow was started: its place is kept until a relay looks after it, however long that takes.

        With an empty `chain` it may not have been, and the relay finds out.
        """
        watch.chain = chain
        calls: list[Awaitable[object]] = [self._registry.lay(watch)]
        if chain:
            terms = (KEPT_MS, 0, self._idle_ttl_ms)
            calls.append(
                self._room.connection.call(self._resource(watch), wire.RENEW, watch.ticket, watch.fence, *terms)
            )
        await asyncio.gather(*calls)

    async def forgo(self, entry: Entry, watch: Watch | None = None) -> None:
        """The workflow was not started: its place is free, unless there is a run that it belongs to."""
        if await self._fate(entry) is not Fate.CLOSED:
            return
        known = await self._registry.drop(self.watch_of(entry).id, anyones=True)
        if (watch := watch or known) is not None and watch.fence:
            await self.free(watch)

    async def admit(self, entry: Entry) -> Watch | None:
        """Takes the place of a run, or finds the one that it has; None when there is none."""
        watch = self.watch_of(entry)
        known = await self._registry.claim(watch)
        own = known.chain in {"", entry.chain}
        while True:
            grant = await self._take(watch, KEPT_MS)
            if grant is None:
                await self._registry.drop(watch.id)
                return None
            watch.fence = grant.fence
            if not own and not grant.fresh:  # an earlier workflow of that ID had it, and somebody may be freeing it
                watch.fence = await self._adopt(watch, grant.fence, KEPT_MS)
            if watch.fence:
                if not await self._registry.put(watch):  # whoever freed the place of an earlier run has ended the watch
                    await self._registry.claim(watch)
                return watch

    async def take_again(self, watch: Watch) -> int:
        """Takes the place of a run that has lost it; its fence, 0 when there is none."""
        grant = await self._take(watch, KEPT_MS)
        return 0 if grant is None else grant.fence

    async def free(self, watch: Watch) -> None:
        """The place is free, if it is still this one."""
        await self._room.connection.call(
            *(self._resource(watch), wire.RELEASE, watch.ticket, watch.fence, "", 0, 0, self._idle_ttl_ms)
        )

    # How it is done

    def _resource(self, watch: Watch) -> wire.Resource:
        return wire.Resource(self._prefix, watch.terms.resource)

    async def _fate(self, entry: Entry) -> Fate:
        return (await self._owners.look((entry.workflow_id, ""))).fate

    async def _take(self, watch: Watch, lease_ms: int) -> _Grant | None:
        terms = (self._room.new_name(), 0, 1, lease_ms, watch.terms.capacity, 0, -1, self._idle_ttl_ms, watch.label)
        while True:
            answer = await self._room.connection.call(
                *(self._resource(watch), wire.ACQUIRE, watch.ticket, watch.request, *terms)
            )
            status, *values = answer.values
            if status == Status.GRANTED:
                fence, granted_at, deadline, *_ = values
                return _Grant(fence, deadline - lease_ms == granted_at)
            if status == Status.WITHDRAWN:  # somebody has released it by its ticket: this asks for another
                watch.request = secrets.token_hex(8)
            elif status != Status.BUSY or not values[-1]:  # dead ones are taken out in batches
                return None

    async def _adopt(self, watch: Watch, fence: int, lease_ms: int) -> int:
        """Takes the place over under a new fence, 0 when it is gone."""
        answer = await self._room.connection.call(
            *(self._resource(watch), wire.ADOPT, watch.ticket, fence, watch.request, self._room.new_name()),
            *(lease_ms, 1, self._idle_ttl_ms, watch.label),
        )
        return int(answer.values[0])
