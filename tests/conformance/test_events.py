"""`on_event`: what a client's owner is told, on both faces, and that no callback harms the protocol."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import pytest

from redlease import AcquireTimeout, LeaseLost
from redlease.events import Abandoned, Connected, Event, Granted, Lost, Queued, Released

from helpers import EventsOfRequests, eventually, until_waiting

if TYPE_CHECKING:
    from conftest import MakeClient

# Which server it is makes no difference to what a client tells of itself.
pytestmark = pytest.mark.parametrize("engine", ["fakeredis", "valkey9"])


async def test_the_life_of_two_holds(engine: str, face: str, make_client: MakeClient) -> None:
    """One is granted at once, the other waits for it: each event says which request, and how long it took."""
    told: list[Any] = EventsOfRequests()
    lock = (await make_client(on_event=told.append)).lock("r")
    async with lock.hold(ticket="a") as first:
        second = asyncio.create_task(lock.hold(ticket="b").__aenter__())
        await until_waiting(lock, 1)
    hold = await second
    await hold.release()
    assert [type(event) for event in told] == [Granted, Queued, Released, Granted, Released]
    granted, queued, released, handed_on, ended = told
    assert (granted.resource, granted.ticket, granted.weight, granted.queued) == ("r", "a", 1, False)
    assert (granted.fence, handed_on.fence) == (first.fence, hold.fence)
    assert queued == Queued("r", "b", 1, 0)
    assert handed_on.queued
    assert 0 < handed_on.waited < 60
    assert granted.waited < 60
    assert 0 < released.held < 60
    assert (ended.ticket, ended.fence) == ("b", hold.fence)


async def test_requests_that_end_without_a_grant(engine: str, face: str, make_client: MakeClient) -> None:
    """Who leaves the queue says why; who may not wait was never in it, and is not told of."""
    told: list[Any] = EventsOfRequests()
    lock = (await make_client(on_event=told.append)).lock("r")
    permit = await lock.acquire()
    assert await lock.try_acquire() is None
    with pytest.raises(AcquireTimeout):
        await lock.acquire(ticket="t", timeout=0.5)
    assert await lock.release(permit)
    _, queued, abandoned, released = told
    assert [type(event) for event in told] == [Granted, Queued, Abandoned, Released]
    assert (queued.ticket, abandoned.ticket, abandoned.queued) == ("t", "t", True)
    assert abandoned.error == "AcquireTimeout"
    assert 0.49 < abandoned.waited < 60
    assert released == Released("r", permit.ticket, 1, permit.fence, None)


async def test_a_loss_and_an_adoption(engine: str, face: str, make_client: MakeClient) -> None:
    """Each loss has its reason, and an adopted permit is a grant that did not wait."""
    told: list[Any] = EventsOfRequests()
    lock, other = [(await make_client(on_event=told.append)).lock("r", lease=1.0) for _ in range(2)]
    hold = await lock.hold(on_lost="signal")
    adopted = await other.adopt(hold.permit, on_lost="signal", max_hold=0.1)
    await eventually(lambda: sum(isinstance(event, Lost) for event in told) == 2)
    grants = [event for event in told if isinstance(event, Granted)]
    assert [grant.fence for grant in grants] == [hold.fence, adopted.fence]
    assert grants[1].waited == 0.0
    losses = {event.fence: event for event in told if isinstance(event, Lost)}
    assert losses[hold.fence].reason == "taken"
    assert losses[adopted.fence].reason == "max_hold"
    assert losses[adopted.fence].held > 0.09


async def test_a_release_that_comes_too_late(
    engine: str, face: str, make_client: MakeClient, raw: Any, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A hold of which the server knows nothing at its end was lost: an event and one line of the log say so."""
    told: list[Any] = EventsOfRequests()
    lock = (await make_client(on_event=told.append)).lock("r")
    hold = await lock.hold(ticket="t")
    await raw.delete(*[key async for key in raw.scan_iter(match=f"{prefix}:*r*")])
    assert not await hold.release()
    assert isinstance(told[-1], Lost)
    assert told[-1].reason == "gone"
    (record,) = caplog.records
    assert (record.__dict__["resource"], record.__dict__["ticket"]) == ("r", "t")


@pytest.mark.parametrize("error", [ArithmeticError, asyncio.CancelledError])
async def test_a_callback_that_raises(
    engine: str, face: str, make_client: MakeClient, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """It is told of once, with its traceback, and every hold is granted, renewed, lost and released as without it."""

    def on_event(event: Event) -> None:
        if not isinstance(event, Connected):
            raise error("its own")

    lock = (await make_client(on_event=on_event)).lock("r")
    for _ in range(3):
        async with lock.hold() as hold:
            waiting = asyncio.create_task(lock.acquire())
            await until_waiting(lock, 1)
        assert await lock.release(await waiting)
    with pytest.raises(LeaseLost):
        async with lock.hold(ticket="t") as hold:
            await lock.release("t")
            await eventually(lambda: hold.lost)
            hold.check()
    failed, lost = caplog.records
    assert failed.exc_info is not None
    assert failed.exc_info[0] is error
    assert (failed.__dict__["resource"], "is lost" in lost.getMessage()) == ("r", True)


async def test_a_callback_that_blocks(engine: str, face: str, make_client: MakeClient) -> None:
    """It blocks the loop as anything else may: a lease that ends meanwhile is lost, and the body is told at once."""

    def on_event(event: Event) -> None:
        if isinstance(event, Granted):
            time.sleep(0.4)

    lock = (await make_client(on_event=on_event)).lock("r", lease=0.3)
    with pytest.raises(LeaseLost):
        async with lock.hold() as hold:
            with pytest.raises(LeaseLost):
                hold.check()
            await hold.wait_lost()


async def test_a_callback_that_is_none(engine: str, face: str, make_client: MakeClient) -> None:
    """What cannot be called is refused before anything is done."""
    wrong: Any = "print"
    with pytest.raises(ValueError, match="on_event must be callable"):
        await make_client(on_event=wrong)


async def test_whose_key_it_is(engine: str, face: str, make_client: MakeClient) -> None:
    """Each event about a request has its key, and None without one."""
    told: list[Any] = EventsOfRequests()
    pool = (await make_client(on_event=told.append)).semaphore("r", capacity=1)
    async with pool.hold(key="acme"):
        with pytest.raises(AcquireTimeout):
            await pool.acquire(key="other", timeout=0.05)
    lost = await pool.hold(key="acme", ticket="lost", on_lost="signal")
    await pool.release("lost")
    await eventually(lambda: lost.lost)
    await pool.release(await pool.acquire(key="acme"))
    await pool.release(await pool.acquire())
    seen = [(type(event), event.key) for event in told]
    assert [each for each in seen if each[0] is not Granted] == [
        (Queued, "other"),
        (Abandoned, "other"),
        (Released, "acme"),
        (Lost, "acme"),
        (Released, "acme"),
        (Released, None),
    ]
    assert [key for kind, key in seen if kind is Granted] == [*["acme"] * 3, None]
