"""The lock and the semaphore as workflow code sees them: nothing here touches Redis, activities do."""

from __future__ import annotations

import asyncio
import dataclasses
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.common import RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, CancelledError, RetryState, TimeoutType
from temporalio.exceptions import TimeoutError as ActivityTimeout

from redlease import limits
from redlease.models import Permit, Snapshot

from . import calls
from .errors import AcquireTimeout, Unavailable, refusal
from .hold import Hold, HoldRequest, OnLost, to_its_end
from .run import Run, current, ticket_of

T = TypeVar("T")
Duration = float | timedelta

ONCE = RetryPolicy(maximum_attempts=1)
OFTEN = RetryPolicy(initial_interval=timedelta(milliseconds=200), maximum_interval=timedelta(seconds=5))
# A local activity ends by itself within a second of its start. These are for a worker that stands still.
LOCAL_LIMIT = timedelta(seconds=10)
LOCAL_IN_ALL = timedelta(seconds=60)  # with the time that it waits for one of the worker's slots for local activities


def misuse(call: Any, *args: Any, **named: Any) -> Any:
    """What a check returns; its ValueError as one that fails the workflow run, not its workflow task."""
    try:
        return call(*args, **named)
    except ValueError as error:
        raise ApplicationError(str(error), type="ValueError", non_retryable=True) from error


class Semaphore:
    """At most `capacity` units of a resource are held at once, granted in the order of arrival. Made by `semaphore`.

    One object is one resource: make it where you like, in a workflow or at the head of its module.

    Example:
        >>> gpu = semaphore("gpu", capacity=3, lease=timedelta(seconds=30))  # doctest: +SKIP
        >>> async with gpu.hold(timeout=timedelta(minutes=10)) as hold:  # doctest: +SKIP
        ...     await workflow.execute_activity(train, hold.fence, start_to_close_timeout=timedelta(hours=1))
    """

    def __init__(self, terms: calls.Terms) -> None:
        self._terms = terms
        self._entered: list[tuple[asyncio.Task[Any] | None, HoldRequest]] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} capacity={self._terms.capacity}>"

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._terms.resource

    # Acquiring

    def hold(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        on_lost: OnLost = "cancel",
        on_close: calls.OnClose = "release",
        max_hold: Duration | None = None,
    ) -> HoldRequest:
        """Acquires and keeps a permit: `async with pool.hold() as hold:`, or `hold = await pool.hold()`.

        Args:
            timeout: How long to wait for the grant, outages included; None waits for ever.
            ticket: The id of the request; by default one that this run's replays and resets come to again.
            weight: Units to hold.
            owner: Who is shown as holder; the workflow id by default.
            metadata: Shown by `inspect()`.
            on_lost: "cancel" cancels the body when the permit is lost, "signal" only sets `hold.lost`.
            on_close: What happens when the run ends without having released it, terminated for example: "release" gives
                it back at once, "lease" lets it lapse, for activities that do not stop at once.
            max_hold: After this it is no longer renewed, and lost when its lease ends.

        Raises:
            AcquireTimeout: No grant within `timeout`; the request is out of the queue.
            QueueFull: `max_waiters` wait already.
            LeaseLost: The permit was lost while the body ran.
            ApplicationError: Of type ValueError: a parameter is wrong, or the weight can never fit.
        """
        if on_lost not in {"cancel", "signal"} or on_close not in {"release", "lease"}:
            raise ApplicationError("on_lost is 'cancel' or 'signal', on_close 'release' or 'lease'", type="ValueError")
        max_hold_ms = None if max_hold is None else misuse(limits.milliseconds, "max_hold", max_hold, 1)

        async def acquire() -> Hold:
            run = current()
            wish = self._wish(run, ticket, weight, owner, metadata, on_close=on_close, max_hold_ms=max_hold_ms)
            permit = await self._obtain(run, wish, _timeout_of(timeout))
            return Hold(run, permit, self.release, on_lost)

        return HoldRequest(acquire)

    async def acquire(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Permit:
        """Acquires a permit as data: nobody renews it, and it is the caller's to release.

        Takes and raises what `hold` does.
        """
        run = current()
        wish = self._wish(run, ticket, weight, owner, metadata, keep=False)
        return await self._obtain(run, wish, _timeout_of(timeout))

    async def try_acquire(
        self,
        *,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
    ) -> Permit | None:
        """Acquires a permit if that takes no waiting; None otherwise.

        Raises:
            Unavailable: Redis was not reached within a second.
        """
        run = current()
        wish = self._wish(run, ticket, weight, owner, metadata, keep=False, queue=False)
        return (await self._ask(calls.ENQUEUE, wish, calls.Standing, wish.local_id)).permit

    async def adopt(
        self,
        permit: Permit,
        *,
        refence: bool | None = None,
        on_lost: OnLost = "cancel",
        on_close: calls.OnClose = "release",
        max_hold: Duration | None = None,
    ) -> Hold:
        """Takes over a permit, from the run that this one continues or from elsewhere, and keeps it from then on.

        From a run of the same chain it keeps its fence; from elsewhere it gets a new one, so that whoever had it before
        is refused. `refence` says otherwise.

        Raises:
            LeaseLost: It is no longer held under its fence.
        """
        run = current()
        self._own(permit)
        max_hold_ms = None if max_hold is None else misuse(limits.milliseconds, "max_hold", max_hold, 1)
        wish = self._wish(
            run, permit.ticket, permit.weight, None, permit.metadata, on_close=on_close, max_hold_ms=max_hold_ms
        )
        adopted = await self._ask(
            calls.ADOPT, calls.Adopting(self._terms, permit, wish, refence), Permit, wish.local_id
        )
        return Hold(run, adopted, self.release, on_lost)

    # Permits

    async def renew(self, permit: Permit, *, lease: Duration | None = None) -> Permit:
        """Gives a permit a full lease again, of another length if given; returns it with its new deadline.

        Raises:
            LeaseLost: It is no longer held under its fence.
            Unavailable: Redis was not reached within a second.
        """
        self._own(permit)
        lease_ms = permit.lease_ms
        if lease is not None:
            lease_ms = misuse(limits.milliseconds, "lease", lease, limits.LEASE_MS_MIN)
        return await self._ask(calls.RENEW, calls.Renewing(self._terms, permit, lease_ms), Permit)

    async def release(self, permit: Permit | str) -> bool:
        """Gives a permit back; whether it was held until now. May be repeated, and survives cancellation.

        With Redis away it returns False within a second; what is left to do is done by an activity of the library, or
        when this run ends. With a ticket instead of a permit this is administrative: no fence is checked.
        """
        if isinstance(permit, str):
            ticket = misuse(limits.checked_text, "ticket", permit, limits.TICKET_BYTES_MAX)
            return await to_its_end(self._give(calls.Giving(self._terms, ticket, administrative=True)))
        self._own(permit)
        return await to_its_end(self._give(calls.Giving(self._terms, permit.ticket, permit.fence)))

    async def check(self, permit: Permit) -> bool:
        """Whether Redis has the permit as held now, under its fence.

        Raises:
            Unavailable: Redis was not reached within a second.
        """
        self._own(permit)
        return await self._ask(calls.CHECK, calls.Checking(self._terms, permit.ticket, permit.fence), bool)

    async def inspect(self, *, limit: int = 100) -> Snapshot:
        """The resource as it is at one moment, with at most `limit` holders and as many waiters.

        The result stands in the history of the run: keep it small.

        Raises:
            Unavailable: Redis was not reached within a second.
        """
        misuse(limits.checked_count, "limit", limit)
        return await self._ask(calls.INSPECT, calls.Inspecting(self._terms, limit), Snapshot)

    # A plain `async with pool as hold:`

    async def __aenter__(self) -> Hold:
        request = self.hold()
        hold = await request.__aenter__()
        self._entered.append((asyncio.current_task(), request))
        return hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        own = [entry for entry in self._entered if entry[0] is asyncio.current_task()]
        self._entered.remove(own[-1])
        await own[-1][1].__aexit__(kind, error, traceback)

    # How it is done

    def _own(self, permit: Permit) -> None:
        if not isinstance(permit, Permit) or permit.resource != self.name:
            message = f"{permit!r} is no permit of resource {self.name!r}"
            raise ApplicationError(message, type="ValueError", non_retryable=True)

    def _wish(
        self,
        run: Run,
        ticket: str | None,
        weight: int,
        owner: str | None,
        metadata: dict[str, str] | None,
        *,
        keep: bool = True,
        queue: bool = True,
        on_close: calls.OnClose = "release",
        max_hold_ms: int | None = None,
    ) -> calls.Wish:
        info, number = workflow.info(), run.number(self.name)
        if ticket is not None:
            misuse(limits.checked_text, "ticket", ticket, limits.TICKET_BYTES_MAX)
        if owner is not None:
            misuse(limits.checked_text, "owner", owner, limits.OWNER_BYTES_MAX)
        return calls.Wish(
            self._terms,
            ticket or ticket_of(info, number),
            info.first_execution_run_id,
            info.get_current_history_length(),
            f"redlease:{number}:{self.name}",
            f"redlease:{number}:{self.name}:wait",
            weight=misuse(limits.checked_count, "weight", weight),
            owner=owner,
            metadata=misuse(limits.checked_metadata, metadata),
            keep=keep,
            queue=queue,
            on_close=on_close,
            max_hold_ms=max_hold_ms,
        )

    async def _obtain(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        """Asks and waits. Whatever ends this but a grant takes the request out of the queue."""
        began = workflow.now()
        try:
            standing = await self._enqueue(wish)
            if standing.salt:
                wish = dataclasses.replace(wish, salt=standing.salt)
            permit = standing.permit or await self._wait(run, wish, standing, timeout)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            await to_its_end(self._withdraw(wish))
            _raise_if_cancelled(error)
            if isinstance(error.cause, ActivityTimeout) and error.cause.type == TimeoutType.SCHEDULE_TO_CLOSE:
                raise self._timed_out(wish, timeout or timedelta(0)) from error
            raise
        except asyncio.CancelledError:
            await to_its_end(self._withdraw(wish))
            raise
        meter = workflow.metric_meter().with_additional_attributes({"resource": self.name})
        meter.create_counter("redlease_granted", "Permits granted").add(1)
        waited_ms = max(0, (workflow.now() - began) // timedelta(milliseconds=1))
        meter.create_histogram("redlease_wait", "Time from asking to the grant", "ms").record(waited_ms)
        return permit

    async def _enqueue(self, wish: calls.Wish) -> calls.Standing:
        try:
            return await _local(calls.ENQUEUE, wish, calls.Standing, wish.local_id)
        except ActivityError as error:
            if refusal(error) is not None or _is_cancelled(error):
                raise
            return calls.Standing()  # Redis did not answer at once: the activity that waits goes on asking

    async def _wait(self, run: Run, wish: calls.Wish, standing: calls.Standing, timeout: timedelta | None) -> Permit:
        if timeout is not None and timeout <= timedelta(0):
            await to_its_end(self._withdraw(wish))
            raise self._timed_out(wish, timeout)
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
            summary=f"waiting for {self.name}{place}",
        )
        return permit

    async def _wait_for_signal(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        key = (self.name, wish.ticket)
        try:
            await workflow.wait_condition(lambda: key in run.granted, timeout=timeout)
        except TimeoutError:
            await to_its_end(self._withdraw(wish))
            raise self._timed_out(wish, timeout or timedelta(0)) from None
        return run.granted.pop(key)

    def _timed_out(self, wish: calls.Wish, timeout: timedelta) -> AcquireTimeout:
        message = (
            f"resource {self.name!r}: no permit within {timeout.total_seconds():g} s: others hold it or are ahead in "
            "the queue, or Redis is away; `inspect()` shows them. The request is out of the queue"
        )
        return AcquireTimeout(message, resource=self.name, ticket=wish.ticket)

    async def _withdraw(self, wish: calls.Wish) -> bool:
        return await self._give(calls.Giving(self._terms, wish.ticket, asked=wish.local_id, salt=wish.salt))

    async def _give(self, giving: calls.Giving) -> bool:
        """Takes a ticket out; with Redis away that is left to an activity, and to the end of the run."""
        try:
            released = await _local(calls.RELEASE, giving, calls.Released, None)
        except ActivityError as error:
            if (refused := refusal(error)) is not None:
                raise refused from error
            released = calls.Released(released=False, pending=True)
        if released.pending:
            later = workflow.start_activity(
                calls.RELEASE_LATER,
                giving,
                result_type=calls.Released,
                task_queue=current().task_queue,
                schedule_to_close_timeout=timedelta(milliseconds=self._terms.lease_ms) + LOCAL_LIMIT,
                retry_policy=OFTEN,
                cancellation_type=workflow.ActivityCancellationType.ABANDON,
                summary=f"releasing {self.name}",
            )
            later.add_done_callback(_seen)
        return released.released

    async def _ask(self, name: str, arg: Any, result: type[T], activity_id: str | None = None) -> T:
        """Calls a local activity whose failure is the caller's."""
        try:
            return await _local(name, arg, result, activity_id)
        except ActivityError as error:
            _raise_if_cancelled(error)
            if (refused := refusal(error)) is not None:
                raise refused from error
            message = f"resource {self.name!r}: Redis was not reached in time ({error.cause}). It is safe to try again"
            raise Unavailable(message, resource=self.name) from error


def _raise_if_cancelled(error: ActivityError) -> None:
    """A cancelled task ends by CancelledError, as asyncio's timeouts and task groups expect it, not by a failure."""
    task = asyncio.current_task()
    if _is_cancelled(error) and task is not None and task.cancelling():
        raise asyncio.CancelledError from error


def _is_cancelled(error: ActivityError) -> bool:
    return isinstance(error.cause, CancelledError)


def _seen(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _timeout_of(timeout: Duration | None) -> timedelta | None:
    if timeout is None:
        return None
    return timedelta(milliseconds=misuse(limits.milliseconds, "timeout", timeout))


async def _local(name: str, arg: Any, result: type[T], activity_id: str | None) -> T:
    try:
        returned: T = await workflow.execute_local_activity(
            name,
            arg,
            result_type=result,
            activity_id=activity_id,
            start_to_close_timeout=LOCAL_LIMIT,
            schedule_to_close_timeout=LOCAL_IN_ALL,
            retry_policy=ONCE,
        )
    except ApplicationError as error:
        # The failure of a local activity comes as it was raised, not as the cause of one that names the activity.
        raise ActivityError(
            "Activity task failed",
            scheduled_event_id=0,
            started_event_id=0,
            identity="",
            activity_type=name,
            activity_id=activity_id or "",
            retry_state=RetryState.MAXIMUM_ATTEMPTS_REACHED,
        ) from error
    return returned


class Lock(Semaphore):
    """A semaphore of capacity 1: one holder at a time, in the order of arrival. Made by `lock`."""
