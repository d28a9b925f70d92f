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
from redlease.events import Abandoned, Granted, Lost, Queued, Reconnected, Released, RenewalFailed
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


def test_a_label_of_keys(meters: MeterProvider, reader: InMemoryMetricReader) -> None:
    """All that is counted of requests is counted by their keys too; requests without one have no such attribute."""
    telemetry = Telemetry(key_label=str.upper, meter_provider=meters)
    telemetry(Queued("r", "waits", 1, 0, "acme"))
    telemetry(Granted("r", "t", 1, 7, 0.1, False, "acme"))
    telemetry(Granted("r", "t", 1, 8, 0.1, False))
    telemetry(Released("r", "t", 1, 7, 0.1, "acme"))
    telemetry(Lost("r", "t", 1, 7, 0.1, "gone", "acme"))
    telemetry(Abandoned("r", "t", 1, 0.1, False, "AcquireTimeout", "acme"))
    telemetry(RenewalFailed("r", "t", 7, "no answer", "acme"))
    found = points(reader)
    assert found["redlease.grants"] == found["redlease.wait.duration"] == {"ACME": 1, "": 1}
    assert found["redlease.queue.length"] == {"ACME": 1, "": 0}
    assert found["redlease.hold.duration"] == {"ACME": 2}
    assert found["redlease.renewal.failures"] == {"ACME": 1, "": 0}
    assert (found["redlease.losses"]["ACME gone"], found["redlease.losses"]["gone"]) == (1, 0)
    assert found["redlease.acquire.failures"]["ACME AcquireTimeout"] == 1


def test_keys_beyond_a_bound_are_counted_together(meters: MeterProvider, reader: InMemoryMetricReader) -> None:
    """The first ten of a hundred keys have series of their own, and keep them; no request is missing."""
    telemetry = Telemetry(key_label=lambda key: key, max_keys=10, meter_provider=meters)
    for number in [*range(100), *range(100)]:
        telemetry(Queued("r", f"t{number}", 1, 0, f"k{number}"))
        telemetry(Granted("r", f"other{number}", 1, number, 0.1, False, f"k{number}"))
    found = points(reader)
    assert found["redlease.grants"] == {f"k{number}": 2 for number in range(10)} | {"other": 2 * 90}
    assert found["redlease.queue.length"]["other"] == 90


def test_a_label_of_keys_that_raises(
    meters: MeterProvider, reader: InMemoryMetricReader, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys for which it raises are recorded without, which is logged once; a bound below 1 is refused."""
    telemetry = Telemetry(key_label=lambda key: key.split(":")[1], meter_provider=meters)
    for key in ("nameless", "nameless", "org:7"):
        telemetry(Granted("r", "t", 1, 7, 0.1, False, key))
    assert points(reader)["redlease.grants"] == {"": 2, "7": 1}
    assert ["key_label" in record.message for record in caplog.records if record.name == "redlease"] == [True]
    with pytest.raises(ValueError, match="max_keys"):
        Telemetry(max_keys=0)


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
