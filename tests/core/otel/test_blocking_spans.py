"""Spans of waits and holds on the blocking face."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry.sdk.metrics import MeterProvider

from redlease.otel import Telemetry
from redlease.sync import Redlease

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from conftest import Servers


def test_a_thread_has_spans_too(
    servers: Servers, prefix: str, tracers: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """On the blocking face wait and hold are children of the span of the thread that asked."""
    telemetry, tracer = Telemetry(tracer_provider=tracers, meter_provider=MeterProvider()), tracers.get_tracer("test")
    with Redlease.from_url(servers.url("valkey9"), prefix=prefix, on_event=telemetry) as client:
        lock = client.lock("r")

        def wait() -> None:
            with tracer.start_as_current_span("second"), lock.hold():
                pass

        with tracer.start_as_current_span("first"), lock.hold() as first:
            waiting = threading.Thread(target=wait)
            waiting.start()
            while not lock.inspect().waiters:
                pass
        waiting.join()
    spans = exporter.get_finished_spans()
    parents = {span.context.span_id: span.name for span in spans}
    below = [(span.name, parents.get(span.parent.span_id)) for span in spans if span.parent is not None]
    assert sorted(below) == [
        ("redlease.hold", "first"),
        ("redlease.hold", "second"),
        ("redlease.wait", "second"),
    ]
    hold = next(span for span in spans if (span.attributes or {}).get("redlease.fence") == first.fence)
    (wait_span,) = (span for span in spans if span.name == "redlease.wait")
    assert [link.context.span_id for link in wait_span.links] == [hold.context.span_id]
