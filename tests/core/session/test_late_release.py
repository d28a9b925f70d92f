"""A release that reaches the server only after the lease of its permit, in virtual time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from redlease.testing import Fault, Simulation

if TYPE_CHECKING:
    from redlease import Redlease


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault(0.9, "restart", seconds=4.0), id="never sent before"),
        pytest.param(Fault(0.9, "silence", "a", seconds=4.0), id="sent, and not answered"),
    ],
)
def test_a_release_after_the_lease_says_so(fault: Fault) -> None:
    """It waits for the server within `call_timeout`, and has its word: the permit was no longer held."""
    released: list[bool] = []

    async def main(client: Redlease) -> None:
        lock = client.lock("ledger", lease=2)
        permit = await lock.acquire()
        await asyncio.sleep(1)
        released.append(await lock.release(permit))

    simulation = Simulation(faults=[fault], engine="model")
    simulation.process("a", main, call_timeout=60)
    assert simulation.run().left == {}
    assert released == [False]
