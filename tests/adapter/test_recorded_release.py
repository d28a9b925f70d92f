"""Releases that wait until the history of their run records them, while Redis or Temporal fails; without Temporal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from fake_temporal import FakeTemporal
from relay_stage import Stage, quick, record_of
from temporalio.service import RPCError, RPCStatusCode

from redlease import Unavailable
from redlease_temporal._backends.redis.registry import ReleaseNote
from redlease_temporal._backends.redis.relay import Relay
from redlease_temporal._backends.redis.tracker import TicketTracker
from redlease_temporal._common.run_monitor import RunMonitor
from redlease_temporal._payloads.locks import ResourceTerms

from helpers import eventually

__all__ = ["quick"]

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from redlease_temporal._payloads.locks import OnClose

    from conftest import Servers

LEASE_MS = 60_000  # a test does not outlast it


@pytest.fixture
async def stage(servers: Servers, prefix: str) -> AsyncIterator[Stage]:
    """A relay."""
    async with Stage(servers.url("valkey9"), prefix, FakeTemporal()).running() as stage:
        yield stage


async def holding(stage: Stage, on_close: OnClose) -> TicketTracker:
    """Return the tracker of a run that holds."""
    stage.temporal.start("w")
    record = dataclasses.replace(record_of("r", "w"), terms=ResourceTerms("r", 1, LEASE_MS), on_close=on_close)
    await stage.relay.claim(record)
    tracker = TicketTracker(stage.relay, record)
    stage.relay.track(tracker)
    await eventually(lambda: tracker.record.recorded)
    return tracker


def note_release(tracker: TicketTracker) -> None:
    """Let the run release what it has, as its local activity does."""
    tracker.record.release = ReleaseNote("marker", 5, tracker.record.fence)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Redis answers to releases, before it carries one out."""
    answers: list[Any] = [ConnectionError("as asked"), Unavailable("as asked"), Unavailable("as asked")]
    release = Relay.try_release

    async def failing(*args: Any, **options: Any) -> Any:
        if not answers:
            return await release(*args, **options)
        if isinstance(answer := answers.pop(0), ConnectionError):
            raise answer
        return answer

    monkeypatch.setattr(Relay, "try_release", failing)
    return answers


async def nothing_is_left(stage: Stage) -> bool:
    """Tell whether nobody holds, and no relay tracks anything."""
    return not await stage.held("r") and not await stage.watched() and not stage.relay.releases


async def test_redis_refuses_a_recorded_release(
    stage: Stage, refusals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record stays until Redis has released the permit, and the next requests know that a release is under way."""

    async def found(*_: Any, **__: Any) -> tuple[bool, int]:
        return True, 100

    monkeypatch.setattr(RunMonitor, "has_marker", found)
    tracker = await holding(stage, "release")
    note_release(tracker)
    tracker.release.start()
    await eventually(lambda: len(refusals) < 2)
    assert stage.relay.releases == {tracker.release}
    await eventually(lambda: nothing_is_left(stage))
    assert not refusals


async def test_nobody_answers_as_a_run_has_closed(
    stage: Stage, refusals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With on_close="lease" its release is carried out all the same, when Temporal and then Redis have answered."""
    failures = 5

    async def found(*_: Any, **__: Any) -> tuple[bool, int]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RPCError("as asked", RPCStatusCode.UNAVAILABLE, b"")
        return True, 100

    monkeypatch.setattr(RunMonitor, "has_marker", found)
    tracker = await holding(stage, "lease")
    note_release(tracker)
    stage.temporal.close("w")
    await eventually(lambda: nothing_is_left(stage))
    assert not refusals
