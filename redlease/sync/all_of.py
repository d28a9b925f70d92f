"""Several resources at once, for a thread: all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import redlease
from redlease._core.hold import lease_of
from redlease._core.primitives.semaphore import Units as TwinUnits
from redlease.errors import LeaseLost, RedleaseError

from .acquiring import Units
from .hold import Hold, OnLost, checked_on_lost
from .semaphore import Semaphore
from .thread.block import Block, Exiting, Manager
from .thread.bound import Bound, ProcessClient


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


class AllRequest(Manager, Bound[redlease.AllRequest]):
    """What `Redlease.all` returns: a `with` block that holds all of the resources, or does not begin.

    It acquires and releases them as `redlease.AllRequest` does, in one call of the background thread.
    """

    def __init__(
        self,
        client: ProcessClient,
        parts: Sequence[Semaphore | Units],
        *,
        on_lost: OnLost,
        **options: Any,
    ) -> None:
        self._on_lost = checked_on_lost(on_lost)
        units = [part if isinstance(part, Units) else Units(part, 1) for part in parts]

        def make(client: redlease.Redlease) -> redlease.AllRequest:
            twins = [_twin_of(part) for part in units]
            how: redlease.OnLost = "signal" if on_lost == "signal" else "cancel"
            return client.all(*twins, on_lost=how, **options)

        super().__init__(client, make)

    def __enter__(self) -> Holds:
        twin, block = self._twin, self._entering()

        async def enter() -> Holds:
            held = await twin.__aenter__()
            for each in held:
                lease_of(each).on_lost = "signal"  # until here, the loss of one has ended the wait for the others
            made = {each: Hold(self._client, each, self._on_lost) for each in dict.fromkeys(held)}
            holds = Holds(made[each] for each in held)
            block.begin(holds[0]._background, holds)
            return holds

        async def leave(_: Holds) -> None:
            await twin.__aexit__(None, None, None)

        try:
            holds = self._client.call(enter, undo=leave)
            for hold in self._each(holds):
                hold._check_at_start()
                hold._enter()
        except BaseException:
            self._failed(block)
            raise
        return holds

    def _leave(self, block: Block, error: BaseException | None, exiting: Exiting) -> None:
        holds, twin = cast("Holds", block.holds), self._made[1]
        background = holds[0]._background
        try:
            if not background.ended:  # else its client is closed, or this is a forked child
                background.run(self._client, lambda: exiting(twin), must_finish=True)
        except RedleaseError:
            if not background.ended:
                raise
        block.end(background)
        losses = [loss for hold in reversed(self._each(holds)) if (loss := _left(hold, error)) is not None]
        if losses:
            raise losses[0]

    @staticmethod
    def _each(holds: tuple[Hold, ...]) -> list[Hold]:
        """Returns each hold once, also if its resource was named twice."""
        return list(dict.fromkeys(holds))


def _twin_of(part: Units) -> TwinUnits:
    if not isinstance(part.pool, Semaphore):
        raise ValueError(f"all() takes locks, semaphores and `pool.weighted(n)`, not {part.pool!r:.80}")
    return part.pool._twin.weighted(part.weight)


def _left(hold: Hold, error: BaseException | None) -> LeaseLost | None:
    try:
        hold._left(error)
    except LeaseLost as loss:
        return loss
    return None
