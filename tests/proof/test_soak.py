"""Load with faults for some seconds, and the judge of what has grown."""

from __future__ import annotations

import pytest

from soak import Sample, problems, soak


@pytest.mark.slow
async def test_some_seconds_of_load_leave_nothing_behind() -> None:
    """Twice load with a fault, then rest: tasks, timers, connections, channels and keys are as many as before."""
    samples, done = await soak(6.0, seed=16)
    assert list(problems(samples)) == []
    assert done["done"]


@pytest.mark.parametrize("name", ["tasks", "timers", "connections", "channels", "keys", "held", "memory_mb"])
def test_what_has_grown_is_found(name: str) -> None:
    """More of anything at the end is found; not more in between, but for what is held."""
    flat = [Sample(9, 5, 3, 3, 24, 0, 60.0)] * 9
    grown = flat[0]._replace(**{name: 1 if name == "held" else 100})
    assert list(problems(flat)) == []
    assert len(list(problems([*flat, *[grown] * 3]))) == 1
    if name != "held":
        assert list(problems([*flat[:4], grown, *flat[4:]])) == []
