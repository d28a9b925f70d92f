"""The activities through which workflow runs use locks in Redis. They call the relay of the worker's process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from redlease import RedleaseError, Unavailable
from redlease.models import Permit, Position, Snapshot
from redlease_temporal._payloads import locks
from redlease_temporal.errors import failure

from .relay import Relay
from .requests import Requests

T = TypeVar("T")

REMOTE_CALL_TIMEOUT_S = 5.0  # how long one attempt of a remote activity waits for Redis


async def with_activity_failures(work: Awaitable[T]) -> T:
    """Awaits the work; raises its error as an activity failure."""
    try:
        return await work
    except Unavailable as error:
        raise failure(error, retryable=True) from error
    except (RedleaseError, ValueError) as error:
        raise failure(error) from error
    except TimeoutError:  # asyncio's: the library's own timeouts are handled above
        raise ApplicationError("Redis did not answer in time", type="Unavailable") from None


class RedisActivities:
    """The activities of locks in Redis.

    The local ones run in the worker that runs the workflow, wait less than a second for Redis and have one attempt. The
    remote ones run on the internal worker and are retried until they succeed.
    """

    def __init__(self, relay: Callable[[], Relay]) -> None:
        self._relay = relay

    @property
    def _requests(self) -> Requests:
        return Requests(self._relay())

    @property
    def local(self) -> list[Callable[..., Any]]:
        """For workers that run workflows."""
        return [self.enqueue, self.release, self.renew, self.adopt, self.check, self.inspect, self.position]

    @property
    def remote(self) -> list[Callable[..., Any]]:
        """For the internal worker."""
        return [self.wait, self.release_later, self.downgrade]

    @activity.defn(name=locks.ENQUEUE)
    async def enqueue(self, call: locks.AcquireCall) -> locks.AcquireStatus:
        """Queues a request."""
        return await with_activity_failures(self._requests.enqueue(call))

    @activity.defn(name=locks.WAIT)
    async def wait(self, call: locks.AcquireCall) -> Permit:
        """Keeps a request queued. A relay completes the activity on the grant; until then it uses no activity slot."""
        await with_activity_failures(self._requests.wait(call, activity.info().task_token))
        _complete_later()

    @activity.defn(name=locks.RELEASE)
    async def release(self, call: locks.ReleaseCall) -> locks.ReleaseResult:
        """Releases a permit or withdraws a request, if Redis answers in time."""
        return await with_activity_failures(self._requests.release(call))

    @activity.defn(name=locks.RELEASE_LATER)
    async def release_later(self, call: locks.ReleaseCall) -> locks.ReleaseResult:
        """Releases a permit or withdraws a request; retried until Redis answers."""
        released = await with_activity_failures(
            self._requests.release(call, answer_within_ms=REMOTE_CALL_TIMEOUT_S * 1000)
        )
        if released.pending:
            raise ApplicationError("Redis could not be reached to release it", type="Unavailable")
        return released

    @activity.defn(name=locks.DOWNGRADE)
    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """Gives back all but one unit of a permit; retried until Redis answers."""
        return await with_activity_failures(self._requests.downgrade(call))

    @activity.defn(name=locks.RENEW)
    async def renew(self, call: locks.RenewCall) -> Permit:
        """Renews a permit."""
        return await with_activity_failures(self._requests.renew(call))

    @activity.defn(name=locks.ADOPT)
    async def adopt(self, call: locks.AdoptCall) -> Permit:
        """Takes over a permit for this run."""
        return await with_activity_failures(self._requests.adopt(call))

    @activity.defn(name=locks.CHECK)
    async def check(self, call: locks.CheckCall) -> bool:
        """Whether a permit is held now."""
        return await with_activity_failures(self._requests.held(call.terms.resource, call.ticket, call.fence))

    @activity.defn(name=locks.INSPECT)
    async def inspect(self, call: locks.InspectCall) -> Snapshot:
        """The current state of a resource."""
        return await with_activity_failures(self._requests.inspect(call))

    @activity.defn(name=locks.POSITION)
    async def position(self, call: locks.PositionCall) -> Position | None:
        """The position of a ticket in the queue."""
        return await with_activity_failures(self._requests.position(call))


def _complete_later() -> NoReturn:
    activity.raise_complete_async()
