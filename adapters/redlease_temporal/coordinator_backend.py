"""Resources kept by a coordinator: asked by a signal that starts it on demand, granted by a signal."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from datetime import timedelta
from typing import Any, TypeVar

from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError

from redlease.models import Permit, Snapshot

from . import calls
from . import coordinator_calls as to
from .backend import answered, local, prolonged, timed_out
from .errors import NAMED, LockError, Unavailable, misused
from .hold import to_its_end
from .post import signal
from .run import Run, current, shown_as
from .wishes import adoption_of, request_name, requester_of

T = TypeVar("T")

ANSWERS_IN = timedelta(seconds=10)  # the time in which a coordinator says whether it grants at once
STALE = (
    "Stale"  # of a refusal: this request was withdrawn before, by a run that was reset or a task that was begun anew
)
BUSY = "Busy"  # it would have to wait
TRIES_MAX = 10
PAUSE_S = 2.0  # between one try to reach a coordinator and the next


class CoordinatorBackend:
    """A resource that workflow runs of one namespace share. `terms`: of the resource."""

    away = "its coordinator"

    def __init__(self, terms: calls.Terms) -> None:
        self._terms = terms

    async def acquire(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        """Asks, and waits for the answer."""
        if timeout is not None and timeout <= timedelta(0):
            permit = await self.try_acquire(run, dataclasses.replace(wish, queue=False))
            if permit is None:
                raise timed_out(self.away, wish, timeout)
            return permit
        try:
            return await self._answer(run, wish, timeout)
        except TimeoutError:
            raise timed_out(self.away, wish, timeout or timedelta(0)) from None

    async def try_acquire(self, run: Run, wish: calls.Wish) -> Permit | None:
        """Asks without queueing."""
        try:
            return await self._answer(run, wish, ANSWERS_IN)
        except TimeoutError:
            message = (
                f"resource {wish.terms.resource!r}: its coordinator did not answer in time. It is safe to try again"
            )
            raise Unavailable(message, resource=wish.terms.resource, ticket=wish.ticket) from None
        except _BusyError:
            return None

    async def _answer(self, run: Run, wish: calls.Wish, timeout: timedelta | None) -> Permit:
        """The permit, or the error that was answered; TimeoutError when nothing was."""
        async with asyncio.timeout(None if timeout is None else timeout.total_seconds()):
            for number in range(TRIES_MAX):
                suffix = f"+{number}" if number else ""
                request = self._request(wish, request_name(wish) + suffix, timeout)
                answer = await self._ask_and_wait(run, request, wish.local_id + suffix)
                if isinstance(answer, calls.Granted):
                    run.post.kept.add((answer.permit.resource, answer.permit.ticket, answer.permit.fence))
                    return answer.permit
                if answer.error != STALE:
                    raise _error(self._terms.resource, wish.ticket, answer)
        raise TimeoutError

    async def _ask_and_wait(self, run: Run, request: to.Request, activity_id: str) -> calls.Granted | calls.Refused:
        """What was answered; whatever ends this but an answer withdraws the request."""
        post, name = run.post, request.requester.request
        post.awaited.add(name)
        try:
            await self._ask_until_heard(request, activity_id)
            await workflow.wait_condition(lambda: name in post.answers)
        # Not whatever comes: a run that is taken out of memory has nothing to say.
        except (ApplicationError, asyncio.CancelledError):
            post.forget(name)
            withdrawal = to.Release(request.ticket, None, name)
            await to_its_end(self._send(to.Call(self._terms, release=withdrawal)))
            raise
        answer = post.answers[name]
        post.forget(name)
        return answer

    async def _ask_until_heard(self, request: to.Request, activity_id: str) -> None:
        """Asks, and as long as nobody can be asked does so again: a repeated request is the same one."""
        for number in itertools.count():
            try:
                await self._ask(to.ASK, request, type(None), f"{activity_id}*{number}" if number else activity_id)
            except Unavailable:
                if not request.queue:
                    raise
                await asyncio.sleep(PAUSE_S)
            else:
                return

    def _request(self, wish: calls.Wish, name: str, timeout: timedelta | None) -> to.Request:
        return to.Request(
            wish.terms,
            wish.ticket,
            requester_of(wish, name),
            weight=wish.weight,
            owner=wish.owner or shown_as(workflow.info()),
            metadata=wish.metadata,
            keep=wish.keep,
            queue=wish.queue,
            on_close=wish.on_close,
            timeout_ms=None if timeout is None else timeout // timedelta(milliseconds=1),
            max_hold_ms=wish.max_hold_ms,
        )

    async def adopt(self, run: Run, adopting: calls.Adopting) -> Permit:
        """Takes over a permit."""
        call = to.Call(self._terms, adoption=adoption_of(adopting))
        name = adopting.wish.local_id
        adopted = await prolonged(to.ADOPT, call, name, away=self.away, resource=self._terms.resource)
        run.post.kept.add((adopted.resource, adopted.ticket, adopted.fence))
        return adopted

    async def renew(self, renewing: calls.Renewing) -> Permit:
        """Gives a permit a new lease."""
        renewal = to.Renewal(renewing.permit.ticket, renewing.permit.fence, renewing.lease_ms)
        call = to.Call(self._terms, renewal=renewal)
        return await prolonged(to.RENEW, call, away=self.away, resource=self._terms.resource)

    async def release(self, giving: calls.Giving) -> bool:
        """Takes a ticket out, and asks what came of it."""
        return await self._give(giving, current().post.call_name())

    async def end(self, giving: calls.Giving) -> bool:
        """Takes a permit out; True unless there is no coordinator."""
        return await self._give(giving, "")

    async def _give(self, giving: calls.Giving, call_name: str) -> bool:
        key = (self._terms.resource, giving.ticket)
        if giving.fence is not None:
            current().post.kept.discard((*key, giving.fence))
        release = to.Release(giving.ticket, giving.fence, call=call_name)
        if current().is_needed_again(*key):
            delivered = await signal(to.workflow_id_of(self._terms.resource), "release", release)
            if not delivered or not call_name:
                return delivered  # and if it is to say what came of it, the same call is asked for
        return await self._send(to.Call(self._terms, release=release))

    async def _send(self, call: to.Call) -> bool:
        """A release; where the local activity fails the server is left to deliver it."""
        try:
            return await local(to.RELEASE, call, bool)
        except ActivityError:
            await signal(to.workflow_id_of(self._terms.resource), "release", call.release)
            return False

    async def check(self, checking: calls.Checking) -> bool:
        """Asks the coordinator."""
        return await self._ask(to.CHECK, checking, bool)

    async def inspect(self, inspecting: calls.Inspecting) -> Snapshot:
        """Looks."""
        return await self._ask(to.INSPECT, inspecting, Snapshot)

    def kept_by(self, permit: Permit) -> str:
        """The coordinator."""
        return to.workflow_id_of(permit.resource)

    async def _ask(self, name: str, arg: Any, result: type[T], activity_id: str | None = None) -> T:
        return await answered(name, arg, result, activity_id, away=self.away, resource=self._terms.resource)


class _BusyError(Exception):
    """It would have to wait."""


def _error(resource: str, ticket: str, refused: calls.Refused) -> Exception:
    if refused.error == BUSY:
        return _BusyError()
    if refused.error == "ValueError":
        return misused(refused.why)
    return NAMED.get(refused.error, LockError)(refused.why, resource=resource, ticket=ticket)
