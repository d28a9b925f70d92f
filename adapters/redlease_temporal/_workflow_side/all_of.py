"""Several resources at once: all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any

from temporalio import workflow

from redlease._core.limits import Duration
from redlease_temporal._payloads.locks import OnClose
from redlease_temporal.errors import usage_error

from .hold import Hold, OnLost
from .primitives import Semaphore, Units, timeout_of


class Holds(tuple[Hold, ...]):
    """The holds on all resources of `all_of`, in the order in which they were named."""

    __slots__ = ()

    @property
    def lost(self) -> bool:
        """Whether any of them is lost."""
        return any(hold.lost for hold in self)

    def check(self) -> None:
        """Raises `LeaseLost` for the first that the run knows to be no longer held."""
        for hold in self:
            hold.check()


class AllRequest:
    """What `all_of` returns: a block that holds all of the resources, or does not begin."""

    _stack: AsyncExitStack | None = None

    def __init__(self, parts: Sequence[Semaphore | Units], timeout: Duration | None, options: dict[str, Any]) -> None:
        self._timeout = timeout_of(timeout)
        self._options = options
        units = [part if isinstance(part, Units) else Units(part, 1) for part in parts]
        self._keys = [part.key for part in units]
        self._parts = _merged(units)
        for pool, weight in self._parts.values():
            # This only checks the parameters: a request does nothing before it is entered.
            pool.hold(weight=weight, **options)

    def __repr__(self) -> str:
        state = "not entered" if self._stack is None else "entered"
        return f"<all of {', '.join(repr(name) for name, _ in self._parts)}, {state}>"

    async def __aenter__(self) -> Holds:
        if self._stack is not None:
            raise RuntimeError("this all_of() is entered already: call all_of() again")
        until = None if self._timeout is None else workflow.now() + self._timeout
        held: dict[tuple[str, str], Hold] = {}
        async with AsyncExitStack() as stack:
            for key, (pool, weight) in sorted(self._parts.items()):
                left = None if until is None else max(timedelta(0), until - workflow.now())
                request = pool.hold(timeout=left, weight=weight, **self._options)
                held[key] = await stack.enter_async_context(request)
            self._stack = stack.pop_all()
        return Holds(held[key] for key in self._keys)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        stack, self._stack = self._stack, None
        if stack is None:
            raise RuntimeError("this all_of() is not entered")
        return await stack.__aexit__(kind, error, traceback)


def all_of(
    *parts: Semaphore | Units,
    timeout: Duration | None = None,
    ticket: str | None = None,
    owner: str | None = None,
    metadata: dict[str, str] | None = None,
    on_lost: OnLost = "cancel",
    on_close: OnClose = "release",
    max_hold: Duration | None = None,
) -> AllRequest:
    """Acquires all of several resources or none, as a block: `async with` gives the holds.

    It acquires them one after the other in the order of their names, whatever order they were given in, so that no two
    such blocks, nor one and a service's `client.all`, can wait for each other in a circle. What fails, times out, is
    cancelled or is lost on the way releases those that it has. The loss of one while the body runs ends the block as
    that of a single hold does, and releases the others. The resources may have different backends.

    Args:
        *parts: Locks, semaphores, `pool.weighted(n)`, sides of read-write locks. Of a resource that is given more than
            once, the largest weight is acquired, once.
        timeout: How long to wait for all of them together; None waits without limit.
        ticket: This and the following are those of `Semaphore.hold`, for each of the resources.
        owner: See there.
        metadata: See there.
        on_lost: "cancel" cancels the body when one of the permits is lost, "signal" only sets `holds.lost`.
        on_close: See there.
        max_hold: See there.

    Raises:
        ValueError: A parameter is wrong, or a resource is given with two capacities. Entering the block raises what
            `Semaphore.hold` raises.

    Example:
        >>> async with all_of(lock("account:1"), lock("account:2"), timeout=60) as holds:  # doctest: +SKIP
        ...     fences = [hold.fence for hold in holds]
        ...     await workflow.execute_activity(transfer, fences, start_to_close_timeout=SOON)
    """
    options = {
        "ticket": ticket,
        "owner": owner,
        "metadata": metadata,
        "on_lost": on_lost,
        "on_close": on_close,
        "max_hold": max_hold,
    }
    return AllRequest(parts, timeout, options)


def _merged(units: list[Units]) -> dict[tuple[str, str], Units]:
    """One entry for each resource, with the largest weight that is asked of it."""
    if not units:
        raise usage_error("all_of() needs at least one lock or semaphore")
    merged: dict[tuple[str, str], Units] = {}
    for each in units:
        other = merged.setdefault(each.key, each)
        if other.pool._terms.capacity != each.pool._terms.capacity:
            raise usage_error(f"all_of() got resource {each.pool.name!r} with two capacities")
        if each.total > other.total:
            merged[each.key] = each
    return merged
