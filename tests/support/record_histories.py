"""Records the history of every pattern of using locks, for the tests to replay on each later release.

Run it once a release, before it is tagged, and commit what it writes; it never overwrites a history:

    PYTHONPATH=adapters python tests/support/record_histories.py

It needs a Temporal server and a Redis, which it starts as the tests do, and writes to
`tests/temporal/histories/<version>/<pattern>.json`, the version being that of pyproject.toml.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import recorded_flows
from recorded_flows import (
    ByHand,
    ByHandBy,
    DowngradeBy,
    HandOn,
    HandOnBy,
    HoldBy,
    HoldLong,
    HoldOnce,
    InSequence,
    Limited,
    LimitedBySlots,
    LoseBy,
    Together,
    WithChild,
    WithLimitedChildren,
    fenced,
)
from temporalio.client import Client, WorkflowFailureError, WorkflowHandle
from temporalio.worker import Worker

import redlease
from redlease import Redlease
from redlease_temporal.sequence_client import Sequence
from redlease_temporal.worker import RedleasePlugin

from helpers import eventually, until_waiting
from servers import Server
from temporal_server import TemporalServer

TESTS = Path(__file__).parents[1]
HISTORIES = TESTS / "temporal" / "histories"
QUEUE = "recorded"
RESOURCE = "pool"

Handle = WorkflowHandle[Any, Any]


class Recorder:
    """What the patterns are played with."""

    def __init__(self, client: Client, redis: Server, service: Redlease) -> None:
        self.client = client
        self.redis = redis
        self.service = service
        self.pool = service.lock(RESOURCE)
        self.first_runs: dict[str, str] = {}

    async def start(self, name: str, workflow: Any, *args: Any) -> Handle:
        """Start the workflow of a pattern; its id is in its tickets, so it is the same at each replay."""
        handle: Handle = await self.client.start_workflow(
            workflow, args=list(args), id=f"golden-{name}", task_queue=QUEUE
        )
        return handle


def without_stacks(history: str) -> str:
    """Return the history without the stacks of its failures, which name where things are on one machine."""
    return re.sub(r'("stackTrace": )"(?:[^"\\]|\\.)*"', r'\1""', history)


async def uncontended(recorder: Recorder, name: str) -> Handle:
    """Granted at once."""
    handle = await recorder.start(name, HoldOnce.run, RESOURCE, None)
    assert await handle.result() == "held"
    return handle


async def contended(recorder: Recorder, name: str) -> Handle:
    """Granted after a wait."""
    permit = await recorder.pool.acquire()
    handle = await recorder.start(name, HoldOnce.run, RESOURCE, None)
    await until_waiting(recorder.pool, 1)
    await asyncio.sleep(0.5)  # until the activity that waits has begun
    await recorder.pool.release(permit)
    assert await handle.result() == "held"
    return handle


async def timeout(recorder: Recorder, name: str) -> Handle:
    """No grant within the time."""
    permit = await recorder.pool.acquire()
    handle = await recorder.start(name, HoldOnce.run, RESOURCE, 0.5)
    assert await handle.result() == "timed out"
    await recorder.pool.release(permit)
    return handle


async def no_wait(recorder: Recorder, name: str) -> Handle:
    """A timeout of 0."""
    permit = await recorder.pool.acquire()
    handle = await recorder.start(name, HoldOnce.run, RESOURCE, 0)
    assert await handle.result() == "timed out"
    await recorder.pool.release(permit)
    return handle


async def cancelled(recorder: Recorder, name: str) -> Handle:
    """Cancelled while it waits."""
    permit = await recorder.pool.acquire()
    handle = await recorder.start(name, HoldOnce.run, RESOURCE, None)
    await until_waiting(recorder.pool, 1)
    await asyncio.sleep(0.5)
    await handle.cancel()
    with contextlib.suppress(WorkflowFailureError):
        await handle.result()
    await recorder.pool.release(permit)
    return handle


async def continued(recorder: Recorder, name: str) -> Handle:
    """The run that hands its permit on."""
    handle = await recorder.start(name, HandOn.run, RESOURCE, None)
    await handle.result()
    return recorder.client.get_workflow_handle(handle.id, run_id=handle.first_execution_run_id)


async def adopted(recorder: Recorder, name: str) -> Handle:
    """The run that adopts it."""
    handle = await recorder.start(name, HandOn.run, RESOURCE, None)
    await handle.result()
    return recorder.client.get_workflow_handle(handle.id)


async def lost(recorder: Recorder, name: str) -> Handle:
    """Released from outside while it is held."""
    handle = await recorder.start(name, HoldLong.run, RESOURCE, 1.0)
    await eventually(lambda: handle.query(HoldLong.holds))
    (permit,) = (await recorder.pool.inspect()).holders
    await recorder.pool.release(permit.ticket)
    assert await handle.result() == "lost"
    return handle


async def redis_away(recorder: Recorder, name: str) -> Handle:
    """Redis does not answer the local activity, so the remote one asks until it does."""
    recorder.redis.kill()
    handle = await recorder.start(name, HoldOnce.run, RESOURCE, None)
    await asyncio.sleep(1.5)
    recorder.redis.start()
    assert await handle.result() == "held"
    return handle


async def release_later(recorder: Recorder, name: str) -> Handle:
    """Redis is away at the release."""
    handle = await recorder.start(name, HoldLong.run, RESOURCE, 5.0)
    await eventually(lambda: handle.query(HoldLong.holds))
    recorder.redis.kill()
    await handle.signal(HoldLong.proceed)
    assert await handle.result() == "held"
    recorder.redis.start()
    return handle


async def by_hand(recorder: Recorder, name: str) -> Handle:
    """Acquired, tried, renewed, inspected, checked and released as data."""
    handle = await recorder.start(name, ByHand.run, "by-hand")
    assert await handle.result() == [True, True, True, True, False, True]
    return handle


async def child(recorder: Recorder, name: str) -> Handle:
    """A child in the hold."""
    handle = await recorder.start(name, WithChild.run, RESOURCE)
    assert await handle.result()
    return handle


class By:
    """The patterns on a backend that needs no Redis, each with a resource of its own name."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def manager(self, recorder: Recorder, name: str) -> Handle:
        """The workflow that keeps the only permit."""
        workflow_id = f"permit:{name}:0" if self.backend == "slots" else f"lock:{name}"
        return recorder.client.get_workflow_handle(workflow_id)

    async def hold(self, recorder: Recorder, name: str, timeout: float | None) -> Handle:
        """One holds until it is told, and another waits for it."""
        first = await recorder.start(f"{name}-first", LoseBy.run, self.backend, name)
        await eventually(lambda: first.query(LoseBy.holds))
        handle = await recorder.start(name, HoldBy.run, self.backend, name, timeout)
        await asyncio.sleep(1.0)  # until it waits, or has given up
        return handle

    async def uncontended(self, recorder: Recorder, name: str) -> Handle:
        """Granted at once."""
        handle = await recorder.start(name, HoldBy.run, self.backend, name, None)
        assert await handle.result() == "held"
        return handle

    async def contended(self, recorder: Recorder, name: str) -> Handle:
        """Granted after a wait."""
        handle = await self.hold(recorder, name, None)
        await recorder.client.get_workflow_handle(f"golden-{name}-first").cancel()
        assert await handle.result() == "held"
        return handle

    async def timeout(self, recorder: Recorder, name: str) -> Handle:
        """No grant within the time."""
        handle = await self.hold(recorder, name, 0.5)
        assert await handle.result() == "timed out"
        return handle

    async def no_wait(self, recorder: Recorder, name: str) -> Handle:
        """A timeout of 0."""
        handle = await self.hold(recorder, name, 0)
        assert await handle.result() == "timed out"
        return handle

    async def cancelled(self, recorder: Recorder, name: str) -> Handle:
        """Cancelled while it waits."""
        handle = await self.hold(recorder, name, None)
        await handle.cancel()
        with contextlib.suppress(WorkflowFailureError):
            await handle.result()
        return handle

    async def lost(self, recorder: Recorder, name: str) -> Handle:
        """Taken away by an administrator."""
        handle = await recorder.start(name, LoseBy.run, self.backend, name)
        await eventually(lambda: handle.query(LoseBy.holds))
        manager = self.manager(recorder, name)
        if self.backend == "slots":
            await manager.cancel()
        else:
            (held,) = (await manager.query("snapshot"))["holders"]
            await manager.signal("release", {"ticket": held["ticket"]})
        assert await handle.result() == "lost"
        return handle

    async def continued(self, recorder: Recorder, name: str) -> Handle:
        """The run that hands its permit on."""
        handle = await self.adopted(recorder, name)
        first = recorder.client.get_workflow_handle(handle.id, run_id=recorder.first_runs[name])
        assert (await first.fetch_history()).events
        return first

    async def adopted(self, recorder: Recorder, name: str) -> Handle:
        """The run that adopts it."""
        handle = await recorder.start(name, HandOnBy.run, self.backend, name, None)
        recorder.first_runs[name] = handle.first_execution_run_id or ""
        await handle.result()
        return recorder.client.get_workflow_handle(handle.id)

    async def by_hand(self, recorder: Recorder, name: str) -> Handle:
        """Acquired, tried, renewed, inspected, checked and released as data."""
        handle = await recorder.start(name, ByHandBy.run, self.backend, name)
        assert await handle.result() == [True, True, True, True, False, True]
        return handle

    async def resource_workflow_itself(self, recorder: Recorder, name: str) -> Handle:
        """The workflow that keeps a resource for one that holds and another that waits."""
        handle = await self.hold(recorder, name, None)
        manager = self.manager(recorder, name)
        kept = recorder.client.get_workflow_handle(manager.id, run_id=(await manager.describe()).run_id)
        await recorder.client.get_workflow_handle(f"golden-{name}-first").cancel()
        assert await handle.result() == "held"
        return kept

    def patterns(self) -> dict[str, Callable[[Recorder, str], Awaitable[Handle]]]:
        """All of them, by name."""
        methods = (
            *(self.uncontended, self.contended, self.timeout, self.no_wait, self.cancelled, self.lost),
            *(self.continued, self.adopted, self.by_hand, self.resource_workflow_itself),
        )
        return {f"{self.backend}_{method.__name__}": method for method in methods}


async def downgraded(recorder: Recorder, name: str) -> Handle:
    """A writer that becomes a reader."""
    backend = "coordinator" if name.startswith("coordinator") else "redis"
    handle = await recorder.start(name, DowngradeBy.run, backend, name)
    assert await handle.result()
    return handle


async def together(recorder: Recorder, name: str) -> Handle:
    """Four resources at once on three backends, of which the last one has to be waited for."""
    last = recorder.service.semaphore(f"{name}-d", capacity=3)
    permit = await last.acquire(weight=3)
    handle = await recorder.start(name, Together.run, name, None)
    await until_waiting(last, 1)
    await asyncio.sleep(0.5)
    await last.release(permit)
    assert await handle.result() == "held"
    return handle


async def together_timeout(recorder: Recorder, name: str) -> Handle:
    """The last one of the four is not free in time."""
    last = recorder.service.semaphore(f"{name}-d", capacity=3)
    permit = await last.acquire(weight=3)
    handle = await recorder.start(name, Together.run, name, 2.0)
    assert await handle.result() == "timed out"
    await last.release(permit)
    return handle


async def in_sequence(recorder: Recorder, name: str) -> Handle:
    """Items handed over, which starts the sequence."""
    handle = await recorder.start(name, InSequence.run, name, [1, 2])
    assert await handle.result() == [1, 2]
    return handle


async def in_running_sequence(recorder: Recorder, name: str) -> Handle:
    """Items handed over to a sequence that runs."""
    first = await recorder.start(f"{name}-first", InSequence.run, name, list(range(30)))
    handle = await recorder.start(name, InSequence.run, name, [1, 2])
    assert await handle.result() == [1, 2]
    await first.result()
    return handle


async def sequence(recorder: Recorder, name: str) -> Handle:
    """The sequence itself, with two callers and an item that was appended."""
    first = await recorder.start(f"{name}-first", InSequence.run, name, list(range(30)))
    second = await recorder.start(f"{name}-second", InSequence.run, name, [1, 2])
    appending = Sequence(recorder.client, name, fenced, task_queue=QUEUE, start_to_close_timeout=30)
    assert await appending.append(7) == 7
    await first.result()
    await second.result()
    handle = recorder.client.get_workflow_handle(f"sequence:{name}")
    await handle.result()
    return handle


async def limited(recorder: Recorder, name: str) -> Handle:
    """A run with a place."""
    handle = await recorder.start(name, Limited.run)
    await handle.signal(Limited.proceed)
    assert await handle.result() == "done"
    return handle


async def limited_children(recorder: Recorder, name: str) -> Handle:
    """A parent one of whose children is refused."""
    await asyncio.sleep(1.5)  # until the place of the one before is free
    handle = await recorder.start(name, WithLimitedChildren.run)
    assert await handle.result() == ["done", "refused"]
    return handle


async def place(recorder: Recorder, name: str) -> Handle:
    """A place without Redis, from the start of its workflow until that is closed."""
    handle = await recorder.start(name, LimitedBySlots.run)
    assert await handle.result() == "done"
    taken = recorder.client.get_workflow_handle("concurrency:LimitedBySlots:0")
    await taken.result()
    return taken


PATTERNS: dict[str, Callable[[Recorder, str], Awaitable[Handle]]] = (
    {
        pattern.__name__: pattern
        for pattern in (
            *(uncontended, contended, timeout, no_wait, cancelled, continued, adopted, lost, by_hand, child),
            *(in_sequence, in_running_sequence, sequence, limited, limited_children, place),
            *(downgraded, together, together_timeout),
            *(redis_away, release_later),
        )
    }
    | {"coordinator_downgraded": downgraded}
    | {name: pattern for backend in ("slots", "coordinator") for name, pattern in By(backend).patterns().items()}
)


def version() -> str:
    """Return the version of the project."""
    return redlease.__version__


async def main() -> None:
    """Record what is not recorded yet."""
    directory = HISTORIES / version()
    directory.mkdir(parents=True, exist_ok=True)
    with Server("redis7") as redis:
        async with TemporalServer() as temporal, Redlease.from_url(redis.url) as service:
            client = await Client.connect(temporal.address, plugins=[RedleasePlugin(redis.url)])
            async with Worker(client, task_queue=QUEUE, workflows=recorded_flows.WORKFLOWS, activities=[fenced]):
                for name, pattern in PATTERNS.items():
                    path = directory / f"{name}.json"
                    if not path.exists():
                        handle = await pattern(Recorder(client, redis, service), name)
                        path.write_text(without_stacks((await handle.fetch_history()).to_json()) + "\n")
                        print(path)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
