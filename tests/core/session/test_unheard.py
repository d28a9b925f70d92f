"""Losses and mistakes that nobody would hear of: each is raised, warned of or logged, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from redlease import LeaseLost, Redlease
from redlease.testing import fake_client

from helpers import cancel, eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from redlease import Hold, Semaphore


@pytest.fixture
async def client() -> AsyncIterator[Redlease]:
    """A client without a server: what is shown here is the client's part."""
    async with fake_client() as client:
        yield client


async def rows(lock: Semaphore) -> AsyncGenerator[int, None]:
    """Yield ten rows inside a hold."""
    async with lock.hold(ticket="t"):
        for number in range(10):
            yield number


async def work(lock: Semaphore, row: int) -> None:
    """Work on a row; on the third for so long that the loss of the permit finds the task here."""
    if row == 3:
        await lock.release("t")
        await asyncio.sleep(30)


async def test_a_closed_generator_raises_the_loss(client: Redlease) -> None:
    """Whoever iterates in `aclosing` gets LeaseLost, and the task is not left cancelled."""
    lock = client.lock("r")

    async def consume() -> None:
        async with contextlib.aclosing(rows(lock)) as iterated:
            async for row in iterated:
                await work(lock, row)

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(consume())
    assert [type(error) for error in caught.value.exceptions] == [LeaseLost]
    assert task.cancelling() == 0


async def test_a_generator_that_nobody_closes(client: Redlease) -> None:
    """The event loop closes it, and its handler of exceptions is told of the loss."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))

    lock = client.lock("r")

    async def consume() -> None:
        async for row in rows(lock):
            await work(lock, row)

    await asyncio.wait([asyncio.create_task(consume())])
    gc.collect()
    await eventually(lambda: told)
    assert [type(error) for error in told] == [LeaseLost]


async def test_a_context_manager_may_yield_inside_a_hold(client: Redlease) -> None:
    """The generator of an `asynccontextmanager` is left with its block, by the task that is cancelled."""
    lock = client.lock("r")

    @contextlib.asynccontextmanager
    async def held() -> AsyncIterator[Hold]:
        async with lock.hold(ticket="t") as hold:
            yield hold

    with pytest.raises(LeaseLost):
        async with held():
            await lock.release("t")
            await asyncio.sleep(30)


async def test_a_hold_that_was_never_begun(client: Redlease) -> None:
    """Python's own warning for a coroutine is given for a hold, with the resource in it."""
    with pytest.warns(RuntimeWarning, match=r"hold\(\) of resource 'forgotten' was neither awaited nor entered"):
        client.lock("forgotten").hold(timeout=1)


async def test_an_adoption_that_was_never_begun(client: Redlease) -> None:
    """The same warning is given for it."""
    permit = await client.lock("forgotten").acquire()
    with pytest.warns(RuntimeWarning, match=r"adopt\(\) of resource 'forgotten' was neither awaited nor entered"):
        client.lock("forgotten").adopt(permit)


async def test_a_hold_that_was_begun_is_not_warned_of(client: Redlease) -> None:
    """Neither one that is used, whatever becomes of it, nor one that was refused for its parameters."""
    lock = client.lock("r")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with lock.hold():
            pass
        assert await (await lock.hold()).release()
        async with lock:
            with pytest.raises(TimeoutError):
                await lock.hold(timeout=0.01)
            with pytest.raises(TimeoutError):
                async with lock.hold(timeout=0):
                    pass
            waiting = asyncio.ensure_future(lock.hold())
            await until_waiting(lock, 1)
            await cancel(waiting)
        for wrong in ({"timeout": -1}, {"weight": 0}, {"ticket": ""}, {"on_lost": "x"}, {"metadata": {1: 2}}):
            with pytest.raises(ValueError, match=r"must be|maps"):
                lock.hold(**wrong)
        gc.collect()


async def test_a_permit_that_had_lapsed_when_it_was_released(
    client: Redlease, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says that nobody renewed it; of one that was held it says nothing."""
    lock = client.lock("r", lease=0.1)
    permit = await lock.acquire(ticket="t")
    assert await lock.release(permit)
    assert not caplog.records
    permit = await lock.acquire(ticket="t")
    await asyncio.sleep(0.15)
    assert not await lock.release(permit)
    (record,) = caplog.records
    for part in ("'r'", "'t'", str(permit.fence), "Nobody renews"):
        assert part in record.getMessage()


@pytest.mark.parametrize("by_block", [True, False])
async def test_a_task_that_waits_for_itself(
    client: Redlease, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, by_block: bool
) -> None:
    """After a while one warning names the resource, the task and both tickets; those who wait for others are not."""
    monkeypatch.setattr("redlease._core.session.self_deadlocks.CHECK_MS", 30.0)
    lock, pool = client.lock("r"), client.semaphore("pool", 2)

    async def asks_twice() -> None:
        if by_block:
            async with lock.hold(ticket="outer"):
                await lock.hold(ticket="inner")
        else:
            await lock.hold(ticket="outer")
            await lock.acquire(ticket="inner")

    self_deadlocks = asyncio.create_task(asks_twice(), name="the caller")
    await until_waiting(lock, 1)
    other = asyncio.create_task(lock.acquire(ticket="other"))
    async with pool.hold(), pool.hold():  # room for both
        third = asyncio.create_task(pool.acquire(ticket="third"))
        await eventually(lambda: caplog.records)
        await asyncio.sleep(0.2)
    (record,) = caplog.records
    for part in ("'r'", "'the caller'", "'inner'", "'outer'", "waits for itself"):
        assert part in record.getMessage()
    await cancel(self_deadlocks, other, third)


async def test_a_semaphore_that_its_own_task_has_filled(
    client: Redlease, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All permits of the task count together, by their weights; one that others may make room for is not warned of."""
    monkeypatch.setattr("redlease._core.session.self_deadlocks.CHECK_MS", 30.0)
    pool = client.semaphore("r", 3)
    others = await asyncio.create_task(pool_hold(pool))
    async with pool.hold(weight=1, ticket="one"), pool.hold(weight=1, ticket="two"):
        with pytest.raises(TimeoutError):
            await pool.hold(timeout=0.3)
        assert not caplog.records
        with pytest.raises(TimeoutError):
            await pool.hold(weight=2, timeout=0.3, ticket="three")
    (record,) = caplog.records
    for part in ("'one', 'two'", "'three'"):
        assert part in record.getMessage()
    await others.release()


async def pool_hold(pool: Semaphore) -> Hold:
    """Hold one, asked for by a task of its own."""
    return await pool.hold()
