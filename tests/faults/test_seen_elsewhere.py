"""What users of other libraries reported and no other test holds; docs/scenarios.md has the whole table."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from redlease import RedleaseError

from clusters import told, until
from helpers import eventually
from proxy import Fault

if TYPE_CHECKING:
    from conftest import MakeClient, MakeProxy, OwnServer

NAMES = 1000


async def test_a_release_that_meets_a_renewal(
    own_server: OwnServer, make_proxy: MakeProxy, make_client: MakeClient
) -> None:
    """A release while the reply to a renewal is on its way: it was held, nothing is lost, and nobody renews on."""
    server = own_server("valkey9")
    proxy = await make_proxy(server)
    client = await make_client(url=proxy.url)
    lock = client.lock("r", lease=1)
    hold = await lock.hold()
    proxy.plan(Fault.DELAY, 1, "EVALSHA")
    await eventually(lambda: sum(proxy.faults.values()) == 1)
    assert await hold.release()
    assert not hold.lost
    assert not (await lock.inspect()).holders
    calls = told(server, "INFO", "commandstats")["cmdstat_evalsha"]
    await asyncio.sleep(0.5)  # a renewal is due every third of the lease
    assert told(server, "INFO", "commandstats")["cmdstat_evalsha"] == calls


async def test_a_server_that_cannot_save(own_server: OwnServer, make_client: MakeClient) -> None:
    """MISCONF refuses a request whole, says what to mend, and costs a holder nothing if it is over within the lease."""
    server = own_server("valkey9", "--dbfilename", "taken.rdb")
    client = await make_client(url=server.url)
    hold = await client.lock("held", lease=5).hold()
    (Path(server.cli("CONFIG", "GET", "dir")["dir"]) / "taken.rdb").mkdir()
    server.cli("CONFIG", "SET", "save", "3600 1")
    server.cli("BGSAVE")
    await asyncio.to_thread(until, lambda: told(server, "INFO", "persistence")["rdb_last_bgsave_status"] == "err")
    with pytest.raises(RedleaseError, match="cannot save to disk"):
        await client.lock("r").acquire(timeout=5)
    server.cli("CONFIG", "SET", "save", "")
    assert not server.cli("KEYS", "*{r}*")
    async with client.lock("r"):
        pass
    assert await hold.release()


async def test_many_names_leave_nothing(own_server: OwnServer, make_client: MakeClient) -> None:
    """A thousand names, each locked by two of whom one waits, are all gone after `idle_ttl`."""
    server = own_server("valkey9")
    client = await make_client(url=server.url, idle_ttl=0.2, waiter_lease=2)

    async def lock_once(name: str) -> None:
        async with client.lock(name, lease=2):
            await asyncio.sleep(0)

    for batch in range(0, NAMES, 50):
        await asyncio.gather(*(lock_once(f"name {batch + number // 2}") for number in range(100)))
    await eventually(lambda: server.cli("DBSIZE") == 0, 10)
