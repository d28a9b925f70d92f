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
from redlease_temporal.errors import Withdrawn, refusal
from redlease_temporal.payloads import locks
from redlease_temporal.workflow_side.backend import (
    LOCAL_LIMIT,
    OFTEN,
    LocalBackend,
    failed_call,
    local,
    read,
    timed_out,
)
from redlease_temporal.workflow_side.cancellation import ended, retrieve_exception
from redlease_temporal.workflow_side.hold import until
from redlease_temporal.workflow_side.run import Run, current

T = TypeVar("T")

RECORDS_S = 0.001  # a timer ends the workflow task, however short it is: its end records what came before


class RedisBackend(LocalBackend):
    """A resource that runs share with services, by way of relays. `terms`: those of the resource."""

    name = "redis"
    away = "Redis"
    has_turns = True
    has_rates = True
    replaces = True

    async def acquire(self, run: Run, wish: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Requests a permit and waits for it."""
        try:
            standing = await self._enqueue(wish)
            if standing.unsettled:
                wish = await _settled(wish)
                standing = await self._enqueue(wish)
            if standing.salt:
                wish = dataclasses.replace(wish, salt=standing.salt)
            return standing.permit or await self._wait(run, wish, standing, timeout)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            current().releasing(self._terms.resource, self._withdraw(wish))
            if isinstance(error.cause, ActivityTimeout) and error.cause.type == TimeoutType.SCHEDULE_TO_CLOSE:
                raise timed_out(self.away, wish, timeout or timedelta(0)) from error
            raise
        except asyncio.CancelledError:
            current().releasing(self._terms.resource, self._withdraw(wish))
            raise

    async def _enqueue(self, wish: locks.AcquireCall) -> locks.AcquireStatus:
        try:
            return await local(locks.ENQUEUE, wish, locks.AcquireStatus, wish.local_id)
        except ActivityError as error:
            if refusal(error) is not None:
                raise
            return locks.AcquireStatus()  # Redis did not answer in time: the waiting activity retries

    async def _wait(
        self, run: Run, wish: locks.AcquireCall, standing: locks.AcquireStatus, timeout: timedelta | None
    ) -> Permit:
        if timeout is not None and timeout <= timedelta(0):
            current().releasing(self._terms.resource, self._withdraw(wish))
            raise timed_out(self.away, wish, timeout)
        if standing.shape == locks.BY_SIGNAL:
            return await self._wait_for_signal(run, wish, timeout)
        place = "" if standing.ahead is None else f", place {standing.ahead + 1}"
        waiting = self._start(
            locks.WAIT,
            wish,
            f"waiting for {self._terms.resource}{place}",
            activity_id=wish.wait_id,
            schedule_to_close_timeout=timeout,
            start_to_close_timeout=timedelta(seconds=run.wait_attempt_s),
        )
        returned = await ended(waiting)
        try:
            return _checked(read(returned, Permit), wish)
        except ValueError as error:
            current().releasing(self._terms.resource, self._withdraw(wish))
            message = (
                f"resource {self._terms.resource!r}: somebody else than the library completed the activity "
                f"{wish.wait_id!r}: {error}. The request is out of the queue: acquire again"
            )
            raise Withdrawn(message, resource=self._terms.resource, ticket=wish.ticket) from error

    async def _wait_for_signal(self, run: Run, wish: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        key = (self._terms.resource, wish.ticket)
        try:
            await until(lambda: key in run.granted, None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            current().releasing(self._terms.resource, self._withdraw(wish))
            raise timed_out(self.away, wish, timeout or timedelta(0)) from None
        return run.granted.pop(key)

    async def _withdraw(self, wish: locks.AcquireCall) -> bool:
        return await self.end(locks.ReleaseCall(self._terms, wish.ticket, asked=wish.local_id, salt=wish.salt))

    async def try_acquire(self, run: Run, wish: locks.AcquireCall) -> Permit | None:
        """Requests a permit without queueing."""
        try:
            status = await self._ask(locks.ENQUEUE, wish, locks.AcquireStatus, wish.local_id)
            if status.unsettled:
                wish = await _settled(wish)
                status = await self._ask(locks.ENQUEUE, wish, locks.AcquireStatus, wish.local_id)
        except asyncio.CancelledError:
            run.releasing(self._terms.resource, self._withdraw(wish))
            raise
        return status.permit

    async def adopt(self, run: Run, adopting: locks.AdoptCall) -> Permit:
        """Takes over a permit."""
        del run
        return await self._ask(locks.ADOPT, adopting, Permit, adopting.wish.local_id)

    async def renew(self, renewing: locks.RenewCall) -> Permit:
        """Renews a permit."""
        return await self._ask(locks.RENEW, renewing, Permit)

    async def release(self, giving: locks.ReleaseCall) -> bool:
        """Releases a permit, by a remote activity, which is retried until Redis answers."""
        try:
            return read(await self._release_later(giving), locks.Released).released
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            return False
        except ValueError:  # somebody completed the activity by hand
            return False

    def _release_later(self, giving: locks.ReleaseCall) -> workflow.ActivityHandle[RawValue | None]:
        return self._start(
            locks.RELEASE_LATER,
            giving,
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
            retry_policy=OFTEN,
            summary=summary,
            **options,
        )
        return handle

    @property
    def _while_it_may_be_held(self) -> timedelta:
        return timedelta(milliseconds=self._terms.lease_ms) + LOCAL_LIMIT

    async def end(self, giving: locks.ReleaseCall) -> bool:
        """Releases a permit or withdraws a request, by a local activity: the relay does so when its marker is recorded.

        If Redis does not answer, a remote activity retries.
        """
        event_id = workflow.info().get_current_history_length()
        giving = dataclasses.replace(giving, local_id=_release_id(giving), event_id=event_id)
        try:
            released = await local(locks.RELEASE, giving, locks.Released, giving.local_id)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            released = locks.Released(released=False, pending=True)
        if released.pending:
            later = dataclasses.replace(giving, local_id="")
            self._release_later(later).add_done_callback(retrieve_exception)
        return released.released

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """Gives back all but one unit of a permit, by a remote activity."""
        summary, limit = f"downgrading {self._terms.resource}", self._while_it_may_be_held
        try:
            returned = await ended(self._start(locks.DOWNGRADE, call, summary, schedule_to_close_timeout=limit))
            return read(returned, bool)
        except ActivityError as error:
            raise failed_call(error, away=self.away, resource=self._terms.resource) from error
        except ValueError:
            # Somebody completed the activity by hand. At worst the permit still excludes more than its run knows.
            return await self.check(locks.Checking(self._terms, call.ticket, call.fence))

    async def check(self, checking: locks.Checking) -> bool:
        """Whether Redis still has the permit."""
        return await self._ask(locks.CHECK, checking, bool)

    async def position(self, placing: locks.Placing) -> Position | None:
        """Where a ticket stands in the queue."""
        return await self._ask(locks.POSITION, placing, Position)

    async def inspect(self, inspecting: locks.Inspecting) -> Snapshot:
        """The current state of the resource."""
        return await self._ask(locks.INSPECT, inspecting, Snapshot)

    def kept_by(self, permit: Permit) -> str:  # noqa: ARG002  the same for each
        """No workflow keeps it."""
        return ""


async def _settled(wish: locks.AcquireCall) -> locks.AcquireCall:
    """Has recorded what the run has released, which the relay waits for; returns the request to be made then."""
    await asyncio.sleep(RECORDS_S)
    event_id = workflow.info().get_current_history_length()
    return dataclasses.replace(wish, settles=False, local_id=f"{wish.local_id}+", event_id=event_id)


def _release_id(giving: locks.ReleaseCall) -> str:
    """Names the release of one permit or request: a task that is executed again may release others.

    Not by the ticket, which names the workflow: histories may be replayed under any id.
    """
    parts = (giving.terms.resource, str(giving.fence), giving.asked, giving.salt)
    return f"redlease:release:{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:32]}"


def _checked(permit: Permit, wish: locks.AcquireCall) -> Permit:
    """Returns the permit; raises ValueError if it is of another resource."""
    # The ticket is not compared: it is made from the workflow id, and histories may be replayed under any id.
    if permit.resource != wish.terms.resource:
        raise ValueError(f"its result is a permit of resource {permit.resource!r}")
    return permit
