"""The scripts against a model: a FIFO semaphore with leases, weights and a capacity that changes, in plain Python."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

import fakeredis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from redlease import LeaseLost, Redlease, Withdrawn
from redlease.protocol import scripts
from redlease.protocol.scripts import read_lua

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from redlease import Permit, Semaphore

TICKETS = ["a", "b", "c", "d", "e", "f"]
OTHERS = tuple(script for script in scripts.SCRIPTS if script.name not in {"acquire", "release"})
A_YEAR_S = 365 * 24 * 3600  # places do not lapse here: the test's clock is not the one that beats go by


@dataclass
class Held:
    """What the model knows of a permit."""

    weight: int
    fence: int
    deadline: int
    shared: bool = field(default=False, compare=False)  # by several requests: no renewal of one makes it end earlier


@dataclass
class Queued:
    """What the model knows of a waiter."""

    weight: int
    lease: int


@dataclass
class Model:
    """The semaphore. Each method is what an operation should do; time is in ms."""

    now: int
    capacity: int = 0
    declared: int = 0
    fence: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    queue: dict[str, Queued] = field(default_factory=dict)

    def used(self) -> int:
        """Return the weights of the live permits, by which alone the semaphore is occupied."""
        return sum(held.weight for held in self.held.values())

    def reap(self) -> None:
        """Forget what has lapsed."""
        self.held = {ticket: held for ticket, held in self.held.items() if held.deadline > self.now}

    def next_fence(self) -> int:
        """Return a fence above all before it."""
        self.fence = max(self.fence + 1, self.now * 1000)
        return self.fence

    def advance(self) -> None:
        """Drop who can never fit, and grant from the head while the next fits."""
        self.reap()
        self.queue = {ticket: queued for ticket, queued in self.queue.items() if queued.weight <= self.capacity}
        while self.queue:
            ticket, queued = next(iter(self.queue.items()))
            if self.used() + queued.weight > self.capacity:
                return
            del self.queue[ticket]
            self.held[ticket] = Held(queued.weight, self.next_fence(), self.now + queued.lease)

    def acquire(self, ticket: str, weight: int, lease: int, declares: int, *, queues: bool) -> str:
        """Ask for a permit; return how that ends or stands."""
        self.reap()
        if (
            ticket in self.held
        ):  # a repeated request declares nothing, and finds its permit whatever the capacity is now
            if self.held[ticket].weight != weight:
                return "other weight"
            # Another request with the ticket never makes the lease end earlier.
            self.held[ticket].deadline = max(self.held[ticket].deadline, self.now + lease)
            self.held[ticket].shared = True
            return "granted"
        capacity = self.capacity
        if declares != self.declared and (self.declared or not self.capacity):
            capacity = declares
        if weight > capacity:
            return "misfit"
        self.capacity, self.declared = capacity, declares
        self.advance()
        if queues or (not self.queue and self.used() + weight <= self.capacity):
            self.queue[ticket] = Queued(weight, lease)
            self.advance()
            return "granted" if ticket in self.held else "queued"
        return "busy"

    def release(self, ticket: str, fence: int | None = None) -> bool:
        """Take a ticket out; with a fence only a holder under it."""
        self.reap()
        held = self.held.get(ticket)
        if fence is not None and (held is None or held.fence != fence):
            return False
        found = self.held.pop(ticket, None) is not None or self.queue.pop(ticket, None) is not None
        if found:
            self.advance()
        return found

    def find(self, ticket: str, fence: int) -> Held | None:
        """Return a live permit under its fence."""
        self.reap()
        held = self.held.get(ticket)
        return held if held is not None and held.fence == fence else None


class Comparison(RuleBasedStateMachine):
    """Does the same to both, and compares after each step what can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(now=1_700_000_000_000)
        self.clock = mock.patch.object(time, "time", self.now)
        self.clock.start()
        self.loop = asyncio.new_event_loop()
        self.fake = fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer())
        self.client = Redlease(self.fake, waiter_lease=A_YEAR_S, idle_ttl=A_YEAR_S)
        self.run(self.client.__aenter__())
        self.permits: list[Permit] = []
        self.waiting: dict[str, asyncio.Task[Permit]] = {}

    def now(self) -> float:
        """Return the server's time in seconds."""
        return self.model.now / 1000

    def teardown(self) -> None:
        """End the client, its waiters and the loop."""
        self.run(self.end())
        self.loop.close()
        self.clock.stop()

    async def end(self) -> None:
        """End what runs on the loop."""
        for task in self.waiting.values():
            task.cancel()
        await asyncio.gather(*self.waiting.values(), return_exceptions=True)
        await self.client.close()
        await self.fake.aclose()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run one step on the machine's own loop."""
        return self.loop.run_until_complete(coroutine)

    def pool(self, lease: int = 1000, capacity: int | None = None) -> Semaphore:
        """Return the semaphore with such terms."""
        return self.client.semaphore("r", capacity=capacity or self.model.declared or 1, lease=lease / 1000)

    async def same(self) -> bool:
        """Collect what the waiters have got, and compare with the model; asked again until it holds."""
        snapshot = await self.pool().inspect()
        held = {permit.ticket: Held(permit.weight, permit.fence, permit.expires_at_ms) for permit in snapshot.holders}
        assert held == self.model.held
        assert [(waiter.ticket, waiter.weight) for waiter in snapshot.waiters] == [
            (ticket, queued.weight) for ticket, queued in self.model.queue.items()
        ]
        assert snapshot.fence == self.model.fence
        assert snapshot.capacity == (self.model.capacity or self.model.declared or 1)
        for ticket, task in list(self.waiting.items()):
            assert task.done() == (ticket not in self.model.queue), ticket
            if task.done():
                del self.waiting[ticket]
                error = task.exception()
                if error is None:
                    self.permits.append(task.result())
                else:
                    assert isinstance(error, ValueError | Withdrawn), error
        return True

    def compare(self) -> None:
        """See that both stand the same."""
        self.run(eventually(self.same, 2))

    # What is done

    @rule(
        ticket=st.sampled_from(TICKETS),
        weight=st.integers(1, 4),
        lease=st.sampled_from([1000, 5000]),
        declares=st.sampled_from([None, None, None, 1, 2, 3, 5]),
    )
    def acquire(self, ticket: str, weight: int, lease: int, declares: int | None) -> None:
        """Ask, and wait in the background if need be; a ticket that waits here may not ask again."""
        declares = declares or self.model.declared or 2
        task = self.loop.create_task(self.pool(lease, declares).acquire(ticket=ticket, weight=weight))
        if ticket in self.waiting:
            self.run(asyncio.wait([task]))
            assert isinstance(task.exception(), ValueError)
            return
        outcome = self.model.acquire(ticket, weight, lease, declares, queues=True)
        if outcome == "queued":
            self.waiting[ticket] = task
        else:
            self.run(asyncio.wait([task], timeout=2))
            assert task.done()
            if outcome == "granted":
                self.permits.append(task.result())
                assert task.result().fence == self.model.held[ticket].fence
            else:
                assert isinstance(task.exception(), ValueError), outcome
        self.compare()

    @rule(ticket=st.sampled_from(TICKETS))
    def acquire_one(self, ticket: str) -> None:
        """Ask for what is asked for most."""
        self.acquire(ticket, 1, 1000, None)

    @rule(ticket=st.sampled_from(TICKETS), weight=st.integers(1, 3))
    def try_acquire(self, ticket: str, weight: int) -> None:
        """Ask without waiting."""
        if ticket in self.waiting:
            return
        declares = self.model.declared or 2
        outcome = self.model.acquire(ticket, weight, 1000, declares, queues=False)
        try:
            permit = self.run(self.pool(1000, declares).try_acquire(ticket=ticket, weight=weight))
        except ValueError:
            assert outcome in {"misfit", "other weight"}
        else:
            assert outcome == ("busy" if permit is None else "granted")
            if permit is not None:
                self.permits.append(permit)
        self.compare()

    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        """Give one of the last permits back, which may be stale."""
        if self.permits:
            permit = self.permits[-1 - which % len(self.permits)]
            held = self.model.release(permit.ticket, permit.fence)
            assert self.run(self.pool().release(permit)) == held
            self.compare()

    @rule(which=st.integers(0, 5), lease=st.sampled_from([500, 1000, 5000]))
    def renew(self, which: int, lease: int) -> None:
        """Renew one of the last permits."""
        if self.permits:
            permit = self.permits[-1 - which % len(self.permits)]
            held = self.model.find(permit.ticket, permit.fence)
            try:
                renewed = self.run(self.pool().renew(permit, lease=lease / 1000))
            except LeaseLost:
                assert held is None
            else:
                assert held is not None
                until = self.model.now + lease
                held.deadline = max(held.deadline, until) if held.shared else until
                assert renewed.expires_at_ms == held.deadline
            self.compare()

    @rule(which=st.integers(0, 5), refence=st.booleans())
    def adopt(self, which: int, *, refence: bool) -> None:
        """Take over one of the last permits, and let go of the hold without releasing it."""
        if self.permits:
            permit = self.permits[-1 - which % len(self.permits)]
            if permit.ticket in self.waiting:
                return
            held = self.model.find(permit.ticket, permit.fence)
            try:
                hold = self.run(self.pool().adopt(permit, refence=refence))
            except LeaseLost:
                assert held is None
            else:
                assert held is not None
                held.deadline = self.model.now + 1000 if refence else max(held.deadline, self.model.now + 1000)
                held.shared = not refence
                if refence:
                    held.fence = self.model.next_fence()
                self.permits.append(hold.detach())
            self.compare()

    @rule(ticket=st.sampled_from(TICKETS))
    def expel(self, ticket: str) -> None:
        """Release whatever the ticket has."""
        assert self.run(self.pool().release(ticket)) == self.model.release(ticket)
        self.compare()

    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        """Cancel one who waits."""
        if self.waiting:
            ticket = list(self.waiting)[which % len(self.waiting)]
            task = self.waiting.pop(ticket)
            task.cancel()
            self.run(asyncio.wait([task]))
            self.model.release(ticket)
            self.compare()

    @rule(capacity=st.integers(1, 6))
    def resize(self, capacity: int) -> None:
        """Change the capacity, not the declaration."""
        self.model.capacity = capacity
        self.model.advance()
        self.run(self.pool().resize(capacity))
        self.compare()

    @rule(ms=st.sampled_from([1, 400, 999, 1000, 1001, 6000]))
    def pass_time(self, ms: int) -> None:
        """Let time pass; the resize to what it is stands for the call that a waiter's timer would make."""
        self.model.now += ms
        self.model.reap()
        if self.model.capacity:
            self.model.advance()
            self.run(self.pool().resize(self.model.capacity))
        self.compare()


def without_the_usual(package: str, name: str) -> str:
    """Return a script that goes the general way from the start."""
    return re.sub(r"-- What is usual.*?(?=--#include state)", "", read_lua(package, name), flags=re.DOTALL)


class GeneralComparison(Comparison):
    """The same, with acquire and release always going the general way."""

    def __init__(self) -> None:
        with mock.patch.object(scripts, "read_lua", without_the_usual):
            acquire, release = (
                scripts.operation(script.name, " ".join(script.args[1:]))
                for script in (scripts.ACQUIRE, scripts.RELEASE)
            )
        assert len(acquire.text) < len(scripts.ACQUIRE.text)
        assert len(release.text) < len(scripts.RELEASE.text)
        self.patched = mock.patch.multiple(
            scripts, ACQUIRE=acquire, RELEASE=release, SCRIPTS=(acquire, release, *OTHERS)
        )
        self.patched.start()
        super().__init__()

    def teardown(self) -> None:
        """End it, and go the usual way again."""
        super().teardown()
        self.patched.stop()


TestComparison = pytest.mark.slow(Comparison.TestCase)
TestComparison.__doc__ = "Whatever is done in whatever order, the scripts do what the model does."
TestGeneralComparison = pytest.mark.slow(GeneralComparison.TestCase)
TestGeneralComparison.__doc__ = "So they do on the general way, which the usual one only shortens."
TestComparison.settings = TestGeneralComparison.settings = settings(
    max_examples=25,
    phases=[Phase.generate],
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
