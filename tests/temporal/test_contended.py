"""The end of a run that holds, while others wait: what it had is theirs within a second, however long its lease."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from backend_bench import Bench
from backend_flows import WORKFLOWS, Holder, guarded
from fake_temporal import FakeTemporal
from temporal_tools import Place, events_of, names_of, pause, unpause
from temporalio.client import Client, WorkflowHandle
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from redlease_temporal._backends.coordinator import contended, queue_state, workflow
from redlease_temporal._backends.coordinator.contended import ContendedHolders
from redlease_temporal._backends.coordinator.queue_state import QueueState
from redlease_temporal._common import run_monitor
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal._payloads.coordinator import CoordinatorRequest, Release, Requester
from redlease_temporal._payloads.locks import AcquireSpec, ResourceTerms
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quiet import Quiet
    from temporal_server import TemporalServer

LEASE = 30.0
WITHIN = 1.0  # of the end of a run for whose permit somebody waits
ROUNDS = 5  # of which the best three are judged: this machine may be busy with other tests


@pytest.fixture
def plugin(prefix: str) -> RedleasePlugin:
    """A plugin without Redis."""
    return RedleasePlugin(prefix=prefix)


@pytest.fixture
async def client(temporal_server: TemporalServer, plugin: RedleasePlugin) -> Client:
    """A client with that plugin."""
    return await Client.connect(temporal_server.address, plugins=[plugin])


@pytest.fixture
def no_own_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let coordinators look at runs themselves when a lease ends, and not before."""
    monkeypatch.setattr(queue_state, "POLL_MS", 10_000_000)


@pytest.fixture
async def bench(client: Client, task_queue: str, no_own_looks: None) -> AsyncIterator[Bench]:
    """A resource kept by a coordinator, beside a worker for all workflows."""
    del no_own_looks
    async with worker(client, task_queue):
        yield Bench(client, task_queue, "coordinator")


def worker(client: Client, task_queue: str) -> Worker:
    """Return a worker for all workflows."""
    return Worker(client, task_queue=task_queue, workflows=WORKFLOWS, activities=[guarded])


def holdings(plugin: RedleasePlugin, client: Client) -> dict[Any, Any]:
    """Return the runs that this process looks at."""
    runtime = plugin._runtime_of(client)
    return runtime._monitor._watched_runs if hasattr(runtime, "_monitor") else {}  # it begins beside the worker


async def holding(bench: Bench, **on: Any) -> WorkflowHandle[Any, Any]:
    """Start a workflow that holds."""
    handle = await bench.holder(**{"lease": LEASE} | on)
    await handle.execute_update(Holder.until_held)
    return handle


async def served_after_its_end(
    bench: Bench, holder: WorkflowHandle[Any, Any], waiter: WorkflowHandle[Any, Any]
) -> float:
    """Terminate who holds; returns after how many seconds who waits is served."""
    await holder.terminate()
    began = asyncio.get_running_loop().time()
    await asyncio.wait_for(waiter.execute_update(Holder.until_held), LEASE / 2)
    return asyncio.get_running_loop().time() - began


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lease", [1.0, LEASE])
@pytest.mark.parametrize("backend", ["redis", "slots", "coordinator"])
async def test_who_waits_is_served_within_a_second(
    pausing_place: Place, task_queue: str, backend: str, lease: float
) -> None:
    """Beside a paused holder, whose permit and fence stay, one holder after the other is terminated."""
    async with pausing_place.serving(WORKFLOWS, [guarded]) as client:
        bench = Bench(client, task_queue, backend)
        actor = await bench.actor()
        on: dict[str, Any] = {"capacity": 2, "lease": lease}
        paused = await holding(bench, **on)
        (held,) = (await bench.seen(actor, **on)).holders
        other = await holding(bench, **on)
        await pause(client, paused)
        took = []
        for number in range(ROUNDS):
            waiter = await bench.holder(**on)
            await bench.until_waiting(actor, 1, **on)
            await asyncio.sleep(0.13 * number)  # another moment between two looks each time
            took.append(await served_after_its_end(bench, other, waiter))
            other = waiter
        assert sorted(took)[2] < WITHIN, took
        kept = [(each.ticket, each.fence) for each in (await bench.seen(actor, **on)).holders]
        assert (held.ticket, held.fence) in kept
        await unpause(client, paused)
        await paused.signal(Holder.proceed)
        assert await paused.result() == f"held {held.fence}"
        await other.terminate()


async def test_a_coordinator_that_continues_as_new_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next of its runs has whoever holds looked at."""
    monkeypatch.setattr(workflow, "EVENTS_MAX", 40)
    actor, holder = await bench.actor(), await holding(bench)
    keeper = bench.client.get_workflow_handle(f"lock:{bench.on.resource}")
    first = (await keeper.describe()).run_id
    waiter = await bench.holder(lease=LEASE)
    await bench.until_waiting(actor, 1)

    async def is_another_run() -> bool:
        await keeper.signal("release", {"ticket": "nobody's"})
        return (await keeper.describe()).run_id != first

    await eventually(is_another_run, 20)
    await served_after_its_end(bench, holder, waiter)


@pytest.mark.usefixtures("no_own_looks")
async def test_a_worker_that_is_restarted_meanwhile(client: Client, task_queue: str, prefix: str) -> None:
    """The process that ends gives the coordinator something to do, so that the next one begins to look."""
    async with worker(client, task_queue):
        bench = Bench(client, task_queue, "coordinator")
        actor, holder = await bench.actor(), await holding(bench)
        waiter = await bench.holder(lease=LEASE)
        await bench.until_waiting(actor, 1)
    plugin = RedleasePlugin(prefix=prefix)
    other = await Client.connect(client.service_client.config.target_host, plugins=[plugin])
    async with worker(other, task_queue):
        await eventually(lambda: holdings(plugin, other), 10)
        await served_after_its_end(bench, holder, waiter)


async def test_nobody_is_looked_at_when_nobody_waits(bench: Bench, plugin: RedleasePlugin) -> None:
    """Not before somebody waits, and not when that is over; meanwhile no look stands in the coordinator's history."""
    runs = holdings(plugin, bench.client)
    actor, holder = await bench.actor(), await holding(bench)
    assert not runs
    waiter = await bench.holder(lease=LEASE)
    await bench.until_waiting(actor, 1)
    await eventually(lambda: len(runs) == 1)
    keeper = bench.client.get_workflow_handle(f"lock:{bench.on.resource}")
    before = len(await events_of(keeper))
    await asyncio.sleep(2.0)
    assert len(await events_of(keeper)) == before
    await waiter.cancel()
    await eventually(lambda: not runs)
    await holder.signal(Holder.proceed)
    assert (await holder.result()).startswith("held")
    assert "MARKER_RECORDED" not in await names_of(keeper)


# The process's part alone


@pytest.fixture
async def alone(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[FakeTemporal, ContendedHolders, RunMonitor]]:
    """What looks at runs, with a server in this process, on which there is a coordinator."""
    monkeypatch.setattr(run_monitor, "BUSY_POLL_MS", 20.0)
    temporal = FakeTemporal()
    for name in ("lock:r", "a", "b"):
        temporal.start(name)
    monitor = RunMonitor(temporal, 1000)  # type: ignore[arg-type]
    looking = asyncio.create_task(monitor.run())
    told = ContendedHolders(temporal, monitor)  # type: ignore[arg-type]
    async with told.running():
        yield temporal, told, monitor
    looking.cancel()


def requester(name: str) -> Requester:
    """Return the request of a run."""
    return Requester(name, f"run of {name}", "", f"request of {name}")


async def test_a_release_that_does_not_get_through(
    alone: tuple[FakeTemporal, ContendedHolders, RunMonitor], monkeypatch: pytest.MonkeyPatch, quiet: Quiet
) -> None:
    """It is sent until the server has taken it, and then no more; what went wrong is logged once."""
    quiet.expect("telling 'lock:r'")
    temporal, told, monitor = alone
    handle_of, failures = temporal.get_workflow_handle, [RPCError("away", RPCStatusCode.UNAVAILABLE, b"")] * 3

    def handle(workflow_id: str) -> Any:
        if failures:
            raise failures.pop()
        return handle_of(workflow_id)

    monkeypatch.setattr(temporal, "get_workflow_handle", handle)
    told.report("lock:r", {requester("a"): "t", requester("b"): "u"}, 60_000)
    temporal.close("a")
    await eventually(lambda: temporal.signalled)
    await asyncio.sleep(0.1)
    assert (temporal.signalled, failures) == (["release lock:r"], [])
    assert list(monitor._watched_runs) == [("b", "run of b")]


async def test_a_coordinator_that_has_moved(alone: tuple[FakeTemporal, ContendedHolders, RunMonitor]) -> None:
    """Of one that says nothing more, as another process serves it or as it has ended, nothing is kept."""
    temporal, told, monitor = alone
    temporal.start("lock:gone")
    temporal.close("lock:gone")
    told.report("lock:r", {requester("a"): "t"}, -int(contended.REPORT_GRACE_MS))
    told.report("lock:gone", {requester("b"): "t"}, 60_000)
    await eventually(lambda: list(monitor._watched_runs) == [("b", "run of b")])
    temporal.close("b")
    await eventually(lambda: not monitor._watched_runs)
    assert not temporal.signalled


async def test_a_process_that_ends_has_others_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It signals the coordinators whose holders it looked at, and no others."""
    temporal = FakeTemporal()
    for name in ("lock:r", "lock:s"):
        temporal.start(name)
    told = ContendedHolders(temporal, RunMonitor(temporal, 1000))  # type: ignore[arg-type]
    async with told.running():
        told.report("lock:r", {requester("a"): "t"}, 60_000)
        told.report("lock:s", {requester("b"): "t"}, 60_000)
        told.report("lock:s", {}, 60_000)
        await asyncio.sleep(0)
    assert temporal.signalled == ["release lock:r"]


def request(name: str, ticket: str, **other: Any) -> CoordinatorRequest:
    """Return what a run asks for."""
    return CoordinatorRequest(ResourceTerms("r", 1, 30_000), AcquireSpec(ticket, **other), requester(name))


def test_whose_end_is_waited_for() -> None:
    """Of those who hold while somebody waits: not of data that nobody keeps, nor of what ends by its lease."""
    cases: list[tuple[dict[str, Any], bool]] = [({}, True), ({"renewed": False}, False), ({"on_close": "lease"}, False)]
    for other, are_contended in cases:
        books = QueueState("r")
        books.request(request("a", "t", **other), 1)
        assert not books.contended(1)
        books.request(request("b", "u"), 1)
        assert books.contended(1) == ({requester("a"): "t"} if are_contended else {})


def test_the_release_of_a_closed_run_that_shares_its_permit() -> None:
    """Whoever shares it has it from then on, and is looked at in its place."""
    books = QueueState("r")
    for name, ticket in [("a", "t"), ("b", "t"), ("c", "u")]:
        books.request(request(name, ticket), 1)
    assert not books.release(Release("t", None, requester("a").request), 2)
    assert books.contended(2) == {requester("b"): "t"}
    granted = books.release(Release("t", None, requester("b").request), 3)
    assert [(effect.kind, effect.to) for effect in granted] == [("granted", requester("c"))]
    assert not books.release(Release("t", None, requester("b").request), 4)
    assert len(books.holders) == 1


def test_what_a_process_says_as_it_ends_changes_nothing() -> None:
    """No ticket, no request, no fence of anybody's."""
    books = QueueState("r")
    for name, ticket in [("a", "t"), ("c", "u")]:
        books.request(request(name, ticket), 1)
    before = repr(books)
    assert not books.release(contended.WAKING_RELEASE, 1)
    assert repr(books) == before
