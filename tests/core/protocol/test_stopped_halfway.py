"""A script that stops with an error at any of its commands: nobody holds more than there is, and all is served again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from stopped_scripts import CHANGING, FakeStopping, History, RealStopping

from servers import find_binary

if TYPE_CHECKING:
    from servers import Server

NEWER = [engine for engine in ("redis7", "valkey9") if find_binary(engine)]  # which have PEXPIRETIME


def test_each_operation_stopped_at_each_command(seed: int) -> None:
    """Whatever the call was about to do, what it leaves is too strict or is found and repaired."""
    for number in range(len(CHANGING)):
        History(FakeStopping(), str(seed), number).stop_each()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("real_engine", NEWER)
def test_many_histories_of_which_a_call_is_stopped(server: Server, seed: int, *, is_long: bool) -> None:
    """So it is in many histories of many kinds."""
    with RealStopping(server) as engine:
        for number in range(20_000 if is_long else 200):
            History(engine, f"many {seed}", number).stop_each()
