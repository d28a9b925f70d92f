"""What a semaphore for threads does besides calling its asyncio twin, whose methods `semaphore` has."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple, Self

import redlease
from redlease._core.limits import Duration
from redlease.models import Permit

from .decorator import Decorator
from .hold import Hold, HoldRequest, OnLost, checked_on_lost
from .thread.block import Block, Exiting, Leave, Manager
from .thread.bound import Bound


class Units(NamedTuple):
    """So many units of a semaphore, for `Redlease.all`. Made by `Semaphore.weighted`."""

    pool: BlockingSemaphore
    weight: int


class BlockingSemaphore(Manager, Bound[redlease.Semaphore]):
    """The base of `Semaphore`, whose methods are generated."""

    def _named(self, name: str) -> Self:
        """Returns the same of another name."""
        return type(self)(self._client, lambda client: self._make_twin(client)._named(name))

    def _decorator(
        self,
        *,
        name_for: Callable[..., str] | None,
        key: str | Callable[..., str] | None,
        on_lost: OnLost,
        max_hold: Duration | None,
        **options: Any,
    ) -> Decorator:
        checked_on_lost(on_lost)
        self._twin.holding(max_hold=max_hold, key=key, **options)  # checks them

        def request(suffix: str | None, key: str | None) -> HoldRequest:
            pool = self if suffix is None else self._named(f"{self._twin.name}:{suffix}")
            settings: Any = options | {"key": key, "max_hold": max_hold, "on_lost": "signal"}
            return HoldRequest(pool._client, lambda: pool._twin.hold(**settings), on_lost)

        return Decorator(request, name_for, key)

    async def _give_back(self, permit: Permit | None) -> None:
        """Releases a permit whose thread was interrupted and did not get it."""
        if permit is not None:
            await self._twin.release(permit)

    async def _adopt(self, permit: Permit, *, refence: bool, on_lost: OnLost, max_hold: Duration | None) -> Hold:
        twin = await self._twin.adopt(permit, refence=refence, on_lost="signal", max_hold=max_hold)
        hold = Hold(self._client, twin, on_lost)
        hold._check_at_start()
        return hold

    # A plain `with pool as hold:`

    def __enter__(self) -> Hold:
        request = HoldRequest(self._client, lambda: self._twin.hold(on_lost="signal"), "exit")
        return request._enter(self._entering())

    @property
    def _kept_here(self) -> list[Leave]:
        kept: dict[int, list[Leave]] = self.__dict__.setdefault("_kept", {})
        return kept.setdefault(get_ident(), [])

    def _leave(self, block: Block, error: BaseException | None, exiting: Exiting) -> None:
        block.holds[0]._leave(block, error, exiting)
