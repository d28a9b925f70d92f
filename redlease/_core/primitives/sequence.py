"""A sequence: a list of items that are handled one at a time under a lock, each result checkpointed before the next."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from redlease._core import limits
from redlease._core.hold import Hold
from redlease._core.limits import Duration
from redlease._core.primitives.semaphore import Lock
from redlease.errors import SequenceFailed

from .checkpoints import Checkpoints, Plan

ITEMS_MAX = 10_000
RESULT_BYTES_MAX = 65_536  # of one result as JSON
ERROR_BYTES_MAX = 1000  # of the text that says why an item failed

Item = TypeVar("Item")


@dataclass(frozen=True)
class Retry:
    """How often a failing item is tried, and the pauses in between.

    Args:
        attempts: How often it is tried at most; None tries without end.
        initial: Seconds before the second attempt.
        backoff: What each further pause is multiplied by.
        maximum: Seconds that a pause lasts at most.

    Raises:
        ValueError: A parameter is wrong.
    """

    attempts: int | None = 5
    initial: Duration = 1.0
    backoff: float = 2.0
    maximum: Duration = 60.0

    def __post_init__(self) -> None:
        if self.attempts is not None:
            limits.checked_count("attempts", self.attempts)
        limits.milliseconds("initial", self.initial)
        limits.milliseconds("maximum", self.maximum)
        if type(self.backoff) not in (int, float) or not 1 <= self.backoff <= 1000:
            raise ValueError(f"backoff must be a number from 1 to 1000, not {self.backoff!r}")

    def pauses(self) -> Iterator[float]:
        """Yields the seconds to wait before each further attempt."""
        longest_ms = limits.milliseconds("maximum", self.maximum)
        pause_ms = float(limits.milliseconds("initial", self.initial))
        for _ in itertools.count() if self.attempts is None else range(self.attempts - 1):
            pause_ms = min(pause_ms, longest_ms)
            yield pause_ms / 1000
            pause_ms *= self.backoff


@dataclass
class Attempt(Generic[Item]):
    """One attempt at an item, and what came of it."""

    item: Item
    result: object = None
    error: Exception | None = None


Step = list[str] | Attempt[Item]  # results as JSON, or what is to be tried before the next one


class SequenceRun(Generic[Item]):
    """What `client.sequence(...)` returns: `await` it for the list of results, or iterate over it with `async for`.

    Each `await` and each iteration is one call, which waits for the lock, handles the items that are not done, and
    returns or yields all results. These are what JSON makes of them: a tuple has become a list.
    """

    def __init__(
        self,
        lock: Lock,
        checkpoints: Callable[[str], Checkpoints],
        items: Iterable[Item],
        handler: Callable[[Item, Hold], Awaitable[Any]],
        *,
        id: str | None,  # noqa: A002
        retry: Retry,
        timeout: Duration | None,
        keep_ms: int,
    ) -> None:
        if not callable(handler) or not isinstance(retry, Retry):
            raise ValueError("a sequence needs a handler, an async function of item and hold, and a Retry")
        if timeout is not None:
            limits.milliseconds("timeout", timeout)
        self._lock = lock
        self._items = list(items)
        self._plan = Plan(_digest(self._items), len(self._items), keep_ms)
        self._id = self._plan.items if id is None else id
        self._checkpoints = checkpoints(self._id)
        self._handler = handler
        self._retry = retry
        self._timeout = timeout

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._id!r} of {self._lock.name!r}: {len(self._items)} items>"

    @property
    def id(self) -> str:
        """The id of the sequence."""
        return self._id

    def __await__(self) -> Generator[object, None, list[Any]]:
        return self._results().__await__()

    async def _results(self) -> list[Any]:
        results: list[str] = []
        await self._handle(results.append)
        return [json.loads(result) for result in results]

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        # In a task of its own: a loss cancels the task that holds, which must not be the one that iterates.
        results: asyncio.Queue[str | None] = asyncio.Queue()
        handling = asyncio.create_task(self._handle(results.put_nowait), name=f"redlease {self!r}")
        handling.add_done_callback(lambda _: results.put_nowait(None))
        try:
            while (result := await results.get()) is not None:
                yield json.loads(result)
            await handling
        finally:
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)

    async def _handle(self, on_done: Callable[[str], None]) -> None:
        """Handles what is not done; calls `on_done` with each result as JSON, those of earlier runs first."""
        if not self._items:
            return
        async with (
            self._lock.hold(timeout=self._timeout, metadata={"sequence": self._id}) as hold,
            contextlib.aclosing(self._steps(hold)) as steps,
        ):
            async for step in steps:
                if isinstance(step, list):
                    for result in step:
                        on_done(result)
                    continue
                try:
                    step.result = await self._handler(step.item, hold)
                except Exception as error:  # noqa: BLE001  the next step records it
                    step.error = error
                del step  # its error's traceback refers to this frame

    async def _steps(self, hold: Hold) -> AsyncGenerator[Step[Item], None]:
        """Yields the results as JSON, and before one that is not stored yet, each attempt at its item.

        Who iterates calls the handler, in its task or its thread, and sets in the attempt what came of it.
        """
        handled = await self._checkpoints.begin(hold, self._plan)
        known = 0
        while known < handled:
            results = await self._checkpoints.results(known)
            yield results
            known += len(results)
        for index in range(handled, len(self._items)):
            pauses = self._retry.pauses()
            while True:
                hold.check()
                yield (attempt := Attempt(self._items[index]))
                if (error := attempt.error) is None:
                    break
                await self._record_error(index, hold, error)
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise self._failed(index, error) from error
                await asyncio.sleep(pause_s)
            result = await self._checked(index, hold, attempt.result)
            await self._checkpoints.record(hold, self._plan, index, result)
            yield [result]

    async def _checked(self, index: int, hold: Hold, result: object) -> str:
        try:
            return _as_json(f"result of item {index}", result, bytes_max=RESULT_BYTES_MAX)
        except ValueError as error:  # another attempt would do the item's work again, for nothing
            await self._record_error(index, hold, error)
            raise self._failed(index, error) from error

    async def _record_error(self, index: int, hold: Hold, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
        await self._checkpoints.record_error(hold, self._plan, index, limits.shortened(why, ERROR_BYTES_MAX))

    def _failed(self, index: int, error: Exception) -> SequenceFailed:
        return SequenceFailed(
            f"resource {self._lock.name!r}: item {index} of {len(self._items)} of sequence {self._id!r} was not done: "
            f"{type(error).__name__}: {error}. Those before it are done, and those after it were not begun: fix it, "
            "and call the sequence again with the same id, which resumes at that item",
            resource=self._lock.name,
            id=self._id,
            index=index,
        )


def _as_json(what: str, value: object, *, bytes_max: float = math.inf, sort_keys: bool = False) -> str:
    """Returns the value as JSON; raises ValueError if that cannot be, or is too large."""
    try:
        text = json.dumps(value, separators=(",", ":"), sort_keys=sort_keys, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the {what} must be a JSON value: {error}") from error
    if size > bytes_max:
        raise ValueError(f"the {what} has {size:,} bytes as JSON; {bytes_max:,} are allowed")
    return text


def _digest(items: list[Any]) -> str:
    """Returns a digest of the items, by which a sequence knows its own; raises ValueError if one is no JSON value."""
    if len(items) > ITEMS_MAX:
        raise ValueError(f"a sequence may have {ITEMS_MAX:,} items, not {len(items):,}: hand them over in parts")
    digest = hashlib.sha256()
    for index, item in enumerate(items):
        digest.update(_as_json(f"item {index}", item, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
