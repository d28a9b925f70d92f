"""Sequences whose processes are killed, whose replies are lost, or whose server is full: each item is done once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio

from redlease import LeaseLost, RedleaseError, SequenceProgress
from redlease._core.primitives.checkpoints import Checkpoints, Plan

from children import child
from proxy import Chances, Fault

if TYPE_CHECKING:
    from redlease import Hold

    from children import Child
    from conftest import MakeClient, MakeProxy, OwnServer
    from proxy import Proxy
    from servers import Server

ITEMS = 200
KILLS = 10


@contextlib.asynccontextmanager
async def written(server: Server, wanted: int, index_of: re.Pattern[str]) -> Any:
    """Collect the index of each result that a script writes while the block runs, up to that one."""
    seen: list[int] = []
    async with redis.asyncio.Redis.from_url(server.url) as raw, raw.monitor() as monitor:

        async def collect() -> None:
            async for command in monitor.listen():
                if command["client_type"] == "lua" and (found := index_of.search(command["command"])):
                    seen.append(int(found[1]))
                    if seen[-1] == wanted:
                        return

        task = asyncio.create_task(collect())
        yield seen
        await asyncio.wait_for(task, 10)


async def killed_again_and_again(processes: contextlib.AsyncExitStack, server: Server, **options: Any) -> Child:
    """Kill the process that handles, somewhere in an item, so many times; return the last one, which goes on."""
    chance = random.Random(1)
    command = ("sequence", server.url)
    current = await processes.enter_async_context(child(*command, **options))
    for _ in range(KILLS):
        await current.event("handling")
        following = await processes.enter_async_context(child(*command, **options))
        for _ in range(chance.randint(0, 8)):
            await current.event("handling")
        await asyncio.sleep(chance.uniform(0, 0.03))
        current.kill()
        current = following
    return current


@pytest.mark.slow
async def test_killed_ten_times(server: Server, make_client: MakeClient, prefix: str) -> None:
    """200 items: each checkpoint is written once, in order, and no two handlers overlap by the server's time.

    Only an item that was in progress when its process was killed is handled again, under a newer fence.
    """
    client = await make_client(url=server.url)
    options = {"client": {"prefix": prefix, "lease": 0.5, "waiter_lease": 5}, "count": ITEMS, "log": f"{prefix}:log"}
    index_of = re.compile(rf"^HSET {prefix}:\{{r\}}:sequence:s (\d+) ")
    async with written(server, ITEMS - 1, index_of) as indices, contextlib.AsyncExitStack() as processes:
        last = await killed_again_and_again(processes, server, **options)
        assert last.process.stdout is not None
        said = json.loads((await last.process.stdout.read()).splitlines()[-1])
    assert indices == list(range(ITEMS))
    assert said["results"] == [2 * number for number in range(ITEMS)]
    assert await client.sequence_progress("r", "s") == SequenceProgress("r", "s", ITEMS, 0, None)

    async with redis.asyncio.Redis.from_url(server.url, decode_responses=True) as raw:
        log = [line.split() for line in await raw.lrange(f"{prefix}:log", 0, -1)]
    entries = [(what, int(item), int(fence)) for what, item, fence, _ in log]
    times = [int(at) for *_, at in log]
    assert times == sorted(times)
    entered = [(item, fence) for what, item, fence in entries if what == "enter"]
    assert len({fence for _, fence in entered}) == KILLS + 1
    assert len(entered) <= ITEMS + KILLS
    # In the server's order: a handler ends before the next begins, unless its process is killed in it.
    for (what, item, fence), (next_what, next_item, next_fence) in itertools.pairwise(entries):
        if what == "enter" and next_fence == fence:
            assert (next_what, next_item) == ("leave", item)
        else:
            assert next_what == "enter"
            assert next_item == item + 1 or (next_item == item and next_fence > fence)
            assert next_fence >= fence


# Replies


@pytest.fixture
def engine(real_engine: str) -> str:
    """Only engines with a connection to disturb."""
    return real_engine


class Handler:
    """Doubles numbers and remembers them."""

    def __init__(self) -> None:
        self.handled: list[int] = []

    async def __call__(self, item: int, hold: Hold) -> int:
        """Handle one item."""
        del hold
        self.handled.append(item)
        return 2 * item


@pytest.mark.parametrize("fault", [Fault.LOSE, Fault.CUT, Fault.DOUBLE, Fault.LATE, Fault.ECHO])
async def test_a_fault_at_any_call(proxy: Proxy, make_client: MakeClient, fault: Fault) -> None:
    """Whichever call of a sequence loses its request or its reply, or is doubled, each item is handled once."""
    client = await make_client(url=proxy.url)
    for after in range(1, 6):  # the last one is the release
        handler = Handler()
        proxy.plan(fault, after, "EVALSHA")
        assert await client.sequence("r", range(2), handler, id=f"{after}", timeout=10) == [0, 2]
        assert handler.handled == [0, 1]
        assert await client.sequence_progress("r", f"{after}") == SequenceProgress("r", f"{after}", 2, 0, None)
    assert proxy.faults[fault] == 5


@pytest.mark.parametrize("raises", [True, False])
async def test_a_loss_is_told_while_the_server_is_away(proxy: Proxy, make_client: MakeClient, raises: bool) -> None:
    """A handler that goes on after the loss does not make the call wait for a server that cannot be reached."""
    client = await make_client(url=proxy.url, lease=0.5)

    async def handler(item: int, hold: Hold) -> int:
        proxy.refuse()
        proxy.drop_all()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        if raises:
            raise RuntimeError("cancelled")
        return item

    with pytest.raises(LeaseLost):
        await asyncio.wait_for(client.sequence("r", [1], handler, id="s"), 15)
    await proxy.accept()
    assert await client.sequence_progress("r", "s") == SequenceProgress("r", "s", 0, 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_many_faults(server: Server, make_proxy: MakeProxy, make_client: MakeClient, seed: int) -> None:
    """Two clients on a bad network share a sequence, resuming where they lose the lock: each gets all results.

    An item is handled again only if the lock was lost while it was in progress.
    """
    chances = Chances(lose=0.03, cut=0.03, double=0.05, late=0.05, delay=0.05, echo=0.01)
    proxies = [await make_proxy(server, seed=10 * seed + number) for number in range(2)]
    clients = [await make_client(url=proxy.url, lease=1, waiter_lease=2) for proxy in proxies]
    for proxy in proxies:
        proxy.chances = chances
    handler = Handler()
    losses = 0

    async def to_the_end(number: int) -> list[Any]:
        nonlocal losses
        while True:
            try:
                results: list[Any] = await clients[number].sequence("r", range(100), handler, id="s")
            except LeaseLost:
                losses += 1
            else:
                return results

    for results in await asyncio.wait_for(asyncio.gather(to_the_end(0), to_the_end(1)), 60):
        assert results == [2 * number for number in range(100)]
    assert sorted(handler.handled) == handler.handled
    assert set(handler.handled) == set(range(100))
    assert len(handler.handled) <= 100 + losses
    for proxy in proxies:
        proxy.chances = Chances()


# Memory


async def test_a_full_server_records_what_was_done(
    own_server: OwnServer, real_engine: str, make_client: MakeClient
) -> None:
    """Once the memory is full no sequence begins or resumes; one that runs goes on, as its items were done."""
    server = own_server(real_engine)
    client = await make_client(url=server.url)

    async def handler(item: int, hold: Hold) -> int:
        server.cli("CONFIG", "SET", "maxmemory", "1")
        return item

    checkpoints = Checkpoints(client._operations, client._operations.resource("r"), "t")
    async with client.lock("r") as hold:
        server.cli("CONFIG", "SET", "maxmemory", "1")
        with pytest.raises(RedleaseError, match="memory"):
            await checkpoints.begin(hold, Plan("items", 1, 60_000))
        server.cli("CONFIG", "SET", "maxmemory", "0")
    assert await checkpoints.progress() is None
    assert await client.sequence("r", range(3), handler, id="s") == [0, 1, 2]
