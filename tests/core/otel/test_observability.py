"""The dashboard, the alert rules and the page name what a Prometheus is really given."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from redlease import LeaseLost, Unavailable
from redlease.otel import Telemetry
from redlease.testing import fake_client

from helpers import eventually, until_waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from prometheus_client.samples import Sample

    from conftest import MakeClient, OwnServer
    from servers import Server

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples/observability/dashboard.json"
ALERTS = ROOT / "examples/observability/alerts.yaml"
PAGE = ROOT / "docs/observability.md"


async def live_through_everything(server: Server, telemetry: Telemetry, make_client: MakeClient) -> None:
    """Wait, hold, give up, lose a hold to a silent server, and reach it again."""
    client = await make_client(url=server.url, on_event=telemetry)
    lock = client.lock("ledger:1", lease=0.5)
    async with client.lock("ledger:1").hold():
        waiting = asyncio.create_task(lock.acquire())
        await until_waiting(lock, 1)
    await lock.release(await waiting)
    with pytest.raises(LeaseLost):
        async with lock.hold():
            server.pause()
            await asyncio.sleep(30)
    with pytest.raises(Unavailable):
        await lock.acquire(timeout=0.1)
    server.resume()
    await eventually(lambda: client._connection.ready)


@pytest.fixture
async def dump(own_server: OwnServer, make_client: MakeClient) -> AsyncIterator[str]:
    """What Prometheus would scrape after a run on a server."""
    meters = MeterProvider(metric_readers=[PrometheusMetricReader()])
    telemetry = Telemetry(resource_label=lambda name: name.partition(":")[0], meter_provider=meters)
    await live_through_everything(own_server("valkey9"), telemetry, make_client)
    yield generate_latest(REGISTRY).decode()
    meters.shutdown()


async def test_what_is_asked_for_exists(dump: str) -> None:
    """Each metric and label in dashboard and rules is in the dump, and the page has each under both of its names."""
    families = [each for each in text_string_to_metric_families(dump) if each.name.startswith("redlease_")]
    samples = [sample for family in families for sample in family.samples]
    names, labels = {sample.name for sample in samples}, {label for sample in samples for label in sample.labels}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = " ".join([ALERTS.read_text(), *(target["expr"] for panel in panels for target in panel["targets"])])
    words = set(re.findall(r"\bredlease_\w+", asked))
    assert words - labels <= names
    assert words & labels == {"redlease_resource", "redlease_loss_reason"}
    assert "error_type" in labels
    assert {re.sub("_(total|bucket)$", "", word) for word in words - labels} == {family.name for family in families}
    assert samples_of("redlease_losses_total", samples) == {("expired", "ledger")}
    assert ("Unavailable", "ledger") in samples_of("redlease_acquire_failures_total", samples)
    rows = dict(re.findall(r"^\| `(redlease\.[\w.]+)` \| `(redlease_\w+)`", PAGE.read_text(), re.MULTILINE))
    assert {name.removesuffix("_total") for name in rows.values()} == {family.name for family in families}
    assert all(spelled.startswith(name.replace(".", "_")) for name, spelled in rows.items())


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
async def test_an_example_of_the_page_runs(code: str) -> None:
    """As it stands, with an open client."""
    async with fake_client() as client:
        names: dict[str, Any] = {"client": client}
        running = eval(compile(code, PAGE.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
        if running is not None:
            await running


def samples_of(name: str, samples: list[Sample]) -> set[tuple[str, str]]:
    """Return what is counted under a name: by the attribute that it has of its own, and by the resource's label."""
    found = [sample.labels for sample in samples if sample.name == name and sample.value]
    return {(each.get("error_type") or each["redlease_loss_reason"], each["redlease_resource"]) for each in found}
