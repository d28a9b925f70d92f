"""A master's death while a lock is held and waited for, once under Sentinels and once in a cluster; and its judge."""

from __future__ import annotations

import pytest
from failover import LATE_WRITES, LEASE_S, SERVERS, WAITERS, Belief, Run


@pytest.mark.slow
@pytest.mark.parametrize("servers", SERVERS)
def test_a_master_dies_whose_replica_lacks_the_grant(servers: str) -> None:
    """All waiters are served, two believe to hold for less than a lease, and every late write is refused."""
    run = SERVERS[servers]("valkey9", behind=True)
    assert run.problems() == []
    assert len(run.beliefs) == 1 + WAITERS
    assert run.refused >= LATE_WRITES


def test_what_is_wrong_is_found() -> None:
    """An overlap or a pause longer than a lease, fences that go back, and a late write that passed, each by itself."""
    first, second = Belief(1, 0.0, 2.0), Belief(2, 1.5, 3.0)
    right = Run(1.0, 1.0, [first, second], [1, 1, 2], refused=1)
    assert (right.served_s, right.overlap_s, right.problems()) == (0.5, 0.5, [])
    wrong = [
        Run(1.0, 1.0, [Belief(1, 0.0, 20.0), Belief(2, 1.5, 30.0)], [1, 2], refused=1),
        Run(1.0, 1.0, [first, Belief(2, 2.0 + LEASE_S, 40.0)], [1, 2], refused=1),
        Run(1.0, 1.0, [first, Belief(1, 1.5, 3.0)], [1, 1], refused=1),
        Run(1.0, 1.0, [first, second], [1, 2, 1], refused=1),
        Run(1.0, 1.0, [first, second], [1, 2]),
    ]
    assert [len(run.problems()) for run in wrong] == [1] * len(wrong)
