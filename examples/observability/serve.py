"""A service that Prometheus can scrape: it takes a lock now and then, and serves its metrics.

pip install 'redlease[otel]' opentelemetry-exporter-prometheus
REDIS_URL=redis://localhost:6379/0 python examples/observability/serve.py
curl http://localhost:9464/metrics
"""

from __future__ import annotations

import asyncio
import os

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import start_http_server

from redlease import Redlease
from redlease.otel import Telemetry

PORT = 9464


async def main() -> None:
    """Works until it is stopped."""
    set_meter_provider(MeterProvider(metric_readers=[PrometheusMetricReader()]))
    start_http_server(PORT, "127.0.0.1")
    telemetry = Telemetry(resource_label=lambda name: name.partition(":")[0])
    async with Redlease.from_url(os.environ["REDIS_URL"], on_event=telemetry) as client:
        while True:
            async with client.lock("invoice:42").hold():
                await asyncio.sleep(0.5)


if __name__ == "__main__":
    asyncio.run(main())
