"""The guard in Redis, for threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redlease

from .thread.bound import Bound


class Guard(Bound[redlease.Guard]):
    """Refuses a fence that is lower than the highest it has seen; as `redlease.Guard`. Made by `Redlease.guard`."""

    @property
    def name(self) -> str:
        """The name of the resource."""
        return self._twin.name

    @property
    def hash_tag(self) -> str:
        """What the names of keys contain to be in this guard's slot of a cluster, with its braces."""
        return self._twin.hash_tag

    def check(self, fence: int) -> None:
        """Records the fence if none higher was seen; as `redlease.Guard.check`, with its errors."""
        self._client.call(lambda: self._twin.check(fence))

    def run(
        self, fence: int, lua: str, keys: Sequence[str | bytes] = (), args: Sequence[str | bytes | int | float] = ()
    ) -> Any:
        """Checks the fence and runs a script in one step; as `redlease.Guard.run`, with its parameters and errors."""
        return self._client.call(lambda: self._twin.run(fence, lua, keys, args))
