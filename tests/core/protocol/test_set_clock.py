"""The scripts against the model at given times: around each ms in which something ends; shrunk where they differ."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from redlease._core.protocol.replies import Status
from redlease.testing import Model

from against_model import LABEL
from random_calls import IDLE_MS, RandomCalls
from servers import find_binary
from set_clock import BEGINS_US, GENERAL, USUAL, WITH_USUAL_PATH, FakeEngine, RealEngine, SetClock, endings

if TYPE_CHECKING:
    from servers import Server

logger = logging.getLogger(__name__)

NEWER = [engine for engine in ("redis7", "valkey9") if find_binary(engine)]  # which have PEXPIRETIME
CALLS_EACH = 500

tickets = st.sampled_from("abc")
places = st.sampled_from(["c1|0", "c2|0", "c2|1", ":c3|0"])
requests = st.sampled_from(["h1", "h2", "p3", "p4"])
weights = st.sampled_from([1, 1, 2, 3, "1 1 ", "1 0 25"])
leases = st.sampled_from([10, 30])
fences = st.integers(0, 3)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("real_engine", NEWER)
@pytest.mark.parametrize("scripts", [USUAL, GENERAL], ids=["usual", "general"])
def test_calls_at_given_times(server: Server, scripts: dict[str, Any], seed: int, *, is_long: bool) -> None:
    """Calls in the ms before, at and after each end do what the model does, on fast paths and without them."""
    seen: Counter[tuple[str, int]] = Counter()
    forgotten = 0
    with RealEngine(server, scripts) as engine:
        for number in range((250_000 if is_long else 2_000) // CALLS_EACH):
            calls = RandomCalls.in_set_time(seed, number)
            clock = SetClock(calls, engine)
            clock.run(calls, CALLS_EACH)
            seen += clock.judge.seen
            forgotten += clock.judge.forgotten
    logger.info("%d calls, idle resources deleted: %d", seen.total(), forgotten)
    assert {("beat", status) for status in (Status.GRANTED, Status.QUEUED, Status.LAPSED)} <= seen.keys()
    assert forgotten > 0


def test_the_general_path_is_run_alone() -> None:
    """The operations with a fast path are compared with the model without it too."""
    assert {name for name, script in USUAL.items() if GENERAL[name].text != script.text} == WITH_USUAL_PATH


@pytest.mark.parametrize("real_engine", NEWER)
def test_a_renewal_in_the_ms_of_the_grant_is_a_write(server: Server) -> None:
    """Replicas confirm writes: what `durability` waits for must be one, even where it changes nothing."""
    raw = redis.Redis.from_url(server.unix_url)

    def written_by(name: str, *args: Any) -> int:
        before = raw.info("persistence")["rdb_changes_since_last_save"]
        engine.run(name, args, BEGINS_US)
        return int(raw.info("persistence")["rdb_changes_since_last_save"] - before)

    with RealEngine(server) as engine, contextlib.closing(raw):
        engine.clear()
        _, granted = engine.run("acquire", ("t", "h1", "c1|0", "0", 1, 1000, 1, 1000, -1, IDLE_MS, LABEL), BEGINS_US)
        fence = granted[2]
        assert written_by("renew", "t", fence, 1000, "write", IDLE_MS) > written_by("check", "t", fence)


@pytest.mark.parametrize("real_engine", NEWER)
def test_a_lock_delay_counts_for_leases_that_end_later(server: Server) -> None:
    """A call that declares one, and in which a lease is found that has ended, lets the next in without it."""
    with RealEngine(server) as engine:
        drawn = RandomCalls(Random(0), Model(), 2, [1], [10])
        clock = SetClock(drawn, engine)
        for ticket, asked, lease, key in (("a", 1, 1000, ()), ("c", "1 0   1 1", 10, "k"), ("b", "1 0   1 1", 10, "k")):
            clock.call("acquire", (ticket, f"h{ticket}", "c1|0", "0", asked, lease, 2, 1000, -1, IDLE_MS, LABEL, *key))
        clock.now_us += 10_000
        clock.call("acquire", ("a", "other", "c1|0", "0", "1 0 500  2 1", 1000, 2, 1000, -1, IDLE_MS, LABEL))
        assert list(drawn.model.held) == ["a", "b"]


class Machine(RuleBasedStateMachine):
    """Makes calls, and lets time pass from one end to the next."""

    scripts = USUAL

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.clock = SetClock(self, FakeEngine(self.scripts))
        self.fences: dict[str, list[int]] = {}

    def learn(self, _name: str, _args: tuple[Any, ...], _reply: list[Any], _fence: int) -> None:
        """Remember the fences of each ticket."""
        for held in self.model.held.values():
            known = self.fences.setdefault(held.ticket, [])
            if held.fence not in known:
                known.insert(0, held.fence)

    def fence(self, ticket: str, age: int) -> int:
        """Return a fence of a ticket, the newest or one of those before it."""
        return next(iter(self.fences.get(ticket, [1])[age:]), 1)

    @rule(past=st.sampled_from([-1, 0, 1]), which=st.integers(0, 2))
    def pass_time(self, past: int, which: int) -> None:
        """Let time pass until something ends."""
        ahead = sorted(ends for ends in endings(self.model) if ends * 1000 > self.clock.now_us)
        if ahead:
            self.clock.now_us = max(self.clock.now_us, (ahead[which % len(ahead)] + past) * 1000)

    @rule(
        ticket=tickets,
        request=requests,
        place=places,
        arrival=st.sampled_from(["0", "0", "+0", "+1", "+2"]),
        weight=weights,
        lease=leases,
        capacity=st.sampled_from([1, 2, 2, 3]),
        waiter_lease=st.sampled_from([0, 10, 30, 30]),
        most=st.sampled_from([-1, -1, 1, 2]),
    )
    def acquire(self, ticket: str, request: str, place: str, arrival: str, **terms: Any) -> None:
        """Request a permit."""
        asked = (terms[name] for name in ("weight", "lease", "capacity", "waiter_lease", "most"))
        self.clock.call("acquire", (ticket, request, place, arrival, *asked, IDLE_MS, LABEL))

    @rule(ticket=tickets, place=st.sampled_from(["c1|0", "c2|0"]), capacity=st.sampled_from([1, 2]))
    def acquire_one(self, ticket: str, place: str, capacity: int) -> None:
        """Request what is requested for most."""
        terms = (f"h{ticket}", place, "0", 1, 30, capacity, 30, -1, IDLE_MS, LABEL)
        self.clock.call("acquire", (ticket, *terms))

    @rule(ticket=tickets, age=fences)
    def release(self, ticket: str, age: int) -> None:
        """Release under a fence."""
        self.clock.call("release", (ticket, "", self.fence(ticket, age), 0, 0, IDLE_MS))

    @rule(ticket=tickets, request=st.one_of(st.just(""), requests), tombstone=st.sampled_from([0, 5]))
    def withdraw(self, ticket: str, request: str, tombstone: int) -> None:
        """Release what a request has, or whatever the ticket has."""
        self.clock.call("release", (ticket, request, "", tombstone, 1, IDLE_MS))

    @rule(ticket=tickets, age=fences, lease=leases, shorten=st.sampled_from(["0", "1", "told"]))
    def renew(self, ticket: str, age: int, lease: int, shorten: str) -> None:
        """Renew."""
        self.clock.call("renew", (ticket, self.fence(ticket, age), lease, shorten, IDLE_MS))

    @rule(ticket=tickets, age=fences, request=requests, place=places, lease=leases, refence=st.integers(0, 1))
    def adopt(self, ticket: str, age: int, **terms: Any) -> None:
        """Take a permit over."""
        asked = (terms[name] for name in ("request", "place", "lease", "refence"))
        self.clock.call("adopt", (ticket, self.fence(ticket, age), *asked, IDLE_MS, LABEL))

    @rule(ticket=tickets, place=places, lease=leases)
    def beat(self, ticket: str, place: str, lease: int) -> None:
        """Keep a place."""
        self.clock.call("beat", (place, lease, ticket, IDLE_MS))

    @rule(ticket=tickets, age=fences, weight=st.sampled_from([1, 2]))
    def reduce(self, ticket: str, age: int, weight: int) -> None:
        """Give back a part."""
        self.clock.call("reduce", (ticket, self.fence(ticket, age), weight, IDLE_MS))

    @rule(capacity=st.integers(1, 3))
    def resize(self, capacity: int) -> None:
        """Set the capacity."""
        self.clock.call("resize", (capacity, IDLE_MS))

    @rule(ticket=tickets, age=fences)
    def look(self, ticket: str, age: int) -> None:
        """Ask whether a ticket is held, and where it is in the queue; and watch."""
        self.clock.call("check", (ticket, self.fence(ticket, age)))
        self.clock.call("position", (ticket,))
        self.clock.call("watch", (3,))


class GeneralMachine(Machine):
    """The same, with acquire and release always on the general path."""

    scripts = GENERAL


TestMachine = pytest.mark.slow(Machine.TestCase)
TestMachine.__doc__ = "Whatever is called in whatever order at whatever time, the scripts do what the model does."
TestGeneralMachine = pytest.mark.slow(GeneralMachine.TestCase)
TestGeneralMachine.__doc__ = "So they do on the general path, which the fast one only shortens."
TestMachine.settings = TestGeneralMachine.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
