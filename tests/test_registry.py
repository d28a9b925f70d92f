"""The registry of what relays watch on behalf of workflow runs, on servers, without Temporal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from redlease import wire
from redlease_temporal.calls import Terms
from redlease_temporal.registry import SCRIPTS, Registry, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import MakeClient, Servers

WATCHES = 10_050  # more than were ever read at once
TAKEN = range(0, WATCHES, 100)


def watch_of(number: int) -> Watch:
    """Return the watch of one workflow of many."""
    workflow = f"workflow-{number}"
    return Watch(Terms("r", 1, 1000), workflow, "request", workflow, "run", "run", 3, "1", "", "", "o")


@pytest.fixture
async def registry_of(make_client: MakeClient, servers: Servers, prefix: str) -> Callable[[str], Registry]:
    """A factory of registries, each as the relay of that name sees it."""
    connection = (await make_client(url=servers.url("redis7"))).room.connection
    connection.scripts = (*wire.SCRIPTS, *SCRIPTS)
    return lambda relay: Registry(connection, prefix, "g", relay)


async def test_a_relay_reads_all_that_is_its_own(registry_of: Callable[[str], Registry]) -> None:
    """Ten thousand watches are read in pages; those that another relay has taken over are not among them."""
    one, other = registry_of("one"), registry_of("other")
    watches = [watch_of(number) for number in range(WATCHES)]
    await asyncio.gather(*map(one.claim, watches))
    await asyncio.gather(*(other.claim(watches[number]) for number in TAKEN))
    kept = {watch.id: watch for number, watch in enumerate(watches) if number not in TAKEN}
    assert {watch_id: Watch.read(text) for watch_id, text in (await one.own()).items()} == kept
    assert (await other.own()).keys() == {watches[number].id for number in TAKEN}


async def test_a_watch_is_ended_for_its_own_run_only(registry_of: Callable[[str], Registry]) -> None:
    """Who has looked after an earlier run leaves alone what was written for a later one meanwhile."""
    registry = registry_of("one")
    earlier, later = watch_of(1), replace(watch_of(1), chain="later")
    await registry.beat(3000)
    await registry.claim(earlier)
    assert await registry.put(later)
    await registry.drop(earlier.id, chain=earlier.chain)
    assert (await registry.own()).keys() == {later.id}
    await registry.drop(later.id, chain=later.chain)
    assert not await registry.own()
