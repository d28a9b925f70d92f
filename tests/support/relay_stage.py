"""A relay and the runs that it serves, without Temporal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import redis.asyncio
from fake_temporal import FakeTemporal, token_of

from redlease import Redlease
from redlease._core.protocol import arguments
from redlease_temporal._admission import redis_tracker
from redlease_temporal._admission.rule import AdmissionRequest
from redlease_temporal._backends.redis import relay, tracker
from redlease_temporal._backends.redis.registry import TicketRecord
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.tracker import TicketTracker
from redlease_temporal._common import run_monitor
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal._common.settings import checked
from redlease_temporal._payloads.locks import ResourceTerms
from redlease_temporal._plugin.runtime import tracker_of

from helpers import watches_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


LEASE_MS = 1000
POLL_MS = 30.0  # how often a run is looked at


class Stage:
    """A relay, and the runs that it serves."""

    def __init__(self, url: str, prefix: str, temporal: FakeTemporal, *, group: str = "g") -> None:
        self.temporal = temporal
        self._url = url
        self._settings = checked(
            lambda: Redlease.from_url(url, prefix=prefix),
            prefix=prefix,
            group=group,
            waiter_lease=LEASE_MS / 1000,  # of which what is left is the first lease of a grant
            idle_ttl=60,
            unknown_grace=60,
            adopt_window=5,
            wait_attempt=300,
            polls_per_second=5000,
        )
        self.relay: Relay
        self._count = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Stage]:
        """Run the relay."""
        temporal: Any = self.temporal
        owners = RunMonitor(temporal, self._settings.polls_per_second)
        self.relay = await Relay.create(temporal, self._settings, owners, tracker_of)
        async with self.relay.running():
            self.relay.spawn(owners.run())
            yield self

    async def ask(self, resource: str) -> str:
        """Let a run ask for a lock; returns its workflow id."""
        self._count += 1
        workflow_id = f"w{self._count}"
        self.temporal.start(workflow_id)
        record = record_of(resource, workflow_id)
        await self.relay.claim(record)
        self.relay.track(TicketTracker(self.relay, record))
        return workflow_id

    async def admit(self) -> str:
        """Let a run take a place; returns its workflow id."""
        self._count += 1
        workflow_id = f"w{self._count}"
        self.temporal.start(workflow_id)
        entry = AdmissionRequest("Flow", workflow_id, 1000, chain=f"run of {workflow_id}")
        record = await redis_tracker.admission_of(self.relay).admit(entry)
        assert record is not None
        self.relay.track(redis_tracker.AdmissionTracker(self.relay, record))
        return workflow_id

    async def held(self, resource: str) -> set[str]:
        """Return the workflows that hold."""
        snapshot = await self.relay.client.semaphore(resource, 1000).inspect(max_items=2000)
        return {permit.owner for permit in snapshot.holders}

    async def watched(self) -> list[str]:
        """Return what is written of records, whoever's they are."""
        async with redis.asyncio.Redis.from_url(self._url, decode_responses=True) as raw:
            return await watches_of(raw, self.relay.prefix)


def record_of(resource: str, workflow_id: str, **other: Any) -> TicketRecord:
    """Return the record of a run whose activity waits."""
    return TicketRecord(
        ResourceTerms(resource, 1, LEASE_MS),
        workflow_id,
        f"request-{workflow_id}",
        workflow_id,
        f"run of {workflow_id}",
        f"run of {workflow_id}",
        3,
        "1",
        "1",
        arguments.label(workflow_id, {}),
        workflow_id,
        token=token_of(workflow_id),
        **other,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all be done soon that is done now and then."""
    for module, name, value in [
        *((run_monitor, name, POLL_MS) for name in ("IDLE_POLL_MS", "BUSY_POLL_MS")),
        (redis_tracker, "POLL_MS", POLL_MS),
        (tracker, "NOTICE_S", 0.03),
        *((redis_tracker, name, 0.03) for name in ("NOTICE_S", "PROVISIONAL_S")),
        (relay, "RELAY_LEASE_MS", (300, 300)),
    ]:
        monkeypatch.setattr(module, name, value)
    with contextlib.suppress(ImportError):
        from redlease_temporal._common import retrying  # noqa: PLC0415

        monkeypatch.setattr(retrying.retry_until_done, "__defaults__", ((0.001, 0.003), None))
        monkeypatch.setattr(relay, "RESTART_PAUSES_S", (0.001, 0.003))


def is_granted(stage: Stage, workflow_id: str) -> bool:
    """Tell whether a run was told by this process that it holds."""
    return workflow_id in stage.temporal.granted
