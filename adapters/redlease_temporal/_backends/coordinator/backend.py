"""Resources kept by a coordinator: a request is a signal that starts it on demand, a grant is a signal back."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from datetime import timedelta
from typing import TypeVar

from temporalio import workflow
from temporalio.exceptions import ApplicationError

from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import coordinator, locks
from redlease_temporal._workflow_side.backend import LocalBackend, timed_out, try_once
from redlease_temporal._workflow_side.mailbox import signal
from redlease_temporal._workflow_side.requests import adoption_of, request_name, requester_of
from redlease_temporal._workflow_side.run import Run, current, shown_as
from redlease_temporal.errors import NAMED, LockError, Unavailable, usage_error

T = TypeVar("T")

# How long a coordinator may take to answer a request that does not queue. A worker that ends may take a workflow task
# with it, and the server hands that out again after 10 s.
TRY_TIMEOUT = timedelta(seconds=30)
STALE = "Stale"  # refusal: an earlier run, or execution of this task, withdrew the request
BUSY = "Busy"  # refusal: the request would have to wait
TRIES_MAX = 10
PAUSE_S = 2.0  # between two attempts to reach a coordinator


class CoordinatorBackend(LocalBackend):
    """A resource that workflow runs of one namespace share. `terms`: those of the resource."""

    name = "coordinator"
    service = "its coordinator"
    has_turns = True
    replaces = True

    async def acquire(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Requests a permit and waits for the answer."""
        if timeout is not None and timeout <= timedelta(0):
            return await try_once(self, run, call, timeout)
        try:
            return await self._answer(run, call, timeout)
        except LockError:  # some of them are TimeoutErrors too
            raise
        except TimeoutError:
            raise timed_out(self.service, call, timeout or timedelta(0)) from None

    async def try_acquire(self, run: Run, call: locks.AcquireCall) -> Permit | None:
        """Requests a permit without queueing."""
        try:
            return await self._answer(run, call, TRY_TIMEOUT)
        except LockError:
            raise
        except TimeoutError:
            message = (
                f"resource {call.terms.resource!r}: its coordinator did not answer in time. It is safe to try again"
            )
            raise Unavailable(message, resource=call.terms.resource, ticket=call.spec.ticket) from None
        except _BusyError:
            return None

    async def _answer(self, run: Run, call: locks.AcquireCall, timeout: timedelta | None) -> Permit:
        """Returns the permit, or raises the error in the answer; TimeoutError if there is none."""
        async with asyncio.timeout(None if timeout is None else timeout.total_seconds()):
            for number in range(TRIES_MAX):
                suffix = f"+{number}" if number else ""
                request = self._request(call, request_name(call) + suffix, timeout)
                answer = await self._request_and_wait(run, request, call.local_id + suffix)
                if isinstance(answer, locks.GrantedSignal):
                    run.mailbox.held_permits.add((answer.permit.resource, answer.permit.ticket, answer.permit.fence))
                    return answer.permit
                if answer.error != STALE:
                    raise _refusal_error(self._terms.resource, call.spec.ticket, answer)
        raise TimeoutError

    async def _request_and_wait(
        self, run: Run, request: coordinator.CoordinatorRequest, activity_id: str
    ) -> locks.GrantedSignal | locks.RefusedSignal:
        """Sends a request and returns the answer; withdraws the request if anything else ends the wait."""
        mailbox, name = run.mailbox, request.requester.request
        mailbox.awaited.add(name)
        sent_in_reset = -1

        def has_to_send() -> bool:  # again after a reset: the answer went to the run before
            return run.resets != sent_in_reset

        try:
            early: locks.GrantedSignal | locks.RefusedSignal | None = await mailbox.take_early(name)
            while has_to_send():
                sent_in_reset = run.resets
                await self._request_until_delivered(
                    request, f"{activity_id}r{sent_in_reset}" if sent_in_reset else activity_id
                )
                # What is there already may be out of date, as after a reset the server delivers signals again. Or an
                # earlier execution of this workflow task has asked for it.
                early = mailbox.answers.pop(name, None) or early
                if early is not None and await self._is_valid(early, request):
                    mailbox.answers[name] = early
                await workflow.wait_condition(lambda: name in mailbox.answers or has_to_send())
        # No other exceptions: an evicted run must not send signals.
        except (ApplicationError, asyncio.CancelledError):
            mailbox.forget(name)
            release = coordinator.Release(request.spec.ticket, None, name)
            run.releasing(self._terms.resource, self._signal_release(release))
            raise
        answer = mailbox.answers[name]
        mailbox.forget(name)
        return answer

    async def _is_valid(
        self, answer: locks.GrantedSignal | locks.RefusedSignal, request: coordinator.CoordinatorRequest
    ) -> bool:
        """Whether an answer is not out of date: the coordinator knows which permits are held."""
        if isinstance(answer, locks.RefusedSignal):
            return True
        while True:
            try:
                return await self.check(locks.CheckCall(self._terms, answer.permit.ticket, answer.permit.fence))
            except Unavailable:
                if not request.spec.queue:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _request_until_delivered(self, request: coordinator.CoordinatorRequest, activity_id: str) -> None:
        """Sends the request until it is delivered: a repeated request counts as the same."""
        for number in itertools.count():
            try:
                await self._call_activity(
                    coordinator.REQUEST, request, type(None), f"{activity_id}*{number}" if number else activity_id
                )
            except Unavailable:
                if not request.spec.queue:
                    raise
                await asyncio.sleep(PAUSE_S)
            else:
                return

    def _request(self, call: locks.AcquireCall, name: str, timeout: timedelta | None) -> coordinator.CoordinatorRequest:
        return coordinator.CoordinatorRequest(
            call.terms,
            dataclasses.replace(call.spec, owner=call.spec.owner or shown_as(workflow.info())),
            requester_of(call, name),
            timeout_ms=None if timeout is None else timeout // timedelta(milliseconds=1),
        )

    async def adopt(self, run: Run, call: locks.AdoptCall) -> Permit:
        """Takes over a permit."""
        message = coordinator.CoordinatorCall(self._terms, adoption=adoption_of(call))
        adopted = await self._call_activity(coordinator.ADOPT, message, Permit, call.acquire.local_id)
        run.mailbox.held_permits.add((adopted.resource, adopted.ticket, adopted.fence))
        return adopted

    async def renew(self, call: locks.RenewCall) -> Permit:
        """Renews a permit."""
        renewal = coordinator.Renewal(call.permit.ticket, call.permit.fence, call.lease_ms)
        return await self._call_activity(
            coordinator.RENEW, coordinator.CoordinatorCall(self._terms, renewal=renewal), Permit
        )

    async def release(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit or withdraws a request; asks the coordinator for the outcome."""
        release = self._release_of(call, current().mailbox.call_name())
        if not await self._signal_release(release):
            return False
        try:
            return await self._call_activity(
                coordinator.OUTCOME, coordinator.CoordinatorCall(self._terms, release=release), bool
            )
        except Unavailable:
            return False

    async def end(self, call: locks.ReleaseCall) -> bool:
        """Releases a permit; returns True unless there is no coordinator."""
        return await self._signal_release(self._release_of(call, ""))

    def _release_of(self, call: locks.ReleaseCall, call_name: str) -> coordinator.Release:
        if call.fence is not None:
            current().mailbox.held_permits.discard((self._terms.resource, call.ticket, call.fence))
        return coordinator.Release(call.ticket, call.fence, call=call_name)

    async def _signal_release(self, release: coordinator.Release) -> bool:
        """Signals a release; returns False if there is no coordinator."""
        return await signal(coordinator.workflow_id_of(self._terms.resource), "release", release)

    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """Gives back all but one unit of a permit, by a signal."""
        downgrade = coordinator.Downgrade(call.ticket, call.fence)
        delivered = await signal(coordinator.workflow_id_of(self._terms.resource), "downgrade", downgrade)
        return delivered and await self.check(locks.CheckCall(self._terms, call.ticket, call.fence))

    async def check(self, call: locks.CheckCall) -> bool:
        """Whether the coordinator still has the permit."""
        return await self._call_activity(coordinator.CHECK, call, bool)

    async def position(self, call: locks.PositionCall) -> Position | None:
        """The position of a ticket in the queue."""
        return await self._call_activity(coordinator.POSITION, call, Position)

    async def inspect(self, call: locks.InspectCall) -> Snapshot:
        """The current state of the resource."""
        return await self._call_activity(coordinator.INSPECT, call, Snapshot)

    def resource_workflow(self, permit: Permit) -> str:
        """The coordinator's ID."""
        return coordinator.workflow_id_of(permit.resource)


class _BusyError(Exception):
    """The request would have to wait."""


def _refusal_error(resource: str, ticket: str, refused: locks.RefusedSignal) -> Exception:
    if refused.error == BUSY:
        return _BusyError()
    if refused.error == "ValueError":
        return usage_error(refused.reason)
    return NAMED.get(refused.error, LockError)(refused.reason, resource=resource, ticket=ticket)
