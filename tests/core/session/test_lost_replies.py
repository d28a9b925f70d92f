"""Calls whose connection is lost, or slow, while another one serves their resource by now, as when a slot has moved."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import pytest

from redlease import LeaseLost, Permit, RedleaseError
from redlease._core.hold import lease_of
from redlease._core.operations import Operations
from redlease._core.options import AcquireSpec
from redlease._core.primitives.semaphore import Lock
from redlease._core.protocol.arguments import Terms
from redlease._core.protocol.encoding import Resource
from redlease._core.protocol.replies import Message, Status
from redlease._core.protocol.scripts import SCRIPTS, Script
from redlease._core.session.leases import LeaseManager
from redlease._core.session.queueing import Session
from redlease._core.transport.base import Departs, OnReply, Transport

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from redis.asyncio import ConnectionPool


TERMS = Terms("o", lease_ms=30_000)
GRANTED = [b"tag", Status.GRANTED, 7, 0, 30_000, 1]
QUEUED = [b"tag", Status.QUEUED, 1, 0, -1, 1, 0, 0, 0]


class Wire(Transport):
    """A route whose replies the test gives: each call waits in `calls`, with what it asks."""

    ready = True
    channel = "c"
    pool = None
    scripts = SCRIPTS
    trouble = ""
    refusal: RedleaseError | None = None
    silent_ms = 0.0

    def __init__(self) -> None:
        """No call yet."""
        super().__init__()
        self.calls: list[tuple[str, OnReply]] = []

    def _take_channel(self) -> None:
        """It has one."""

    def endpoint_for(self, resource: Resource) -> Wire:
        """Serve everything."""
        del resource
        return self

    def send(
        self, resource: Resource, script: Script, tail: bytes, on_reply: OnReply, departs: Departs | None = None
    ) -> bool:
        """Keep the call."""
        del resource, tail, departs
        self.calls.append((script.name, on_reply))
        return True

    def master_pools(self) -> list[ConnectionPool]:
        """There is no server."""
        return []

    async def next(self, name: str) -> OnReply:
        """Return the reply that the next call is waiting for, which must be of that name."""
        await eventually(lambda: self.calls)
        called, on_reply = self.calls.pop(0)
        assert called == name
        return on_reply

    async def until_ready(self, resource: Resource | None = None) -> None:
        """Be ready."""

    def set_silence_limit(self, shortest_ms: Callable[[], float]) -> None:
        """Never give up."""

    def check_silence_by(self, wait_ms: float) -> None:
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
def session(wires: Wire) -> Session:
    """The requests of a client over it."""
    return Session(LeaseManager(wires), poll_interval_ms=500)


@pytest.fixture
def lock(session: Session) -> Lock:
    """A lock of that client."""
    return Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS))


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


@pytest.mark.parametrize("way", ["hold", "block", "acquire", "try_acquire"])
async def test_a_grant_that_is_over_before_its_task_goes_on(
    session: Session, wires: Wire, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop stands still between the reply and the turn of the task: what lapsed meanwhile is asked for again."""
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS._replace(lease_ms=100)))
    ways: dict[str, Callable[[], Any]] = {
        "hold": lock.hold,
        "block": lambda: lock.hold().__aenter__(),
        "acquire": lock.acquire,
        "try_acquire": lock.try_acquire,
    }
    asking = asyncio.ensure_future(ways[way]())
    (await wires.next("acquire"))(GRANTED)
    time.sleep(0.12)
    on_reply = await wires.next("acquire")
    assert not asking.done()
    on_reply([b"tag", Status.GRANTED, 8, 200, 300, 1])
    assert (await asking).fence == 8
    assert "asks again" in caplog.text
    assert not session.pending


async def test_a_grant_out_of_the_queue_that_is_over_before_its_task_goes_on(session: Session, wires: Wire) -> None:
    """The same of a grant that a message told of, which lasts as long as the place in the queue would have."""
    terms = TERMS._replace(waiter_lease_ms=100)
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(terms))
    holding = asyncio.ensure_future(lock.hold())
    (await wires.next("acquire"))(QUEUED)
    (request,) = session.pending
    session.on_message(Message("g", request, (7, 0, 100, 1)))
    time.sleep(0.12)
    (await wires.next("acquire"))([b"tag", Status.GRANTED, 8, 200, 30_200, 1])
    hold = await holding
    assert hold.fence == 8
    assert hold.remaining() > 20


async def test_a_late_message_of_a_grant_gives_no_longer_lease(session: Session, wires: Wire) -> None:
    """A grant lasts no longer than its message says, though its client has extended the place in the queue since."""
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS))
    holding = asyncio.ensure_future(lock.hold())
    (await wires.next("acquire"))(QUEUED)
    (request,) = session.pending
    session.on_message(Message("g", request, (7, 0, 5000, 1)))
    hold = await holding
    assert hold.fence == 7
    assert hold.remaining() < 5
    hold.detach()


async def test_a_late_message_of_a_grant_that_is_over(session: Session, wires: Wire) -> None:
    """A grant whose message comes after its end is none: the request is sent again."""
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS))
    holding = asyncio.ensure_future(lock.hold())
    (await wires.next("acquire"))(QUEUED)
    (request,) = session.pending
    session.on_message(Message("g", request, (7, -20, -10, 1)))
    (await wires.next("acquire"))([b"tag", Status.GRANTED, 8, 200, 30_200, 1])
    assert (await holding).fence == 8


async def test_a_grant_that_is_over_leaves_by_its_timeout(session: Session, wires: Wire) -> None:
    """The time that the caller gave goes on meanwhile, and what the second copy may get is given back."""
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS._replace(lease_ms=100)))
    asking = asyncio.ensure_future(lock.acquire(timeout=0.15))
    (await wires.next("acquire"))(GRANTED)
    time.sleep(0.12)
    await wires.next("acquire")
    with pytest.raises(TimeoutError):
        await asking
    await wires.next("release")


async def test_a_client_that_closed_asks_for_nothing_again(session: Session, wires: Wire) -> None:
    """A grant that is over when its client is closed is given back."""
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS._replace(lease_ms=100)))
    asking = asyncio.ensure_future(lock.acquire())
    (await wires.next("acquire"))(GRANTED)
    time.sleep(0.12)
    session.closed = True
    with pytest.raises(RedleaseError, match="closed"):
        await asking
    await wires.next("release")


async def test_an_adoption_that_is_over_before_its_task_goes_on(session: Session, wires: Wire) -> None:
    """The same of a permit that is taken over, by the same request, which finds what the first copy got."""
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS._replace(lease_ms=100)))
    adopting = asyncio.ensure_future(lock.adopt(Permit("r", "t", 7, 1, 1, 30_000, 0, 30_000, "o", {})))
    on_reply = await wires.next("adopt")
    (request,) = session.listeners
    on_reply([b"tag", 8, 0, 100, 1, 1])
    time.sleep(0.12)
    on_reply = await wires.next("adopt")
    assert list(session.listeners) == [request]
    on_reply([b"tag", 8, 0, 300, 1, 1])
    hold = await adopting
    hold.check()


async def test_a_renewed_permit_that_is_over_before_its_task_goes_on(lock: Lock, wires: Wire) -> None:
    """The same of a permit that is renewed by hand; what the server no longer has is lost."""
    renewing = asyncio.ensure_future(lock.renew(Permit("r", "t", 7, 1, 1, 100, 0, 100, "o", {})))
    (await wires.next("renew"))([b"tag", 100, 1, 0])
    time.sleep(0.12)
    (await wires.next("renew"))([b"tag", 0, 1, 0])
    with pytest.raises(LeaseLost):
        await renewing


async def test_a_renewal_is_sent_again(lock: Lock, session: Session, wires: Wire) -> None:
    """The same of a renewal, which would else be due at the end of the lease only."""
    hold = await entered(lock, wires)
    session.manager.schedule.at(-math.inf, lease_of(hold))
    (await wires.next("renew"))(None)
    await wires.next("renew")
    assert not hold.lost


async def test_a_renewal_that_is_answered_too_late(session: Session, wires: Wire) -> None:
    """What was seen to be lost stays lost, though the reply to a renewal waited all along; the permit is given back."""
    lock = Lock(Operations(session, "p"), Resource("p", "r"), AcquireSpec.default(TERMS._replace(lease_ms=100)))
    hold = await entered(lock, wires)
    session.manager.schedule.at(-math.inf, lease_of(hold))
    on_reply = await wires.next("renew")
    time.sleep(0.12)
    assert hold.lost
    on_reply([b"tag", 200, 1, 0])
    assert hold.lost
    await wires.next("release")


async def test_a_beat_is_sent_again(lock: Lock, session: Session, wires: Wire) -> None:
    """The same of the beat that keeps a place."""
    acquiring = asyncio.create_task(lock.acquire())
    (await wires.next("acquire"))(QUEUED)
    (place,) = session.waiter_leases.values()
    session.manager.schedule.at(-math.inf, place)
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


async def test_no_second_release_overtakes_the_first(lock: Lock, session: Session, wires: Wire) -> None:
    """A node that becomes ready does not get a release whose answer is still to come: the later one would hide it."""
    hold = await entered(lock, wires)
    releasing = asyncio.create_task(hold.release())
    on_reply = await wires.next("release")
    session.manager.on_ready()
    assert not wires.calls
    on_reply([b"tag", 1, 0])
    assert await releasing


async def test_a_release_that_comes_in_one_read_with_the_grant(lock: Lock, session: Session, wires: Wire) -> None:
    """Somebody released the ticket before its caller went on: entering the block raises, and the body never runs."""
    acquiring = asyncio.ensure_future(lock.hold().__aenter__())
    (await wires.next("acquire"))(GRANTED)
    (request,) = session.pending
    session.on_message(Message("x", request, ()))
    session.on_message(Message("r", request, ()))
    with pytest.raises(LeaseLost, match="released by its ticket"):
        await acquiring
    assert not session.manager.leases
    assert not wires.calls


async def test_a_shortened_lease_that_is_told_in_one_read_with_the_grant(
    lock: Lock, session: Session, wires: Wire
) -> None:
    """Somebody made the lease end earlier before its caller went on: it is filled again at once, not in ten seconds."""
    acquiring = asyncio.ensure_future(lock.hold().__aenter__())
    (await wires.next("acquire"))(GRANTED)
    (request,) = session.pending
    session.on_message(Message("r", request, ()))
    hold = await acquiring
    await wires.next("renew")
    assert not hold.lost


async def test_a_hold_that_only_signals_is_told_of_it_too(lock: Lock, session: Session, wires: Wire) -> None:
    """With `on_lost="signal"` the body is entered all the same, and its hold says that it is lost."""
    acquiring = asyncio.ensure_future(lock.hold(on_lost="signal").__aenter__())
    (await wires.next("acquire"))(GRANTED)
    (request,) = session.pending
    session.on_message(Message("x", request, ()))
    hold = await acquiring
    assert hold.lost
    assert hold.remaining() == 0


async def test_an_adopted_permit_that_is_released_before_its_adopter_goes_on(
    lock: Lock, session: Session, wires: Wire
) -> None:
    """The same of a permit that is taken over: whoever adopts it is told, and keeps nothing."""
    permit = Permit("r", "t", 7, 1, 1, 30_000, 0, 30_000, "o", {})
    adopting = asyncio.ensure_future(lock.adopt(permit))
    (await wires.next("adopt"))([b"tag", 8, 0, 30_000, 1, 1])
    (request,) = session.listeners
    session.on_message(Message("x", request, ()))
    with pytest.raises(LeaseLost, match="released by its ticket"):
        await adopting
    assert not session.manager.leases
    assert not session.listeners
    again = asyncio.ensure_future(lock.adopt(permit))
    (await wires.next("adopt"))([b"tag", 9, 0, 30_000, 1, 1])
    assert not (await again).lost


async def test_each_key_is_asked_about_in_turn(lock: Lock, session: Session, wires: Wire) -> None:
    """A grant whose message was lost is found, whichever of the client's keys it went to."""
    tasks = []
    for number, key in enumerate("aab"):
        tasks.append(asyncio.ensure_future(lock.acquire(key=key, ticket=f"{key}{number}", share=2)))
        (await wires.next("acquire"))([b"tag", Status.QUEUED, number + 1, number, -1, 1, 0, 0, 0])
    (place,) = session.waiter_leases.values()
    asked = []
    for _ in range(4):
        first = place._first(0.0)
        assert first is not None
        asked.append(first.request.ticket)
        place.on_due(0.0)
        (await wires.next("beat"))([b"tag", Status.QUEUED, 0, -1, 1, 0])
    assert asked == ["a0", "b2", "a0", "b2"]
    session.on_ready()
    assert {waiting.request.ticket for waiting in session.pending.values() if waiting.due_ms is not None} == {
        "a0",
        "a1",
        "b2",
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
