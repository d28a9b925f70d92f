"""Workflow instances that a worker drops as it ends, which the garbage collector then takes in any thread."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from redlease import Permit
from redlease_temporal import lock
from redlease_temporal._workflow_side.hold import Hold, HoldRequest
from redlease_temporal._workflow_side.run import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

PERMIT = Permit("r", "t", 5, 1, 1, 30_000, 0, 30_000)


class Pause:
    """What a workflow waits for that goes on no more."""

    def __await__(self) -> Generator[None, None, None]:
        """Wait once."""
        yield


class Untouched:
    """The semaphore of a hold: nothing is asked of it by an instance that is thrown away."""

    async def end(self, _: Permit) -> bool:
        """Fail the test."""
        pytest.fail("it was given back")

    async def downgrade(self, _: Permit) -> bool:
        """Fail the test."""
        pytest.fail("it was downgraded")

    async def resume(self, _: Permit) -> Permit:
        """Fail the test."""
        pytest.fail("it was asked for")


async def in_a_hold(hold: Hold) -> None:
    """Wait in the block of a hold."""
    async with hold:
        await Pause()


async def in_a_request(hold: Hold) -> None:
    """Wait in the block of a request."""

    async def acquire() -> Hold:
        return hold

    async with HoldRequest(acquire):
        await Pause()


async def in_a_plain_block(hold: Hold) -> None:
    """Wait in the block of the lock itself."""

    async def acquire() -> Hold:
        return hold

    pool = lock("r")
    pool.hold = lambda **_: HoldRequest(acquire)  # type: ignore[method-assign]
    async with pool:
        await Pause()


@pytest.mark.parametrize("body", [in_a_hold, in_a_request, in_a_plain_block])
async def test_it_ends_without_a_word(
    body: Callable[[Hold], Coroutine[None, None, None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block that it waits in asks for no event loop, gives nothing back and raises nothing."""
    with monkeypatch.context() as in_a_run:
        in_a_run.setattr("temporalio.workflow.now", lambda: datetime.now(UTC))
        hold = Hold(Run("q", 1.0), PERMIT, Untouched(), "cancel")
    coroutine = body(hold)
    coroutine.send(None)
    await asyncio.to_thread(coroutine.close)
