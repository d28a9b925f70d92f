"""The library's activities, bound to the relay of the worker's process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from redlease import RedleaseError, Unavailable
from redlease.models import Permit, Snapshot

from . import calls, limited
from .errors import failure
from .relay import Relay
from .requests import AT_ONCE_S, Requests

T = TypeVar("T")

PATIENCE_S = 5.0  # how long one attempt of a remote activity waits for Redis


async def _told(work: Awaitable[T]) -> T:
    """What the work returns, or its error as the failure of an activity."""
    try:
        return await work
    except TimeoutError:
        raise ApplicationError("Redis did not answer in time", type="Unavailable") from None
    except Unavailable as error:
        raise failure(error, retryable=True) from error
    except (RedleaseError, ValueError) as error:
        raise failure(error) from error


class Activities:
    """What workflow code calls.

    The local ones run in the worker that runs the workflow, wait for Redis less than a second, and are tried once. The
    remote ones run on the internal worker and are tried until they succeed.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    @property
    def _requests(self) -> Requests:
        return Requests(self._relay.with_redis())

    def _for(self, entry: limited.Entry) -> Requests:
        return self._requests if entry.backend == "redis" else Requests(self._relay)

    @property
    def local(self) -> list[Callable[..., Any]]:
        """For workers that run workflows."""
        locks: list[Callable[..., Any]] = [self.enqueue, self.release, self.renew, self.adopt, self.check, self.inspect]
        return [*locks, self.reserve, self.forgo, self.admit]

    @property
    def remote(self) -> list[Callable[..., Any]]:
        """For the internal worker."""
        return [self.wait, self.release_later, self.reserve_later, self.admit_later, self._relay.slots.owner]

    @activity.defn(name=calls.ENQUEUE)
    async def enqueue(self, wish: calls.Wish) -> calls.Standing:
        """Queues a request."""
        return await _told(self._requests.enqueue(wish))

    @activity.defn(name=calls.WAIT)
    async def wait(self, wish: calls.Wish) -> Permit:
        """Keeps a place in the queue; completed by a relay once it is granted, and uses no slot until then."""
        await _told(self._requests.wait(wish, activity.info().task_token))
        _complete_later()

    @activity.defn(name=calls.RELEASE)
    async def release(self, giving: calls.Giving) -> calls.Released:
        """Takes a ticket out, as far as Redis can be reached at once."""
        return await _told(self._requests.release(giving))

    @activity.defn(name=calls.RELEASE_LATER)
    async def release_later(self, giving: calls.Giving) -> calls.Released:
        """Takes a ticket out, tried until Redis can be reached."""
        released = await _told(self._requests.release(giving, patience_ms=5000))
        if released.pending:
            raise ApplicationError("Redis could not be reached to release it", type="Unavailable")
        return released

    @activity.defn(name=calls.RENEW)
    async def renew(self, renewing: calls.Renewing) -> calls.Prolonged:
        """Gives a permit a new lease."""
        return calls.Prolonged.of(await _told(self._requests.renew(renewing)))

    @activity.defn(name=calls.ADOPT)
    async def adopt(self, adopting: calls.Adopting) -> calls.Prolonged:
        """Takes over a permit for this run."""
        return calls.Prolonged.of(await _told(self._requests.adopt(adopting)))

    @activity.defn(name=calls.CHECK)
    async def check(self, checking: calls.Checking) -> bool:
        """Whether a permit is held now."""
        return await _told(self._requests.held(checking.terms.resource, checking.ticket, checking.fence))

    @activity.defn(name=calls.INSPECT)
    async def inspect(self, inspecting: calls.Inspecting) -> Snapshot:
        """Looks at a resource."""
        return await _told(self._requests.inspect(inspecting))

    @activity.defn(name=limited.RESERVE)
    async def reserve(self, entry: limited.Entry) -> bool:
        """Takes a place for a child workflow."""
        return await _told(self._for(entry).reserve(entry, limit_s=AT_ONCE_S))

    @activity.defn(name=limited.LATER[limited.RESERVE])
    async def reserve_later(self, entry: limited.Entry) -> bool:
        """Takes a place for a child workflow, tried until Redis can be reached."""
        return await _told(self._for(entry).reserve(entry, limit_s=PATIENCE_S))

    @activity.defn(name=limited.FORGO)
    async def forgo(self, entry: limited.Entry) -> bool:
        """Gives back the place of a child workflow that was not started."""
        return await _told(self._for(entry).forgo(entry))

    @activity.defn(name=limited.ADMIT)
    async def admit(self, entry: limited.Entry) -> bool:
        """Takes the place of this run, as far as Redis can be reached at once."""
        return await _told(self._for(entry).admit(entry, limit_s=AT_ONCE_S))

    @activity.defn(name=limited.LATER[limited.ADMIT])
    async def admit_later(self, entry: limited.Entry) -> bool:
        """Takes the place of this run, tried until Redis can be reached."""
        return await _told(self._for(entry).admit(entry, limit_s=PATIENCE_S))


def _complete_later() -> NoReturn:
    activity.raise_complete_async()
