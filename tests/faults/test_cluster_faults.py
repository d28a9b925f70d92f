"""Faulty networks in front of the nodes of a cluster: each node announces the address of its proxy."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from redlease.events import Disconnected, Event, Reconnected

from clusters import Cluster
from proxy import Fault, Proxy
from servers import REAL_ENGINES, available_engines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from conftest import MakeClient

pytestmark = pytest.mark.slow

ENGINES = [engine for engine in available_engines() if engine in REAL_ENGINES]


class Shaky:
    """Three masters behind a proxy each, which is all that clients see of them."""

    def __init__(self, engine: str) -> None:
        self.cluster = Cluster(engine)
        self.proxies = [Proxy(node.port, seed=number) for number, node in enumerate(self.cluster.nodes)]

    @property
    def url(self) -> str:
        """The proxies of the first two."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{proxy.port}" for proxy in self.proxies[:2])

    async def start(self) -> None:
        """Start the nodes, which are told where they are reached."""
        for node, proxy in zip(self.cluster.nodes, self.proxies, strict=True):
            announced = {"port": proxy.port, "bus-port": node.port + 10_000}
            node.arguments += tuple(
                word for name, port in announced.items() for word in (f"--cluster-announce-{name}", str(port))
            )
        await asyncio.to_thread(self.cluster.start)


@pytest.fixture(params=ENGINES)
async def shaky(request: pytest.FixtureRequest) -> AsyncIterator[Shaky]:
    """A cluster of each real engine in turn."""
    shaky = Shaky(request.param)
    async with AsyncExitStack() as stack:
        for proxy in shaky.proxies:
            await stack.enter_async_context(proxy)
        stack.callback(shaky.cluster.stop)
        await shaky.start()
        yield shaky


async def test_a_node_that_is_lost_as_it_becomes_ready(shaky: Shaky, make_client: MakeClient) -> None:
    """Given up with the last reply of its opening, it is not called: requests wait for the next connection.

    Events tell when the first node is out of reach, and when none is any more.
    """
    told: list[type[Event]] = []
    client = await make_client(url=shaky.url, on_event=lambda event: told.append(type(event)))
    for proxy in shaky.proxies:
        proxy.plan(Fault.ECHO, 1, "INFO")
    async with asyncio.timeout(15):
        for number in range(10):
            assert await client.lock(f"r{number}").acquire(timeout=2)
    assert sum(proxy.faults[Fault.ECHO] for proxy in shaky.proxies) == 3
    found = [kind for kind in told if kind in {Disconnected, Reconnected}]
    assert found
    assert found == [Disconnected, Reconnected] * (len(found) // 2)
