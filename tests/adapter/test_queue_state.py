"""The books of a coordinator against a model of a few lines, and by hand where the model does not reach."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from redlease._core.limits import CAPACITY_MAX
from redlease_temporal._backends.coordinator.entries import Notification
from redlease_temporal._backends.coordinator.queue_state import BYTES_MAX, IDLE_MS, UNKNOWN_MAX, QueueState
from redlease_temporal._payloads.coordinator import (
    Adoption,
    Confirmed,
    CoordinatorRequest,
    Downgrade,
    Release,
    Renewal,
    Requester,
)
from redlease_temporal._payloads.locks import AcquireSpec, ResourceTerms

if TYPE_CHECKING:
    from redlease import Permit

LEASE_MS = 1000
START_MS = 1_000_000_000
TICKETS = st.sampled_from("abcde")


def requester(ticket: str, number: int = 0) -> Requester:
    """Return the run that asks under a ticket; each number is a request of its own."""
    return Requester(f"workflow-{ticket}", f"run-{ticket}", f"run-{ticket}", f"{ticket}/{number}")


def request(
    ticket: str, number: int = 0, *, capacity: int = 1, max_waiters: int | None = None, **more: Any
) -> CoordinatorRequest:
    """Return a request."""
    timeout_ms = more.pop("timeout_ms", None)
    terms, spec = ResourceTerms("r", capacity, LEASE_MS, max_waiters), AcquireSpec(ticket, **more)
    return CoordinatorRequest(terms, spec, requester(ticket, number), timeout_ms)


def us(ms: int) -> int:
    """Return a moment of the test, in microseconds."""
    return (START_MS + ms) * 1000


def told(effects: list[Notification]) -> list[tuple[str, str]]:
    """Return what is told to whom."""
    return [(effect.error or effect.kind, effect.to.request) for effect in effects]


@dataclass
class Entry:
    """What the model knows of a ticket; `ends_ms`: its lease or its deadline."""

    number: int
    weight: int
    renewed: bool
    ends_ms: int | None
    fence: int = 0


class Against(RuleBasedStateMachine):
    """The same calls on the books and on two dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.books = QueueState("r")
        self.capacity = 2
        self.now_ms = START_MS
        self.holding: dict[str, Entry] = {}
        self.waiting: dict[str, Entry] = {}
        self.numbers = 0
        self.fence = 0

    def us(self) -> int:
        return self.now_ms * 1000

    def settle(self, effects: list[Notification], *also: str) -> None:
        """Grant as the model would, and see that just those were told of a grant."""
        granted = list(also)
        while self.waiting:
            ticket, entry = next(iter(self.waiting.items()))
            if entry.weight + sum(each.weight for each in self.holding.values()) > self.capacity:
                break
            del self.waiting[ticket]
            entry.ends_ms = self.now_ms + LEASE_MS
            self.holding[ticket] = entry
            granted.append(ticket)
        grants = [effect.permit for effect in effects if effect.kind == "granted"]
        assert [permit.ticket for permit in grants if permit] == granted
        for permit in grants:
            assert permit is not None
            if permit.ticket not in also:
                assert permit.fence > self.fence
                self.fence = permit.fence
                self.holding[permit.ticket].fence = permit.fence

    @rule(
        ticket=TICKETS, weight=st.integers(1, 3), renewed=st.booleans(), timeout_ms=st.sampled_from([None, 300, 2000])
    )
    def ask(self, ticket: str, weight: int, renewed: bool, timeout_ms: int | None) -> None:
        """Queue a new request, or repeat a known one."""
        known = self.holding.get(ticket) or self.waiting.get(ticket)
        if known is None:
            self.numbers += 1
        number = known.number if known else self.numbers
        weight = known.weight if known else weight
        asked = request(ticket, number, capacity=2, weight=weight, renewed=renewed, timeout_ms=timeout_ms)
        if self.books.declared:
            asked = replace(asked, terms=replace(asked.terms, capacity=self.books.declared))
        effects = self.books.request(asked, self.us())
        if ticket in self.holding:
            self.holding[ticket].ends_ms = self.now_ms + LEASE_MS
            self.settle(effects, ticket)
            return
        if weight > self.capacity:
            assert told(effects) == [("ValueError", f"{ticket}/{number}")]
            return
        ends_ms = None if timeout_ms is None else self.now_ms + timeout_ms
        if ticket in self.waiting:
            self.waiting[ticket].ends_ms = ends_ms
        else:
            self.waiting[ticket] = Entry(number, weight, renewed, ends_ms)
        self.settle(effects)

    @rule(ticket=TICKETS)
    def try_to_ask(self, ticket: str) -> None:
        """Ask without queueing for what is not known yet."""
        if ticket in self.holding or ticket in self.waiting:
            return
        self.numbers += 1
        asked = request(ticket, self.numbers, capacity=self.books.declared or 2, renewed=False, queue=False)
        effects = self.books.request(asked, self.us())
        if self.waiting or sum(each.weight for each in self.holding.values()) + 1 > self.capacity:
            assert told(effects) == [("Busy", f"{ticket}/{self.numbers}")]
        else:
            self.waiting[ticket] = Entry(self.numbers, 1, renewed=False, ends_ms=None)
            self.settle(effects)

    @rule(ticket=TICKETS, stale=st.booleans())
    def release(self, ticket: str, stale: bool) -> None:
        """Release under the fence, or under one that it is not held by."""
        entry = self.holding.get(ticket)
        fence = (entry.fence if entry else 1) + stale
        effects = self.books.release(Release(ticket, fence, call="c"), self.us())
        if entry and not stale:
            del self.holding[ticket]
        self.settle(effects)

    @rule(ticket=TICKETS)
    def withdraw(self, ticket: str) -> None:
        """Take back the request, whether granted or not; a late copy of it grants nothing."""
        entry = self.holding.pop(ticket, None) or self.waiting.pop(ticket, None)
        number = entry.number if entry else self.numbers + 1
        self.numbers += entry is None
        effects = self.books.release(Release(ticket, None, f"{ticket}/{number}"), self.us())
        self.settle(effects)
        late = request(ticket, number, capacity=self.books.declared or 2)
        assert ("Stale", f"{ticket}/{number}") in told(self.books.request(late, self.us()))

    @rule(ticket=TICKETS)
    def administer(self, ticket: str) -> None:
        """Release by the ticket alone; whoever had it or waited for it is told."""
        held, waited = self.holding.pop(ticket, None), self.waiting.pop(ticket, None)
        effects = self.books.release(Release(ticket), self.us())
        kinds = [kind for kind, _ in told(effects) if kind != "granted"]
        assert kinds == (["lost"] if held and held.renewed else []) + (["Withdrawn"] if waited else [])
        self.settle(effects)

    @rule(capacity=st.integers(1, 4))
    def resize(self, capacity: int) -> None:
        """Change the capacity; who can never fit any more is refused."""
        if not self.books.declared:
            return
        self.capacity = capacity
        effects = self.books.resize(capacity, self.us())
        never = [ticket for ticket, entry in self.waiting.items() if entry.weight > capacity]
        assert [effect.error for effect in effects if effect.kind == "refused"] == ["ValueError"] * len(never)
        for ticket in never:
            del self.waiting[ticket]
        self.settle(effects)

    @rule(ms=st.integers(1, 1500))
    def wait(self, ms: int) -> None:
        """Let time pass: what nobody keeps lapses, and waiters past their deadline leave."""
        self.now_ms += ms
        over = [key for key, each in self.holding.items() if not each.renewed and (each.ends_ms or 0) <= self.now_ms]
        effects = self.books.expire(self.us())
        assert not [effect for effect in effects if effect.kind == "lost"]  # nobody waits to hear of plain data
        for ticket in over:
            del self.holding[ticket]
        for ticket in [key for key, each in self.waiting.items() if each.ends_ms is not None]:
            if (self.waiting[ticket].ends_ms or 0) <= self.now_ms:
                del self.waiting[ticket]
        self.settle(effects)

    @rule(ticket=TICKETS, fate=st.sampled_from(["open", "closed"]))
    def look(self, ticket: str, fate: str) -> None:
        """Find a run open or closed."""
        entry = self.holding.get(ticket) or self.waiting.get(ticket)
        if entry is None:
            return
        effects = self.books.apply_status(requester(ticket, entry.number), fate, self.us())
        if fate == "closed":
            self.holding.pop(ticket, None)
            self.waiting.pop(ticket, None)
        elif ticket in self.holding:
            entry.ends_ms = self.now_ms + LEASE_MS
        self.settle(effects)

    @rule(ticket=TICKETS)
    def downgrade(self, ticket: str) -> None:
        """Give back all but one unit of what is held, or of what is not."""
        entry = self.holding.get(ticket)
        effects = self.books.downgrade(Downgrade(ticket, entry.fence if entry else 0), self.us())
        if entry:
            entry.weight = 1
        self.settle(effects)

    @invariant()
    def agrees(self) -> None:
        """The same hold and wait, in the same order."""
        assert [each.permit.ticket for each in self.books.holders] == list(self.holding)
        assert [each.request.spec.ticket for each in self.books.queue] == list(self.waiting)
        assert {each.permit.ticket: each.permit.fence for each in self.books.holders} == {
            ticket: entry.fence for ticket, entry in self.holding.items()
        }

    @invariant()
    def something_is_due(self) -> None:
        """No timer would ring at once for ever: after what is due was done, the next is ahead."""
        due = self.books.due(self.now_ms)
        assert due or self.books.next_ms(self.now_ms) > self.now_ms or not (self.holding or self.waiting)


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_release_that_comes_before_its_request() -> None:
    """The request that arrives after its own withdrawal is told so, and nothing is granted."""
    books = QueueState("r")
    books.release(Release("a", None, "a/0"), us(0))
    assert told(books.request(request("a"), us(1))) == [("Stale", "a/0")]
    assert not books.holders


def test_a_closed_run_is_reset_before_its_release_comes() -> None:
    """The request of the new run keeps its permit, or its place, until that run closes too."""
    books = QueueState("r")
    of_closed = {ticket: Release(ticket, None, f"{ticket}/0", run_id=f"run-{ticket}") for ticket in "ab"}
    for ticket in "ab":
        books.request(request(ticket), us(0))
        again = replace(request(ticket), requester=replace(requester(ticket), run_id=f"again-{ticket}"))
        books.request(again, us(1))
        assert books.release(of_closed[ticket], us(2)) == []
    assert [each.permit.ticket for each in books.holders] == ["a"]
    assert [each.request.spec.ticket for each in books.queue] == ["b"]
    granted = books.release(replace(of_closed["a"], run_id="again-a"), us(3))
    assert told(granted) == [("granted", "b/0")]


def test_a_repeated_request_has_its_permit_again() -> None:
    """A copy of a granted request gets the same permit with a full lease; one with another weight is refused."""
    books = QueueState("r")
    (first,) = books.request(request("a", capacity=3), us(0))
    (again,) = books.request(request("a", capacity=3), us(400))
    assert first.permit is not None
    assert again.permit == replace(first.permit, expires_at_ms=first.permit.expires_at_ms + 400)
    assert told(books.request(request("a", capacity=3, weight=2), us(500))) == [("ValueError", "a/0")]


def test_two_that_share_a_ticket() -> None:
    """Both are told of the one permit, and when one of them gives up waiting the other stays."""
    books = QueueState("r")
    books.request(request("a"), us(0))
    other = replace(request("b"), requester=requester("c"))
    books.request(request("b"), us(1))
    books.request(other, us(2))
    assert len(books.queue) == 1
    assert told(books.release(Release("a", books.holders[0].permit.fence), us(3))) == [
        ("granted", "b/0"),
        ("granted", "c/0"),
    ]
    books.request(request("a", 1), us(4))
    books.request(replace(request("a", 1), requester=requester("d")), us(5))
    books.release(Release("a", None, "a/1"), us(6))
    assert [each.requesters for each in books.queue] == [[requester("d")]]


def shared() -> tuple[QueueState, Permit]:
    """Return books in which two runs share a granted ticket and a third waits, and their permit."""
    books = QueueState("r")
    (granted,) = books.request(request("a"), us(0))
    books.request(request("b"), us(1))
    books.request(replace(request("b"), requester=requester("c")), us(2))
    books.request(request("d"), us(3))
    assert granted.permit is not None
    to_b, to_c = books.release(Release("a", granted.permit.fence), us(4))
    assert to_b.permit is not None
    assert to_b.permit == to_c.permit
    return books, to_b.permit


@pytest.mark.parametrize("how", ["told in vain", "looked at", "withdrawn"])
def test_one_of_two_that_share_a_permit_is_gone(how: str) -> None:
    """The other one holds it on, and is looked at from then on; the permit is free when that is gone too."""
    books, permit = shared()
    for leaving in "bc":
        assert books.holders[0].requester == requester(leaving)
        if how == "told in vain":
            effects = books.take_back(Notification("granted", requester(leaving), permit), us(5))
        elif how == "looked at":
            effects = books.apply_status(requester(leaving), "closed", us(5))
        else:
            effects = books.release(Release("b", None, f"{leaving}/0"), us(5))
        assert told(effects) == ([] if leaving == "b" else [("granted", "d/0")])


def test_the_second_of_two_that_share_a_permit_is_gone() -> None:
    """Nothing changes for the first, and nobody holds it when that is gone too."""
    books, permit = shared()
    assert books.take_back(Notification("granted", requester("c"), permit), us(5)) == []
    assert books.permit("b", permit.fence) is not None
    assert told(books.apply_status(requester("b"), "closed", us(6))) == [("granted", "d/0")]


def test_one_of_two_that_share_a_permit_releases_it() -> None:
    """It is released for both, and whoever still works under it is told."""
    books, permit = shared()
    effects = books.release(Release("b", permit.fence), us(5))
    assert told(effects) == [("lost", "b/0"), ("lost", "c/0"), ("granted", "d/0")]


@pytest.mark.parametrize("text", ["x", "é", "\x01", "\U0001f600", '"'])
def test_full_books_fit_into_a_run(text: str) -> None:
    """Whatever texts the requests are made of, what one run of a coordinator hands to the next is not too large."""
    books = QueueState("r")
    for number in range(10_000):
        ticket = str(number)
        who = Requester((text * 900)[:900], "r" * 36, "c" * 36, f"{'r' * 36}/{number}/{'h' * 16}")
        metadata = {"key": text * (number % 9) * 100}
        asked = replace(request(ticket, owner=text * 60, metadata=metadata), requester=who)
        if told(books.request(asked, us(number)))[-1:] == [("QueueFull", who.request)]:
            break
    else:
        pytest.fail("the books are never full")
    assert len(books.queue) > 20
    assert len(json.dumps(asdict(books))) < 1.2 * BYTES_MAX


def test_a_grant_that_reaches_nobody_goes_to_the_next() -> None:
    """The permit of a requester that is gone passes on, unless another run has taken it over meanwhile."""
    books = QueueState("r")
    (granted,) = books.request(request("a"), us(0))
    books.request(request("b"), us(1))
    assert told(books.take_back(granted, us(2))) == [("granted", "b/0")]
    assert books.take_back(granted, us(3)) == []
    adoption = Adoption("b", books.holders[0].permit.fence, requester("c"), LEASE_MS)
    to_b = Notification("granted", requester("b"), books.holders[0].permit)
    books.adopt(adoption, us(4))
    assert books.take_back(to_b, us(5)) == []
    assert books.holders[0].requester == requester("c")


def test_of_two_that_adopt_the_first_wins() -> None:
    """The first has a new fence, a copy of its adoption changes nothing, and the second finds nothing to adopt."""
    books = QueueState("r")
    (granted,) = books.request(request("a"), us(0))
    assert granted.permit is not None
    first = Adoption("a", granted.permit.fence, requester("b"), LEASE_MS)
    books.adopt(first, us(1))
    books.adopt(first, us(2))
    books.adopt(replace(first, requester=requester("c")), us(3))
    adopted = books.adopted("a", "b/0")
    assert adopted is not None
    assert adopted.fence > granted.permit.fence
    assert books.adopted("a", "c/0") is None


def test_the_next_run_of_the_chain_keeps_the_fence() -> None:
    """A permit that a run adopts from the run before it has the fence that it had."""
    books = QueueState("r")
    (granted,) = books.request(request("a"), us(0))
    assert granted.permit is not None
    successor = replace(requester("a", 1), run_id="run-2")
    books.apply_status(requester("a"), "continued", us(500))
    books.adopt(Adoption("a", granted.permit.fence, successor, LEASE_MS), us(900))
    assert books.permit("a", granted.permit.fence) is not None
    assert books.expire(us(1800)) == []


def reader_of(books: QueueState) -> Permit:
    """Return the permit of a writer of these books that became a reader."""
    (granted,) = books.request(request("a", capacity=CAPACITY_MAX, weight=CAPACITY_MAX), us(0))
    assert granted.permit is not None
    books.downgrade(Downgrade("a", granted.permit.fence), us(1))
    return granted.permit


def test_a_writer_becomes_a_reader() -> None:
    """The readers at the head of the queue enter beside it, the next writer does not, and its permit stays as it is."""
    books = QueueState("r")
    books.request(request("a", capacity=CAPACITY_MAX, weight=CAPACITY_MAX), us(0))
    permit = books.holders[0].permit
    for ticket, weight in (("b", 1), ("c", 1), ("d", CAPACITY_MAX), ("e", 1)):
        books.request(request(ticket, capacity=CAPACITY_MAX, weight=weight), us(1))
    assert books.downgrade(Downgrade("a", permit.fence + 1), us(2)) == []
    assert told(books.downgrade(Downgrade("a", permit.fence), us(2))) == [("granted", "b/0"), ("granted", "c/0")]
    assert books.downgrade(Downgrade("a", permit.fence), us(3)) == []
    assert books.permit("a", permit.fence) == replace(permit, weight=1)


def test_a_run_that_is_reset_after_a_downgrade_has_lost_the_permit() -> None:
    """Found by a look it is told so; if it asks again it is queued as a writer again; a late copy changes nothing."""
    books = QueueState("r")
    reader_of(books)
    assert told(books.apply_status(requester("a"), "reset", us(2))) == [("lost", "a/0")]
    assert not books.holders
    books = QueueState("r")
    permit = reader_of(books)
    books.request(request("b", capacity=CAPACITY_MAX), us(2))
    asked = request("a", capacity=CAPACITY_MAX, weight=CAPACITY_MAX)
    assert told(books.request(asked, us(3))) == [("ValueError", "a/0")]
    assert books.permit("a", permit.fence) is not None
    again = replace(asked, requester=replace(asked.requester, run_id="run-2"))
    assert told(books.request(again, us(4))) == [("lost", "a/0")]
    assert [each.request.spec.ticket for each in books.queue] == ["a"]


def test_an_adopted_permit_survives_a_reset_after_its_downgrade() -> None:
    """The run that adopts it never held more, so that it confirms what it has after a reset, as usual."""
    books = QueueState("r")
    permit = reader_of(books)
    successor = replace(requester("a", 1), run_id="run-2")
    books.adopt(Adoption("a", permit.fence, successor, LEASE_MS), us(2))
    assert told(books.apply_status(successor, "reset", us(3))) == [("confirm", "a/1")]
    assert books.permit("a", permit.fence) is not None


@pytest.mark.parametrize("fate", ["continued", "reset"])
def test_who_moved_on_has_a_lease_to_say_so(fate: str) -> None:
    """The permit of a run that went on as another one lapses after a lease, unless that says that it has it."""
    books = QueueState("r")
    (granted,) = books.request(request("a"), us(0))
    assert granted.permit is not None
    effects = books.apply_status(requester("a"), fate, us(1000))
    assert told(effects) == ([("confirm", "a/0")] if fate == "reset" else [])
    assert books.expire(us(1999)) == []
    books.confirmed(Confirmed("a", granted.permit.fence, "run-2"), us(1999))
    assert books.expire(us(2500)) == []
    books.apply_status(replace(requester("a"), run_id="run-2"), fate, us(2999))
    assert told(books.expire(us(4000))) == [("lost", "a/0")]


def test_a_server_that_does_not_say_is_believed_for_a_while() -> None:
    """A permit is kept over some looks that found nothing out, and not for ever."""
    books = QueueState("r")
    books.request(request("a"), us(0))
    for number in range(1, UNKNOWN_MAX + 1):
        books.apply_status(requester("a"), "unknown", us(1000 * number))
        assert books.expire(us(1000 * number)) == []
    books.apply_status(requester("a"), "unknown", us(1000 * (UNKNOWN_MAX + 1)))
    assert told(books.expire(us(1000 * (UNKNOWN_MAX + 1)))) == [("lost", "a/0")]


def test_max_hold_ends_the_keeping() -> None:
    """After it nobody looks at the run any more, and the permit lapses with its lease, or a renewed one."""
    books = QueueState("r")
    (granted,) = books.request(request("a", max_hold_ms=1500), us(0))
    assert books.due(START_MS + 1000) == [requester("a")]
    books.apply_status(requester("a"), "open", us(1000))
    assert books.due(START_MS + 2000) == []
    assert granted.permit is not None
    books.renew(Renewal("a", granted.permit.fence, 5000), us(1900))
    assert books.expire(us(2000)) == []
    assert told(books.expire(us(6900))) == [("lost", "a/0")]


def test_on_close_lease_lets_it_lapse() -> None:
    """The permit of a closed run is not given back, and lapses."""
    books = QueueState("r")
    books.request(request("a", on_close="lease"), us(0))
    assert books.apply_status(requester("a"), "closed", us(900)) == []
    assert books.holders
    assert told(books.expire(us(1000))) == [("lost", "a/0")]


def test_bounds() -> None:
    """More than `max_waiters`, and more than fits into what a run hands to the next, end in QueueFull."""
    books = QueueState("r")
    books.request(request("a", max_waiters=1), us(0))
    books.request(request("b", max_waiters=1), us(1))
    assert told(books.request(request("c", max_waiters=1), us(2))) == [("QueueFull", "c/0")]
    effects: list[Notification] = []
    number = 0
    while not effects:
        number += 1
        effects = books.request(request(f"t{number}", metadata={"k": "v" * 4000}), us(3))
    assert told(effects) == [("QueueFull", f"t{number}/0")]
    assert BYTES_MAX / 2 < books.size() <= BYTES_MAX


def test_fences_outlive_the_books() -> None:
    """New books, which know of no fence, go on above the old ones as long as time does."""
    old, new = QueueState("r"), QueueState("r")
    fences = []
    for books, ms in ((old, 0), (new, 1)):
        (granted,) = books.request(request("a"), us(ms))
        assert granted.permit is not None
        fences.append(granted.permit.fence)
    assert fences == sorted(set(fences))


def test_books_that_nobody_uses_are_idle() -> None:
    """A minute after the last use, and not while somebody holds."""
    books = QueueState("r")
    (granted,) = books.request(request("a"), us(0))
    assert granted.permit is not None
    assert not books.idle(START_MS + 10 * IDLE_MS)
    books.release(Release("a", granted.permit.fence), us(100))
    assert not books.idle(START_MS + IDLE_MS)
    assert books.idle(START_MS + IDLE_MS + 100)
    assert books.next_ms(START_MS + 200) == START_MS + IDLE_MS + 100
