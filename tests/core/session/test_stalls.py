"""An event loop that stands still, and threads beside it: what a hold says, which grant a body gets (P7)."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from redlease import LeaseLost

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from redlease import Hold, Redlease, Semaphore

    from conftest import MakeClient, Servers


async def is_free(lock: Semaphore) -> bool:
    """Tell whether nobody holds it."""
    return not await lock.locked()


def stall_until_over(hold: Hold) -> None:
    """Keep this thread busy until the lease is over."""
    deadline = time.monotonic() + 20
    while hold.remaining() > 0:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asked_by_a_thread(hold: Hold) -> list[str]:
    """Ask a hold until its lease is over, and return what two calls of `check()` raise from then on."""
    hold.check()
    stall_until_over(hold)
    assert hold.lost
    raised = []
    for _ in range(2):
        try:
            hold.check()
        except Exception as error:  # noqa: BLE001  whatever it is, it is shown
            raised.append(f"{type(error).__name__}: {error}")
    return raised


async def test_another_thread_asks_while_the_loop_stands_still(
    client: Redlease, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told of the loss by the clock alone; what follows from a loss is done by the loop once it runs again."""
    lock = client.lock("r", lease=0.3)
    with pytest.raises(LeaseLost, match="lease ended"):
        async with lock.hold() as hold:
            with ThreadPoolExecutor(1) as pool:
                first, second = pool.submit(asked_by_a_thread, hold).result()
            assert first == second
            assert first.startswith("LeaseLost: resource 'r'")
            assert not caplog.records
            await asyncio.sleep(30)
    assert {record.threadName for record in caplog.records} == {threading.current_thread().name}
    await eventually(lambda: is_free(lock))


async def test_a_thread_asks_while_the_loop_runs(client: Redlease) -> None:
    """A body in a thread checks its hold as often as it likes, and hears of a loss that the loop was told of."""
    lock = client.lock("r")
    hold = await lock.hold(ticket="t", on_lost="signal")
    released = threading.Event()

    def body() -> str:
        hold.check()
        assert 0 < hold.remaining() <= 30
        assert released.wait(20)
        with pytest.raises(LeaseLost) as caught:
            hold.check()
        assert hold.remaining() == 0
        return str(caught.value)

    working = asyncio.create_task(asyncio.to_thread(body))
    await lock.release("t")
    assert await hold.wait_lost()
    released.set()
    assert "released by its ticket" in await working


async def test_a_lost_hold_says_so_without_a_turn_of_the_loop(client: Redlease) -> None:
    """From the deadline on `lost` is true and stays so, and the server has the permit back when the loop runs again."""
    lock = client.lock("r", lease=0.3)
    async with lock.hold(on_lost="signal") as hold:
        hold.check()
        stall_until_over(hold)
        assert hold.lost
        with pytest.raises(LeaseLost, match="lease ended"):
            hold.check()
        with pytest.raises(LeaseLost):
            hold.detach()
        assert not await hold.release()
        assert await hold.wait_lost()
        assert hold.lost
        await eventually(lambda: is_free(lock))


async def test_a_body_that_ends_on_its_own_check(client: Redlease) -> None:
    """LeaseLost of `check()` comes out of the block once, and cancels nobody."""
    lock = client.lock("r", lease=0.3)
    current = asyncio.current_task()
    assert current is not None
    with pytest.raises(LeaseLost) as caught:
        async with lock.hold() as hold:
            stall_until_over(hold)
            hold.check()
    assert not hasattr(caught.value, "__notes__")
    assert current.cancelling() == 0
    await asyncio.sleep(0)  # a cancellation would come here
    await eventually(lambda: is_free(lock))


async def test_a_body_that_ends_after_its_lease(client: Redlease) -> None:
    """A block whose lease ended in its last moments raises LeaseLost, though the loop had no turn to notice."""
    lock = client.lock("r", lease=0.3)
    with pytest.raises(LeaseLost, match="lease ended"):
        async with lock.hold() as hold:
            stall_until_over(hold)


async def test_max_hold_is_named_by_the_clock_too(client: Redlease) -> None:
    """A hold that is renewed no more says what ended it, to a thread as to its body."""
    lock = client.lock("r", lease=0.3)
    async with lock.hold(on_lost="signal", max_hold=0.05) as hold:
        stall_until_over(hold)
        with pytest.raises(LeaseLost, match="max_hold was reached"):
            hold.check()


async def test_no_body_begins_after_its_lease(client: Redlease) -> None:
    """The loop stands still between request and reply, for longer than the lease: the body begins under a live one."""
    lock = client.lock("r", lease=0.25)
    await lock.locked()  # connected

    async def body() -> None:
        async with lock.hold() as hold:
            assert hold.remaining() > 0
            assert await lock.is_held(hold.permit)

    running = asyncio.create_task(body())
    await asyncio.sleep(0)  # it has asked
    time.sleep(0.6)
    await running


@pytest.mark.slow
async def test_no_permit_is_returned_after_its_lease(servers: Servers, make_client: MakeClient) -> None:
    """The same of permits as data, got at once or out of the queue: they are held when they are returned."""
    client = await make_client(url=servers.url("valkey9"))
    lock = client.lock("r", lease=1, waiter_lease=1)
    for way in (lock.acquire, lock.try_acquire):
        asking = asyncio.create_task(way())
        await asyncio.sleep(0)
        time.sleep(1.2)
        permit = await asking
        assert permit is not None
        waiting = asyncio.create_task(lock.acquire())
        await until_waiting(lock, 1)
        await lock.release(permit)
        time.sleep(1.2)
        permit = await waiting
        assert await lock.is_held(permit)
        assert await lock.release(permit)


async def test_a_hold_that_is_over_is_no_block(client: Redlease) -> None:
    """A hold that is lost, released or detached by the time it is entered runs no body; one that signals does."""
    lock = client.lock("r", lease=0.3)
    lost, released, signals = await lock.hold(), await client.lock("s").hold(), await client.lock("t").hold()
    assert await released.release()
    signals.detach()
    stall_until_over(lost)
    for hold in (lost, released, signals):
        with pytest.raises(LeaseLost):
            async with hold:
                pytest.fail("it is not held")
    # Of another lock: a grant out of the queue lasts until its first renewal as long as its place would have.
    told = await client.lock("u", lease=0.3).hold(on_lost="signal")
    stall_until_over(told)
    async with told:
        assert told.lost
