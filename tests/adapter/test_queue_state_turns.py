"""Keys, shares, limits of keys and `when_full` in the books of a coordinator, as the model of the protocol has them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from redlease.protocol.replies import Status
from redlease.testing.model import Model
from redlease_temporal.backends.coordinator.queue_state import QueueState
from redlease_temporal.backends.coordinator.views import position, snapshot
from redlease_temporal.payloads.coordinator import Adoption, Release, Renewal, Request, Requester
from redlease_temporal.payloads.locks import Terms

if TYPE_CHECKING:
    from redlease.limits import Full
    from redlease_temporal.backends.coordinator.entries import Notification

CAPACITY = 4
LEASE_MS = 10**9  # nothing lapses while the two are compared
IDLE_MS = 10**10
GRACE_MS = 10**8
START_MS = 1_700_000_000_000
TICKETS = st.sampled_from("abcdefghij")
KEYS = st.sampled_from(["", "k", "l", "m"])
SHARES = st.sampled_from(
    [0.7, 1.3, 1.9, 3.1]
)  # so that no turns are equal: of such the model prefers those without a key
PLACE = "client|0"


def requester(ticket: str, number: int = 0) -> Requester:
    """Return the run that asks under a ticket; each number is a request of its own."""
    return Requester(f"workflow-{ticket}", f"run-{ticket}", f"run-{ticket}", f"{ticket}/{number}")


def request(ticket: str, number: int = 0, *, per_key: int | None = None, capacity: int = 1, **more: object) -> Request:
    """Return a request."""
    asked = Request(Terms("r", capacity, LEASE_MS, per_key=per_key), ticket, requester(ticket, number))
    return replace(asked, **more)  # type: ignore[arg-type]


def told(effects: list[Notification]) -> list[tuple[str, str]]:
    """Return what is told to whom."""
    return [(effect.error or effect.kind, effect.to.request) for effect in effects]


class AgainstTheModel(RuleBasedStateMachine):
    """The same calls on the books and on the model that the scripts for Redis are checked against."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = START_MS
        self.books = QueueState("r")
        self.model = Model(clock=self.now_ms * 1000)
        self.per_key = 0
        self.numbers = 0
        self.named: dict[str, str] = {}  # the request of each ticket that holds or waits

    def us(self) -> int:
        """Let a millisecond pass, and return the moment."""
        self.now_ms += 1
        self.model.clock = self.now_ms * 1000
        return self.now_ms * 1000

    @rule(ticket=TICKETS, key=KEYS, weight=st.integers(1, 3), share=SHARES)
    def ask(self, ticket: str, key: str, weight: int, share: float) -> None:
        """Ask for a permit, if the ticket is not known."""
        self._ask(ticket, key, weight, share, "wait")

    @rule(
        ticket=TICKETS, key=KEYS, weight=st.integers(1, 3), full=st.sampled_from(["replace-waiter", "replace-holder"])
    )
    def replace(self, ticket: str, key: str, weight: int, full: Full) -> None:
        """Ask for a permit in place of others of the key."""
        self._ask(ticket, key, weight, 1.3, full)

    def _ask(self, ticket: str, key: str, weight: int, share: float, full: Full) -> None:
        if ticket in self.named:
            return
        self.numbers += 1
        share = share if key else 1
        more = {"key": key, "share": share, "weight": weight, "full": full, "grace_ms": GRACE_MS}
        asked = request(ticket, self.numbers, per_key=self.per_key, capacity=CAPACITY, **more)
        name, now_us = asked.requester.request, self.us()
        effects = self.books.request(asked, now_us)
        settings = f"{weight}    {self.per_key} {share}"
        terms = (PLACE, "0", settings, LEASE_MS, CAPACITY, LEASE_MS, -1, IDLE_MS, key)
        reply = self.model.acquire(ticket, name, *terms)
        if reply[0] == Status.MISFIT:
            assert ("ValueError", name) in told(effects)
            return
        self.named[ticket] = name
        if reply[0] == Status.QUEUED and full != "wait":
            self.model.supersede(ticket, name, int(full == "replace-holder"), LEASE_MS, GRACE_MS, IDLE_MS)
        self._forget_the_rest()

    @rule(ticket=TICKETS)
    def release(self, ticket: str) -> None:
        """Release what it holds, by its fence, or take it out of the queue."""
        now_us, holder = self.us(), self.books.holder(ticket)
        held = self.model.held.get(ticket)
        if ticket not in self.named:
            return
        if holder is not None and held is not None:
            self.books.release(Release(ticket, holder.permit.fence), now_us)
            self.model.release(ticket, "", str(held.fence), 0, 0, IDLE_MS)
        else:
            self.books.release(Release(ticket, None, self.named[ticket]), now_us)
            self.model.release(ticket, self.named[ticket], "", LEASE_MS, 0, IDLE_MS)
        self._forget_the_rest()

    @rule(per_key=st.sampled_from([0, 3, 4]))
    def limit(self, per_key: int) -> None:
        """Let the next request declare another limit of keys."""
        self.per_key = per_key

    def _forget_the_rest(self) -> None:
        known = {*self.model.held, *self.model.queue}
        self.named = {ticket: name for ticket, name in self.named.items() if ticket in known}

    @invariant()
    def the_same_hold(self) -> None:
        """The same tickets hold, granted in the same order, and the same of them are replaced."""
        held = sorted(self.model.held.values(), key=lambda each: each.fence)
        holders = sorted(self.books.holders, key=lambda each: each.permit.fence)
        assert [each.permit.ticket for each in holders] == [each.ticket for each in held]
        assert [bool(each.replaced_by) for each in holders] == [each.is_replaced for each in held]

    @invariant()
    def the_same_wait(self) -> None:
        """The same tickets wait."""
        assert {place.request.ticket for place in self.books.queue} == set(self.model.queue)


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def us(ms: int) -> int:
    """Return a moment of the test, in microseconds."""
    return (START_MS + ms) * 1000


def waiters(books: QueueState) -> list[str]:
    """Return who waits, in the order of their turns."""
    return [each.ticket for each in snapshot(books, 100, START_MS).waiters]


def test_the_order_of_turns_is_shown() -> None:
    """A snapshot lists waiters in the order of their turns, with their keys, and a position counts them so."""
    books = QueueState("r")
    for ticket, key in [("h", ""), ("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("n", "")]:
        books.request(request(ticket, key=key), us(0))
    order = ["n", "a1", "b1", "a2", "a3"]
    assert waiters(books) == order
    assert {each.ticket: each.key for each in snapshot(books, 100, START_MS).waiters}["a2"] == "a"
    positions = [position(books, ticket) for ticket in order]
    assert [position.place for position in positions if position] == [1, 2, 3, 4, 5]
    granted = []
    for moment in range(6):
        (holder,) = books.holders
        granted.append(holder.permit.ticket)
        books.release(Release(holder.permit.ticket, holder.permit.fence), us(moment))
    assert granted == ["h", *order]


def test_a_permit_that_is_replaced() -> None:
    """It cannot be renewed, adopted nor asked for again; released, or after the grace, it makes room."""
    for ends in ("released", "grace"):
        books = QueueState("r")
        (granted,) = books.request(request("old", 1), us(0))
        permit = granted.permit
        assert permit is not None
        (lost,) = books.request(request("new", 2, full="replace-holder", grace_ms=500), us(1))
        assert (lost.kind, lost.to, lost.replaced) == ("lost", requester("old", 1), True)
        assert "'new'" in lost.why
        assert books.permit("old", permit.fence) is None
        books.renew(Renewal("old", permit.fence, LEASE_MS), us(2))
        books.adopt(Adoption("old", permit.fence, requester("other"), LEASE_MS), us(3))
        assert told(books.request(request("old", 3), us(4))) == [("Superseded", "old/3")]
        assert not books.lapse(us(400))
        if ends == "released":
            effects = books.release(Release("old", permit.fence), us(450))
        else:
            assert books.next_ms(START_MS + 450) == START_MS + 501
            effects = books.lapse(us(501))
        assert told(effects) == [("granted", "new/2")]


def test_a_waiter_that_is_replaced() -> None:
    """It is told so once, whoever shares its ticket too, and a late copy of it is refused."""
    books = QueueState("r")
    books.request(request("held"), us(0))
    books.request(request("old", 1, key="k"), us(1))
    books.request(request("old", 2, key="k"), us(1))
    books.request(request("other", key="l"), us(1))
    effects = books.request(request("new", key="k", full="replace-waiter"), us(2))
    assert told(effects) == [("Superseded", "old/1"), ("Superseded", "old/2")]
    assert told(books.request(request("old", 1, key="k"), us(3))) == [("Stale", "old/1")]
    assert sorted(waiters(books)) == ["new", "other"]


@pytest.mark.parametrize("full", ["replace-waiter", "replace-holder"])
def test_a_free_unit_replaces_nobody(full: Full) -> None:
    """A request that is granted at once leaves all others alone."""
    books = QueueState("r")
    books.request(request("a", capacity=2), us(0))
    assert told(books.request(request("b", capacity=2, full=full), us(1))) == [("granted", "b/0")]
    assert len(books.holders) == 2


def test_a_limit_of_keys_that_is_lowered_refuses_what_can_never_fit() -> None:
    """A waiter whose weight is above it is told so; holders keep what they have."""
    books = QueueState("r")
    books.request(request("held", capacity=3, weight=3, key="k"), us(0))
    books.request(request("waits", capacity=3, weight=2, key="k"), us(1))
    effects = books.request(request("n", capacity=3, per_key=1), us(2))
    assert told(effects) == [("ValueError", "waits/0")]
    assert len(books.holders) == 1
    assert told(books.request(request("m", capacity=3, weight=2, key="k"), us(3))) == [("ValueError", "m/0")]
