"""The activities through which workflow runs use locks in Redis. They call the relay of the worker's process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from redlease import RedleaseError, Unavailable
from redlease.models import Permit, Position, Snapshot
from redlease_temporal.errors import failure
from redlease_temporal.payloads import locks

from .relay import Relay
from .requests import Requests

T = TypeVar("T")

PATIENCE_S = 5.0  # how long one attempt of a remote activity waits for Redis


async def told(work: Awaitable[T]) -> T:
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
    async def enqueue(self, wish: locks.AcquireCall) -> locks.AcquireStatus:
        """Queues a request."""
        return await told(self._requests.enqueue(wish))

    @activity.defn(name=locks.WAIT)
    async def wait(self, wish: locks.AcquireCall) -> Permit:
        """Keeps a request queued. A relay completes the activity on the grant; until then it uses no activity slot."""
        await told(self._requests.wait(wish, activity.info().task_token))
        _complete_later()

    @activity.defn(name=locks.RELEASE)
    async def release(self, giving: locks.ReleaseCall) -> locks.Released:
        """Releases a permit or withdraws a request, if Redis answers in time."""
        return await told(self._requests.release(giving))

    @activity.defn(name=locks.RELEASE_LATER)
    async def release_later(self, giving: locks.ReleaseCall) -> locks.Released:
        """Releases a permit or withdraws a request; retried until Redis answers."""
        released = await told(self._requests.release(giving, patience_ms=PATIENCE_S * 1000))
        if released.pending:
            raise ApplicationError("Redis could not be reached to release it", type="Unavailable")
        return released

    @activity.defn(name=locks.DOWNGRADE)
    async def downgrade(self, call: locks.DowngradeCall) -> bool:
        """Gives back all but one unit of a permit; retried until Redis answers."""
        return await told(self._requests.downgrade(call))

    @activity.defn(name=locks.RENEW)
    async def renew(self, renewing: locks.RenewCall) -> Permit:
        """Renews a permit."""
        return await told(self._requests.renew(renewing))

    @activity.defn(name=locks.ADOPT)
    async def adopt(self, adopting: locks.AdoptCall) -> Permit:
        """Takes over a permit for this run."""
        return await told(self._requests.adopt(adopting))

    @activity.defn(name=locks.CHECK)
    async def check(self, checking: locks.Checking) -> bool:
        """Whether a permit is held now."""
        return await told(self._requests.held(checking.terms.resource, checking.ticket, checking.fence))

    @activity.defn(name=locks.INSPECT)
    async def inspect(self, inspecting: locks.Inspecting) -> Snapshot:
        """The current state of a resource."""
        return await told(self._requests.inspect(inspecting))

    @activity.defn(name=locks.POSITION)
    async def position(self, placing: locks.Placing) -> Position | None:
        """Where a ticket stands in the queue."""
        return await told(self._requests.position(placing))


def _complete_later() -> NoReturn:
    activity.raise_complete_async()
