"""Metrics of a client, as a reader of OpenTelemetry's SDK collects them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import redlease.otel.metrics
from redlease.events import Granted, Queued, Reconnected, Released, RenewalFailed
from redlease.otel import Telemetry

from helpers import until_waiting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import MakeClient


@pytest.fixture
def reader() -> InMemoryMetricReader:
    """What collects."""
    return InMemoryMetricReader()


@pytest.fixture
def meters(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    """The SDK."""
    provider = MeterProvider(metric_readers=[reader])
    yield provider
    provider.shutdown()


def points(reader: InMemoryMetricReader) -> dict[str, dict[str, Any]]:
    """Collect what there is, by the name of a metric and by its attributes."""
    data = reader.get_metrics_data()
    assert data is not None
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    return {
        metric.name: {
            " ".join(map(str, (point.attributes or {}).values())): getattr(
                point, "value", getattr(point, "count", None)
            )
            for point in metric.data.data_points
        }
        for metric in scope.metrics
    }


@pytest.mark.parametrize("engine", ["fakeredis", "valkey9"])
async def test_what_a_reader_collects(
    engine: str, make_client: MakeClient, meters: MeterProvider, reader: InMemoryMetricReader
) -> None:
    """Grants, waits, holds, losses and failures are counted by the label of the resource, and who waits meanwhile."""
    telemetry = Telemetry(resource_label=lambda name: name.partition(":")[0], meter_provider=meters)
    lock = (await make_client(on_event=telemetry)).lock("ledger:42")
    async with lock.hold():
        waiting = asyncio.create_task(lock.acquire())
        await until_waiting(lock, 1)
        during = points(reader)
        with pytest.raises(TimeoutError):
            await lock.acquire(timeout=0.5)
    await lock.release(await waiting)
    hold = await lock.hold(ticket="t", on_lost="signal")
    await lock.release("t")
    await hold.wait_lost()
    after = points(reader)
    assert during["redlease.grants"] == {"ledger": 1}
    assert during["redlease.queue.length"] == {"ledger": 1}
    assert 0 < during["redlease.queue.longest_wait"]["ledger"] < 60
    assert after["redlease.queue.length"] == after["redlease.queue.longest_wait"] == {"ledger": 0}
    assert after["redlease.grants"] == after["redlease.wait.duration"] == {"ledger": 3}
    assert after["redlease.hold.duration"] == {"ledger": 2}  # one is released, one lost; a permit as data is no hold
    assert {label for label, count in after["redlease.losses"].items() if count} == {"ledger taken"}
    assert after["redlease.acquire.failures"] == {"ledger AcquireTimeout": 1, "ledger Unavailable": 0}


def test_without_a_label_no_resource_is_named(meters: MeterProvider, reader: InMemoryMetricReader) -> None:
    """A million resources are one series, as long as nobody says how to tell few of them apart."""
    telemetry = Telemetry(meter_provider=meters)
    for number in range(100):
        telemetry(Granted(f"r{number}", "t", 1, number, 0.1, False))
        telemetry(RenewalFailed(f"r{number}", "t", number, "no answer"))
    telemetry(Reconnected(0.5))
    found = points(reader)
    assert found["redlease.grants"] == found["redlease.renewal.failures"] == {"": 100}
    assert found["redlease.connection.reconnects"] == {"": 1}
    assert found["redlease.queue.length"] == {"": 0}


def test_a_label_that_raises(
    meters: MeterProvider, reader: InMemoryMetricReader, caplog: pytest.LogCaptureFixture
) -> None:
    """What it raises for is recorded without a label, and logged once; other resources are recorded as ever."""
    telemetry = Telemetry(resource_label=lambda name: name.split(":")[1], meter_provider=meters)
    for resource in ("nameless", "nameless", "ledger:42"):
        telemetry(Queued(resource, "t", 1, 0))
        telemetry(Granted(resource, "t", 1, 7, 0.1, False))
    found = points(reader)
    assert found["redlease.grants"] == {"": 2, "42": 1}
    assert found["redlease.queue.length"] == {"": 1, "42": 1}
    (record,) = (record for record in caplog.records if record.name == "redlease")
    assert record.__dict__["resource"] == "nameless"


def test_events_that_nobody_collects(
    meters: MeterProvider, reader: InMemoryMetricReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept up to a number, and recorded all the same: nothing is lost, and memory is bounded."""
    monkeypatch.setattr(redlease.otel.metrics, "KEPT_MOST", 10)
    telemetry = Telemetry(meter_provider=meters)
    for number in range(100):
        telemetry(Released("r", "t", 1, number, 0.1))
    assert len(telemetry._metrics._events) == 10
    assert points(reader)["redlease.hold.duration"] == {"": 100}


def test_without_the_extra_nothing_is_imported() -> None:
    """A client loads no more of OpenTelemetry than redis-py does by itself."""
    code = """
import sys, redis.asyncio
before = {name for name in sys.modules if name.startswith("opentelemetry")}
import redlease.sync
redlease.sync.Redlease, redlease.Redlease.from_url("redis://localhost", on_event=print)
assert "redlease.otel" not in sys.modules
assert before == {name for name in sys.modules if name.startswith("opentelemetry")}
"""
    subprocess.run([sys.executable, "-c", code], check=True)
