"""Histories of real processes on a real server, judged by Porcupine and by our own checks; and what the judges find."""

from __future__ import annotations

import pytest

from campaign import OTHERS, REDLEASE, judge_all, record_and_judge
from episodes import FAULTS
from records import MS, History, Loss, Operation, Seen

# Go builds Porcupine when it is asked for the first time on a machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_histories_keep_the_promises() -> None:
    """Processes hold, wait, are stopped past their leases and killed: exclusion, order, fences and notices hold."""
    findings = await record_and_judge(REDLEASE, 160, seed=16)
    assert findings.violations == []
    assert findings.judged["histories"] >= 160
    assert findings.judged["acquire"] > 1000
    assert findings.judged["pairs in order"] > 1000
    assert findings.judged["losses"] > 10


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_fails_breaks_no_promise(fault: str) -> None:
    """However it fails, all promises hold; where data was lost, exclusion from one lease later on, and fences grow."""
    few = REDLEASE._replace(histories=8, processes=3)
    findings = await record_and_judge(few, 8, seed=16, fault=FAULTS[fault])
    assert findings.violations == []
    assert findings.judged["faults"] == 1
    assert findings.judged["acquire"] > 0


@pytest.mark.parametrize("library", OTHERS)
async def test_other_locks_break_what_users_assume(library: str) -> None:
    """The same workload on other locks: two bodies believe to hold at once, and newcomers pass those who wait."""
    found: set[str] = set()
    for seed in range(5):  # nearly always the first shows both; a stop may meet no holder
        if found != {"exclusion", "order"}:
            found |= (await record_and_judge(OTHERS[library], 40, seed)).kinds().keys()
    assert found == {"exclusion", "order"}


def history() -> History:
    """Return a history in which everything is right; times in ms, fences as a server of that time gives them."""

    def operation(op: str, ticket: str, call: int, returned: int, fence: int) -> Operation:
        client = ord(ticket)
        return Operation(op, client, ticket, call * MS, returned * MS, fence=fence, until=(returned + 100) * MS)

    calls = [
        operation("acquire", "a", 0, 2, 1),
        operation("check", "a", 5, 6, 1),
        operation("release", "a", 10, 12, 1),
        operation("acquire", "b", 3, 13, 2),
        operation("check", "b", 14, 15, 2),
        operation("release", "b", 20, 22, 2),
        operation("acquire", "c", 4, 23, 3),
        operation("check", "c", 30, 31, 3),
        operation("acquire", "d", 140, 160, 4),
    ]
    seen = [Seen(4 * MS, 5 * MS, ["b", "c"])]
    return History("planted", 1, calls, seen, [Loss(ord("c"), "c", 132 * MS, 131 * MS)])


def change(recorded: History, kind: str, ticket: str, **values: int) -> None:
    """Change one operation."""
    (found,) = (each for each in recorded.operations if (each.op, each.ticket) == (kind, ticket))
    for name, value in values.items():
        setattr(found, name, value)


def test_what_is_right_is_found_right() -> None:
    """No judge objects to a permit that ended by itself, or to a process that died while it released."""
    right = history()
    change(right, "release", "b", returned=None)  # type: ignore[arg-type]
    assert judge_all([history()]).violations == []
    assert judge_all([right]).violations == []


@pytest.mark.parametrize(
    ("kind", "operation", "ticket", "values"),
    [
        ("exclusion", "acquire", "b", {"call": 3 * MS, "returned": 9 * MS}),
        ("exclusion", "check", "a", {"call": 14 * MS, "returned": 15 * MS}),
        ("exclusion", "check", "c", {"call": 170 * MS, "returned": 171 * MS}),
        ("exclusion", "acquire", "c", {"weight": 2}),
        ("fences", "acquire", "d", {"fence": 2}),
    ],
)
def test_a_planted_violation_is_found(kind: str, operation: str, ticket: str, values: dict[str, int]) -> None:
    """One call that is not as it should be is found, by the judge that is for it."""
    wrong = history()
    change(wrong, operation, ticket, **values)
    assert kind in judge_all([wrong]).kinds()


def test_what_outlives_a_loss_of_data_is_found() -> None:
    """Who was granted before a loss may hold beside others for one lease, and no longer."""
    lost = history()
    lost.struck, lost.lease_ns = (13 * MS, 13 * MS), 20 * MS
    for each in lost.operations:
        each.fence += 20_000 * (each.ticket in "cd")  # in µs: these were granted after it
    change(lost, "check", "b", call=31 * MS, returned=32 * MS)
    assert judge_all([lost], kept=False).violations == []
    change(lost, "check", "b", call=40 * MS, returned=41 * MS)
    assert judge_all([lost], kept=False).kinds() == {"exclusion": 1}
    change(lost, "check", "b", call=31 * MS, returned=32 * MS)
    change(lost, "acquire", "d", call=24 * MS, returned=26 * MS)
    assert judge_all([lost], kept=False).kinds() == {"exclusion": 1}


def test_a_planted_change_of_order_is_found() -> None:
    """Who was behind another in the queue, or came later, has the lower fence; but not if the other stood still."""
    wrong = history()
    wrong.seen[0].waiters.reverse()
    assert judge_all([wrong]).kinds() == {"order": 1}
    wrong.stalls[ord("c")].append((4 * MS, 20 * MS))
    assert judge_all([wrong]).violations == []


def test_a_planted_late_notice_is_found() -> None:
    """A loss that is told half a second late is found, unless the process stood still until then."""
    wrong = history()
    wrong.losses[0].at += 500 * MS
    assert judge_all([wrong]).kinds() == {"losses": 1}
    wrong.stalls[ord("c")].append((130 * MS, 630 * MS))
    assert judge_all([wrong]).violations == []
