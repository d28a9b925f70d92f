"""Exceptions thrown into running tasks, each at a place where the task waits."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator


class Thrown(Exception):
    """What nobody has foreseen. Each has its number."""


class Thrower:
    """Throws into tasks, by the name of the coroutine function that they do: `Relay._beat`.

    Args:
        names: The functions.
        times: How often it throws into each.
        also: Functions that are done too seldom for so many times.
        chance: Of being thrown into, each time that a task would go on.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        times: int,
        random: random.Random,
        chance: float = 0.5,
        also: tuple[str, ...] = (),
    ) -> None:
        self.thrown: collections.Counter[str] = collections.Counter()
        self.throwing = False
        self._names = names
        self._also = also
        self._times = times
        self._random = random
        self._chance = chance

    @property
    def is_done(self) -> bool:
        """Whether it has thrown into each function as often as it was to."""
        return all(self.thrown[name] >= self._times for name in self._names)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Throw into the tasks of these functions that the event loop makes from now on."""
        loop = asyncio.get_running_loop()

        def make(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
            name = name_of(coro)
            return asyncio.Task(
                _Target(coro, name, self) if name in (*self._names, *self._also) else coro, loop=loop, **options
            )

        loop.set_task_factory(make)
        try:
            yield
        finally:
            self.throwing = False
            loop.set_task_factory(None)

    def strikes(self, name: str) -> Thrown | None:
        """Return what is thrown now, if something is."""
        if not self.throwing or self.thrown[name] >= self._times or self._random.random() > self._chance:
            return None
        self.thrown[name] += 1
        return Thrown(f"{name} number {self.thrown[name]}")


def name_of(coro: Any) -> str:
    """Return what a task does; what `retry_until_done` does is what it was given."""
    frame = coro.cr_frame
    if coro.__qualname__ == "retry_until_done" and frame is not None:
        return str(frame.f_locals["work"].__qualname__)
    return str(coro.__qualname__)


class _Target(Coroutine[Any, Any, Any]):
    def __init__(self, coro: Coroutine[Any, Any, Any], name: str, thrower: Thrower) -> None:
        self._coro = coro
        self._name = name
        self._thrower = thrower
        self._waits = False

    def send(self, value: Any) -> Any:
        thrown = self._thrower.strikes(self._name) if self._waits else None
        self._waits = True
        return self._coro.send(value) if thrown is None else self._coro.throw(thrown)

    def throw(self, *error: Any) -> Any:
        return self._coro.throw(*error)

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Any:
        return self._coro.__await__()
