"""Resources in Redis. Local activities send the requests; a remote activity waits for the grant."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RawValue
from temporalio.exceptions import ActivityError, TimeoutType
from temporalio.exceptions import TimeoutError as ActivityTimeout

from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import locks
from redlease_temporal._workflow_side.backend import (
    LOCAL_ATTEMPT_TIMEOUT,
    RETRY_OFTEN,
    LocalBackend,
    failed_call,
    local,
    read,
    timed_out,
)
from redlease_temporal._workflow_side.cancellation import ended, retrieve_exception
from redlease_temporal._workflow_side.hold import until
from redlease_temporal._workflow_side.run import Run, current
from redlease_temporal.errors import Withdrawn, refusal

T = TypeVar("T")

RECORDS_S = 0.001  # a timer ends the workflow task, however short it is: its end records what came before


class RedisBackend(LocalBackend):
    """A resource that runs share with services, by way of relays. `terms`: those of the resource."""

    name = "redis"
    service = "Redis"
    has_turns = True
    has_rates = True
    replaces = True

    async def acquire(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Requests a permit and waits for it."""
        try:
            status = await self._enqueue(call)
            if status.unsettled:
                call = await _settled(call)
                status = await self._enqueue(call)
            if status.salt:
                call = dataclasses.replace(call, salt=status.salt)
            return status.permit or await self._wait(run, call, status, timeout)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            current().releasing(self._terms.resource, self._withdraw(call))
            if isinstance(error.cause, ActivityTimeout) and error.cause.type == TimeoutType.SCHEDULE_TO_CLOSE:
                raise timed_out(self.service, call, timeout or timedelta(0)) from error
            raise
        except asyncio.CancelledError:
            current().releasing(self._terms.resource, self._withdraw(call))
            raise

    async def _enqueue(self, call: locks.AcquireCall) -> locks.AcquireStatus:
        try:
            return await local(locks.ENQUEUE, call, locks.AcquireStatus, call.local_id)
        except ActivityError as error:
            if refusal(error) is not None:
                raise
            return locks.AcquireStatus()  # Redis did not answer in time: the waiting activity retries

    async def _wait(
        self, run: Run, call: locks.AcquireCall, status: locks.AcquireStatus, timeout: timedelta | None
    ) -> Permit:
        if timeout is not None and timeout <= timedelta(0):
            current().releasing(self._terms.resource, self._withdraw(call))
            raise timed_out(self.service, call, timeout)
        if status.shape == locks.BY_SIGNAL:
            return await self._wait_for_signal(run, call, timeout)
        place = "" if status.ahead is None else f", place {status.ahead + 1}"
        waiting = self._start(
            locks.WAIT,
            call,
            f"waiting for {self._terms.resource}{place}",
            activity_id=call.wait_id,
            schedule_to_close_timeout=timeout,
            start_to_close_timeout=timedelta(seconds=run.wait_attempt_s),
        )
        returned = await ended(waiting)
        try:
            return _checked(read(returned, Permit), call)
        except ValueError as error:
            current().releasing(self._terms.resource, self._withdraw(call))
            message = (
                f"resource {self._terms.resource!r}: the library did not complete the activity "
                f"{call.wait_id!r}: {error}. The request is out of the queue: acquire again"
            )
            raise Withdrawn(message, resource=self._terms.resource, ticket=call.spec.ticket) from error

    async def _wait_for_signal(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        key = (self._terms.resource, call.spec.ticket)
        try:
            await until(lambda: key in run.granted, None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            current().releasing(self._terms.resource, self._withdraw(call))
            raise timed_out(self.service, call, timeout or timedelta(0)) from None
        return run.granted.pop(key)

    async def _withdraw(self, call: locks.AcquireCall) -> bool:
        return await self.end(
            locks.ReleaseCall(self._terms, call.spec.ticket, acquire_id=call.local_id, salt=call.salt)
        )

    async def try_acquire(self, run: Run, call: locks.AcquireCall) -> Permit | None:
        """Requests a permit without queueing."""
        try:
            status = await self._call_activity(locks.ENQUEUE, call, locks.AcquireStatus, call.local_id)
            if status.unsettled:
                call = await _settled(call)
                status = await self._call_activity(locks.ENQUEUE, call, locks.AcquireStatus, call.local_id)
        except asyncio.CancelledError:
            run.releasing(self._terms.resource, self._withdraw(call))
            raise
        return status.permit

    async def adopt(self, run: Run, call: locks.AdoptCall) -> Permit:
        """Takes over a permit."""
        del run
        return await self._call_activity(locks.ADOPT, call, Permit, call.acquire.local_id)

    async def renew(self, call: locks.RenewCall) -> Permit:
        """Renews a permit."""
        return await self._call_activity(locks.RENEW, call, Permit)

    async def release(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit, by a remote activity, which is retried until Redis answers."""
        try:
            return read(await self._release_later(call), locks.ReleaseResult).released
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            return False
        except ValueError:  # somebody completed the activity by hand
            return False

    def _release_later(self, call: locks.ReleaseCall) -> workflow.ActivityHandle[RawValue | None]:
        return self._start(
            locks.RELEASE_LATER,
            call,
            f"releasing {self._terms.resource}",
            schedule_to_close_timeout=self._while_it_may_be_held,
            cancellation_type=workflow.ActivityCancellationType.ABANDON,
        )

    def _start(self, name: str, call: object, summary: str, **options: Any) -> workflow.ActivityHandle[RawValue | None]:
        """Starts a remote activity of the internal worker, which is retried."""
        handle: workflow.ActivityHandle[RawValue | None] = workflow.start_activity(
            *(name, call),
            result_type=RawValue,
            task_queue=current().task_queue,
            retry_policy=RETRY_OFTEN,
            summary=summary,
            **options,
        )
        return handle

    @property
    def _while_it_may_be_held(self) -> timedelta:
        return timedelta(milliseconds=self._terms.lease_ms) + LOCAL_ATTEMPT_TIMEOUT

    async def end(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit or withdraws a request, by a local activity: the relay does so when its marker is recorded.

        If Redis does not answer, a remote activity retries.
        """
        event_id = workflow.info().get_current_history_length()
        call = dataclasses.replace(call, local_id=_release_id(call), event_id=event_id)
        try:
            released = await local(locks.RELEASE, call, locks.ReleaseResult, call.local_id)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            released = locks.ReleaseResult(released=False, pending=True)
        if released.pending:
            later = dataclasses.replace(call, local_id="")
            self._release_later(later).add_done_callback(retrieve_exception)
        return released.released

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """Gives back all but one unit of a permit, by a remote activity."""
        summary, limit = f"downgrading {self._terms.resource}", self._while_it_may_be_held
        try:
            returned = await ended(self._start(locks.DOWNGRADE, call, summary, schedule_to_close_timeout=limit))
            return read(returned, bool)
        except ActivityError as error:
            raise failed_call(error, service=self.service, resource=self._terms.resource) from error
        except ValueError:
            # Somebody completed the activity by hand. At worst the permit still excludes more than its run knows.
            return await self.check(locks.CheckCall(self._terms, call.ticket, call.fence))

    async def check(self, call: locks.CheckCall) -> bool:
        """Whether Redis still has the permit."""
        return await self._call_activity(locks.CHECK, call, bool)

    async def position(self, call: locks.PositionCall) -> Position | None:
        """The position of a ticket in the queue."""
        return await self._call_activity(locks.POSITION, call, Position)

    async def inspect(self, call: locks.InspectCall) -> Snapshot:
        """The current state of the resource."""
        return await self._call_activity(locks.INSPECT, call, Snapshot)

    def resource_workflow(self, permit: Permit) -> str:  # noqa: ARG002  the same for each
        """No workflow keeps it."""
        return ""


async def _settled(call: locks.AcquireCall) -> locks.AcquireCall:
    """Has recorded what the run has released, which the relay waits for; returns the request to be made then."""
    await asyncio.sleep(RECORDS_S)
    event_id = workflow.info().get_current_history_length()
    return dataclasses.replace(call, settles=False, local_id=f"{call.local_id}+", event_id=event_id)


def _release_id(call: locks.ReleaseCall) -> str:
    """Names the release of one permit or request: a task that is executed again may release others.

    Not by the ticket, which names the workflow: histories may be replayed under any id.
    """
    parts = (call.terms.resource, str(call.fence), call.acquire_id, call.salt)
    return f"redlease:release:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"


def _checked(permit: Permit, call: locks.AcquireCall) -> Permit:
    """Returns the permit; raises ValueError if it is of another resource."""
    # The ticket is not compared: it is made from the workflow id, and histories may be replayed under any id.
    if permit.resource != call.terms.resource:
        raise ValueError(f"its result is a permit of resource {permit.resource!r}")
    return permit
