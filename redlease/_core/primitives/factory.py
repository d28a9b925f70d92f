"""Makes the primitives of one client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache, partial
from typing import Any, Literal

from redlease._core import limits, options
from redlease._core.hold import Hold
from redlease._core.limits import GRACE_S, Duration, Full, Rate
from redlease._core.operations import Operations
from redlease._core.options import AcquireSpec, Durability, OnLost
from redlease._core.protocol.arguments import Terms
from redlease._core.protocol.encoding import Resource
from redlease._core.session.queueing import Session
from redlease.guards.redis import Guard

from .all_of import AllRequest
from .checkpoints import Checkpoints, SequenceProgress
from .leader import Leader
from .rwlock import RWLock
from .semaphore import Lock, Semaphore, Units
from .sequence import Item, Retry, SequenceRun

NAMES_KEPT = 1024  # how many resources, with their encoded keys, are cached


class PrimitiveFactory:
    """Makes locks, semaphores and what is built on them: the base of the client."""

    _session: Session
    _operations: Operations
    _prefix: str
    _terms: Terms

    def _set_up_factory(self) -> None:
        # Most callers make a new primitive for each use, with few names and the same settings.
        self._known_resource = lru_cache(maxsize=NAMES_KEPT)(partial(Resource, self._prefix))
        self._known_spec = lru_cache(maxsize=64, typed=True)(self._make_spec)

    def _forget_specs(self) -> None:
        """Lets primitives made from now on have the client's current terms."""
        self._known_spec.cache_clear()

    def lock(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
        idle_ttl: Duration | None = None,
        max_waiters: int | None = None,
        lock_delay: Duration | None = None,
        history: int | None = None,
        durability: Durability | None = None,
    ) -> Lock:
        """Makes the lock of that name, a semaphore of capacity 1.

        Args:
            name: The name of the resource, at most 512 bytes.
            lease: This and the following override the client's settings.
            owner: See the class.
            waiter_lease: See the class.
            idle_ttl: See the class.
            max_waiters: An acquire raises `QueueFull` at once if that many requests wait already.
            lock_delay: Seconds for which the units of a holder whose lease ended without a release stay in use, so that
                what it sent late arrives before the next holder begins. It is a setting of the resource, which the next
                acquire stores; None leaves it as it is, at first 0. At most `idle_ttl`.
            history: See the class.
            durability: How many replicas must have a grant before the caller gets it; by default none.

        Raises:
            ValueError: A parameter is wrong.
            RedleaseError: The client is closed.
        """
        default_spec = self._spec(1, lease, owner, waiter_lease, idle_ttl, max_waiters, lock_delay, history, durability)
        return Lock(self._operations, self._resource(name), default_spec)

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
        max_waiters_per_key: int | None = None,
        lock_delay: Duration | None = None,
        history: int | None = None,
        per_key: int | None = None,
        rate: Rate | Literal[0] | None = None,
        per_key_rate: Rate | Literal[0] | None = None,
        durability: Durability | None = None,
    ) -> Semaphore:
        """Makes the semaphore of that name.

        Args:
            name: The name of the resource, at most 512 bytes.
            capacity: Units that may be held at once. A value that differs from the one last declared replaces it.
            lease: This and the following override the client's settings.
            owner: See the class.
            waiter_lease: See the class.
            idle_ttl: See the class.
            max_waiters: An acquire raises `QueueFull` at once if that many requests wait already.
            max_waiters_per_key: It does so if that many requests with its `key` wait, so that no key fills the queue.
            lock_delay: Seconds for which the units of a holder whose lease ended without a release stay in use, so that
                what it sent late arrives before the next holder begins. It is a setting of the resource, which the next
                acquire stores; None leaves it as it is, at first 0. At most `idle_ttl`.
            history: See the class.
            per_key: Units that requests with one `key` may hold at once; 0 for no such limit, as for requests without
                a key. A key at its limit does not hold up others. It is a setting of the resource, as `lock_delay` is.
            rate: How many grants there may be in a time, besides the units: `Rate(100, per=60, burst=20)`; 0 for any
                number. It is a setting of the resource too.
            per_key_rate: The same for the requests of one key. A key without a token does not hold up others.
            durability: How many replicas must have a grant before the caller gets it; by default none.

        Raises:
            ValueError: A parameter is wrong.
            RedleaseError: The client is closed.
        """
        limits.checked_count("capacity", capacity)
        default_spec = self._spec(
            *(capacity, lease, owner, waiter_lease, idle_ttl, max_waiters, lock_delay, history, durability, per_key),
            *(rate, per_key_rate, max_waiters_per_key),
        )
        return Semaphore(self._operations, self._resource(name), default_spec)

    def rwlock(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
        idle_ttl: Duration | None = None,
        max_waiters: int | None = None,
        lock_delay: Duration | None = None,
        history: int | None = None,
        durability: Durability | None = None,
    ) -> RWLock:
        """Makes the read-write lock of that name: any number of readers, or one writer.

        A lock or semaphore of the same name would be the same resource with another capacity: give each its own name.
        The parameters and errors are those of `lock`.
        """
        default_spec = self._spec(
            limits.CAPACITY_MAX, lease, owner, waiter_lease, idle_ttl, max_waiters, lock_delay, history, durability
        )
        return RWLock(self._operations, self._resource(name), default_spec)

    def all(
        self,
        *parts: Semaphore | Units,
        timeout: Duration | None = None,
        ticket: str | None = None,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        priority: int = 0,
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
        on_lost: OnLost = "cancel",
        max_hold: Duration | None = None,
    ) -> AllRequest:
        """Acquires all of several resources or none: `async with client.all(lock, pool.weighted(2)) as holds:`.

        It acquires them in the order of their names, so that no two such blocks wait for each other in a circle.

        Args:
            *parts: Locks, semaphores, `pool.weighted(n)`, sides of read-write locks. Of a resource that is given more
                than once, the largest weight is acquired, once.
            timeout: Seconds to wait for all of them together; None waits forever.
            ticket: This and the following are those of `Semaphore.hold`, for each of the resources.
            owner: See there.
            metadata: See there.
            priority: See there.
            key: See there.
            share: See there.
            when_full: See there.
            grace: See there.
            on_lost: "cancel" cancels the body when one of the permits is lost, "signal" only sets `holds.lost`.
            max_hold: See there.

        Raises:
            ValueError: A parameter is wrong, or a resource is given with two capacities. Entering the block raises what
                `Semaphore.hold` does, and then holds nothing.
        """
        options: dict[str, Any] = {"ticket": ticket, "owner": owner, "metadata": metadata, "priority": priority}
        options |= {"key": key, "share": share, "when_full": when_full, "grace": grace}
        options |= {"on_lost": on_lost, "max_hold": max_hold}
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

    def guard(self, name: str, *, idle_ttl: Duration | None = None) -> Guard:
        """Makes the guard of that name, which refuses the fences of former holders.

        Args:
            name: The name of what is written, at most 512 bytes; usually that of the lock.
            idle_ttl: Seconds that it remembers a fence, from the later of its last use and the time in the fence;
                overrides the client's setting. A holder that is stopped for longer is not refused.

        Raises:
            ValueError: A parameter is wrong.
            RedleaseError: The client is closed.
        """
        self._session.check_open()
        terms = options.changed_terms(self._terms, idle_ttl=idle_ttl)
        return Guard(self._operations, self._prefix, name, terms.idle_ttl_ms)

    def sequence(
        self,
        resource: str,
        items: Iterable[Item],
        handler: Callable[[Item, Hold], Awaitable[Any]],
        *,
        id: str | None = None,  # noqa: A002
        retry: Retry = Retry(),  # noqa: B008  it is frozen
        timeout: Duration | None = None,
        lease: Duration | None = None,
        keep: Duration | None = None,
    ) -> SequenceRun[Item]:
        """Handles items one at a time, in order, under the lock of a resource; each result is stored before the next.

        `await` it for the list of results, or iterate with `async for` over each result as its item is done; use
        `contextlib.aclosing(aiter(...))` if the loop may be left early. A repeated call with the same id, in any
        process, resumes: what is done is not handled again, and its results are returned or yielded first. An item
        whose process died before its result was stored is handled again, under a newer fence.

        Args:
            resource: The name of the resource, whose lock is held meanwhile.
            items: JSON values, at most 10,000.
            handler: An async function of an item and the `Hold`. It returns a JSON value of at most 64 kB.
            id: Of this list of items, at most 256 bytes; by default it is derived from the items.
            retry: How often a failing item is tried; the lock is held meanwhile.
            timeout: Seconds to wait for the lock.
            lease: Overrides the client's setting.
            keep: Seconds that results stay on the server after the last one, `idle_ttl` by default. It must be longer
                than one attempt at an item and the pause after it.

        Raises:
            SequenceFailed: An item failed for good, or its result is no JSON value. It and the following are raised
                when the sequence runs; so are the errors of `Lock.hold`.
            LeaseLost: The lock was lost. What was done until then stays done.
            ValueError: A parameter is wrong, or the id is one of other items.

        Example:
            >>> receipts = await client.sequence("ledger", payments, post, id="2026-11")  # doctest: +SKIP
        """
        lock = self.lock(resource, lease=lease)
        keep_ms = self._terms.idle_ttl_ms if keep is None else limits.milliseconds("keep", keep, 1)
        known = partial(Checkpoints, self._operations, self._resource(resource))
        return SequenceRun(lock, known, items, handler, id=id, retry=retry, timeout=timeout, keep_ms=keep_ms)

    async def sequence_progress(self, resource: str, id: str) -> SequenceProgress | None:  # noqa: A002
        """Returns how far a sequence is; None if it has not begun, was forgotten or has expired.

        Raises:
            Unavailable: The server was not reached.
            ValueError: The id is wrong.
        """
        return await Checkpoints(self._operations, self._resource(resource), id).progress()

    async def forget_sequence(self, resource: str, id: str) -> bool:  # noqa: A002
        """Removes the results of a sequence; returns whether there were any. One that runs fails at its next result.

        Raises:
            Unavailable: The server was not reached.
            ValueError: The id is wrong.
        """
        return await Checkpoints(self._operations, self._resource(resource), id).forget()

    def _spec(self, *settings: Any) -> AcquireSpec:
        self._session.check_open()
        try:
            return self._known_spec(*settings)
        except TypeError:  # an unhashable value is no valid setting; the check raises the right error
            return self._make_spec(*settings)

    def _make_spec(  # noqa: PLR0917  positional for speed: looked up for every primitive that is made
        self,
        capacity: int,
        lease: Duration | None,
        owner: str | None,
        waiter_lease: Duration | None,
        idle_ttl: Duration | None,
        max_waiters: int | None,
        lock_delay: Duration | None,
        history: int | None,
        durability: Durability | None,
        per_key: int | None = None,
        rate: Rate | Literal[0] | None = None,
        per_key_rate: Rate | Literal[0] | None = None,
        max_waiters_per_key: int | None = None,
    ) -> AcquireSpec:
        terms = options.changed_terms(
            self._terms,
            capacity=capacity,
            lease=lease,
            owner=owner,
            waiter_lease=waiter_lease,
            idle_ttl=idle_ttl,
            max_waiters=max_waiters,
            lock_delay=lock_delay,
            history=history,
            per_key=per_key,
            durability=durability,
            rate=rate,
            per_key_rate=per_key_rate,
            max_waiters_per_key=max_waiters_per_key,
        )
        return AcquireSpec.default(terms)

    def _resource(self, name: str) -> Resource:
        return self._known_resource(name) if type(name) is str else Resource(self._prefix, name)
