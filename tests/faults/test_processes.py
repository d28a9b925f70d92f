"""Processes that die, stand still and come back: what they had passes on in time, and to whom it belongs (P4 to P7)."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from children import child
from helpers import queue_up, until_waiting

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import MakeClient, Servers
    from servers import Server


@pytest.mark.slow
async def test_a_killed_holder_s_permit_passes_on(server: Server, make_client: MakeClient, prefix: str) -> None:
    """The next waiter has it when the lease of the killed process ends, and not before."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=1.5)
    async with child("hold", server.url, client={"prefix": prefix, "lease": 1.5}) as holder:
        fence = (await holder.event("held"))["fence"]
        tasks = await queue_up(lock, 2)
        holder.kill()
        await holder.process.wait()
        (dead,) = (await lock.inspect()).holders
        permit = await asyncio.wait_for(tasks[0], 10)
    assert permit.fence > fence
    assert 0 <= permit.granted_at_ms - dead.expires_at_ms < 1000
    await lock.release(permit)
    await tasks[1]


async def seconds_behind_dead_waiters(
    server: Server, make_client: MakeClient, prefix: str, processes: int, count: int
) -> float:
    """Kill processes with waiters at the head of the queue; return how long the live one behind them waits then."""
    client = await make_client(url=server.url, prefix=prefix, waiter_lease=1)
    lock = client.lock("r")
    settings = {"prefix": prefix, "waiter_lease": 1}
    async with contextlib.AsyncExitStack() as stack:
        hold = await lock.hold()
        children = []
        for _ in range(processes):
            entered = await stack.enter_async_context(child("wait", server.url, client=settings, count=count))
            await entered.event("waiting")
            children.append(entered)
        (task,) = await queue_up(lock, 1)
        for dead in children:
            dead.kill()
        for dead in children:
            await dead.process.wait()
        killed = asyncio.get_running_loop().time()
        assert await hold.release()
        permit = await asyncio.wait_for(task, 30)
        waited = asyncio.get_running_loop().time() - killed
        assert await lock.release(permit)
    return waited


@pytest.mark.slow
async def test_a_hundred_dead_waiters_cost_what_one_costs(server: Server, make_client: MakeClient, prefix: str) -> None:
    """Behind 100 killed waiters a live one has its grant within two seconds of when it would have it behind one."""
    behind_one = await seconds_behind_dead_waiters(server, make_client, f"{prefix}a", 1, 1)
    behind_many = await seconds_behind_dead_waiters(server, make_client, f"{prefix}b", 1, 100)
    assert behind_one < 1 + 2
    assert behind_many - behind_one < 2


@pytest.mark.slow
async def test_dead_waiters_of_several_processes(servers: Servers, make_client: MakeClient, prefix: str) -> None:
    """The same where the 100 belonged to several processes, whose places end at different moments."""
    waited = await seconds_behind_dead_waiters(servers["valkey9"], make_client, prefix, 4, 25)
    assert waited < 1 + 2


@pytest.mark.slow
async def test_a_paused_holder_finds_out(server: Server, make_client: MakeClient, prefix: str) -> None:
    """Stopped past its lease and continued, a process gets LeaseLost in its body, and its release is a no-op."""
    client = await make_client(url=server.url)
    lock = client.lock("r", lease=0.6)
    async with child("hold", server.url, client={"prefix": prefix, "lease": 0.6}) as holder:
        fence = (await holder.event("held"))["fence"]
        holder.pause()
        permit = await asyncio.wait_for(lock.acquire(), 10)
        assert permit.fence > fence
        await lock.renew(permit, lease=30)
        holder.resume()
        said = await holder.event("lost")
        assert (said["released"], said["remaining"]) == (False, 0)
        assert await holder.process.wait() == 0
    assert await lock.is_held(permit)


@pytest.mark.slow
async def test_a_pause_shorter_than_the_lease_costs_nothing(
    server: Server, make_client: MakeClient, prefix: str
) -> None:
    """A process that is stopped for part of its lease keeps its permit."""
    client = await make_client(url=server.url)
    lock = client.lock("r")
    async with child("hold", server.url, client={"prefix": prefix, "lease": 4}) as holder:
        fence = (await holder.event("held"))["fence"]
        for _ in range(2):
            holder.pause()
            await asyncio.sleep(1.6)
            holder.resume()
            await asyncio.sleep(0.6)
        (held,) = (await lock.inspect()).holders
        assert held.fence == fence


async def test_a_ticket_finds_its_permit_again(server: Server, make_client: MakeClient, prefix: str) -> None:
    """A process that died leaves its permit to whoever asks with its ticket: same fence, full lease."""
    client = await make_client(url=server.url)
    async with child("acquire", server.url, client={"prefix": prefix}, ticket="t") as holder:
        fence = (await holder.event("acquired"))["fence"]
        holder.kill()
        await holder.process.wait()
        permit = await client.lock("r").acquire(ticket="t")
    assert permit.fence == fence
    assert await client.lock("r").release(permit)


async def test_a_ticket_finds_its_place_again(server: Server, make_client: MakeClient, prefix: str) -> None:
    """A process that died in the queue leaves its place to whoever asks with its ticket: nobody passed it."""
    client = await make_client(url=server.url)
    lock = client.lock("r")
    permit = await lock.acquire()
    async with child("wait", server.url, client={"prefix": prefix}, count=1, ticket="t") as waiter:
        await waiter.event("waiting")
        (behind,) = await queue_up(lock, 1)
        waiter.kill()
        await waiter.process.wait()
        again = asyncio.create_task(lock.acquire(ticket="t"))
        await asyncio.sleep(0)  # it has asked, and what is asked next on the same connection comes after it
        assert (await until_waiting(lock, 2))[0] == "t"
        assert await lock.release(permit)
        assert await lock.release(await asyncio.wait_for(again, 15))
        assert await lock.release(await asyncio.wait_for(behind, 15))


async def test_an_interrupted_process_gives_back_at_once(server: Server, make_client: MakeClient, prefix: str) -> None:
    """Ctrl-C in a body releases the permit on the way out, long before the lease ends."""
    client = await make_client(url=server.url)
    lock = client.lock("r")
    async with child("hold", server.url, client={"prefix": prefix}) as holder:
        await holder.event("held")
        (task,) = await queue_up(lock, 1)
        holder.interrupt()
        assert await asyncio.wait_for(task, 10)
        assert await asyncio.wait_for(holder.process.wait(), 10) != 0


@pytest.mark.slow
async def test_processes_exclude_each_other(server: Server, prefix: str, tmp_path: Path) -> None:
    """Several processes count in one file, one at a time: no addition is lost, and every fence is another."""
    file = tmp_path / "number"
    file.write_text("0")
    options: dict[str, Any] = {"client": {"prefix": prefix}, "path": str(file), "times": 60}
    async with contextlib.AsyncExitStack() as stack:
        children = [await stack.enter_async_context(child("count", server.url, **options)) for _ in range(3)]
        counted = [(await counting.event("counted", within=30))["fences"] for counting in children]
    assert int(file.read_text()) == 180
    assert all(fences == sorted(fences) for fences in counted)
    assert len({fence for fences in counted for fence in fences}) == 180
