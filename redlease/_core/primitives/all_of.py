"""Several resources at once: all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from redlease._core import clock, limits
from redlease._core.hold import Hold
from redlease._core.limits import Duration
from redlease._core.options import checked_hold_options

from .semaphore import Semaphore, Units


class Holds(tuple[Hold, ...]):
    """The holds on all resources of `Redlease.all`, in the order in which they were named."""

    __slots__ = ()

    @property
    def lost(self) -> bool:
        """Whether any of them is lost."""
        return any(hold.lost for hold in self)

    def check(self) -> None:
        """Raises `LeaseLost` for the first that is no longer held. Does no I/O."""
        for hold in self:
            hold.check()

    def remaining(self) -> float:
        """Seconds until the first of the leases ends unless it is renewed."""
        return min(hold.remaining() for hold in self)


class AllRequest:
    """What `Redlease.all` returns: a block that holds all of the resources, or does not begin.

    It acquires them one after the other in the order of their names, whatever order they were given in, so that no two
    such blocks can wait for each other in a circle. What fails, times out, is cancelled or is lost on the way releases
    those that it has. The loss of one while the body runs ends the block as that of a single hold does, and releases
    the others.
    """

    _is_entered = False
    _stack: AsyncExitStack | None = None

    def __init__(self, parts: Sequence[Semaphore | Units], timeout: Duration | None, options: dict[str, Any]) -> None:
        self._timeout_ms = None if timeout is None else limits.milliseconds("timeout", timeout)
        hold_options = {name: options.pop(name) for name in ("on_lost", "max_hold")}
        checked_hold_options(**hold_options)
        self._options = options | hold_options
        units = [part if isinstance(part, Units) else Units(part, 1) for part in parts]
        self._parts = _merged(units)
        self._names = [part.pool.name for part in units]
        for part in self._parts.values():
            part.check(dict(options, timeout=timeout))

    def __repr__(self) -> str:
        state = "entered" if self._is_entered else "not entered"
        return f"<all of {', '.join(map(repr, self._parts))}, {state}>"

    async def __aenter__(self) -> Holds:
        if self._is_entered:
            raise RuntimeError("this all() is entered already: call all() again")
        self._is_entered = True
        try:
            return await self._acquire()
        except BaseException:
            self._is_entered = False
            raise

    async def _acquire(self) -> Holds:
        until_ms = None if self._timeout_ms is None else clock.now_ms() + self._timeout_ms
        held: dict[str, Hold] = {}
        async with AsyncExitStack() as stack:
            for name, (pool, weight) in sorted(self._parts.items()):
                left_s = None if until_ms is None else max(0.0, until_ms - clock.now_ms()) / 1000
                options = dict(self._options)
                if left_s == 0 and options["when_full"] != "refuse":
                    options["when_full"] = "wait"  # without time it takes nobody's place
                request = pool.hold(timeout=left_s, weight=weight, **options)
                held[name] = await stack.enter_async_context(request)
            self._stack = stack.pop_all()
        return Holds(held[name] for name in self._names)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            raise RuntimeError("this all() is not entered")
        self._is_entered = False
        await stack.__aexit__(kind, error, traceback)


def _merged(units: list[Units]) -> dict[str, Units]:
    """Returns one entry for each resource, with the largest weight that is asked of it."""
    if not units:
        raise ValueError("all() needs at least one lock or semaphore")
    merged: dict[str, Units] = {}
    for each in units:
        if not isinstance(each.pool, Semaphore):
            raise ValueError(f"all() takes locks, semaphores and `pool.weighted(n)`, not {each.pool!r:.80}")
        if each.pool._session is not units[0].pool._session:
            raise ValueError(f"all() got {each.pool!r} of another client: make all of them by the same client")
        name = each.pool.name
        other = merged.setdefault(name, each)
        if other.pool._terms.capacity != each.pool._terms.capacity:
            raise ValueError(f"all() got resource {name!r} with two capacities")
        if each.total > other.total:
            merged[name] = each
    return merged
