"""The semaphore and the lock, for threads."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple, Self

import redlease
from redlease._core import limits
from redlease._core.limits import GRACE_S, Duration, Full, Until
from redlease._core.protocol.histories import HISTORY_COUNT
from redlease._core.protocol.snapshots import SNAPSHOT_LIMIT
from redlease.models import HistoryEntry, Permit, Position, Snapshot

from .decorator import Decorator
from .hold import Hold, HoldRequest, OnLost, checked_on_lost
from .thread.block import Block, Exiting, Leave, Manager
from .thread.bound import Bound
from .watching import Watch


class Units(NamedTuple):
    """So many units of a semaphore, for `Redlease.all`. Made by `Semaphore.weighted`."""

    pool: Semaphore
    weight: int


class Semaphore(Manager, Bound[redlease.Semaphore]):
    """At most `capacity` units of a resource are held at once, granted in the order of arrival.

    Made by `Redlease.semaphore`. Any number of threads may share one object. The parameters and errors of each method
    are those of the method of `redlease.Semaphore` with the same name.

    Example:
        >>> pool = client.semaphore("gpu", capacity=3, lease=30)  # doctest: +SKIP
        >>> with pool.hold(timeout=10) as hold:  # doctest: +SKIP
        ...     train(fence=hold.fence)
    """

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._twin.name

    # Acquiring

    def hold(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        priority: int = 0,
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
        on_lost: OnLost = "exit",
        max_hold: Duration | None = None,
    ) -> HoldRequest:
        """Acquires a permit and renews it: `with pool.hold() as hold:`, or `hold = pool.hold().acquire()`.

        The parameters and errors are those of `redlease.Semaphore.hold`, except for `on_lost`.

        Args:
            timeout: See there.
            ticket: See there.
            weight: See there.
            owner: See there.
            metadata: See there.
            priority: See there.
            key: See there.
            share: See there.
            when_full: See there.
            grace: See there. A thread is not cancelled, so its body has to look at `hold.lost`.
            on_lost: "exit" raises `LeaseLost` when the block is left, "raise" also at the next call of redlease in the
                thread that entered the block, "signal" only sets `hold.lost`.
            max_hold: See there.
        """
        options: Any = {"ticket": ticket, "weight": weight, "owner": owner, "metadata": metadata}
        options |= {"priority": priority, "key": key, "share": share, "when_full": when_full, "grace": grace}

        def request() -> redlease.HoldRequest:
            return self._twin.hold(timeout=timeout, on_lost="signal", max_hold=max_hold, **options)

        return HoldRequest(self._client, request, on_lost)

    def holding(
        self,
        *,
        name_for: Callable[..., str] | None = None,
        timeout: Duration | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        priority: int = 0,
        key: str | Callable[..., str] | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
        on_lost: OnLost = "exit",
        max_hold: Duration | None = None,
    ) -> Decorator:
        """Makes a decorator: each call of the decorated function runs while it holds a permit.

        It decorates plain functions; otherwise as `redlease.Semaphore.holding`, with its parameters and errors.
        """
        checked_on_lost(on_lost)
        options: Any = {"timeout": timeout, "weight": weight, "owner": owner, "metadata": metadata}
        options |= {"priority": priority, "share": share, "when_full": when_full, "grace": grace}
        self._twin.holding(max_hold=max_hold, key=key, **options)  # checks them

        def request(suffix: str | None, key: str | None) -> HoldRequest:
            pool = self if suffix is None else self._named(f"{self.name}:{suffix}")
            return pool.hold(key=key, on_lost=on_lost, max_hold=max_hold, **options)

        return Decorator(request, name_for, key)

    def _named(self, name: str) -> Self:
        return type(self)(self._client, lambda client: self._make_twin(client)._named(name))

    def weighted(self, weight: int) -> Units:
        """Returns so many units of this semaphore, to be acquired with others by `Redlease.all`."""
        return Units(self, limits.checked_count("weight", weight))

    def acquire(
        self,
        *,
        timeout: Duration | None = None,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        priority: int = 0,
        key: str | None = None,
        share: float = 1,
        when_full: Full = "wait",
        grace: Duration = GRACE_S,
    ) -> Permit:
        """Acquires a permit as data, which redlease does not renew; as `redlease.Semaphore.acquire`."""
        options: Any = {"ticket": ticket, "weight": weight, "owner": owner, "metadata": metadata}
        options |= {"priority": priority, "key": key, "share": share, "when_full": when_full, "grace": grace}
        return self._client.call(lambda: self._twin.acquire(timeout=timeout, **options), undo=self._give_back)

    def try_acquire(
        self,
        *,
        ticket: str | None = None,
        weight: int = 1,
        owner: str | None = None,
        metadata: dict[str, str] | None = None,
        key: str | None = None,
    ) -> Permit | None:
        """Acquires a permit if capacity is free, else returns None; as `redlease.Semaphore.try_acquire`."""
        options: Any = {"ticket": ticket, "weight": weight, "owner": owner, "metadata": metadata, "key": key}
        return self._client.call(lambda: self._twin.try_acquire(**options), undo=self._give_back)

    async def _give_back(self, permit: Permit | None) -> None:
        if permit is not None:
            await self._twin.release(permit)

    def adopt(
        self, permit: Permit, *, refence: bool = True, on_lost: OnLost = "exit", max_hold: Duration | None = None
    ) -> Hold:
        """Takes over a stored permit and renews it from then on; as `redlease.Semaphore.adopt`, with its errors.

        A call that is interrupted as it ends releases the permit, whose new fence nobody knows.
        """
        checked_on_lost(on_lost)

        async def adopt() -> Hold:
            twin = await self._twin.adopt(permit, refence=refence, on_lost="signal", max_hold=max_hold)
            hold = Hold(self._client, twin, on_lost)
            hold._check_at_start()
            return hold

        return self._client.call(adopt, undo=Hold._give_up)

    # Permits

    def renew(self, permit: Permit, *, lease: Duration | None = None) -> Permit:
        """Renews a permit and returns it with its new deadline; as `redlease.Semaphore.renew`, with its errors."""
        return self._client.call(lambda: self._twin.renew(permit, lease=lease))

    def release(self, permit: Permit | str) -> bool:
        """Releases a permit, or what has that ticket; returns True if it was held; as `redlease.Semaphore.release`."""
        return self._client.release(lambda: self._twin.release(permit))

    def is_held(self, permit: Permit) -> bool:
        """Returns True if the permit is held now, under its fence; as `redlease.Semaphore.check`."""
        return self._client.call(lambda: self._twin.is_held(permit))

    # The resource as a whole

    def inspect(self, *, max_items: int = SNAPSHOT_LIMIT) -> Snapshot:
        """Returns a snapshot of the resource; as `redlease.Semaphore.inspect`."""
        return self._client.call(lambda: self._twin.inspect(max_items=max_items))

    def locked(self) -> bool:
        """Returns True if an acquire of weight 1 would have to wait now; as `redlease.Semaphore.locked`."""
        return self._client.call(self._twin.locked)

    def position(self, ticket: str) -> Position | None:
        """Returns the position of a request in the queue, by its ticket; as `redlease.Semaphore.position`."""
        return self._client.call(lambda: self._twin.position(ticket))

    def history(self, count: int = HISTORY_COUNT) -> list[HistoryEntry]:
        """Returns what happened to the resource recently, the newest last; as `redlease.Semaphore.history`."""
        return self._client.call(lambda: self._twin.history(count))

    def resize(self, capacity: int) -> None:
        """Sets the capacity; as `redlease.Semaphore.resize`."""
        self._client.call(lambda: self._twin.resize(capacity))

    def set_limit(
        self,
        capacity: int | None = None,
        *,
        per_key: int | None = None,
        key: str | None = None,
        until: Until = None,
        reason: str = "",
    ) -> None:
        """Limits how many units may be held, whatever processes declare; as `redlease.Semaphore.limit`."""
        self._client.call(lambda: self._twin.set_limit(capacity, per_key=per_key, key=key, until=until, reason=reason))

    def clear_limit(self, *, key: str | None = None) -> bool:
        """Lifts what `set_limit` has set; as `redlease.Semaphore.clear_limit`."""
        return self._client.call(lambda: self._twin.clear_limit(key=key))

    def pause(self, *, until: Until = None, reason: str = "") -> None:
        """Grants nothing until that ends or `resume`; as `redlease.Semaphore.pause`."""
        self._client.call(lambda: self._twin.pause(until=until, reason=reason))

    def resume(self) -> bool:
        """Ends a pause; returns whether there was one."""
        return self._client.call(self._twin.resume)

    def back_off(self, key: str | None, delay: Duration, *, reason: str = "") -> None:
        """Grants nothing of that key so long; as `redlease.Semaphore.back_off`."""
        self._client.call(lambda: self._twin.back_off(key, delay, reason=reason))

    def end_back_off(self, key: str | None) -> bool:
        """Ends what `back_off` has set, earlier; as `redlease.Semaphore.end_back_off`."""
        return self._client.call(lambda: self._twin.end_back_off(key))

    def release_all(self, *, queue: bool = False) -> int:
        """Releases the permits of all holders, with `queue` first all waiters; returns how many."""
        return self._client.release(lambda: self._twin.release_all(queue=queue))

    def watch(self) -> Watch:
        """Yields a snapshot of the resource, and another one after each change: `for snapshot in pool.watch():`.

        `close()`, which any thread may call, ends the loop; use it, or the watch as a `with` block, if the loop may be
        left early.
        """
        return Watch(self._client, self._twin.watch)

    # A plain `with pool as hold:`

    def __enter__(self) -> Hold:
        return self.hold()._enter(self._entering())

    @property
    def _kept_here(self) -> list[Leave]:
        kept: dict[int, list[Leave]] = self.__dict__.setdefault("_kept", {})
        return kept.setdefault(get_ident(), [])

    def _leave(self, block: Block, error: BaseException | None, exiting: Exiting) -> None:
        block.holds[0]._leave(block, error, exiting)


class Lock(Semaphore):
    """A semaphore of capacity 1: one holder at a time, in the order of arrival. Made by `Redlease.lock`.

    Example:
        >>> with client.lock("invoice:42", lease=30) as hold:  # doctest: +SKIP
        ...     pay(fence=hold.fence)
    """
