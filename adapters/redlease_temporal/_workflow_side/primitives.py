"""The lock and the semaphore for workflow code, on any backend."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from datetime import timedelta
from types import TracebackType
from typing import Any, NamedTuple

from temporalio import workflow

from redlease._core import limits
from redlease._core.limits import GRACE_S, WAITS, Duration, Full, WhenFull
from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import locks
from redlease_temporal.errors import (
    AcquireTimeout,
    as_usage_error,
    refused_when_full,
    usage_error,
    without_keys,
    without_replacing,
)

from . import metrics
from .backend import Backend
from .hold import Hold, HoldRequest, OnLost, shielded
from .run import Run, current, ticket_of


class Units(NamedTuple):
    """So many units of a semaphore, for `all_of`. Made by `Semaphore.weighted`."""

    pool: Semaphore
    weight: int

    @property
    def key(self) -> tuple[str, str]:
        """Identifies the resource: its name, and the backend that keeps it. `all_of` acquires in this order."""
        return self.pool.name, self.pool._backend.name

    @property
    def total(self) -> int:
        """The weight of the permit that is acquired."""
        return self.weight * self.pool._unit


AGAIN = ""  # the name under which a run numbers its confirmations: no resource has it


class Semaphore:
    """At most `capacity` units of a resource are held at once, granted in the order of arrival. Made by `semaphore`.

    One object is one resource: make it where you like, in a workflow or at the head of its module.

    Example:
        >>> gpu = semaphore("gpu", capacity=3, lease=timedelta(seconds=30))  # doctest: +SKIP
        >>> async with gpu.hold(timeout=timedelta(minutes=10)) as hold:  # doctest: +SKIP
        ...     await workflow.execute_activity(train, hold.fence, start_to_close_timeout=timedelta(hours=1))
    """

    _unit = 1  # units of the resource that a weight of 1 stands for

    def __init__(self, terms: locks.ResourceTerms, backend: Backend) -> None:
        self._terms = terms
        self._backend = backend
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
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
        on_lost: OnLost = "cancel",
        on_close: locks.OnClose = "release",
        max_hold: Duration | None = None,
    ) -> HoldRequest:
        """Acquires and keeps a permit: `async with pool.hold() as hold:`, or `hold = await pool.hold()`.

        Durations are seconds or a `timedelta`.

        Args:
            timeout: How long to wait for the grant, outages included; None waits without limit.
            ticket: The id of the request; the default is the same in this run's replays and resets.
            weight: Units to hold.
            owner: Who is shown as holder; the workflow id by default.
            metadata: Shown by `inspect()`.
            key: Requests with different keys take turns, however many of each wait: a customer, say. By default the
                fairness key of the workflow's priority, with its fairness weight as share.
            share: How large a share of the turns its key gets beside keys of share 1, from 0.001 to 1000.
            when_full: "wait", "refuse" (`QueueFull`), "replace-waiter" (older waiters of its key get `Superseded`), or
                "replace-holder" (holders of its key lose their permits, too). Slots know the first two.
            grace: How long a holder that it replaces may take to end before this request is granted.
            on_lost: "cancel" cancels the body when the permit is lost, "signal" only sets `hold.lost`.
            on_close: What happens when the run ends without a release, for example terminated: "release" releases the
                permit at once, "lease" lets it expire, for activities that do not stop at once.
            max_hold: After this the permit is no longer renewed, and is lost when its lease ends.

        Raises:
            AcquireTimeout: No grant within `timeout`; the request is out of the queue.
            QueueFull: `max_waiters` wait already, or `when_full` is "refuse".
            Withdrawn: Somebody took the request out of the queue by its ticket; `Superseded`: a newer request did.
            LeaseLost: The permit was lost while the body ran.
            ValueError: A parameter is wrong, or the weight can never fit. It fails the run, as an `ApplicationError`.
        """
        _check_endings(on_lost, on_close)
        max_hold_ms = None if max_hold is None else as_usage_error(limits.milliseconds, "max_hold", max_hold, 1)
        limit, full = self._waiting(timeout, when_full, grace)
        spec = self._spec(ticket, weight, owner, metadata, key=key, share=share, full=full)
        spec = dataclasses.replace(spec, on_close=on_close, max_hold_ms=max_hold_ms)
        return HoldRequest(functools.partial(self._held, spec, limit, on_lost))

    async def _held(self, spec: locks.AcquireSpec, limit: timedelta | None, on_lost: OnLost) -> Hold:
        run = current()
        call = self._acquire_call(run, spec)
        return self._hold_of(run, await self._obtain(run, call, limit), call, on_lost)

    def weighted(self, weight: int) -> Units:
        """So many units of this semaphore, to be acquired with others by `all_of`.

        Raises:
            ValueError: The weight is not a whole number above 0.
        """
        return Units(self, as_usage_error(limits.checked_count, "weight", weight))

    async def acquire(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
    ) -> Permit:
        """Acquires a permit as data: nobody renews it, and the caller must release it.

        Takes the request parameters of `hold`, and raises the same errors except `LeaseLost`.
        """
        run, (limit, full) = current(), self._waiting(timeout, when_full, grace)
        spec = self._spec(ticket, weight, owner, metadata, key=key, share=share, full=full)
        return await self._obtain(run, self._acquire_call(run, dataclasses.replace(spec, renewed=False)), limit)

    async def try_acquire(
        self,
        *,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        key: str | None = None,
    ) -> Permit | None:
        """Acquires a permit without waiting; None if none is free.

        Takes the parameters of `acquire` except `timeout` and `share`.

        Raises:
            Unavailable: The backend was not reached in time.
        """
        run = current()
        spec = self._spec(ticket, weight, owner, metadata, key=key)
        call = self._acquire_call(run, dataclasses.replace(spec, renewed=False, queue=False))
        began = workflow.now()
        await run.release_delivered(self.name)
        permit = await self._backend.try_acquire(run, dataclasses.replace(call, settles=True))
        if permit is not None:
            metrics.granted(self.name, run.resource_label, workflow.now() - began)
        return permit

    def adopt(
        self,
        permit: Permit,
        *,
        refence: bool | None = None,
        on_lost: OnLost = "cancel",
        on_close: locks.OnClose = "release",
        max_hold: Duration | None = None,
    ) -> HoldRequest:
        """Takes over a permit, from the run that this one continues or from elsewhere, and keeps it from then on.

        As `hold`: `async with pool.adopt(permit) as hold:`, or `hold = await pool.adopt(permit)`.

        From a run of the same chain it keeps its fence; from elsewhere it gets a new one, so that its former holder is
        refused. `refence` overrides that; `on_lost`, `on_close` and `max_hold` are those of `hold`.

        Raises:
            LeaseLost: It is no longer held with its fence.
        """
        self._check_own(permit)
        _check_endings(on_lost, on_close)
        max_hold_ms = None if max_hold is None else as_usage_error(limits.milliseconds, "max_hold", max_hold, 1)
        metadata = as_usage_error(limits.checked_metadata, permit.metadata)
        spec = locks.AcquireSpec(
            permit.ticket,
            permit.weight,
            metadata=metadata,
            key=permit.key or "",
            on_close=on_close,
            max_hold_ms=max_hold_ms,
        )

        async def adopted() -> Hold:
            run = current()
            call = self._acquire_call(run, spec)
            adopted_permit = await self._backend.adopt(run, locks.AdoptCall(self._terms, permit, call, refence))
            return self._hold_of(run, adopted_permit, call, on_lost)

        return HoldRequest(adopted)

    # Permits

    async def renew(self, permit: Permit, *, lease: Duration | None = None) -> Permit:
        """Renews a permit for a full lease, of another length if given; returns it with its new deadline.

        Raises:
            LeaseLost: It is no longer held with its fence.
            Unavailable: The backend was not reached in time.
        """
        self._check_own(permit)
        lease_ms = permit.lease_ms
        if lease is not None:
            lease_ms = as_usage_error(limits.milliseconds, "lease", lease, limits.LEASE_MS_MIN)
        return await self._backend.renew(locks.RenewCall(self._terms, permit, lease_ms))

    async def release(self, permit: Permit | str) -> bool:
        """Releases a permit; returns whether it was still held. May be repeated, and survives cancellation.

        It returns when the release has taken effect; if Redis or the server does not answer within the lease, it
        returns False, and the permit ends with the run. With a ticket instead of a permit the release is
        administrative: no fence is checked.
        """
        if isinstance(permit, str):
            ticket = as_usage_error(limits.checked_text, "ticket", permit, limits.TICKET_BYTES_MAX)
            call = locks.ReleaseCall(self._terms, ticket, administrative=True)
        else:
            self._check_own(permit)
            call = locks.ReleaseCall(self._terms, permit.ticket, permit.fence)
        return await shielded(self._backend.release(call))

    async def is_held(self, permit: Permit) -> bool:
        """Whether the backend still has the permit with its fence.

        Raises:
            Unavailable: The backend was not reached in time.
        """
        self._check_own(permit)
        return await self._backend.check(locks.CheckCall(self._terms, permit.ticket, permit.fence))

    async def inspect(self, *, max_items: int = 100) -> Snapshot:
        """The resource as it is at one moment, with at most `max_items` holders and as many waiters.

        The history of the run records the result: keep it small.

        Raises:
            Unavailable: The backend was not reached in time.
        """
        as_usage_error(limits.checked_count, "max_items", max_items)
        return await self._backend.inspect(locks.InspectCall(self._terms, max_items))

    async def position(self, ticket: str) -> Position | None:
        """The position of a request in the queue, and about how long it will wait, by its ticket.

        None if the ticket neither waits nor holds a permit. The history of the run records the result.

        Raises:
            Unavailable: The backend was not reached in time.
            ValueError: It is not a valid ticket, or the backend is "slots", which has a queue for each slot. It is an
                `ApplicationError` too, and fails the run.
        """
        ticket = as_usage_error(limits.checked_text, "ticket", ticket, limits.TICKET_BYTES_MAX)
        return await self._backend.position(locks.PositionCall(self._terms, ticket))

    # A plain `async with pool as hold:`

    async def __aenter__(self) -> Hold:
        request = self.hold()
        hold = await request.__aenter__()
        self._entered.append((asyncio.current_task(), request))
        return hold

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, GeneratorExit):
            return  # see `Hold.__aexit__`
        entered = [entry for entry in self._entered if entry[0] is asyncio.current_task()]
        self._entered.remove(entered[-1])
        await entered[-1][1].__aexit__(kind, error, traceback)

    # Implementation

    def _check_own(self, permit: Permit) -> None:
        as_usage_error(limits.checked_permit, permit, self.name)

    def _spec(
        self,
        ticket: str | None,
        weight: int,
        owner: str | None,
        metadata: dict[str, str] | None,
        *,
        key: str | None,
        share: float = 1,
        full: WhenFull = WAITS,
    ) -> locks.AcquireSpec:
        if ticket is not None:
            as_usage_error(limits.checked_text, "ticket", ticket, limits.TICKET_BYTES_MAX)
        if owner is not None:
            as_usage_error(limits.checked_text, "owner", owner, limits.OWNER_BYTES_MAX)
        units = as_usage_error(
            limits.checked_count, "weight", as_usage_error(limits.checked_count, "weight", weight) * self._unit
        )
        if units > self._backend.weight_max:
            message = (
                f"resource {self.name!r}: backend={self._backend.name!r} grants one unit at a time: a weight needs "
                "backend='coordinator' or 'redis'"
            )
            raise usage_error(message)
        as_usage_error(limits.checked_share, share, key)
        if key is not None:
            as_usage_error(limits.checked_text, "key", key, limits.KEY_BYTES_MAX)
            if not self._backend.has_turns:
                raise without_keys(self.name, self._backend.name)
        if key is None:
            key, share = locks.turn_of(workflow.info().priority) if self._backend.has_turns else ("", 1)
        return locks.AcquireSpec(
            ticket or "",
            units,
            owner or "",
            as_usage_error(limits.checked_metadata, metadata),
            key=key,
            share=share,
            full=full.mode,
            grace_ms=full.grace_ms,
        )

    def _waiting(self, timeout: Duration | None, when_full: Full, grace: Duration) -> tuple[timedelta | None, WhenFull]:
        """How long a request waits, and what it does if it has to."""
        limit, capacity = timeout_of(timeout), self._terms.capacity
        never_waits = limit == timedelta(0)
        full = as_usage_error(
            WhenFull.checked, when_full, grace, capacity=capacity, never_waits=never_waits, priority=0
        )
        if full.replaces and not self._backend.replaces:
            raise without_replacing(self.name, self._backend.name, when_full)
        return limit, full

    def _acquire_call(self, run: Run, spec: locks.AcquireSpec, *, number: str = "") -> locks.AcquireCall:
        info = workflow.info()
        number = number or str(run.number(self.name))
        return locks.AcquireCall(
            self._terms,
            dataclasses.replace(spec, ticket=spec.ticket or ticket_of(info, number)),
            info.first_execution_run_id,
            info.get_current_history_length(),
            f"redlease:{number}:{self.name}",
            f"redlease:{number}:{self.name}:wait",
        )

    async def _obtain(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        began = workflow.now()
        with run.requesting():
            await run.release_delivered(self.name)
            permit = await self._within(run, call, timeout)
        metrics.granted(self.name, run.resource_label, workflow.now() - began)
        return permit

    async def _within(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        limits_of_waiters = (self._terms.max_waiters, self._terms.max_waiters_per_key)
        if call.spec.full == "refuse" or timeout == timedelta(0) or 0 in limits_of_waiters:
            call = dataclasses.replace(call, settles=True)
        if call.spec.full != "refuse":
            return await self._backend.acquire(run, call, timeout)
        try:
            return await self._backend.acquire(run, call, timedelta(0))
        except AcquireTimeout as error:
            raise refused_when_full(self.name, call.spec.ticket) from error

    def _hold_of(self, run: Run, permit: Permit, call: locks.AcquireCall, on_lost: OnLost) -> Hold:
        return Hold(
            run, permit, HeldPermit(self, run, call), on_lost, resource_workflow=self._backend.resource_workflow(permit)
        )


class HeldPermit:
    """What the hold of a permit asks of its resource. `call`: the request that it was granted to."""

    def __init__(self, pool: Semaphore, run: Run, call: locks.AcquireCall) -> None:
        self._terms, self._backend, self._pool = pool._terms, pool._backend, pool
        self._run, self._acquire_call = run, call

    async def end(self, permit: Permit) -> bool:
        """Releases the permit."""
        return await self._backend.end(locks.ReleaseCall(self._terms, permit.ticket, permit.fence))

    async def downgrade(self, permit: Permit) -> bool:
        """Gives back all but one unit of the permit; returns whether it is held."""
        return await self._backend.downgrade(locks.DowngradeCall(self._terms, permit.ticket, permit.fence))

    async def resume(self, permit: Permit) -> Permit:
        """Takes over the permit for the run, which was reset, with its fence as it is."""
        before = self._acquire_call.spec
        spec = locks.AcquireSpec(
            permit.ticket,
            permit.weight,
            metadata=permit.metadata,
            on_close=before.on_close,
            max_hold_ms=before.max_hold_ms,
            key=permit.key or "",
        )
        # Not one of the run's requests: these have the numbers that they had before the reset.
        number = f"again{self._run.number(AGAIN)}"
        call = self._pool._acquire_call(self._run, spec, number=number)
        adopt_call = locks.AdoptCall(self._terms, permit, call, refence=False, resumes=True)
        return await self._backend.adopt(self._run, adopt_call)


def _check_endings(on_lost: str, on_close: str) -> None:
    if on_lost not in ("cancel", "signal") or on_close not in ("release", "lease"):
        raise usage_error("on_lost is 'cancel' or 'signal', on_close 'release' or 'lease'")


def timeout_of(timeout: Duration | None) -> timedelta | None:
    """The checked timeout."""
    if timeout is None:
        return None
    return timedelta(milliseconds=as_usage_error(limits.milliseconds, "timeout", timeout))


class Lock(Semaphore):
    """A semaphore of capacity 1: one holder at a time, in the order of arrival. Made by `lock`."""
