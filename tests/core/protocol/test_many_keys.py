"""A raised limit of more keys than one call can look at: no unit is idle, and no key is passed over for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from many_keys import ManyKeys

from set_clock import RealEngine

if TYPE_CHECKING:
    from servers import Server


@pytest.mark.parametrize("real_engine", ["redis7", "valkey9"])
def test_no_key_is_passed_over_for_long(server: Server, seed: int, is_long: bool) -> None:
    """Random calls leave no unit idle that a waiter may have; raises in turn reach each key, however many come."""
    with RealEngine(server) as engine:
        for number in range(200 if is_long else 3):
            ManyKeys(engine, f"{seed} {number}").play(200)
