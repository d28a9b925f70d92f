"""The registry of what relays watch on behalf of workflow runs, on servers, without Temporal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from redlease_temporal.backends.redis.registry import OWN, SCRIPTS, Registry, Watch
from redlease_temporal.payloads.locks import Terms

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
    tickets = (await make_client(url=servers.url("valkey9"))).tickets
    tickets.connect(*SCRIPTS)
    return lambda relay: Registry(tickets, prefix, "g", relay)


@pytest.mark.slow
async def test_a_relay_reads_all_that_is_its_own(registry_of: Callable[[str], Registry]) -> None:
    """Ten thousand watches are read in pages; those that another relay has taken over are not among them."""
    one, other = registry_of("one"), registry_of("other")
    watches = [watch_of(number) for number in range(WATCHES)]
    await asyncio.gather(*map(one.claim, watches))
    await asyncio.gather(*(other.claim(watches[number]) for number in TAKEN))
    kept = {watch.id: watch for number, watch in enumerate(watches) if number not in TAKEN}
    assert {watch_id: Watch.read(text) for watch_id, text in (await one.list_owned()).items()} == kept
    assert (await other.list_owned()).keys() == {watches[number].id for number in TAKEN}


async def test_a_watch_is_ended_for_its_own_run_only(registry_of: Callable[[str], Registry]) -> None:
    """Who has looked after an earlier run leaves alone what was written for a later one meanwhile."""
    registry = registry_of("one")
    earlier, later = watch_of(1), replace(watch_of(1), chain="later")
    await registry.beat(3000)
    await registry.claim(earlier)
    assert await registry.put(later)
    await registry.drop(earlier.id, chain=earlier.chain)
    assert (await registry.list_owned()).keys() == {later.id}
    await registry.drop(later.id, chain=later.chain)
    assert not await registry.list_owned()


async def test_what_is_written_of_watches_is_read_in_small_replies(registry_of: Callable[[str], Registry]) -> None:
    """However much stands in each watch, no reply is so long that a server would end the connection."""
    one, heir = registry_of("one"), registry_of("heir")
    await one.beat(3000)
    watches = [replace(watch_of(number), metadata={"note": "\x01" * 1300}, token="t" * 12_000) for number in range(200)]
    await asyncio.gather(*map(one.claim, watches))
    first = await one._call(OWN, "one", "")
    assert 10 < len(first) // 2 < 100
    assert sum(map(len, first[2::2])) < 600_000
    assert {watch_id: Watch.read(text) for watch_id, text in (await one.list_owned()).items()} == {
        watch.id: watch for watch in watches
    }
    await one.beat(0)
    left = list(await heir.list_owned("one"))
    taken = [watch for start in range(0, 200, 50) for watch in await heir.inherit("one", left[start : start + 50])]
    assert {watch.id for watch in taken} == {watch.id for watch in watches}
