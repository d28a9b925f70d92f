"""The registry of the tickets that relays track on behalf of workflow runs, on servers, without Temporal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from redlease_temporal.backends.redis.registry import OWN, SCRIPTS, Registry, TicketRecord
from redlease_temporal.payloads.locks import Terms

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import MakeClient, Servers

RECORDS = 10_050  # more than were ever read at once
TAKEN = range(0, RECORDS, 100)


def record_of(number: int) -> TicketRecord:
    """Return the record of one workflow of many."""
    workflow = f"workflow-{number}"
    return TicketRecord(Terms("r", 1, 1000), workflow, "request", workflow, "run", "run", 3, "1", "", "", "o")


@pytest.fixture
async def registry_of(make_client: MakeClient, servers: Servers, prefix: str) -> Callable[[str], Registry]:
    """A factory of registries, each as the relay of that name sees it."""
    tickets = (await make_client(url=servers.url("valkey9"))).tickets
    tickets.connect(*SCRIPTS)
    return lambda relay: Registry(tickets, prefix, "g", relay)


@pytest.mark.slow
async def test_a_relay_reads_all_that_is_its_own(registry_of: Callable[[str], Registry]) -> None:
    """Ten thousand records are read in pages; those that another relay has taken over are not among them."""
    one, other = registry_of("one"), registry_of("other")
    records = [record_of(number) for number in range(RECORDS)]
    await asyncio.gather(*map(one.claim, records))
    await asyncio.gather(*(other.claim(records[number]) for number in TAKEN))
    kept = {record.id: record for number, record in enumerate(records) if number not in TAKEN}
    assert {record_id: TicketRecord.read(text) for record_id, text in (await one.list_owned()).items()} == kept
    assert (await other.list_owned()).keys() == {records[number].id for number in TAKEN}


async def test_a_watch_is_ended_for_its_own_run_only(registry_of: Callable[[str], Registry]) -> None:
    """Who has looked after an earlier run leaves alone what was written for a later one meanwhile."""
    registry = registry_of("one")
    earlier, later = record_of(1), replace(record_of(1), chain="later")
    await registry.beat(3000)
    await registry.claim(earlier)
    assert await registry.put(later)
    await registry.drop(earlier.id, chain=earlier.chain)
    assert (await registry.list_owned()).keys() == {later.id}
    await registry.drop(later.id, chain=later.chain)
    assert not await registry.list_owned()


async def test_what_is_written_of_watches_is_read_in_small_replies(registry_of: Callable[[str], Registry]) -> None:
    """However much stands in each record, no reply is so long that a server would end the connection."""
    one, heir = registry_of("one"), registry_of("heir")
    await one.beat(3000)
    records = [
        replace(record_of(number), metadata={"note": "\x01" * 1300}, token="t" * 12_000) for number in range(200)
    ]
    await asyncio.gather(*map(one.claim, records))
    first = await one._call(OWN, "one", "")
    assert 10 < len(first) // 2 < 100
    assert sum(map(len, first[2::2])) < 600_000
    assert {record_id: TicketRecord.read(text) for record_id, text in (await one.list_owned()).items()} == {
        record.id: record for record in records
    }
    await one.beat(0)
    left = list(await heir.list_owned("one"))
    taken = [record for start in range(0, 200, 50) for record in await heir.inherit("one", left[start : start + 50])]
    assert {record.id for record in taken} == {record.id for record in records}
