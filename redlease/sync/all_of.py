"""Several resources at once, for a thread: all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import redlease
from redlease import clock, limits
from redlease.limits import Duration

from .bound import ProcessClient
from .hold import Hold, checked_on_lost
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
    """What `Redlease.all` returns: a `with` block that holds all of the resources, or does not begin.

    It acquires them in the order of their names, as `redlease.AllRequest` does.
    """

    _stack: ExitStack | None = None

    def __init__(
        self,
        client: ProcessClient,
        parts: Sequence[Semaphore | Units],
        timeout: Duration | None,
        options: dict[str, Any],
    ) -> None:
        checked_on_lost(options["on_lost"])
        units = [part if isinstance(part, Units) else Units(part, 1) for part in parts]
        twins = {id(part.pool._twin): part.pool for part in units}
        # It checks the parameters, and merges parts of the same resource.
        self._twin: redlease.AllRequest = client.twin.all(
            *(part.pool._twin.weighted(part.weight) for part in units),
            timeout=timeout,
            **options | {"on_lost": "signal"},
        )
        self._parts = {name: Units(twins[id(part.pool)], part.weight) for name, part in self._twin._parts.items()}
        self._names = [part.pool.name for part in units]
        self._timeout_ms = None if timeout is None else limits.milliseconds("timeout", timeout)
        self._options = options

    def __repr__(self) -> str:
        state = "not entered" if self._stack is None else "entered"
        return f"<all of {', '.join(map(repr, self._parts))}, {state}>"

    def __enter__(self) -> Holds:
        if self._stack is not None:
            raise RuntimeError("this all() is entered already: call all() again")
        until_ms = None if self._timeout_ms is None else clock.now_ms() + self._timeout_ms
        held: dict[str, Hold] = {}
        with ExitStack() as stack:
            for name, (pool, weight) in sorted(self._parts.items()):
                left_s = None if until_ms is None else max(0.0, until_ms - clock.now_ms()) / 1000
                held[name] = stack.enter_context(pool.hold(timeout=left_s, weight=weight, **self._options))
            self._stack = stack.pop_all()
        return Holds(held[name] for name in self._names)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        stack, self._stack = self._stack, None
        if stack is None:
            raise RuntimeError("this all() is not entered")
        return stack.__exit__(kind, error, traceback)
