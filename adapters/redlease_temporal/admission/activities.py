"""The activities through which workflow runs take and free places, in Redis or on slots."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from redlease_temporal.backends.redis.activities import PATIENCE_S, told
from redlease_temporal.backends.redis.relay import Relay
from redlease_temporal.backends.redis.requests import AT_ONCE_S

from .redis_tracker import PlaceTracker, places_of
from .replacing import Places, replacing
from .rule import ADMIT, FORGO, LATER, REPLACING, RESERVE, Entry, WorkflowConcurrencyLimitExceeded
from .slot_places import SlotAdmission


class AdmissionActivities:
    """The local activities, and the remote ones that are retried until they succeed.

    Args:
        relay: Returns the relay of this process; raises if the plugin was given no Redis.
        slots: Returns what takes places on slots.
    """

    def __init__(self, relay: Callable[[], Relay], slots: Callable[[], SlotAdmission]) -> None:
        self._relay = relay
        self._slots = slots

    @property
    def local(self) -> list[Callable[..., Any]]:
        """For workers that run workflows."""
        return [self.reserve, self.forgo, self.admit]

    @property
    def remote(self) -> list[Callable[..., Any]]:
        """For the internal worker, while it runs."""
        replacing = [self.reserve_replacing, self.admit_replacing]
        return [self.reserve_later, self.admit_later, *replacing, self._slots().owner]

    @activity.defn(name=RESERVE)
    async def reserve(self, entry: Entry) -> bool:
        """Takes a place for a child workflow."""
        return await told(self._reserve(entry, limit_s=AT_ONCE_S))

    @activity.defn(name=LATER[RESERVE])
    async def reserve_later(self, entry: Entry) -> bool:
        """Takes a place for a child workflow; retried until Redis answers."""
        return await told(self._reserve(entry, limit_s=PATIENCE_S))

    @activity.defn(name=FORGO)
    async def forgo(self, entry: Entry) -> bool:
        """Frees the place of a child workflow that was not started."""
        return await told(self._forgo(entry))

    @activity.defn(name=ADMIT)
    async def admit(self, entry: Entry) -> bool:
        """Takes the place of this run, if Redis answers in time."""
        return await told(self._admit(entry, limit_s=AT_ONCE_S))

    @activity.defn(name=LATER[ADMIT])
    async def admit_later(self, entry: Entry) -> bool:
        """Takes the place of this run; retried until Redis answers."""
        return await told(self._admit(entry, limit_s=PATIENCE_S))

    @activity.defn(name=REPLACING[RESERVE])
    async def reserve_replacing(self, entry: Entry) -> bool:
        """Takes a place for a child workflow, of the oldest workflow if none is free."""
        return await told(self._replacing(entry, functools.partial(self._reserve, limit_s=PATIENCE_S)))

    @activity.defn(name=REPLACING[ADMIT])
    async def admit_replacing(self, entry: Entry) -> bool:
        """Takes the place of this run, of the oldest workflow if none is free."""
        return await told(self._replacing(entry, functools.partial(self._admit, limit_s=PATIENCE_S)))

    # Implementation

    async def _replacing(self, entry: Entry, take: Callable[[Entry], Awaitable[bool]]) -> bool:
        """Takes a place, by replacing others if need be; returns whether there was one."""
        slots = self._slots()
        places: Places = slots if entry.backend == "slots" else places_of(self._relay())

        async def taken(entry: Entry) -> bool:
            # What waited on behalf of a run that has closed would take the place from the next run of its ID.
            if entry.asked and entry.chain and await slots.monitor.is_closed(entry.workflow_id, entry.chain):
                raise ApplicationError(f"workflow {entry.workflow_id!r}: the run that asked closed", non_retryable=True)
            if not await take(entry):
                raise entry.refusal()
            return True

        try:
            return await replacing(slots.temporal, places, entry, taken)
        except WorkflowConcurrencyLimitExceeded:
            return False

    async def _reserve(self, entry: Entry, *, limit_s: float) -> bool:
        """Takes a place for a child about to be started; returns whether there was one."""
        if entry.backend == "slots":
            return await self._reserve_slot(entry)
        relay = self._relay()
        async with relay.recover_on_error(), asyncio.timeout(limit_s):
            try:
                record = await places_of(relay).reserve(entry)
            except WorkflowConcurrencyLimitExceeded:
                return False
            if record is not None:
                await relay.registry.claim(record)
        if record is not None:
            relay.track(PlaceTracker(relay, record))
        return True

    async def _reserve_slot(self, entry: Entry) -> bool:
        try:
            await self._slots().reserve(entry)
        except WorkflowConcurrencyLimitExceeded:
            return False
        return True

    async def _forgo(self, entry: Entry) -> bool:
        """Frees the place of a child that was not started."""
        if entry.backend == "slots":
            await self._slots().forgo(entry)
            return True
        async with asyncio.timeout(AT_ONCE_S):
            await places_of(self._relay()).forgo(entry)
        return True

    async def _admit(self, entry: Entry, *, limit_s: float) -> bool:
        """Takes the place of a run; returns whether there was one."""
        if entry.backend == "slots":
            return await self._slots().admit(entry)
        relay = self._relay()
        async with relay.recover_on_error(), asyncio.timeout(limit_s):
            record = await places_of(relay).admit(entry)
        if record is not None:
            relay.track(PlaceTracker(relay, record))
        return record is not None
