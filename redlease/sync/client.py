"""The blocking client, which makes the primitives: from a URL, from a redis-py client, or with an embedded server."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, Self, cast

import redis
import redis.asyncio

import redlease
from redlease._core.limits import GRACE_S, Duration, Full, Rate
from redlease._core.options import Durability
from redlease._core.primitives.checkpoints import SequenceProgress
from redlease._core.primitives.sequence import Item, Retry
from redlease.events import OnEvent

from .all_of import AllRequest
from .guard import Guard
from .hold import Hold, OnLost
from .leader import Leader
from .redis_clients import non_blocking
from .rwlock import RWLock
from .semaphore import Lock, Semaphore, Units
from .sequence import SequenceRun
from .thread.bound import ProcessClient


class Redlease:
    """A client for threads: one connection to a server, however many locks, threads and waiters use it.

    All clients of a process share one background thread, which runs from the first use of a client until the last one
    is closed. A client that was made before a fork, used or not, is a client of its own in each child. Entering it
    connects and checks the server, as its first use does otherwise; leaving it closes it.

    Args:
        redis_client: A client of redis-py (`Redis`, `RedisCluster`, a Sentinel's `master_for`), blocking or of
            `redis.asyncio`. redlease opens its own connection with its address, TLS and credentials.
        prefix: This and the following are those of `redlease.Redlease`.
        owner: See there.
        lease: See there.
        waiter_lease: See there.
        idle_ttl: See there.
        call_timeout: See there.
        poll_interval: See there.
        on_event: See there. It is called in the background thread, which serves all clients of the process.

    Raises:
        ValueError: A parameter is wrong.

    Example:
        >>> with Redlease.from_url("redis://localhost:6379/0") as client:  # doctest: +SKIP
        ...     with client.lock("invoice:42", lease=30) as hold:
        ...         pay(fence=hold.fence)
    """

    def __init__(
        self,
        redis_client: redis.Redis | redis.RedisCluster | redis.asyncio.Redis | redis.asyncio.RedisCluster,
        *,
        prefix: str = "redlease",
        owner: str | None = None,
        lease: Duration = 30.0,
        waiter_lease: Duration = 10.0,
        idle_ttl: Duration = 86_400.0,
        history: int | None = None,
        call_timeout: Duration = 5.0,
        poll_interval: Duration = 0.5,
        on_event: OnEvent | None = None,
    ) -> None:
        self._set_up(
            lambda: redlease.Redlease(
                non_blocking(redis_client),
                prefix=prefix,
                owner=owner,
                lease=lease,
                waiter_lease=waiter_lease,
                idle_ttl=idle_ttl,
                history=history,
                call_timeout=call_timeout,
                poll_interval=poll_interval,
                on_event=on_event,
            )
        )

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        prefix: str = "redlease",
        owner: str | None = None,
        lease: Duration = 30.0,
        waiter_lease: Duration = 10.0,
        idle_ttl: Duration = 86_400.0,
        history: int | None = None,
        call_timeout: Duration = 5.0,
        poll_interval: Duration = 0.5,
        on_event: OnEvent | None = None,
        **redis_options: Any,
    ) -> Self:
        """Makes a client for the server, cluster or Sentinels at `url`; as `redlease.Redlease.from_url`."""
        self = cls.__new__(cls)
        self._set_up(
            lambda: redlease.Redlease.from_url(
                url,
                prefix=prefix,
                owner=owner,
                lease=lease,
                waiter_lease=waiter_lease,
                idle_ttl=idle_ttl,
                history=history,
                call_timeout=call_timeout,
                poll_interval=poll_interval,
                on_event=on_event,
                **redis_options,
            )
        )
        return self

    @classmethod
    def embedded(cls, **settings: Any) -> Self:
        """Makes a client with its own server, a child process; as `redlease.Redlease.embedded`.

        The server is that of the process which entered the client. A child that is forked then uses it too.
        """
        self = cls.__new__(cls)
        of_parent: list[redlease.Redlease] = []

        def make() -> redlease.Redlease:
            for each in of_parent:
                if each._server is not None and each._server.is_running:
                    return redlease.Redlease.from_url(each._server.url, **settings)
            of_parent[:] = [redlease.Redlease.embedded(**settings)]
            return of_parent[0]

        self._set_up(make)
        return self

    def _set_up(self, make: Callable[[], redlease.Redlease]) -> None:
        self._client = ProcessClient(make)

    def __repr__(self) -> str:
        return repr(self._client)

    # Life

    def __enter__(self) -> Self:
        self._client.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the holds, ends the waiting calls of all threads with `Withdrawn`, and closes the connection.

        Idempotent, and for any thread. In a forked child it closes what the child has opened. A program that ends
        without it leaves its permits to expire.
        """
        self._client.close(redlease.Redlease.close)

    def abandon(self) -> None:
        """Closes the connection without releasing anything: permits and places stay until adopted or expired."""
        self._client.close(redlease.Redlease.abandon)

    # Primitives. Each method is described at `redlease.Redlease`.

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
        """Makes the lock of that name; as `redlease.Redlease.lock`, with its parameters and errors."""
        settings: Any = {"lease": lease, "owner": owner, "waiter_lease": waiter_lease, "idle_ttl": idle_ttl}
        settings |= {"max_waiters": max_waiters, "lock_delay": lock_delay, "history": history, "durability": durability}
        return Lock(self._client, lambda client: client.lock(name, **settings))

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
        """Makes the semaphore of that name; as `redlease.Redlease.semaphore`, with its parameters and errors."""
        settings: Any = {"lease": lease, "owner": owner, "waiter_lease": waiter_lease, "idle_ttl": idle_ttl}
        settings |= {"max_waiters": max_waiters, "lock_delay": lock_delay, "history": history, "durability": durability}
        settings |= {"per_key": per_key, "rate": rate, "per_key_rate": per_key_rate}
        settings |= {"max_waiters_per_key": max_waiters_per_key}
        return Semaphore(self._client, lambda client: client.semaphore(name, capacity, **settings))

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
        """Makes the read-write lock of that name; as `redlease.Redlease.rwlock`, with its parameters and errors."""
        settings: Any = {"lease": lease, "owner": owner, "waiter_lease": waiter_lease, "idle_ttl": idle_ttl}
        settings |= {"max_waiters": max_waiters, "lock_delay": lock_delay, "history": history, "durability": durability}
        return RWLock(self._client, lambda client: client.rwlock(name, **settings))

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
        on_lost: OnLost = "exit",
        max_hold: Duration | None = None,
    ) -> AllRequest:
        """Acquires all of several resources or none: `with client.all(lock, pool.weighted(2)) as holds:`.

        As `redlease.Redlease.all`, with its parameters and errors, except for `on_lost`: see `Semaphore.hold`.
        """
        options: Any = {"ticket": ticket, "owner": owner, "metadata": metadata, "priority": priority}
        options |= {"key": key, "share": share, "when_full": when_full, "grace": grace, "max_hold": max_hold}
        return AllRequest(self._client, parts, timeout, on_lost, options)

    def leader(
        self,
        name: str,
        *,
        lease: Duration | None = None,
        owner: str | None = None,
        waiter_lease: Duration | None = None,
    ) -> Leader:
        """Makes the role of that name, which one process at a time has: `for term in leader.terms():`."""
        return Leader(self.lock(name, lease=lease, owner=owner, waiter_lease=waiter_lease))

    def guard(self, name: str, *, idle_ttl: Duration | None = None) -> Guard:
        """Makes the guard of that name; as `redlease.Redlease.guard`, with its parameters and errors."""
        return Guard(self._client, lambda client: client.guard(name, idle_ttl=idle_ttl))

    def sequence(
        self,
        resource: str,
        items: Iterable[Item],
        handler: Callable[[Item, Hold], Any],
        *,
        id: str | None = None,  # noqa: A002
        retry: Retry = Retry(),  # noqa: B008  it is frozen
        timeout: Duration | None = None,
        lease: Duration | None = None,
        keep: Duration | None = None,
    ) -> SequenceRun[Item]:
        """Handles items one at a time, in order, under the lock of a resource; each result is stored before the next.

        As `redlease.Redlease.sequence`, with its parameters and errors; `handler` is a plain function of an item and
        the `Hold`. Call `results()` for the list of results, or iterate with `for`.

        Example:
            >>> receipts = client.sequence("ledger", payments, post, id="2026-11").results()  # doctest: +SKIP
        """
        kept: Any = list(items)
        options: Any = {"id": id, "retry": retry, "timeout": timeout, "lease": lease, "keep": keep}
        return SequenceRun(
            self._client,
            self.lock(resource, lease=lease),
            lambda client: client.sequence(resource, kept, cast("Any", handler), **options),
            handler,
            timeout,
        )

    def sequence_progress(self, resource: str, id: str) -> SequenceProgress | None:  # noqa: A002
        """Returns how far a sequence is; as `redlease.Redlease.sequence_progress`."""
        return self._client.call(lambda: self._client.twin.sequence_progress(resource, id))

    def forget_sequence(self, resource: str, id: str) -> bool:  # noqa: A002
        """Removes the results of a sequence; returns whether there were any."""
        return self._client.call(lambda: self._client.twin.forget_sequence(resource, id))
