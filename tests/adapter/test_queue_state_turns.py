"""Keys, shares, limits of keys and `when_full` in the books of a coordinator.

With one key they do what the model of the protocol does. With more, turns may differ in detail, but not in what they
promise: order within a key, shares, limits, and no unit idle that somebody may have.
"""

from __future__ import annotations

import itertools
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from redlease._core.protocol.replies import Status
from redlease.testing.model import Model
from redlease_temporal._backends.coordinator.queue_state import QueueState
from redlease_temporal._backends.coordinator.views import position, snapshot
from redlease_temporal._payloads.coordinator import Adoption, CoordinatorRequest, Release, Renewal, Requester
from redlease_temporal._payloads.locks import AcquireSpec, ResourceTerms

if TYPE_CHECKING:
    from redlease._core.limits import Full
    from redlease_temporal._backends.coordinator.entries import Holder, Notification

CAPACITY = 4
LEASE_MS = 10**9  # nothing lapses while the two are compared
IDLE_MS = 10**10
GRACE_MS = 10**8
START_MS = 1_700_000_000_000
TICKETS = st.sampled_from("abcdefghij")
KEYS = st.sampled_from(["", "k", "l", "m"])
SHARES = st.sampled_from([0.5, 1, 2, 3])
REPLACING = st.sampled_from(["replace-waiter", "replace-holder"])
PLACE = "client|0"


def requester(ticket: str, number: int = 0) -> Requester:
    """Return the run that asks under a ticket; each number is a request of its own."""
    return Requester(f"workflow-{ticket}", f"run-{ticket}", f"run-{ticket}", f"{ticket}/{number}")


def request(
    ticket: str, number: int = 0, *, per_key: int | None = None, capacity: int = 1, **more: Any
) -> CoordinatorRequest:
    """Return a request."""
    timeout_ms = more.pop("timeout_ms", None)
    terms, spec = ResourceTerms("r", capacity, LEASE_MS, per_key=per_key), AcquireSpec(ticket, **more)
    return CoordinatorRequest(terms, spec, requester(ticket, number), timeout_ms)


def told(effects: list[Notification]) -> list[tuple[str, str]]:
    """Return what is told to whom."""
    return [(effect.error or effect.kind, effect.to.request) for effect in effects]


class Books(RuleBasedStateMachine):
    """Calls on the books of a coordinator, by runs that each know one ticket at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = START_MS
        self.books = QueueState("r")
        self.per_key = 0
        self.numbers = 0
        self.named: dict[str, str] = {}  # the request of each ticket that holds or waits

    def us(self) -> int:
        """Let a millisecond pass, and return the moment."""
        self.now_ms += 1
        return self.now_ms * 1000

    @rule(ticket=TICKETS, key=KEYS, weight=st.integers(1, 3), share=SHARES)
    def ask(self, ticket: str, key: str, weight: int, share: float) -> None:
        """Ask for a permit, if the ticket is not known."""
        self._ask(ticket, key, weight, share, "wait")

    @rule(ticket=TICKETS, key=KEYS, weight=st.integers(1, 3), full=REPLACING)
    def replace(self, ticket: str, key: str, weight: int, full: Full) -> None:
        """Ask for a permit in place of others of the key."""
        self._ask(ticket, key, weight, 1, full)

    @rule(ticket=TICKETS)
    def release(self, ticket: str) -> None:
        """Release what it holds, by its fence, or take it out of the queue."""
        if ticket not in self.named:
            return
        holder = self.books.holder(ticket)
        fence, name = (holder.permit.fence, "") if holder else (None, self.named[ticket])
        self.released(Release(ticket, fence, name), self.us())
        self._forget_the_rest()

    @rule(per_key=st.sampled_from([0, 3, 4]))
    def limit(self, per_key: int) -> None:
        """Let the next request declare another limit of keys."""
        self.per_key = per_key

    def _ask(self, ticket: str, key: str, weight: int, share: float, full: Full) -> None:
        if ticket in self.named:
            return
        self.numbers += 1
        key = self.key_of(key)
        more = {"key": key, "share": share if key else 1, "weight": weight, "full": full, "grace_ms": GRACE_MS}
        asked = request(ticket, self.numbers, per_key=self.per_key, capacity=CAPACITY, **more)
        self.named[ticket] = asked.requester.request
        self.asked(asked, self.us())
        self._forget_the_rest()

    def _forget_the_rest(self) -> None:
        known = {holder.permit.ticket for holder in self.books.holders}
        known |= {place.request.spec.ticket for place in self.books.queue}
        self.named = {ticket: name for ticket, name in self.named.items() if ticket in known}

    def key_of(self, drawn: str) -> str:
        """Return the key of a request."""
        return drawn

    def asked(self, asked: CoordinatorRequest, now_us: int) -> None:
        """Pass a request to the books."""
        self.books.request(asked, now_us)

    def released(self, release: Release, now_us: int) -> None:
        """Pass a release to the books."""
        self.books.release(release, now_us)


class OneKey(Books):
    """The same calls on the books and on the model that the scripts for Redis are checked against, all of one key."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(clock=self.now_ms * 1000)
        self.key = ""

    @initialize(key=st.sampled_from(["", "k"]))
    def choose(self, key: str) -> None:
        """Choose the key of all requests."""
        self.key = key

    def key_of(self, drawn: str) -> str:
        """Return the key of a request."""
        del drawn
        return self.key

    def asked(self, asked: CoordinatorRequest, now_us: int) -> None:
        """Pass a request to both."""
        self.model.clock = now_us
        effects = self.books.request(asked, now_us)
        ticket, name = asked.spec.ticket, asked.requester.request
        settings = f"{asked.spec.weight}    {self.per_key} {asked.spec.share}"
        reply = self.model.acquire(
            ticket, name, PLACE, "0", settings, LEASE_MS, CAPACITY, LEASE_MS, -1, IDLE_MS, asked.spec.key
        )
        assert (("ValueError", name) in told(effects)) == (reply[0] == Status.MISFIT)
        if reply[0] == Status.QUEUED and asked.spec.replaces:
            self.model.supersede(ticket, name, int(asked.spec.full == "replace-holder"), LEASE_MS, GRACE_MS, IDLE_MS)

    def released(self, release: Release, now_us: int) -> None:
        """Pass a release to both."""
        self.model.clock = now_us
        self.books.release(release, now_us)
        self.model.release(release.ticket, release.request, str(release.fence or ""), LEASE_MS, 0, IDLE_MS)

    @invariant()
    def the_same_hold(self) -> None:
        """The same tickets hold, granted in the same order, and the same of them are replaced."""
        held = sorted(self.model.held.values(), key=lambda each: each.fence)
        holders = sorted(self.books.holders, key=lambda each: each.permit.fence)
        assert [each.permit.ticket for each in holders] == [each.ticket for each in held]
        assert [bool(each.replaced_by) for each in holders] == [each.is_replaced for each in held]

    @invariant()
    def the_same_wait(self) -> None:
        """The same tickets wait, in the same order."""
        waiters = sorted(self.model.queue.values(), key=lambda each: each.arrival)
        assert [place.request.spec.ticket for place in self.books.queue] == [each.ticket for each in waiters]


class ManyKeys(Books):
    """What holds of the books whatever the keys, the shares and the limits are."""

    def asked(self, asked: CoordinatorRequest, now_us: int) -> None:
        """Pass a request to the books, and look at what is granted."""
        before = list(self.books.holders)
        waits = asked.spec.replaces and not any(
            effect.kind == "granted" for effect in self.books.request(asked, now_us)
        )
        if not asked.spec.replaces:
            self.books.request(asked, now_us)
        self._look_at_grants(before)
        if waits and any(place.request.spec.ticket == asked.spec.ticket for place in self.books.queue):
            assert [p.request.spec.ticket for p in self.books.queue if p.request.spec.key == asked.spec.key] == [
                asked.spec.ticket
            ]

    def released(self, release: Release, now_us: int) -> None:
        """Pass a release to the books, and look at what is granted."""
        before = list(self.books.holders)
        super().released(release, now_us)
        self._look_at_grants(before)

    def _look_at_grants(self, before: list[Holder]) -> None:
        """No new permit takes its key above the limit of this moment."""
        for key in {each.permit.key for each in self.books.holders if each not in before and each.permit.key}:
            units = sum(each.permit.weight for each in self.books.holders if each.permit.key == key)
            assert not self.books.per_key or units <= self.books.per_key

    @invariant()
    def the_capacity_is_kept(self) -> None:
        """No more is held than there is."""
        assert self.books.held <= CAPACITY

    @invariant()
    def no_one_passes_in_a_key(self) -> None:
        """Whoever waits asked later than all of the same key who hold."""
        for holder in self.books.holders:
            for place in self.books.queue:
                if place.request.spec.key == (holder.permit.key or ""):
                    assert number_of(holder.requester) < number_of(place.requesters[0])

    @invariant()
    def nothing_is_idle(self) -> None:
        """If any key may have another permit, then one of these does not fit: its turn is next."""
        free, firsts = CAPACITY - self.books.held, dict[str, CoordinatorRequest]()
        for place in self.books.queue:
            firsts.setdefault(place.request.spec.key, place.request)
        able = [asked for asked in firsts.values() if self._may_have(asked)]
        assert not able or any(asked.spec.weight > free for asked in able)

    def _may_have(self, asked: CoordinatorRequest) -> bool:
        units = sum(each.permit.weight for each in self.books.holders if each.permit.key == asked.spec.key)
        return not (self.books.per_key and asked.spec.key) or units + asked.spec.weight <= self.books.per_key

    @invariant()
    def the_oldest_are_replaced(self) -> None:
        """Of the permits of a key, those that a newer request ended are older than the others."""
        for key in {each.permit.key for each in self.books.holders}:
            own = sorted((h for h in self.books.holders if h.permit.key == key), key=lambda each: each.permit.fence)
            ended = [bool(each.replaced_by) for each in own]
            assert ended == sorted(ended, reverse=True)


def number_of(asked: Requester) -> int:
    """Return the how-manieth request of the test this is."""
    return int(asked.request.split("/")[1])


TestOneKey = OneKey.TestCase
TestOneKey.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestManyKeys = ManyKeys.TestCase
TestManyKeys.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@given(
    shares=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=2, max_size=4),
    capacity=st.integers(2, 4),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_keys_that_always_wait_get_their_shares(shares: list[float], capacity: int, seed: int) -> None:
    """Between any two moments, what two keys were granted for their shares differs by one request of each at most."""
    books, chance, granted = QueueState("r"), Random(seed), [0.0] * len(shares)
    largest = [2 / share for share in shares]
    numbers = itertools.count()

    def ask(key: int) -> None:
        ticket = f"{key}-{next(numbers)}"
        more: dict[str, Any] = {"key": f"k{key}", "share": shares[key], "weight": chance.randint(1, 2)}
        books.request(request(ticket, capacity=capacity, **more), us(0))

    books.request(request("first", capacity=capacity, weight=capacity), us(0))
    for key in [*range(len(shares))] * (capacity + 1):  # one release may grant as many as the capacity of one key
        ask(key)
    moments = [list(granted)]
    for moment in range(40):
        ends = chance.choice(books.holders).permit
        for effect in books.release(Release(ends.ticket, ends.fence), us(moment)):
            key = int(effect.to.request[0])
            granted[key] += effect.permit.weight / shares[key] if effect.permit else 0
            ask(key)
        moments.append(list(granted))
    for one, other in itertools.combinations(range(len(shares)), 2):
        ahead = [each[one] - each[other] for each in moments]
        assert max(ahead) - min(ahead) <= largest[one] + largest[other] + 0.01  # tags are whole numbers


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
    order = ["a1", "b1", "n", "a2", "a3"]
    assert waiters(books) == order
    assert {each.ticket: each.key for each in snapshot(books, 100, START_MS).waiters}["a2"] == "a"
    positions = [position(books, ticket) for ticket in order]
    assert [position.rank for position in positions if position] == [1, 2, 3, 4, 5]
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
        assert "'new'" in lost.reason
        assert books.permit("old", permit.fence) is None
        books.renew(Renewal("old", permit.fence, LEASE_MS), us(2))
        books.adopt(Adoption("old", permit.fence, requester("other"), LEASE_MS), us(3))
        assert told(books.request(request("old", 3), us(4))) == [("Superseded", "old/3")]
        assert not books.expire(us(400))
        if ends == "released":
            effects = books.release(Release("old", permit.fence), us(450))
        else:
            assert books.next_ms(START_MS + 450) == START_MS + 501
            effects = books.expire(us(501))
        assert told(effects) == [("granted", "new/2")]


def test_a_late_look_does_not_prolong_a_permit_that_is_replaced() -> None:
    """A look at its run that was under way then finds it open: it ends after the grace all the same."""
    books = QueueState("r")
    (granted,) = books.request(request("old", 1), us(0))
    assert granted.permit is not None
    books.request(request("new", 2, full="replace-holder", grace_ms=500), us(1))
    books.apply_status(requester("old", 1), "open", us(2))
    assert books.next_ms(START_MS + 2) == START_MS + 501
    assert told(books.expire(us(501))) == [("granted", "new/2")]


@pytest.mark.parametrize("per_key", [None, 1])
def test_the_units_of_a_permit_are_for_who_replaced_it(per_key: int | None) -> None:
    """They do not go to requests of other keys that have waited for longer, at a limit of its key or without one."""
    books = QueueState("r")
    (granted,) = books.request(request("old", key="a", per_key=per_key), us(0))
    assert granted.permit is not None
    books.request(request("waiting", key="b", per_key=per_key), us(1))
    books.request(request("new", key="a", per_key=per_key, full="replace-holder", grace_ms=500), us(2))
    assert told(books.release(Release("old", granted.permit.fence), us(3))) == [("granted", "new/0")]


def test_a_ticket_has_one_key() -> None:
    """With another one it is refused, whether it waits or is held."""
    books = QueueState("r")
    books.request(request("held", key="a"), us(0))
    books.request(request("waiting", key="a"), us(1))
    for ticket in ("held", "waiting"):
        assert told(books.request(request(ticket, 1, key="b"), us(2))) == [("ValueError", f"{ticket}/1")]


def test_a_writer_waits_no_longer_than_a_reader() -> None:
    """Its turn costs as much as that of a reader, so readers with keys do not pass it for ever."""
    books = QueueState("r")
    all_units = 2**31 - 1
    books.request(request("first", capacity=all_units), us(0))
    books.request(request("writer", capacity=all_units, weight=all_units, key="w"), us(1))
    for number in range(4):
        books.request(request(f"reader{number}", capacity=all_units, key="a"), us(2))
    (holder,) = books.holders
    assert told(books.release(Release("first", holder.permit.fence), us(3))) == [("granted", "writer/0")]


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
