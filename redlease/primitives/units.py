"""So many units of a semaphore."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .semaphore import Semaphore


class Units(NamedTuple):
    """So many units of a semaphore, for `Redlease.all`. Made by `Semaphore.weighted`."""

    pool: Semaphore
    weight: int

    @property
    def total(self) -> int:
        """The weight of the permit that is acquired."""
        return self.weight * self.pool._usual.weight

    def check(self, owner: str | None, ticket: str | None, metadata: dict[str, str] | None, priority: int) -> None:
        """Raises ValueError for a parameter that an acquire of these units would refuse."""
        self.pool._usual.changed(None, ticket, self.weight, owner, metadata, priority=priority)
