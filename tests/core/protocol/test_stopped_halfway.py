"""A script that stops with an error at any of its commands: nobody holds more than there is, and all are served."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from stopped_scripts import CHANGING, FakeStopping, History, RealStopping

from servers import find_binary

if TYPE_CHECKING:
    from servers import Server

NEWER = [engine for engine in ("redis7", "valkey9") if find_binary(engine)]  # which have PEXPIRETIME


@pytest.mark.parametrize("name", CHANGING)
def test_an_operation_stopped_at_some_commands(name: str, seed: int) -> None:
    """Whatever the call was about to do, what it leaves is too strict or is found and repaired."""
    history = History(FakeStopping(), str(seed), CHANGING.index(name))
    stops_at = Random(f"{name} {seed}").randint(1, 4)
    while history.play(stops_at):
        stops_at += max(4, stops_at // 2)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("real_engine", NEWER)
def test_many_histories_of_which_a_call_is_stopped(server: Server, seed: int, *, is_long: bool) -> None:
    """So it is in many histories of many kinds."""
    with RealStopping(server) as engine:
        for number in range(20_000 if is_long else 40):
            History(engine, f"many {seed}", number).stop_each()
