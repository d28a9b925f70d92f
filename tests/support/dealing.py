"""In which order a run takes its tests: first those that may take long, so that none of them begins late."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# A test that needs a limit of its own, in seconds, from here on is one of the long ones.
LONG_S = 120


def may_take_long(item: pytest.Item) -> bool:
    """Tell whether a test has a limit far above the usual one."""
    marker = item.get_closest_marker("timeout")
    return marker is not None and marker.args[0] >= LONG_S


def longest_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in such an order that each worker begins with its share of the long ones.

    `--dist worksteal` cuts the list into so many equal parts; whoever is done takes over the later half of another's.
    """
    long = [item for item in items if may_take_long(item)]
    short = [item for item in items if not may_take_long(item)]
    dealt: list[pytest.Item] = []
    for remaining in range(workers, 0, -1):
        share = len(long) // remaining
        rest = (len(long) + len(short)) // remaining - share
        dealt += long[:share] + short[:rest]
        long, short = long[share:], short[rest:]
    return dealt
