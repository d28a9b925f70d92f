"""How a client of a cluster goes by what its nodes say: which of them it believes, and which answers it expects."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from redis.crc import key_slot

from redlease._core.hold import lease_of

from clusters import Cluster, raw_reply, told, until
from helpers import eventually
from servers import REAL_ENGINES, available_engines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from redlease._core.transport.addresses import Address

    from conftest import MakeClient
    from servers import Server

pytestmark = pytest.mark.slow

ENGINES = [engine for engine in available_engines() if engine in REAL_ENGINES]


@pytest.fixture(params=ENGINES)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Three masters, the first with a replica, for one test alone."""
    with Cluster(request.param, replicas=1) as running:
        yield running


async def test_a_node_that_has_left_the_cluster_is_not_believed(
    cluster: Cluster, make_client: MakeClient, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only node of the URL, asked first, has nothing to tell: the client goes by what the others say."""
    (seed,) = cluster.replicas

    def seed_first(addresses: list[Address]) -> None:
        addresses.sort(key=lambda address: address.port != seed.port)

    monkeypatch.setattr("redlease._core.transport.cluster.random.shuffle", seed_first)
    client = await make_client(url=f"redis+cluster://127.0.0.1:{seed.port}")
    holds = [await client.lock(f"r{number}", lease=3).hold(on_lost="signal") for number in range(12)]
    seed.cli("CLUSTER", "RESET")
    until(lambda: raw_reply(seed, "CLUSTER", "SLOTS") == [])
    cluster.masters[0].cli("CLIENT", "KILL", "TYPE", "pubsub")
    leases = [lease_of(hold) for hold in holds]
    asked = [lease.deadline_ms for lease in leases]
    await eventually(lambda: all(lease.deadline_ms > before for lease, before in zip(leases, asked, strict=True)))
    assert not any(hold.lost for hold in holds)
    assert all(await asyncio.gather(*(hold.release() for hold in holds)))


async def test_a_name_that_is_left_and_used_again_at_once(
    cluster: Cluster, make_client: MakeClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer to leaving a channel is known for what it is, though the client listens to it again meanwhile."""
    monkeypatch.setattr("redlease._core.transport.node.CHANNELS_MIN", 5)
    client = await make_client(url=cluster.url)

    async def use(number: int) -> None:
        some = random.Random(number)
        for _ in range(200):
            async with client.lock(f"r{some.randrange(400)}"):
                pass

    await asyncio.gather(*map(use, range(10)))
    assert "was lost" not in caplog.text


def refused(node: Server) -> int:
    """Return how many calls a node has refused because a part of their keys was on their way."""
    count = told(node, "INFO", "errorstats").get("errorstat_TRYAGAIN", "count=0")
    return int(count.removeprefix("count="))


async def test_a_release_while_a_slot_is_on_its_way(cluster: Cluster, make_client: MakeClient, prefix: str) -> None:
    """It is asked for again at short intervals, however long the slot takes, and done once that has arrived."""
    client = await make_client(url=cluster.url)
    lock = client.lock("r")
    key = f"{prefix}:{{r}}:state"
    source, slot = cluster.master_of(key), key_slot(key.encode())
    target = next(node for node in cluster.masters if node is not source)
    hold = await lock.hold()
    cluster.begin_move(slot, source, target)
    one, *_ = source.cli("CLUSTER", "GETKEYSINSLOT", slot, 9)
    source.cli("MIGRATE", "127.0.0.1", target.port, one, 0, 5000)
    releasing = asyncio.create_task(hold.release())
    try:
        await eventually(lambda: refused(source) + refused(target) >= 15, within=10)
    finally:
        cluster.move_keys(slot, source, target)
        cluster.end_move(slot, target)
    await releasing
    assert (await lock.acquire(timeout=5)).fence > hold.fence
