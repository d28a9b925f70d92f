"""The activities through which workflow runs take and free places, in Redis or on slots."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from temporalio import activity
from temporalio.exceptions import ApplicationError

from redlease_temporal._backends.redis.activities import REMOTE_CALL_TIMEOUT_S, with_activity_failures
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.requests import LOCAL_CALL_TIMEOUT_S

from .redis_tracker import AdmissionTracker, admission_of
from .replacing import AdmissionBackend, replacing
from .rule import (
    ADMIT,
    CANCEL_RESERVATION,
    LATER,
    REPLACING,
    RESERVE,
    AdmissionRequest,
    WorkflowConcurrencyLimitExceeded,
)
from .slot_admission import SlotAdmission


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
        return [self.reserve, self.cancel_reservation, self.admit]

    @property
    def remote(self) -> list[Callable[..., Any]]:
        """For the internal worker, while it runs."""
        replacing_activities = [self.reserve_replacing, self.admit_replacing]
        return [self.reserve_later, self.admit_later, *replacing_activities, self._slots().owner]

    @activity.defn(name=RESERVE)
    async def reserve(self, request: AdmissionRequest) -> bool:
        """Takes a place for a child workflow."""
        return await with_activity_failures(self._reserve(request, limit_s=LOCAL_CALL_TIMEOUT_S))

    @activity.defn(name=LATER[RESERVE])
    async def reserve_later(self, request: AdmissionRequest) -> bool:
        """Takes a place for a child workflow; retried until Redis answers."""
        return await with_activity_failures(self._reserve(request, limit_s=REMOTE_CALL_TIMEOUT_S))

    @activity.defn(name=CANCEL_RESERVATION)
    async def cancel_reservation(self, request: AdmissionRequest) -> bool:
        """Frees the place of a child workflow that was not started."""
        return await with_activity_failures(self._cancel_reservation(request))

    @activity.defn(name=ADMIT)
    async def admit(self, request: AdmissionRequest) -> bool:
        """Takes the place of this run, if Redis answers in time."""
        return await with_activity_failures(self._admit(request, limit_s=LOCAL_CALL_TIMEOUT_S))

    @activity.defn(name=LATER[ADMIT])
    async def admit_later(self, request: AdmissionRequest) -> bool:
        """Takes the place of this run; retried until Redis answers."""
        return await with_activity_failures(self._admit(request, limit_s=REMOTE_CALL_TIMEOUT_S))

    @activity.defn(name=REPLACING[RESERVE])
    async def reserve_replacing(self, request: AdmissionRequest) -> bool:
        """Takes a place for a child workflow, of the oldest workflow if none is free."""
        return await with_activity_failures(
            self._replacing(request, functools.partial(self._reserve, limit_s=REMOTE_CALL_TIMEOUT_S))
        )

    @activity.defn(name=REPLACING[ADMIT])
    async def admit_replacing(self, request: AdmissionRequest) -> bool:
        """Takes the place of this run, of the oldest workflow if none is free."""
        return await with_activity_failures(
            self._replacing(request, functools.partial(self._admit, limit_s=REMOTE_CALL_TIMEOUT_S))
        )

    # Implementation

    async def _replacing(self, request: AdmissionRequest, take: Callable[[AdmissionRequest], Awaitable[bool]]) -> bool:
        """Takes a place, by replacing others if need be; returns whether there was one."""
        slot_admission = self._slots()
        admission: AdmissionBackend = slot_admission if request.backend == "slots" else admission_of(self._relay())

        async def take_slot(request: AdmissionRequest) -> bool:
            # What waited on behalf of a run that has closed would take the place from the next run of its ID.
            if (
                request.requested_at
                and request.chain
                and await slot_admission.monitor.is_closed(request.workflow_id, request.chain)
            ):
                raise ApplicationError(
                    f"workflow {request.workflow_id!r}: the run that asked closed", non_retryable=True
                )
            if not await take(request):
                raise request.refusal()
            return True

        try:
            return await replacing(slot_admission.temporal, admission, request, take_slot)
        except WorkflowConcurrencyLimitExceeded:
            return False

    async def _reserve(self, request: AdmissionRequest, *, limit_s: float) -> bool:
        """Takes a place for a child about to be started; returns whether there was one."""
        if request.backend == "slots":
            return await self._reserve_slot(request)
        relay = self._relay()
        async with relay.recover_on_error(), asyncio.timeout(limit_s):
            try:
                record = await admission_of(relay).reserve(request)
            except WorkflowConcurrencyLimitExceeded:
                return False
            if record is not None:
                await relay.registry.claim(record)
        if record is not None:
            relay.track(AdmissionTracker(relay, record))
        return True

    async def _reserve_slot(self, request: AdmissionRequest) -> bool:
        try:
            await self._slots().reserve(request)
        except WorkflowConcurrencyLimitExceeded:
            return False
        return True

    async def _cancel_reservation(self, request: AdmissionRequest) -> bool:
        """Frees the place of a child that was not started."""
        if request.backend == "slots":
            await self._slots().cancel_reservation(request)
            return True
        async with asyncio.timeout(LOCAL_CALL_TIMEOUT_S):
            await admission_of(self._relay()).cancel_reservation(request)
        return True

    async def _admit(self, request: AdmissionRequest, *, limit_s: float) -> bool:
        """Takes the place of a run; returns whether there was one."""
        if request.backend == "slots":
            return await self._slots().admit(request)
        relay = self._relay()
        async with relay.recover_on_error(), asyncio.timeout(limit_s):
            record = await admission_of(relay).admit(request)
        if record is not None:
            relay.track(AdmissionTracker(relay, record))
        return record is not None
