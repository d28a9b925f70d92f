"""Makes the primitives of one client."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from redlease import limits, options
from redlease.limits import Duration
from redlease.options import AcquireOptions, OnLost
from redlease.protocol.arguments import Terms
from redlease.protocol.encoding import Resource
from redlease.session.queueing import Session
from redlease.tickets import Tickets

from .all_of import AllRequest
from .leader import Leader
from .rwlock import RWLock
from .semaphore import Lock, Semaphore, Units

NAMES_KEPT = 1024  # how many resources, with their encoded keys, are cached


class PrimitiveFactory:
    """Makes locks, semaphores and what is built on them: the base of the client."""

    session: Session
    tickets: Tickets
    _prefix: str
    _terms: Terms

    def _set_up_factory(self) -> None:
        # Most callers make a new primitive for each use, with few names and the same settings.
        self._known_resource = lru_cache(maxsize=NAMES_KEPT)(partial(Resource, self._prefix))
        self._known_wish = lru_cache(maxsize=64, typed=True)(self._usual_wish)

    def _forget_wishes(self) -> None:
        """Lets primitives made from now on have the client's current terms."""
        self._known_wish.cache_clear()

    def lock(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
        idle_ttl: Duration | None = None,
        max_waiters: int | None = None,
    ) -> Lock:
        """Makes the lock of that name, a semaphore of capacity 1.

        Args:
            name: The name of the resource, at most 512 bytes.
            lease: This and the following override the client's settings.
            owner: See the class.
            waiter_lease: See the class.
            idle_ttl: See the class.
            max_waiters: An acquire raises `QueueFull` at once if so many requests wait already.

        Raises:
            ValueError: A parameter is wrong.
            RedleaseError: The client is closed.
        """
        usual = self._wish(1, lease, owner, waiter_lease, idle_ttl, max_waiters)
        return Lock(self.tickets, self._resource(name), usual)

    def semaphore(
        self,
        name: str,
        capacity: int,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
        idle_ttl: Duration | None = None,
        max_waiters: int | None = None,
    ) -> Semaphore:
        """Makes the semaphore of that name.

        Args:
            name: The name of the resource, at most 512 bytes.
            capacity: Units that may be held at once. A value that differs from the one last declared replaces it.
            lease: This and the following override the client's settings.
            owner: See the class.
            waiter_lease: See the class.
            idle_ttl: See the class.
            max_waiters: An acquire raises `QueueFull` at once if so many requests wait already.

        Raises:
            ValueError: A parameter is wrong.
            RedleaseError: The client is closed.
        """
        limits.checked_count("capacity", capacity)
        usual = self._wish(capacity, lease, owner, waiter_lease, idle_ttl, max_waiters)
        return Semaphore(self.tickets, self._resource(name), usual)

    def rwlock(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
        idle_ttl: Duration | None = None,
        max_waiters: int | None = None,
    ) -> RWLock:
        """Makes the read-write lock of that name: any number of readers, or one writer.

        A lock or semaphore of the same name would be the same resource with another capacity: give each its own name.
        The parameters and errors are those of `lock`.
        """
        usual = self._wish(limits.CAPACITY_MAX, lease, owner, waiter_lease, idle_ttl, max_waiters)
        return RWLock(self.tickets, self._resource(name), usual)

    def all(
        self,
        *parts: Semaphore | Units,
        timeout: Duration | None = None,
        ticket: str | None = None,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        on_lost: OnLost = "cancel",
        max_hold: Duration | None = None,
    ) -> AllRequest:
        """Acquires all of several resources or none: `async with client.all(lock, pool.weighted(2)) as holds:`.

        It acquires them in the order of their names, so that no two such blocks wait for each other in a circle.

        Args:
            *parts: Locks, semaphores, `pool.weighted(n)`, sides of read-write locks. Of a resource that is given more
                than once, the largest weight is acquired, once.
            timeout: Seconds to wait for all of them together; None waits for ever.
            ticket: This and the following are those of `Semaphore.hold`, for each of the resources.
            owner: See there.
            metadata: See there.
            on_lost: "cancel" cancels the body when one of the permits is lost, "signal" only sets `holds.lost`.
            max_hold: See there.

        Raises:
            ValueError: A parameter is wrong, or a resource is given with two capacities. Entering the block raises what
                `Semaphore.hold` does, and then holds nothing.
        """
        options = {"ticket": ticket, "owner": owner, "metadata": metadata, "on_lost": on_lost, "max_hold": max_hold}
        return AllRequest(parts, timeout, options)

    def leader(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
    ) -> Leader:
        """Makes the role of that name, which one process at a time has: `async for term in leader.terms():`.

        Args:
            name: The name of the role, and of the lock underneath.
            lease: Seconds after which another process leads if the leader is gone.
            owner: The name shown as leader.
            waiter_lease: See the class.

        Raises:
            ValueError: A parameter is wrong.
        """
        return Leader(self.lock(name, lease=lease, owner=owner, waiter_lease=waiter_lease))

    def _wish(self, *settings: Any) -> AcquireOptions:
        self.session.check_open()
        try:
            return self._known_wish(*settings)
        except TypeError:  # an unhashable value is no valid setting; the check raises the right error
            return self._usual_wish(*settings)

    def _usual_wish(  # noqa: PLR0917  positional for speed: looked up for every primitive that is made
        self,
        capacity: int,
        lease: Duration | None,
        owner: str | None,
        waiter_lease: Duration | None,
        idle_ttl: Duration | None,
        max_waiters: int | None,
    ) -> AcquireOptions:
        terms = options.changed_terms(
            self._terms,
            capacity=capacity,
            lease=lease,
            owner=owner,
            waiter_lease=waiter_lease,
            idle_ttl=idle_ttl,
            max_waiters=max_waiters,
        )
        return AcquireOptions.usual(terms)

    def _resource(self, name: str) -> Resource:
        return self._known_resource(name) if type(name) is str else Resource(self._prefix, name)
