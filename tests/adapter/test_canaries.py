"""Services with one codec class and different keys: none takes over what it could not speak of; without Temporal."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING

import pytest
from fake_temporal import FakeTemporal
from keyed import Keyed
from relay_stage import Stage, is_granted, quick, record_of
from temporalio.converter import DataConverter

from redlease_temporal._backends.redis import relay
from redlease_temporal._backends.redis.tracker import TicketTracker

from helpers import eventually

if TYPE_CHECKING:
    from temporalio.converter import PayloadCodec

    from conftest import Servers

__all__ = ["quick"]


class Services:
    """Relays of services that share a namespace and a Redis, on one Temporal server."""

    def __init__(self, url: str, prefix: str) -> None:
        self.first = FakeTemporal()
        self._url = url
        self._prefix = prefix

    def stage(self, codec: PayloadCodec | None) -> Stage:
        """Return a process of a service; its group is that of its data converter."""
        temporal = FakeTemporal(dataclasses.replace(DataConverter.default, payload_codec=codec))
        temporal.statuses = self.first.statuses
        return Stage(self._url, self._prefix, temporal, group="")

    async def die(self, stage: Stage) -> None:
        """Let a process end without a word: its tasks are gone, and nothing else was done."""
        tasks = list(stage.relay._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def services(servers: Servers, prefix: str) -> Services:
    """Services."""
    return Services(servers.url("valkey9"), prefix)


async def waits(stage: Stage, workflow_id: str = "w1") -> str:
    """Let a run wait for a permit that somebody else holds."""
    await stage.relay.client.lock("r").acquire()
    stage.temporal.start(workflow_id)
    record = record_of("r", workflow_id)
    tracker = TicketTracker(stage.relay, await stage.relay.claim(record))
    stage.relay.track(tracker)
    await tracker.status()
    return workflow_id


async def free(stage: Stage) -> None:
    """Let the permit that was held elsewhere be free."""
    snapshot = await stage.relay.client.lock("r").inspect()
    for permit in snapshot.holders:
        await stage.relay.client.lock("r").release(permit)


async def beats(stage: Stage, count: int) -> None:
    """Let a relay beat so often."""
    for _ in range(count):
        await stage.relay._renew_relay_lease()


async def test_another_key_completes_nothing(services: Services) -> None:
    """A dead process's waiting activity stays, for a relay that has its key: of another one it could read nothing."""
    dead = services.stage(Keyed("one"))
    async with dead.running(), services.stage(Keyed("two")).running() as other:
        workflow_id = await waits(dead)
        await services.die(dead)
        await asyncio.sleep(relay.RELAY_LEASE_MS[1] / 1000)
        await beats(other, 3)
        assert not other.relay.trackers
        await free(other)
        async with services.stage(Keyed("one")).running() as heir:
            await eventually(lambda: workflow_id in heir.temporal.granted, 10)
        assert not other.temporal.granted
        assert not dead.temporal.granted


async def test_whoever_can_read_takes_over(services: Services) -> None:
    """A process of the same service, and one that has its key among others, do."""
    for number, codec in enumerate((Keyed("one"), Keyed("three", "one"))):
        dead = services.stage(Keyed("one"))
        async with dead.running(), services.stage(codec).running() as heir:
            workflow_id = await waits(dead, f"w{number}")
            await services.die(dead)
            await free(heir)
            await eventually(functools.partial(is_granted, heir, workflow_id), 10)
            heir.temporal.close(workflow_id)


async def test_what_has_no_canary_is_taken_over(services: Services) -> None:
    """A record that the version before has written goes to whoever is there."""
    dead = services.stage(Keyed("one"))
    async with dead.running(), services.stage(Keyed("two")).running() as heir:
        dead.relay.canary = ""
        workflow_id = await waits(dead)
        await services.die(dead)
        await free(heir)
        await eventually(lambda: workflow_id in heir.temporal.granted, 10)


async def test_a_codec_that_is_away_for_a_while(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read now is looked at again."""
    monkeypatch.setattr(relay, "FOREIGN_MS", 200.0)
    codec = Keyed("one")
    dead = services.stage(Keyed("one"))
    async with dead.running(), services.stage(codec).running() as heir:
        workflow_id = await waits(dead)
        codec.away = True
        await services.die(dead)
        await asyncio.sleep(relay.RELAY_LEASE_MS[1] / 1000)
        await beats(heir, 3)
        assert not heir.relay.trackers
        codec.away = False
        await free(heir)
        await eventually(lambda: workflow_id in heir.temporal.granted, 10)


async def test_many_dead_relays_of_another_key_hide_nobody(services: Services) -> None:
    """Behind a dozen dead processes that it cannot read a relay still finds one that it can."""
    async with contextlib.AsyncExitStack() as stack:
        for number in range(12):
            foreign = await stack.enter_async_context(services.stage(Keyed("one")).running())
            record = record_of(f"f{number}", f"f{number}")
            foreign.temporal.start(f"f{number}")
            await foreign.relay.claim(record)
            await services.die(foreign)
        dead = await stack.enter_async_context(services.stage(Keyed("two")).running())
        workflow_id = await waits(dead)
        await services.die(dead)
        heir = await stack.enter_async_context(services.stage(Keyed("two")).running())
        await free(heir)
        await eventually(lambda: workflow_id in heir.temporal.granted, 10)
        assert heir.temporal.granted.keys() == {workflow_id}
