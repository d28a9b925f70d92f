"""A client against the model: what it does in whatever order, on a server whose clock stands still between steps."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import fakeredis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from redlease import LeaseLost, Redlease, Withdrawn
from redlease._core.protocol.replies import Status
from redlease.testing import Model

from helpers import cancel, eventually

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from redlease import Permit, Semaphore

Ask = tuple[str, str, str, str, int, int, int, int, int, int]  # the arguments of `Model.acquire`

TICKETS = ["a", "b", "c", "d", "e", "f"]
A_YEAR_S = 365 * 24 * 3600  # places do not lapse here: the test's clock is not the one that beats go by
A_YEAR_MS = A_YEAR_S * 1000
PLACE = "client|1"  # of the one client, and the model's name for it


class Comparison(RuleBasedStateMachine):
    """Does the same to both, and compares after each step what can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(clock=1_700_000_000_000_000)
        self.clock = mock.patch.object(time, "time", self.now)
        self.clock.start()
        self.loop = asyncio.new_event_loop()
        self.fake = fakeredis.FakeAsyncRedis(server=fakeredis.FakeServer())
        self.client = Redlease(self.fake, waiter_lease=A_YEAR_S, idle_ttl=A_YEAR_S)
        self.run(self.client.__aenter__())
        self.permits: list[Permit] = []
        self.waiting: dict[str, tuple[asyncio.Task[Permit], Ask]] = {}
        self.requests = itertools.count()

    def now(self) -> float:
        """Return the server's time in seconds."""
        return self.model.clock / 1_000_000

    def teardown(self) -> None:
        """End the client, its waiters and the loop."""
        self.run(self.end())
        self.loop.close()
        self.clock.stop()

    async def end(self) -> None:
        """End what runs on the loop."""
        await cancel(*(task for task, _ in self.waiting.values()))
        await self.client.close()
        await self.fake.aclose()

    def run(self, step: Awaitable[Any]) -> Any:
        """Run one step on the machine's own loop."""
        return self.loop.run_until_complete(step)

    def pool(self, lease: int = 1000, capacity: int | None = None) -> Semaphore:
        """Return the semaphore with such terms."""
        return self.client.semaphore("r", capacity=capacity or self.model.declared or 1, lease=lease / 1000)

    async def same(self) -> bool:
        """Collect what the waiters have got, and compare with the model; asked again until it holds."""
        snapshot = await self.pool().inspect()
        live = [held for held in self.model.held.values() if self.model.is_live(held)]
        expected = {held.ticket: (held.weight, held.fence, held.deadline) for held in live}
        assert {held.ticket: (held.weight, held.fence, held.expires_at_ms) for held in snapshot.holders} == expected
        expected_waiters = [(queued.ticket, queued.weight) for queued in self.model.waiters()]
        assert [(waiter.ticket, waiter.weight) for waiter in snapshot.waiters] == expected_waiters
        assert snapshot.fence == self.model.fence
        assert snapshot.capacity == (self.model.capacity or self.model.declared or 1)
        for ticket, (task, _) in list(self.waiting.items()):
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
        """Do what the client does by itself after each step, and see that both stand the same."""
        for ticket in self.waiting:
            queued = self.model.queue.get(ticket)
            if queued is not None and queued.weight > self.model.capacity:
                self.release_from_model(ticket)  # it was told that the request fits no more
        for ticket, (_, ask) in self.waiting.items():
            if ticket in self.model.held:
                self.model.acquire(*ask)  # a grant is claimed, for a full lease
        self.run(eventually(self.same, 15))

    def ask(self, ticket: str, weight: int, lease: int, declares: int, *, queues: bool) -> Ask:
        """Return a new request as the model takes it."""
        request = f"r{next(self.requests)}"
        return ticket, request, PLACE, "0", weight, lease, declares, A_YEAR_MS if queues else 0, -1, A_YEAR_MS

    def release_from_model(self, ticket: str, fence: int | str = "") -> bool:
        """Take the ticket out of the model, or only the permit with that fence; return whether it was live."""
        return bool(self.model.release(ticket, "", str(fence), 0, 0, A_YEAR_MS)[0])

    def size(self, capacity: int) -> None:
        """Set the capacity of both."""
        self.model.resize(capacity, A_YEAR_MS)
        self.run(self.pool().resize(capacity))

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
        ask = self.ask(ticket, weight, lease, declares, queues=True)
        status, *values = self.model.acquire(*ask)
        if status == Status.QUEUED:
            self.waiting[ticket] = task, ask
        else:
            self.run(asyncio.wait([task], timeout=2))
            assert task.done()
            if status == Status.GRANTED:
                self.permits.append(task.result())
                assert task.result().fence == values[0]
            else:
                assert isinstance(task.exception(), ValueError), status
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
        status, *_ = self.model.acquire(*self.ask(ticket, weight, 1000, declares, queues=False))
        try:
            permit = self.run(self.pool(1000, declares).try_acquire(ticket=ticket, weight=weight))
        except ValueError:
            assert status in {Status.MISFIT, Status.OTHER_WEIGHT}
        else:
            assert status == (Status.BUSY if permit is None else Status.GRANTED)
            if permit is not None:
                self.permits.append(permit)
        self.compare()

    @rule(which=st.integers(0, 5))
    def release(self, which: int) -> None:
        """Give one of the last permits back, which may be stale."""
        if self.permits:
            permit = self.permits[-1 - which % len(self.permits)]
            held = self.release_from_model(permit.ticket, permit.fence)
            assert self.run(self.pool().release(permit)) == held
            self.compare()

    @rule(which=st.integers(0, 5), lease=st.sampled_from([500, 1000, 5000]))
    def renew(self, which: int, lease: int) -> None:
        """Renew one of the last permits."""
        if self.permits:
            permit = self.permits[-1 - which % len(self.permits)]
            until, *_ = self.model.renew(permit.ticket, permit.fence, lease, "told", A_YEAR_MS)
            try:
                renewed = self.run(self.pool().renew(permit, lease=lease / 1000))
            except LeaseLost:
                assert until == 0
            else:
                assert renewed.expires_at_ms == until
            self.compare()

    @rule(which=st.integers(0, 5), refence=st.booleans())
    def adopt(self, which: int, *, refence: bool) -> None:
        """Take over one of the last permits, and let go of the hold without releasing it."""
        if self.permits:
            permit = self.permits[-1 - which % len(self.permits)]
            if permit.ticket in self.waiting:
                return
            request = f"r{next(self.requests)}"
            terms = (request, PLACE, 1000, int(refence), A_YEAR_MS)
            fence, *_ = self.model.adopt(permit.ticket, permit.fence, *terms)
            try:
                hold = self.run(self.pool().adopt(permit, refence=refence))
            except LeaseLost:
                assert fence == 0
            else:
                assert hold.fence == fence
                self.permits.append(hold.detach())
            self.compare()

    @rule(ticket=st.sampled_from(TICKETS))
    def expel(self, ticket: str) -> None:
        """Release whatever the ticket has."""
        assert self.run(self.pool().release(ticket)) == self.release_from_model(ticket)
        self.compare()

    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        """Cancel one who waits."""
        if self.waiting:
            ticket = list(self.waiting)[which % len(self.waiting)]
            task, _ = self.waiting.pop(ticket)
            self.run(cancel(task))
            self.release_from_model(ticket)
            self.compare()

    @rule(capacity=st.integers(1, 6))
    def resize(self, capacity: int) -> None:
        """Change the capacity, not the declaration."""
        self.size(capacity)
        self.compare()

    @rule(ms=st.sampled_from([1, 400, 999, 1000, 1001, 6000]))
    def pass_time(self, ms: int) -> None:
        """Let time pass; the resize to what it is stands for the calls that a waiter's timer would make."""
        self.model.clock += ms * 1000
        for _ in range(2 if self.model.capacity else 0):  # the first may leave expired permits that it need not remove
            self.size(self.model.capacity)
        self.compare()


TestComparison = pytest.mark.slow(Comparison.TestCase)
TestComparison.__doc__ = "Whatever is done in whatever order, the scripts do what the model does."
TestComparison.settings = settings(
    max_examples=25,
    phases=[Phase.generate],
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
