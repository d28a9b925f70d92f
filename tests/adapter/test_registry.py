"""The registry of the tickets that relays track on behalf of workflow runs, on servers, without Temporal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from redlease_temporal._backends.redis.registry import LIST, SCRIPTS, Registry, ReleaseNote, TicketRecord
from redlease_temporal._payloads.locks import ResourceTerms

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import MakeClient, Servers

RECORDS = 10_050  # more than were ever read at once
TAKEN = range(0, RECORDS, 100)


def record_of(number: int) -> TicketRecord:
    """Return the record of one workflow of many."""
    workflow = f"workflow-{number}"
    return TicketRecord(ResourceTerms("r", 1, 1000), workflow, "request", workflow, "run", "run", 3, "1", "", "", "o")


@pytest.fixture
async def registry_of(make_client: MakeClient, servers: Servers, prefix: str) -> Callable[[str], Registry]:
    """A factory of registries, each as the relay of that name sees it."""
    tickets = (await make_client(url=servers.url("valkey9")))._operations
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
    assert await registry.save(later)
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
    first = await one._call(LIST, "one", "")
    assert 10 < len(first) // 2 < 100
    assert sum(map(len, first[2::2])) < 600_000
    assert {record_id: TicketRecord.read(text) for record_id, text in (await one.list_owned()).items()} == {
        record.id: record for record in records
    }
    await one.beat(0)
    left = list(await heir.list_owned("one"))
    taken = [record for start in range(0, 200, 50) for record in await heir.inherit("one", left[start : start + 50])]
    assert {record.id for record in taken} == {record.id for record in records}


def released(record: TicketRecord, fence: int, event: int = 7) -> TicketRecord:
    """Return what a process lays claim to that is asked for a release: of a permit by its fence, or of a request."""
    request = "" if fence else record.request
    return replace(record, request=request, fence=fence, release=ReleaseNote(f"release-{event}", event, fence))


@pytest.fixture
async def pair(registry_of: Callable[[str], Registry]) -> tuple[Registry, Registry]:
    """Two relays."""
    one, other = registry_of("one"), registry_of("other")
    for registry in (one, other):
        await registry.beat(3000)
    return one, other


async def stored(registry: Registry, record: TicketRecord) -> TicketRecord:
    """Return the record as it is stored, if this relay owns it."""
    return TicketRecord.read((await registry.list_owned())[record.id])


@pytest.mark.parametrize("fence", [0, 5])
async def test_a_note_of_a_release_crosses_another_write(pair: tuple[Registry, Registry], fence: int) -> None:
    """A relay that has read the record before the release was noted, and writes it after that, drops no note."""
    one, other = pair
    record = replace(record_of(1), fence=fence)
    await one.claim(record)
    noted = await other.claim(leaving := released(record, fence))
    assert noted.release == leaving.release
    assert await one.claim(record_of(1)) == noted  # it has it back, and does not heed what it is answered
    record = replace(record, arrival=9, metadata={"release": "null"})
    assert await one.save(record)
    assert record.release == leaving.release
    assert await stored(one, record) == record
    newer = replace(record, release=ReleaseNote("newer", 9, fence))
    assert await one.save(newer)
    assert await stored(one, newer) == newer
    later = await other.claim(released(record, fence, 11))
    assert later.release == ReleaseNote("release-11", 11, fence)


@pytest.mark.parametrize("fence", [0, 5])
async def test_a_note_of_a_release_is_of_one_request(pair: tuple[Registry, Registry], fence: int) -> None:
    """The next request of a ticket is not released by the note of the last one, and neither is another permit."""
    one, other = pair
    record = replace(record_of(1), fence=fence)
    await one.claim(released(record, fence))
    following = replace(record, request="next", fence=6)
    assert await one.save(following)
    assert (await stored(one, following)).release is None
    assert (await other.claim(released(record, fence))).release is None


async def test_lost_data_loses_no_note(pair: tuple[Registry, Registry]) -> None:
    """The relay that writes next has the note that another one has written meanwhile."""
    one, other = pair
    one.generation = "lost"
    record = record_of(1)
    noted = await other.claim(released(record, 0))
    assert await one.save(record)
    assert record.release == noted.release
