"""Resources in Redis: nothing here touches it, local activities do, and a remote one keeps a place while it waits."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, TimeoutType
from temporalio.exceptions import TimeoutError as ActivityTimeout

from redlease.models import Permit, Snapshot

from . import calls
from .backend import LOCAL_LIMIT, OFTEN, answered, is_cancelled, local, prolonged, raise_if_cancelled, timed_out
from .errors import refusal
from .hold import seen, to_its_end, until
from .run import Run, current

T = TypeVar("T")


class RedisBackend:
    """A resource that services share, kept by relays. `terms`: of the resource."""

    away = "Redis"

    def __init__(self, terms: calls.Terms) -> None:
        self._terms = terms

    async def acquire(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        """Asks and waits."""
        try:
            standing = await self._enqueue(wish)
            if standing.salt:
                wish = dataclasses.replace(wish, salt=standing.salt)
            if standing.permit is not None:
                run.on_fresh(standing.permit)
            return standing.permit or await self._wait(run, wish, standing, timeout)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            await to_its_end(self._withdraw(wish))
            raise_if_cancelled(error)
            if isinstance(error.cause, ActivityTimeout) and error.cause.type == TimeoutType.SCHEDULE_TO_CLOSE:
                raise timed_out(self.away, wish, timeout or timedelta(0)) from error
            raise
        except asyncio.CancelledError:
            await to_its_end(self._withdraw(wish))
            raise

    async def _enqueue(self, wish: calls.Wish) -> calls.Standing:
        try:
            return await local(calls.ENQUEUE, wish, calls.Standing, wish.local_id)
        except ActivityError as error:
            if refusal(error) is not None or is_cancelled(error):
                raise
            return calls.Standing()  # Redis did not answer at once: the activity that waits goes on asking

    async def _wait(self, run: Run, wish: calls.Wish, standing: calls.Standing, timeout: timedelta | None) -> Permit:
        if timeout is not None and timeout <= timedelta(0):
            await to_its_end(self._withdraw(wish))
            raise timed_out(self.away, wish, timeout)
        if standing.shape == calls.BY_SIGNAL:
            return await self._wait_for_signal(run, wish, timeout)
        place = "" if standing.ahead is None else f", place {standing.ahead + 1}"
        permit: Permit = await workflow.execute_activity(
            calls.WAIT,
            wish,
            result_type=Permit,
            task_queue=run.task_queue,
            activity_id=wish.wait_id,
            schedule_to_close_timeout=timeout,
            start_to_close_timeout=timedelta(seconds=run.wait_attempt_s),
            retry_policy=OFTEN,
            summary=f"waiting for {self._terms.resource}{place}",
        )
        return permit

    async def _wait_for_signal(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        key = (self._terms.resource, wish.ticket)
        try:
            await until(lambda: key in run.granted, None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            await to_its_end(self._withdraw(wish))
            raise timed_out(self.away, wish, timeout or timedelta(0)) from None
        return run.granted.pop(key)

    async def _withdraw(self, wish: calls.Wish) -> bool:
        return await self.release(calls.Giving(self._terms, wish.ticket, asked=wish.local_id, salt=wish.salt))

    async def try_acquire(self, run: Run, wish: calls.Wish) -> Permit | None:
        """Asks without queueing."""
        permit = (await self._ask(calls.ENQUEUE, wish, calls.Standing, wish.local_id)).permit
        if permit is not None:
            run.on_fresh(permit)
        return permit

    async def adopt(self, run: Run, adopting: calls.Adopting) -> Permit:
        """Takes over a permit."""
        del run
        name = adopting.wish.local_id
        return await prolonged(calls.ADOPT, adopting, name, away=self.away, resource=self._terms.resource)

    async def renew(self, renewing: calls.Renewing) -> Permit:
        """Gives a permit a new lease."""
        return await prolonged(calls.RENEW, renewing, away=self.away, resource=self._terms.resource)

    async def release(self, giving: calls.Giving) -> bool:
        """Takes a ticket out; with Redis away that is left to an activity, and to the end of the run."""
        if current().is_needed_again(self._terms.resource, giving.ticket):
            try:
                return (await self._release_later(giving)).released
            except ActivityError:
                return False
        try:
            released = await local(calls.RELEASE, giving, calls.Released)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            released = calls.Released(released=False, pending=True)
        if released.pending:
            self._release_later(giving).add_done_callback(seen)
        return released.released

    def _release_later(self, giving: calls.Giving) -> workflow.ActivityHandle[calls.Released]:
        return workflow.start_activity(
            calls.RELEASE_LATER,
            giving,
            result_type=calls.Released,
            task_queue=current().task_queue,
            schedule_to_close_timeout=timedelta(milliseconds=self._terms.lease_ms) + LOCAL_LIMIT,
            retry_policy=OFTEN,
            cancellation_type=workflow.ActivityCancellationType.ABANDON,
            summary=f"releasing {self._terms.resource}",
        )

    async def end(self, giving: calls.Giving) -> bool:
        """Takes a permit out."""
        return await self.release(giving)

    async def check(self, checking: calls.Checking) -> bool:
        """Asks Redis."""
        return await self._ask(calls.CHECK, checking, bool)

    async def inspect(self, inspecting: calls.Inspecting) -> Snapshot:
        """Looks."""
        return await self._ask(calls.INSPECT, inspecting, Snapshot)

    def kept_by(self, permit: Permit) -> str:  # noqa: ARG002  the same for each
        """No workflow."""
        return ""

    async def _ask(self, name: str, arg: Any, result: type[T], activity_id: str | None = None) -> T:
        return await answered(name, arg, result, activity_id, away=self.away, resource=self._terms.resource)
