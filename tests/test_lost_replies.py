"""Calls whose connection is lost, or slow, while another one serves their resource by now, as when a slot has moved."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import pytest

from redlease import LeaseLost, Permit, wire
from redlease.keeper import Keeper
from redlease.route import OnReply, Route
from redlease.semaphore import Lock
from redlease.waiting import Room
from redlease.wish import Wish

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from redlease.errors import RedleaseError

TERMS = wire.Terms("o", lease_ms=30_000)
GRANTED = [b"tag", wire.Status.GRANTED, 7, 0, 30_000, 1]
QUEUED = [b"tag", wire.Status.QUEUED, 1, 0, -1, 1, 0, 0]


class Wire(Route):
    """A route whose replies the test gives: each call waits in `calls`, with what it asks."""

    ready = True
    channel = "c"
    scripts = wire.SCRIPTS
    trouble = ""
    refusal: RedleaseError | None = None

    def __init__(self) -> None:
        """No call yet."""
        super().__init__()
        self.calls: list[tuple[str, OnReply]] = []

    def of(self, resource: wire.Resource) -> Wire:
        """Serve everything."""
        del resource
        return self

    def send(self, resource: wire.Resource, script: wire.Script, tail: bytes, on_reply: OnReply) -> None:
        """Keep the call."""
        del resource, tail
        self.calls.append((script.name, on_reply))

    async def next(self, name: str) -> OnReply:
        """Return the reply that the next call is waiting for, which must be of that name."""
        await eventually(lambda: self.calls)
        called, on_reply = self.calls.pop(0)
        assert called == name
        return on_reply

    async def until_ready(self, resource: wire.Resource | None = None) -> None:
        """Be ready."""

    def be_patient_for(self, shortest_ms: Callable[[], float]) -> None:
        """Never give up."""

    def look_sooner(self, wait_ms: float) -> None:
        """Never give up."""

    async def subscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Hear nothing."""

    def unsubscribe(self, channel: str, listener: Callable[[bytes], None]) -> None:
        """Hear nothing."""

    async def close(self) -> None:
        """Nothing is open."""

    async def _run(self) -> None:
        pass


@pytest.fixture
def wires() -> Wire:
    """What the calls go over."""
    return Wire()


@pytest.fixture
def room(wires: Wire) -> Room:
    """The requests of a client over it."""
    return Room(Keeper(wires))


@pytest.fixture
def lock(room: Room) -> Lock:
    """A lock of that client."""
    return Lock(room, wire.Resource("p", "r"), Wish.usual(TERMS))


async def entered(lock: Lock, wires: Wire) -> Any:
    """Return a hold that was granted at once."""
    acquiring = asyncio.ensure_future(lock.hold().__aenter__())
    (await wires.next("acquire"))(GRANTED)
    return await acquiring


async def test_an_acquire_is_asked_for_again(lock: Lock, wires: Wire) -> None:
    """The connection it went out on is lost; the one that serves by now gets it, though none has become ready since."""
    acquiring = asyncio.create_task(lock.acquire())
    (await wires.next("acquire"))(None)
    (await wires.next("acquire"))(GRANTED)
    assert (await acquiring).fence == 7


async def test_a_renewal_is_sent_again(lock: Lock, room: Room, wires: Wire) -> None:
    """The same of a renewal, which would else be due at the end of the lease only."""
    hold = await entered(lock, wires)
    room.keeper.schedule.at(-math.inf, hold)
    (await wires.next("renew"))(None)
    await wires.next("renew")
    assert not hold.lost


async def test_a_beat_is_sent_again(lock: Lock, room: Room, wires: Wire) -> None:
    """The same of the beat that keeps a place."""
    acquiring = asyncio.create_task(lock.acquire())
    (await wires.next("acquire"))(QUEUED)
    (place,) = room.places.values()
    room.keeper.schedule.at(-math.inf, place)
    (await wires.next("beat"))(None)
    await wires.next("beat")
    acquiring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await acquiring


async def test_a_release_is_sent_again(lock: Lock, wires: Wire) -> None:
    """The same of a release; and as the copy without an answer may have done it, finding nothing is no loss."""
    hold = await entered(lock, wires)
    releasing = asyncio.create_task(hold.release())
    (await wires.next("release"))(None)
    (await wires.next("release"))([b"tag", 0, 0])
    assert await releasing


async def test_no_second_release_overtakes_the_first(lock: Lock, room: Room, wires: Wire) -> None:
    """A node that becomes ready does not get a release whose answer is still to come: the later one would hide it."""
    hold = await entered(lock, wires)
    releasing = asyncio.create_task(hold.release())
    on_reply = await wires.next("release")
    room.keeper.on_ready()
    assert not wires.calls
    on_reply([b"tag", 1, 0])
    assert await releasing


async def test_a_release_that_comes_in_one_read_with_the_grant(lock: Lock, room: Room, wires: Wire) -> None:
    """Somebody released the ticket before its caller went on: entering the block raises, and the body never runs."""
    acquiring = asyncio.ensure_future(lock.hold().__aenter__())
    (await wires.next("acquire"))(GRANTED)
    (request,) = room.waitings
    room.on_message(wire.Message("x", request, ()))
    room.on_message(wire.Message("r", request, ()))
    with pytest.raises(LeaseLost, match="released by its ticket"):
        await acquiring
    assert not room.keeper.leases
    assert not wires.calls


async def test_a_shortened_lease_that_is_told_in_one_read_with_the_grant(lock: Lock, room: Room, wires: Wire) -> None:
    """Somebody made the lease end earlier before its caller went on: it is filled again at once, not in ten seconds."""
    acquiring = asyncio.ensure_future(lock.hold().__aenter__())
    (await wires.next("acquire"))(GRANTED)
    (request,) = room.waitings
    room.on_message(wire.Message("r", request, ()))
    hold = await acquiring
    await wires.next("renew")
    assert not hold.lost


async def test_a_hold_that_only_signals_is_told_of_it_too(lock: Lock, room: Room, wires: Wire) -> None:
    """With `on_lost="signal"` the body is entered all the same, and its hold says that it is lost."""
    acquiring = asyncio.ensure_future(lock.hold(on_lost="signal").__aenter__())
    (await wires.next("acquire"))(GRANTED)
    (request,) = room.waitings
    room.on_message(wire.Message("x", request, ()))
    hold = await acquiring
    assert hold.lost
    assert hold.remaining() == 0


async def test_an_adopted_permit_that_is_released_before_its_adopter_goes_on(
    lock: Lock, room: Room, wires: Wire
) -> None:
    """The same of a permit that is taken over: whoever adopts it is told, and keeps nothing."""
    permit = Permit("r", "t", 7, 1, 1, 30_000, 0, 30_000, "o", {})
    adopting = asyncio.ensure_future(lock.adopt(permit))
    (await wires.next("adopt"))([b"tag", 8, 0, 30_000, 1, 1])
    (request,) = room.listeners
    room.on_message(wire.Message("x", request, ()))
    with pytest.raises(LeaseLost, match="released by its ticket"):
        await adopting
    assert not room.keeper.leases
    assert not room.listeners
    again = asyncio.ensure_future(lock.adopt(permit))
    (await wires.next("adopt"))([b"tag", 9, 0, 30_000, 1, 1])
    assert not (await again).lost
